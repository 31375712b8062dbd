"""Batches whose dimension 0 is time, and modules that expect time in dimension 0."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from paceline.torch._batch.batch import Batch, Move, same


class AlongDimension1:
    """A batch that is cut along dimension 1. `size` is its length, or 0 if the tensors do not agree about it.

    Tensors of one dimension go along unchanged.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        sizes = {tensor.shape[1] for _, tensor in batch.tensors() if tensor.dim() > 1}
        self.size = sizes.pop() if len(sizes) == 1 else 0

    def slice(self, begin: int, end: int, move: Move = same) -> Any:
        """Like `Batch.slice`."""
        return self._batch.cut(lambda tensor: tensor[:, begin:end] if tensor.dim() > 1 else tensor, move)

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Like `Batch.rows`."""
        return torch.arange(begin, end)

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Like `Batch.tensors`, with the item first."""
        return [
            (f"{path}.transpose(0, 1)", one.transpose(0, 1)) for path, one in self._batch.tensors() if one.dim() > 1
        ]


def time_first(module: nn.Module) -> list[str]:
    """The names of the submodules that expect time in dimension 0."""
    return [name for name, part in module.named_modules() if getattr(part, "batch_first", None) is False]


@contextlib.contextmanager
def batch_first(module: nn.Module) -> Iterator[None]:
    """Let these submodules expect the item in dimension 0."""
    parts = [module.get_submodule(name) for name in time_first(module)]
    try:
        for part in parts:
            part.batch_first = True  # type: ignore[assignment]
        yield
    finally:
        for part in parts:
            part.batch_first = False  # type: ignore[assignment]
