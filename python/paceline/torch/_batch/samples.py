"""A batch as a list of samples, which are put together on the devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from paceline import InvalidArgument
from paceline.torch._batch.batch import Batch
from paceline.torch._batch.moving import Move, moved, same

Collate = Callable[[list[Any]], Any]


class Samples(Batch):
    """A list of samples, one per item. `collate` makes the slice of a micro-batch from its samples, on the worker that runs it.

    So samples may be what no tensor can hold together: strings, graphs, images of many sizes, sequences that are packed without padding.

    Raises
    ------
    InvalidArgument
        If `data` is not a sequence, if it is empty, or if `collate` is not a function.
    """

    def __init__(self, data: Any, collate: Collate) -> None:
        if not callable(collate):
            raise InvalidArgument(
                f"collate: {type(collate).__name__}; a function that makes a slice from a list of samples is needed."
            )
        together = isinstance(data, tuple) and any(isinstance(entry, torch.Tensor) for entry in data)
        if together or isinstance(data, (str, bytes, Mapping, torch.Tensor)) or not isinstance(data, Sequence):
            raise InvalidArgument(
                f"batch: {type(data).__name__} together with collate=, which takes a list of samples, one per item. Give the DataLoader "
                "collate_fn=list, or leave collate= out if the batch is put together already."
            )
        if not data:
            raise InvalidArgument("batch: the list of samples is empty. Skip empty batches; with group= pass None.")
        self.leaves = []
        self._samples = data if isinstance(data, list) else list(data)
        self._collate = collate
        self.size = len(data)
        self.places = {}
        self.item_shapes = ()
        self._views = {}
        self.in_order = False

    def slice(self, begin: int, end: int, move: Move = same) -> Any:
        return moved(self._collate(self._samples[begin:end]), move)

    def slice_apart(self, begin: int, end: int, move: Move = same) -> Any:
        return self.slice(begin, end, move)

    def gathered(self, rows: torch.Tensor, move: Move = same) -> Any:
        return moved(self._collate([self._samples[row] for row in rows.tolist()]), move)

    def part(self, begin: int, end: int) -> Samples:
        return Samples(list(self._samples[begin:end]), self._collate)

    @property
    def structure(self) -> Any:
        return type(self._samples[0])

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """None: samples are not cut."""
        return []
