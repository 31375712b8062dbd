"""``DataParallel(..., graphs=True)``: what is captured once and replayed trains as what runs eagerly."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch

from gpu_support import Box, equal
from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import classifier, classify

pytestmark = [
    pytest.mark.needs_cuda,
    pytest.mark.boxes("one_gpu", "two_equal_parts", "two_unequal_parts"),
    pytest.mark.skipif(
        "graphs" not in inspect.signature(DataParallel).parameters,
        reason="this version of paceline has no DataParallel(graphs=)",
    ),
]


def train(module: Any, batches: list[Any], step: Any) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in batches:
        losses.append(step(batch).detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_replayed_steps_are_eager_steps(box: Box) -> None:
    """Batches change, one size comes later than the others, and the module changes its mode in between."""
    module, _ = classifier(48)
    module = box.put(module)
    sizes = [48] * 8 + [24] * 4 + [48] * 4
    batches = [box.put(classifier(items, seed=seed)[1]) for seed, items in enumerate(sizes)]
    reference = copy.deepcopy(module)

    def plain_step(batch: Any) -> torch.Tensor:
        loss: torch.Tensor = classify(reference, batch)
        loss.backward()
        return loss

    wanted = train(reference, batches, plain_step)
    options: dict[str, Any] = {"balance": "even", "graphs": True}
    with DataParallel(module, box.devices, **options) as trainer:
        losses = train(module, batches, lambda batch: trainer.step(classify, batch))
        explained = trainer.explain()
    equal(losses, wanted, 1e-12)
    equal(list(module.parameters()), list(reference.parameters()), 1e-12)
    assert "graph" in explained, "nothing says whether anything was captured"


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="before 2.12 PyTorch takes no capture after one that CUDA has ended"
)
def test_after_a_refused_capture_others_capture_and_draw(box: Box) -> None:
    """What PyTorch leaves of a capture that CUDA has ended would break the allocator's pool and the GPU's generator."""
    module, batch = classifier(48)
    module, batch = box.put(module), box.put(batch)

    def reads(one: Any, part: Any) -> Any:
        loss = classify(one, part)
        return loss * float(loss.item() > -1.0)

    with DataParallel(module, box.devices, balance="even", graphs=True) as trainer:
        for _ in range(2):
            trainer.step(reads, batch)
        with pytest.raises(InvalidArgument, match=r"cannot be captured at .*, in reads"):
            trainer.step(reads, batch)
        module.zero_grad()
        torch.nn.functional.dropout(batch[0])
        for _ in range(5):
            trainer.step(classify, batch)
        assert "replay" in trainer.explain()
    torch.cuda.synchronize()
    torch.randn(8, device=box.torch_device)
