"""Shared by the tests of saves: a module with random numbers and buffers, its batches, and a digest of all bits."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import torch
from torch import nn

from torch_support import classify


def network() -> nn.Module:
    """Draws random numbers and writes buffers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3)).double()


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 6, generator=generator, dtype=torch.double), torch.randint(3, (16,), generator=generator))
        for _ in range(count)
    ]


def train(trainer: Any, optimizer: Any, data: Any, loss_fn: Any = classify) -> None:
    for batch in data:
        trainer.step(loss_fn, batch)
        optimizer.step()
        optimizer.zero_grad()


def digest(*states: Any) -> str:
    """A number for all bits of nests of tensors and plain values."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            plain = value.detach().resolve_conj().contiguous()
            size = plain.numel() * plain.element_size()
            add([str(plain.dtype), list(plain.shape)])
            found.update(ctypes.string_at(plain.data_ptr(), size) if size else b"")
        elif isinstance(value, dict):
            add([[key, one] for key, one in value.items()])
        elif isinstance(value, (list, tuple)):
            found.update(b"(")
            for one in value:
                add(one)
            found.update(b")")
        else:
            found.update(repr(value).encode())

    add(list(states))
    return found.hexdigest()


def states(module: nn.Module, optimizer: Any) -> str:
    return digest(module.state_dict(), optimizer.state_dict())


def seeded(module: nn.Module) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.1)
