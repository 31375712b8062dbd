"""Modules that PyTorch compiles with CUDA graphs of its own (``mode="reduce-overhead"``), on the workers' threads and on the caller's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import paceline
from gpu_support import Box
from paceline.torch import DataParallel
from torch_support import classifier, classify, gradients, plain, worst_difference

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def options(box: Box) -> dict[str, Any]:
    """On the host there are no graphs to capture, and compiling takes long."""
    return {"mode": "reduce-overhead"} if box.is_cuda else {"backend": "aot_eager"}


@pytest.mark.needs_cuda
@pytest.mark.boxes("two_unequal_parts")
def test_graphs_of_the_compiler_are_refused_on_parts(box: Box) -> None:
    """Seen with PyTorch 2.11: the process is aborted in a backward on one part while the other part replays."""
    module, batch = classifier(48, dtype=torch.float32)
    module, batch = box.put(module), box.put(batch)
    compiled: Any = torch.compile(module, mode="reduce-overhead")
    with DataParallel(compiled, box.devices) as trainer:
        with pytest.raises(paceline.InvalidArgument, match="several parts of one GPU"):
            trainer.step(classify, batch)


@pytest.mark.boxes("one_gpu")
def test_graphs_of_the_compiler_train_on_workers_and_then_run_on_the_callers_thread(box: Box) -> None:
    module, batch = classifier(48, dtype=torch.float32)
    module, batch = box.put(module), box.put(batch)
    before = copy.deepcopy(module)
    wanted_loss, wanted = plain(module, classify, batch)
    compiled: Any = torch.compile(module, **options(box))
    with DataParallel(compiled, box.devices, balance="even") as trainer:
        for _ in range(5):  # two to warm up, one to capture, then replays
            module.zero_grad()
            loss = trainer.step(classify, batch)
            torch.testing.assert_close(loss, wanted_loss, rtol=1e-4, atol=1e-5)
            assert worst_difference(gradients(module), wanted) <= 1e-4
        while_open = compiled(batch[0])
        torch.testing.assert_close(while_open, before(batch[0]), rtol=1e-4, atol=1e-5)
    for _ in range(3):
        module.zero_grad()
        loss = classify(compiled, batch)
        loss.backward()
        torch.testing.assert_close(loss.detach(), wanted_loss, rtol=1e-4, atol=1e-5)
        assert worst_difference(gradients(module), wanted) <= 1e-4
