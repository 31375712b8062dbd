"""Requests that were answered, which stand for others of their kind when a version is warmed."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

_MOST = 64  # kinds; an example is a whole request
_cost = operator.attrgetter("cost")


class Example(NamedTuple):
    """What is kept of a request."""

    kind: str
    leaves: list[torch.Tensor]
    spec: Any
    cost: float


class Examples:
    """A request of each kind. Where costs differ, with padding, two: that of the least cost and that of the largest.

    A batch takes the memory of its longest request, and what compiles may compile for one length alone. Threads: any.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Example, ...]] = {}
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Example]:
        return (one for kept in list(self._kept.values()) for one in kept)

    def keep(self, requests: Sequence[Any]) -> None:
        """Keep what is needed of a batch that has its answers. Its requests have what an `Example` has."""
        kind = requests[0].kind
        kept = self._kept.get(kind)
        if kept is not None and all(kept[0].cost <= one.cost <= kept[-1].cost for one in requests):
            return
        with self._lock:
            kept = self._kept.get(kind, ())
            if not kept and len(self._kept) >= _MOST:
                return
            least, most = min((*kept, *requests), key=_cost), max((*kept, *requests), key=_cost)
            with contextlib.suppress(RuntimeError, MemoryError):  # no memory for it: the batch has its answers
                self._kept[kind] = tuple(map(_example, (least, most) if least.cost < most.cost else (least,)))


def _example(of: Any) -> Example:
    if isinstance(of, Example):
        return of
    return Example(of.kind, [one.detach().clone() for one in of.leaves], of.spec, of.cost)
