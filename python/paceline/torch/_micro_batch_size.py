"""The size of micro-batches, found by measuring it while training."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise

from paceline._words import counted

_FIRST_SEARCH = 5  # steps: the first ones compile and allocate
_NEXT_SEARCH = 500  # steps: what was best may not be any more
_PAIRS = 3  # of a step with many sizes, and one as usual before it
_GAIN = 0.95  # of the time of an item, or less: a size that is that much faster is taken
_ALIKE = 1.03  # times the best: of sizes as good as that the largest is taken
_LEAST_SECONDS = 5e-3  # of a micro-batch: smaller ones would pay for more calls than they can gain
_MOST_SIZES = 6  # in one search
_MOST_KINDS = 8  # of batches that are remembered

Timed = Sequence[
    Sequence[Sequence[tuple[int, float]]]
]  # of each device, of each claim: items and seconds of its pieces


class SizeSearch:
    """Whether larger shares of one kind of batch are faster in smaller micro-batches: what fits a cache, or memory that is at hand.

    Now and then some steps cut each claim into one piece of each size, halves of halves, by turns with steps as usual: so each device is
    compared with itself at nearly the same time, and all sizes are known after seven steps. All devices run the same size in a step,
    since it is their speeds beside each other that shares go by.
    """

    def __init__(self) -> None:
        self.size: int | None = None  # in use, items; None: a claim is one micro-batch
        self.gain = 1.0  # times as fast as what was in use before
        self._rest: float = _FIRST_SEARCH
        self._sizes: list[int] = []  # that are tried, from large to small; empty: no search
        self._turn = 0
        self._usual: list[float | None] = []  # seconds of an item in the usual step before, of each device
        self._ratios: dict[int, list[float]] = {}

    def stop(self) -> None:
        """A claim stays one micro-batch: the forward keeps count of them, in a buffer."""
        self.size, self._sizes, self._rest = None, [], math.inf

    @property
    def on_trial(self) -> bool:
        """Whether the next step tries sizes: its times are no evidence of speeds."""
        return bool(self._sizes) and self._turn % 2 == 0

    def pieces(self, begin: int, end: int) -> list[tuple[int, int]]:
        """A claim of the next step, cut up."""
        if not self.on_trial:
            return in_pieces(begin, end, self.size)
        bounds = [begin]
        for size in self._sizes:
            if bounds[-1] + size <= end:
                bounds.append(bounds[-1] + size)
        if bounds[-1] < end:
            bounds.append(end)
        return list(pairwise(bounds))

    def add(self, timed: Timed) -> None:
        """A step that was committed."""
        usual = [_seconds_of_an_item(piece for claim in claims for piece in claim) for claims in timed]
        if all(seconds is None for seconds in usual):
            return
        if not self._sizes:
            self._rest -= 1
            if self._rest <= 0:
                self._begin(timed, usual)
            return
        if not self.on_trial:
            self._usual = usual
        elif self._turn > 0:  # the first one warms up
            self._compare(timed)
        self._turn += 1
        if self._turn > 2 * _PAIRS:
            self._end()

    def _begin(self, timed: Timed, usual: Sequence[float | None]) -> None:
        largest = max(sum(items for items, _ in claim) for claims in timed for claim in claims)
        slowest = max(seconds for seconds in usual if seconds is not None)
        size = -(-largest // 2)
        while size > 1 and size * slowest >= _LEAST_SECONDS and len(self._sizes) < _MOST_SIZES:
            self._sizes.append(size)
            size = -(-size // 2)
        self._turn, self._ratios = 0, {size: [] for size in self._sizes}
        if not self._sizes:
            self._rest = _NEXT_SEARCH

    def _compare(self, timed: Timed) -> None:
        for claims, usual in zip(timed, self._usual, strict=True):
            for items, seconds in (piece for claim in claims for piece in claim):
                if usual is not None and items in self._ratios:
                    self._ratios[items].append(seconds / items / usual)

    def _end(self) -> None:
        found = {size: statistics.median(ratios) for size, ratios in self._ratios.items() if ratios}
        best = min(found.values(), default=1.0)
        if best <= _GAIN:
            self.size = max(size for size, ratio in found.items() if ratio <= _ALIKE * best)
            self.gain = 1 / found[self.size]
        self._sizes, self._rest = [], _NEXT_SEARCH


def _seconds_of_an_item(pieces: Iterable[tuple[int, float]]) -> float | None:
    items, seconds = 0, 0.0
    for count, time in pieces:
        items += count
        seconds += time
    return seconds / items if items else None


class MicroBatchSizes:
    """The sizes that are searched, one search for each kind of batch."""

    def __init__(self) -> None:
        self._searches: dict[Hashable, SizeSearch] = {}
        self._last: SizeSearch | None = None

    def of(self, kind: Hashable) -> SizeSearch:
        """The search for batches of this kind."""
        search = self._searches.pop(kind, None) or SizeSearch()
        if len(self._searches) >= _MOST_KINDS:
            del self._searches[next(iter(self._searches))]
        self._searches[kind] = self._last = search
        return search

    def explain(self) -> str:
        """A line if claims are worked off in micro-batches, else nothing."""
        if self._last is None or self._last.size is None:
            return ""
        return (
            f"Micro-batches of about {counted(self._last.size, 'item')}: measured to be {self._last.gain:.2f} times as fast as the size before that. "
            "micro_batch= sets it.\n"
        )


def in_pieces(begin: int, end: int, size: int | None) -> list[tuple[int, int]]:
    """Items ``[begin, end)`` in equal pieces of about `size` items, at most half as many again."""
    count = 1 if size is None else max(1, round((end - begin) / size))
    return list(pairwise(begin + (end - begin) * k // count for k in range(count + 1)))
