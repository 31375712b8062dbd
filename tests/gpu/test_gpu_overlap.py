"""Buckets of gradients are summed while backward still runs, on the GPU's own time line."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpu_support import Box
from paceline.torch import DataParallel
from timeline import OURS, hidden, kernels_of

pytestmark = [pytest.mark.needs_cuda, pytest.mark.boxes("two_equal_parts", "two_unequal_parts")]


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_sums_run_inside_of_backward(box: Box, graphs: bool) -> None:
    """Needs buckets that are sealed during backward or a replay of it, and nothing of them but the names of their kernels."""
    module = nn.Sequential(*(layer for _ in range(16) for layer in (nn.Linear(2048, 2048), nn.ReLU())))
    module = box.put(module)
    batch = torch.randn(2048, 2048, device=box.torch_device)
    with DataParallel(module, box.devices, balance="even", graphs=graphs) as trainer:

        def step() -> None:
            trainer.step(lambda one, x: one(x).square().mean(), batch)
            module.zero_grad()

        for _ in range(6):  # with graphs the third one is captured
            step()
        kernels = kernels_of(step)
    if not kernels:
        pytest.skip("PyTorch's profiler sees no kernels here")
    sums = [each for each in kernels if OURS in each.name]
    others = [each for each in kernels if OURS not in each.name]
    assert len(sums) > 1, f"{len(sums)} sums: all gradients in one piece cannot overlap"
    assert min(each.begin for each in sums) < max(each.end for each in others), "the first sum began after backward"
    part = hidden(kernels)
    assert part is not None
    assert part > 0.0, "no sum ran beside a kernel of backward"
