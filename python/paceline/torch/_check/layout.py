"""Batches whose dimension 0 is time, and modules that take it for time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from paceline.torch._batch.batch import Batch, Move, same


class AlongDimension1:
    """A batch cut along dimension 1, where all of its tensors that have one agree about it.

    Tensors of one dimension go along unchanged.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        sizes = {tensor.shape[1] for _, tensor in batch.tensors() if tensor.dim() > 1}
        self.size = sizes.pop() if len(sizes) == 1 else 0  # 0: there is no such dimension

    def slice(self, begin: int, end: int, move: Move = same) -> Any:
        """As `Batch.slice`."""
        return self._batch.cut(lambda tensor: tensor[:, begin:end] if tensor.dim() > 1 else tensor, move)

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """As `Batch.rows`."""
        return torch.arange(begin, end)

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """As `Batch.tensors`, with the item first."""
        return [
            (f"{path}.transpose(0, 1)", one.transpose(0, 1)) for path, one in self._batch.tensors() if one.dim() > 1
        ]


def time_first(module: nn.Module) -> list[str]:
    """The names of the submodules that take dimension 0 for time."""
    return [name for name, part in module.named_modules() if getattr(part, "batch_first", None) is False]


@contextlib.contextmanager
def batch_first(module: nn.Module) -> Iterator[None]:
    """With these taking dimension 0 for the item."""
    parts = [module.get_submodule(name) for name in time_first(module)]
    try:
        for part in parts:
            part.batch_first = True  # type: ignore[assignment]
        yield
    finally:
        for part in parts:
            part.batch_first = False  # type: ignore[assignment]
