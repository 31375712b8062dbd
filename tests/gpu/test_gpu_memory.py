"""Memory: a share that does not fit is run in smaller parts, hundreds of steps take no more, and close() gives all back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from gpu_support import Box, forget_streams
from paceline.torch import DataParallel
from torch_support import classifier, classify, gradients, worst_difference

pytestmark = pytest.mark.needs_cuda

MEGABYTES_OF_AN_ITEM = 32
ITEMS = 64


class Wide(nn.Module):
    """Takes and keeps a lot of memory for each item."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.5, dtype=torch.double))
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.unsqueeze(1).expand(-1, (MEGABYTES_OF_AN_ITEM << 20) // 32, -1)
        return (wide * self.weight).tanh().mean((1, 2))


def squares(module: Any, x: torch.Tensor) -> Any:
    return module(x).square().mean()


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Room for a quarter of the batch: what the product is, its tanh, and their gradients."""
    forget_streams()
    total = torch.cuda.get_device_properties(0).total_memory
    needed = ITEMS * (MEGABYTES_OF_AN_ITEM << 20)
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + needed) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    forget_streams()


def test_what_does_not_fit_is_run_again_in_smaller_parts(box: Box, little_memory: None) -> None:
    torch.manual_seed(0)
    module, x = box.put(Wide()), box.put(torch.randn(ITEMS, 4, dtype=torch.double))
    reference = copy.deepcopy(module)
    for part in x.split(2):
        (squares(reference, part) * len(part) / ITEMS).backward()
    wanted = gradients(reference)
    sizes: list[int] = []

    def loss_fn(replica: Any, part: torch.Tensor) -> Any:
        if part.is_cuda:  # a host device beside it has memory of its own
            sizes.append(len(part))
        return squares(replica, part)

    before = torch.random.get_rng_state()
    with DataParallel(module, box.devices) as trainer:
        trainer.step(loss_fn, x)
        assert worst_difference(gradients(module), wanted) <= 1e-12
        assert max(sizes) * len(box) >= ITEMS // 2, "nothing was too large: the test says nothing"
        first = max(sizes)
        sizes.clear()
        module.zero_grad()
        trainer.step(loss_fn, x)
        assert max(sizes) < first, "the cap was forgotten"
        assert worst_difference(gradients(module), wanted) <= 1e-12
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.boxes("one_gpu", "two_unequal_parts")
def test_an_item_that_does_not_fit_is_an_error_and_nothing_is_lost(box: Box) -> None:
    module, batch = classifier()
    module, batch = box.put(module), box.put(batch)

    def too_large(replica: Any, part: Any) -> Any:
        torch.empty(1 << 44, dtype=torch.uint8, device="cuda")
        return classify(replica, part)

    with DataParallel(module, box.devices) as trainer:
        trainer.step(classify, batch)
        wanted = gradients(module)
        with pytest.raises((MemoryError, torch.cuda.OutOfMemoryError)):
            trainer.step(too_large, batch)
        assert worst_difference(gradients(module), wanted) == 0.0
        module.zero_grad()
        trainer.step(classify, batch)
        assert worst_difference(gradients(module), wanted) <= 1e-12


def test_hundreds_of_steps_take_no_more_memory_and_close_gives_all_back(box: Box) -> None:
    module, batch = classifier(64, dtype=torch.float32)
    module, batch = box.put(module), box.put(batch)
    steps_in_use(module, batch, box, 5)  # contexts of parts, loaded kernels, and what PyTorch itself keeps, stay
    forget_streams()
    allocated, (free, _) = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()
    in_use = steps_in_use(module, batch, box, 400)
    assert in_use[-1] <= in_use[100]
    forget_streams()
    assert torch.cuda.memory_allocated() <= allocated
    assert torch.cuda.mem_get_info()[0] >= free - (8 << 20)  # by the driver's count, which knows all pools


def steps_in_use(module: nn.Module, batch: Any, box: Box, steps: int) -> list[int]:
    """The bytes that PyTorch holds after each step of a trainer, which is closed in the end."""
    in_use = []
    with DataParallel(module, box.devices, micro_batch=10) as trainer:
        optimizer = trainer.optimizer(torch.optim.SGD, lr=1e-3)
        for _ in range(steps):
            trainer.step(classify, batch)
            optimizer.step()
            optimizer.zero_grad()
            in_use.append(torch.cuda.memory_reserved())
        torch.cuda.synchronize()
    return in_use


def peak_of(module: nn.Module, step: Any) -> int:
    """The most bytes that PyTorch's allocator has given out during three steps, gradients and an optimizer's state included."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
    forget_streams()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@pytest.mark.boxes("one_gpu", "two_equal_parts")
def test_the_peak_is_that_of_plain_pytorch_and_the_gradients_of_each_part(box: Box) -> None:
    module = box.put(nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))))
    x = torch.randn(512, 2048, device=box.torch_device)
    gradient_bytes = sum(each.numel() * each.element_size() for each in module.parameters())
    wanted = peak_of(module, lambda: squares(module, x).backward())
    with DataParallel(module, box.devices, balance="even") as trainer:
        peak = peak_of(module, lambda: trainer.step(squares, x))
        pools = trainer.report()["memory"]
    peak += sum(int(each.get("pool_peak_bytes", 0)) for each in pools.values())
    workspace = 64 << 20  # of cuBLAS, for each stream: 32 MiB on Hopper
    assert peak <= wanted + len(box) * (gradient_bytes + workspace), (peak, wanted, gradient_bytes)
