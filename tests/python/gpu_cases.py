"""Shared by the tests of GPUs on fakes: sets of devices, a module with its batch, and plain PyTorch as the reference."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.torch import DataParallel
from paceline.torch._devices import cuda
from torch_support import classify

# Then four parts of one GPU stand for four GPUs: one of the fake runtime, or a real one.
AS_PARTS = os.environ.get("PACELINE_PARTS_AS_GPUS") == "1"
ON_A_GPU = AS_PARTS and torch.cuda.is_available()
GPUS = [f"cuda:0/{k}" if AS_PARTS else f"cuda:{k}" for k in range(4)]
BOXES = {"one": ["cuda:0"], "two": GPUS[:2], "four": GPUS, "mixed": ["host:0", GPUS[1], "host:1", GPUS[0]]}


def number_of(name: str) -> int:
    """The number of the GPU that is called so, or of which this is a part."""
    return int(name.split(":")[1].split("/")[0])


def home_of(devices: list[str]) -> torch.device:
    """Where a module for these devices lives. On fakes the tensors of GPUs are the host's, or those of the fake device."""
    gpu = next((name for name in devices if name.startswith("cuda")), None)
    return torch.device("cpu") if gpu is None else cuda.device(number_of(gpu))


def gpu_type() -> str:
    """The type of the GPUs' tensors, for what PyTorch has one of for each type of device."""
    return home_of(BOXES["one"]).type


def module_and_batch(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).to(dtype)
    return module, (torch.randn(24, 6, dtype=dtype), torch.randint(0, 3, (24,)))


def plain(module: nn.Module, batch: Any, loss_fn: Any = classify) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    alone = copy.deepcopy(module)
    loss = loss_fn(alone, batch)
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in alone.parameters()]


def expect_same(module: nn.Module, expected: list[torch.Tensor | None], tolerance: float = 1e-12) -> None:
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        if gradient is None:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, gradient, rtol=tolerance, atol=tolerance)


def expect_step(
    trainer: DataParallel,
    batch: Any,
    loss_fn: Any = classify,
    *,
    whole: Any = None,
    tolerance: float = 1e-12,
    **options: Any,
) -> None:
    """A step has loss and gradient of one device. `whole` is the loss of the whole batch, where `loss_fn` is another function."""
    loss, gradients = plain(trainer.module, batch, whole or loss_fn)
    trainer.module.zero_grad()
    found = trainer.step(loss_fn, batch, **options)
    if "scaler" not in options:  # which scales the loss of `whole`, too
        torch.testing.assert_close(found, loss, rtol=tolerance, atol=tolerance)
    expect_same(trainer.module, gradients, tolerance)


def queues_of(trainer: DataParallel) -> Any:
    return trainer._execution.places.queues


def flat_of(trainer: DataParallel) -> Any:
    return trainer._execution.flat


class Shared(nn.Module):
    """One layer used in two checkpoints, each of which calls backward in the backward. They ask for no generator's state, which a capture refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.layer, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.into(x)
        for _ in range(2):
            hidden = checkpoint(
                lambda y: torch.tanh(self.layer(y)), hidden, use_reentrant=True, preserve_rng_state=False
            )
        out: torch.Tensor = self.out(hidden)
        return out
