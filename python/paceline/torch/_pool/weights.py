"""Copies of a served module's parameters in the memory of devices where the module is not."""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from paceline.torch._pool.seats import Seat

# Tensors, which are kept so that no other one gets their identity, and versions.
Marks = tuple[list[torch.Tensor | None], list[Any]]


class Weights:
    """Copies of the parameters for one memory space where the module is not. The devices there share them.

    One batch at a time is on a device. So when a device takes over new copies nothing there uses the old ones any more, and a lone device may write to them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: Marks = ([], [])
        self._copies: list[torch.Tensor] = []
        self._ready: Any = None
        self.generation = 0
        self.devices: set[str] = set()

    def of(self, seat: Seat, marks: Marks, present: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
        """The copies, and how often they were made. `present`: what the device uses now."""
        with self._lock:
            if not (self._copies and same(marks, self._seen)):
                # A tensor that changes while this goes on is copied again before the next batch.
                given = [one for one in marks[0] if one is not None]
                alone, self._seen = len(self.devices) == 1, ([], [])
                if not (alone and self._overwritten(given)):
                    if alone and self._copies:  # do not hold old and new ones at once
                        self._copies = []
                        for alias in filter(_is_plain, present):
                            alias.data = alias.data.new_empty(0)
                    made = {id(one): one.detach().to(seat.device, copy=True) for one in given}
                    self._copies = [made[id(one)] for one in given]
                self._seen, self._ready = marks, seat.mark()
                self.generation += 1
            elif self._ready is not None:
                seat.follow([self._ready])
            return self._copies, self.generation

    def _overwritten(self, given: list[torch.Tensor]) -> bool:
        """Write the values into the copies, which takes no memory. False if these have another form."""
        if len(given) != len(self._copies) or not all(map(_is_like, given, self._copies)):
            return False
        pairs = {(id(one), id(copy)): (one, copy) for one, copy in zip(given, self._copies, strict=True)}
        if not len(pairs) == len({one for one, _ in pairs}) == len({copy for _, copy in pairs}):
            return False  # other ones are tied
        for one, copy in pairs.values():
            copy.copy_(one.detach())
        return True


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_quantized


def _is_like(one: torch.Tensor, copy: torch.Tensor) -> bool:
    return (
        _is_plain(one)
        and _is_plain(copy)
        and (one.shape, one.dtype, one.stride()) == (copy.shape, copy.dtype, copy.stride())
    )


def same(marks: Marks, seen: Marks) -> bool:
    return marks[1] == seen[1] and len(marks[0]) == len(seen[0]) and all(map(operator.is_, marks[0], seen[0]))
