"""The size of micro-batches, found by measuring it while training."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise

from paceline._words import counted

_FIRST_SEARCH = 5  # steps: the first ones compile and allocate
_NEXT_SEARCH = 500  # steps: what was best may not be any more
_PAIRS = 3  # of a step on trial, and one as usual before it
_TURNS = 2 * _PAIRS + 1  # of a trial, with one that warms up
_GAIN = 0.95  # of the time of an item, or less: a size that is that much faster is taken
_ALIKE = 1.03  # times the best: of sizes as good as that the largest is taken
_LEAST_SECONDS = 5e-3  # of a micro-batch: smaller ones would pay for more calls than they can gain
_MOST_SIZES = 6  # in one search
_WHOLE = math.inf  # as a size: a claim in one piece
_MOST_KINDS = 8  # of batches that are remembered

Timed = Sequence[
    Sequence[Sequence[tuple[int, float]]]
]  # of each device, of each claim: items and seconds of its pieces


class SizeSearch:
    """Whether larger shares of one kind of batch are faster in smaller micro-batches: what fits a cache, or memory that is at hand.

    Now and then some steps cut each claim into one piece of each size, halves of halves, by turns with steps as usual: so each device is
    compared with itself at nearly the same time, and all sizes are known after seven steps. Where a size is in use, whole claims are
    compared with it likewise, in seven steps more. All devices run the same size in a step, since it is their speeds beside each other
    that shares go by.
    """

    def __init__(self) -> None:
        self.size: int | None = None  # in use, items; None: a claim is one micro-batch
        self.gain = 1.0  # times as fast as what was in use before
        self._rest: float = _FIRST_SEARCH
        self._trials: list[
            list[int]
        ] = []  # each the sizes that a claim is cut into, from large to small; none: it is whole
        self._turn = 0  # through all trials
        self._usual: list[float | None] = []  # seconds of an item in the usual step before, of each device
        self._ratios: dict[float, list[float]] = {}  # of the times of an item, by size

    @property
    def on_trial(self) -> bool:
        """Whether the next step tries sizes: its times are no evidence of speeds."""
        return bool(self._trials) and self._turn % _TURNS % 2 == 0

    def pieces(self, begin: int, end: int) -> list[tuple[int, int]]:
        """A claim of the next step, cut up."""
        if not self.on_trial:
            return in_pieces(begin, end, self.size)
        bounds = [begin]
        for size in self._trials[self._turn // _TURNS]:
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
        if not self._trials:
            self._rest -= 1
            if self._rest <= 0:
                self._begin(timed, usual)
            return
        if not self.on_trial:
            self._usual = usual
        elif self._turn % _TURNS > 0:  # the first one warms up
            self._compare(timed)
        self._turn += 1
        if self._turn == _TURNS * len(self._trials):
            self._end()

    def _begin(self, timed: Timed, usual: Sequence[float | None]) -> None:
        largest = max(sum(items for items, _ in claim) for claims in timed for claim in claims)
        slowest = max(seconds for seconds in usual if seconds is not None)
        sizes: list[int] = []
        size = -(-largest // 2)
        while size > 1 and size * slowest >= _LEAST_SECONDS and len(sizes) < _MOST_SIZES:
            sizes.append(size)
            size = -(-size // 2)
        self._trials = [sizes] if sizes else []
        if self.size is not None:
            self._trials.append([])
        self._turn, self._ratios = 0, {size: [] for size in (*sizes, _WHOLE)}
        if not self._trials:
            self._rest = _NEXT_SEARCH

    def _compare(self, timed: Timed) -> None:
        whole = not self._trials[self._turn // _TURNS]
        for claims, usual in zip(timed, self._usual, strict=True):
            for items, seconds in (piece for claim in claims for piece in claim):
                # Claims that would not be cut anyway are corrections, too small to speak for whole ones.
                size = _WHOLE if whole and len(in_pieces(0, items, self.size)) > 1 else items
                if usual is not None and size in self._ratios:
                    self._ratios[size].append(seconds / items / usual)

    def _end(self) -> None:
        found = {size: statistics.median(ratios) for size, ratios in self._ratios.items() if ratios}
        best = min(found.values(), default=1.0)
        if best <= _GAIN:
            size = max(size for size, ratio in found.items() if ratio <= _ALIKE * best)
            self.size = None if size == _WHOLE else int(size)
            self.gain = 1 / found[size]
        self._trials, self._rest = [], _NEXT_SEARCH


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
