"""The size of micro-batches, found by measuring it while training."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise

from paceline._words import plural

_FIRST_SEARCH = 5  # steps: the first ones compile and allocate
_NEXT_SEARCH = 500  # steps: what was best may not be any more
_PAIRS = 3  # comparisons at least: each of a step on trial with the usual steps around it
_MOST_PAIRS = 20  # comparisons at most: where times vary much, few of them do not tell
_GAIN = 0.95  # of the time of an item, or less: a size that is that much faster is taken
_ERRORS = 2.5  # standard errors between a ratio and _GAIN that end the search; above 2, since the ratio is the least of several
_ALIKE = 1.03  # times the best: of sizes as good as that the largest is taken
_LEAST_SECONDS = 5e-3  # of a micro-batch: smaller ones would pay for more calls than they can gain
_MOST_SIZES = 6  # in one search
_WHOLE = math.inf  # as a size: a claim in one piece
_MOST_KINDS = 8  # of batches that are remembered

Timed = Sequence[
    Sequence[Sequence[tuple[int, float]]]
]  # of each device, of each claim: items and seconds of its pieces


class Compared:
    """What a trial has found of one device so far: logs of ratios of the time of an item."""

    def __init__(self) -> None:
        self.items = 0  # that it ran
        self.largest = 0.0  # the size of the first piece of its first claim
        self.first: list[float] = []  # that size to steps as usual
        self.others: dict[float, list[float]] = {}  # each size to the largest in the same claim

    def add(self, sizes: Sequence[float], claim: Sequence[tuple[int, float]], usual: float) -> None:
        """A claim, in pieces of these sizes, between steps in which an item took `usual` seconds.

        Claims that begin with another size than the first one tell nothing: those are corrections.
        """
        self.largest = self.largest or sizes[0]
        if sizes[0] != self.largest:
            return
        times = [seconds / items for items, seconds in claim[: len(sizes)]]
        self.items += sum(items for items, _ in claim)
        self.first.append(math.log(times[0] / usual))
        for size, time in zip(sizes, times, strict=True):
            self.others.setdefault(size, []).append(math.log(time / times[0]))

    def found(self, size: float) -> float:
        """The log of the ratio."""
        return statistics.median(self.first) + statistics.median(self.others[size])

    def variance(self, size: float) -> float:
        """Of what is found of a size."""
        return _variance_of_median(self.first) + _variance_of_median(self.others[size])


class SizeSearch:
    """Whether larger shares of one kind of batch are faster in smaller micro-batches: what fits a cache, or memory that is at hand.

    Now and then some steps cut each claim into one piece of each size, halves of halves, by turns with steps as usual. Sizes are compared
    within a claim, where all of it meets the same machine; the largest of them with whole claims of the same device, in the step before and
    the one after. That takes eight steps, and up to 42 where times vary. Where a size is in use, as many more steps compare whole
    claims with it. All devices run the same size in a step, since it is their speeds beside each other that shares go by.
    """

    def __init__(self) -> None:
        self.size: int | None = None  # in use, items; None: a claim is one micro-batch
        self.gain = 1.0  # times as fast as what was in use before
        self._rest: float = _FIRST_SEARCH
        self._trials: list[
            list[int]
        ] = []  # to go, each the sizes that a claim is cut into, from large to small; none: it is whole
        self._turn = 0  # of the first of them
        self._before: list[float | None] = []  # seconds of an item in the usual step before, of each device
        self._tried: Timed = []  # the step on trial that followed
        self._compared: list[Compared] = []  # of each device
        self._found: dict[float, tuple[float, float]] = {}  # as `_result` tells it, of all trials

    @property
    def on_trial(self) -> bool:
        """Whether the next step tries sizes: its times are no evidence of speeds."""
        return bool(self._trials) and self._turn % 2 == 0

    def pieces(self, begin: int, end: int) -> list[tuple[int, int]]:
        """A claim of the next step, cut up."""
        if not self.on_trial:
            return in_pieces(begin, end, self.size)
        bounds = [begin]
        for size in self._cuts(end - begin):
            bounds.append(bounds[-1] + size)
        if bounds[-1] < end:
            bounds.append(end)
        return list(pairwise(bounds))

    def add(self, timed: Timed) -> None:
        """A step that was committed."""
        if not self._trials and self._rest > 1:
            self._rest -= 1
            return
        usual = [_seconds_of_an_item(piece for claim in claims for piece in claim) for claims in timed]
        if all(seconds is None for seconds in usual):
            return
        if not self._trials:
            self._begin(timed, usual)
            return
        if self._turn % 2 == 0:
            self._tried = timed
        else:
            if self._turn > 1:  # the first one warms up
                self._compare(usual)
            self._before = usual
        self._turn += 1
        pairs = self._turn // 2 - 1
        if self._turn % 2 == 0 and pairs >= _PAIRS and (pairs >= _MOST_PAIRS or self._is_certain()):
            self._next()

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
        self._found = {}
        self._start(len(timed))

    def _start(self, devices: int) -> None:
        self._turn, self._compared = 0, [Compared() for _ in range(devices)]
        if not self._trials:
            self._rest = _NEXT_SEARCH

    def _cuts(self, items: int) -> list[int]:
        """The sizes of the first pieces of a claim on trial; none: it is whole, or too small to be cut."""
        sizes, left = [], items
        for size in self._trials[0]:
            if 2 * size <= items + 1 and size <= left:
                sizes.append(size)
                left -= size
        return sizes

    def _compare(self, usual: Sequence[float | None]) -> None:
        for compared, claims, before, after in zip(self._compared, self._tried, self._before, usual, strict=True):
            if not before or not after:
                continue
            for claim in claims:
                items = sum(count for count, _ in claim)
                sizes: list[float] = [*self._cuts(items)]
                # Claims that would not be cut anyway are corrections, too small to speak for whole ones.
                if not self._trials[0] and len(in_pieces(0, items, self.size)) > 1:
                    sizes = [_WHOLE]
                if sizes and all(seconds > 0 for _, seconds in claim):
                    compared.add(sizes, claim, math.sqrt(before * after))

    def _result(self) -> dict[float, tuple[float, float]]:
        """By size the log of the ratio, the mean over devices by the items that they ran, and its standard error."""
        known = [compared for compared in self._compared if compared.first]
        result = {}
        for size in {size for compared in known for size in compared.others}:
            ran = [compared for compared in known if size in compared.others]
            items = sum(compared.items for compared in ran)
            ratio = sum(compared.items * compared.found(size) for compared in ran) / items
            variance = sum((compared.items / items) ** 2 * compared.variance(size) for compared in ran)
            result[size] = ratio, math.sqrt(variance)
        return result

    def _is_certain(self) -> bool:
        """Of the size that is the fastest so far, whether it is fast enough."""
        ratio, error = min(self._result().values(), default=(0.0, 0.0))
        return abs(ratio - math.log(_GAIN)) > _ERRORS * error

    def _next(self) -> None:
        """The first trial has ended."""
        self._found |= self._result()
        del self._trials[0]
        if not self._trials and self._found:
            best, error = min(self._found.values())
            if best + error <= math.log(_GAIN):
                size = max(size for size, (ratio, _) in self._found.items() if ratio <= best + math.log(_ALIKE))
                self.size = None if size == _WHOLE else int(size)
                self.gain = math.exp(-self._found[size][0])
        self._start(len(self._compared))


def _variance_of_median(values: Sequence[float]) -> float:
    middle = statistics.median(values)
    deviation = 1.48 * statistics.median(abs(value - middle) for value in values)
    few = 1 + 4 / len(values)  # a median deviation of few values is too small half of the time
    return few * math.pi / 2 * deviation**2 / len(values)


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
            f"Micro-batches of about {plural(self._last.size, 'item')}: measured to be {self._last.gain:.2f} times as fast as the size before that. "
            "micro_batch= sets it.\n"
        )


def in_pieces(begin: int, end: int, size: int | None) -> list[tuple[int, int]]:
    """Items ``[begin, end)`` in equal pieces of about `size` items, at most half as many again."""
    if size is None:
        return [(begin, end)]
    count = max(1, round((end - begin) / size))
    return list(pairwise(begin + (end - begin) * k // count for k in range(count + 1)))
