"""The two networks of race_gpu.py: one limited by arithmetic, one by memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

Pair = tuple[torch.Tensor, torch.Tensor]


class Residual(nn.Module):
    """Element-wise work on much data, with little arithmetic per byte."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.scale * nn.functional.gelu(self.norm(x))
        return out


def compute_bound(width: int, layers: int) -> nn.Module:
    pairs = [(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*[module for pair in pairs for module in pair])


def memory_bound(width: int, layers: int) -> nn.Module:
    return nn.Sequential(*[Residual(width) for _ in range(2 * layers)])


@dataclass(frozen=True)
class Network:
    """A network of a size that fits the kind of device, and its batches."""

    name: str
    make: Callable[[int, int], nn.Module]
    device: torch.device

    @property
    def _width(self) -> int:
        return 4096 if self.device.type == "cuda" else 128

    @property
    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def bytes_of_an_item(self) -> int:
        """About the memory that forward keeps per item for backward."""
        return 6 * LAYERS * self._width * self._dtype.itemsize

    def module(self) -> nn.Module:
        """Build the network with the same weights each time."""
        torch.manual_seed(0)
        return self.make(self._width, LAYERS).to(self.device, self._dtype)

    def batch(self, items: int) -> Pair:
        generator = torch.Generator(self.device).manual_seed(items)
        x = torch.randn(items, self._width, device=self.device, generator=generator).to(self._dtype)
        return x, torch.roll(x, 1, 0)


LAYERS = 6
MAKERS = {"compute-bound": compute_bound, "memory-bound": memory_bound}


def loss_fn(module: nn.Module, batch: Pair) -> torch.Tensor:
    return nn.functional.mse_loss(module(batch[0]), batch[1])


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW, with a learning rate so small that nothing diverges over thousands of steps."""
    return torch.optim.AdamW(module.parameters(), lr=1e-6, fused=True)
