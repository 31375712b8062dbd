"""Medians, their intervals, and what the ratios are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """An interval that holds the true median with at least this probability, whatever the distribution.

    The k-th smallest and k-th largest value: the number of values below the median is binomial (the sign test turned
    round; see Conover, *Practical Nonparametric Statistics*, 3.2). None where there are too few values: six are needed
    for 95 %.
    """
    ordered = sorted(values)
    count = len(ordered)
    outside = 0.0  # twice the probability that at most k of the values lie below the median
    k = 0
    while k < count:
        outside += 2 * math.comb(count, k) * 0.5**count
        if outside > 1 - confidence:
            break
        k += 1
    if k == 0:
        return None
    return ordered[k - 1], ordered[count - k]


def rate(batch: int, blocks: Sequence[Sequence[float]]) -> float:
    """Items a second over all steps of all blocks."""
    return batch * sum(map(len, blocks)) / sum(map(sum, blocks))


def spread(values: Sequence[float]) -> float:
    """Half the distance between the smallest and the largest round, relative to the median."""
    return (max(values) - min(values)) / 2 / statistics.median(values)


def ratio_summary(ratios: Sequence[float]) -> dict[str, object]:
    """The median of ratios of neighbouring blocks, the interval that holds the true one with 95 %, and their spread."""
    interval = median_interval(ratios)
    return {
        "median": round(statistics.median(ratios), 4),
        "interval": None if interval is None else [round(end, 4) for end in interval],
        "spread": round(spread(ratios), 4),
        "pairs": len(ratios),
    }


def steps_to_recover(seconds: Sequence[float], change: int, end: int, tolerance: float = 0.05) -> int | None:
    """Steps from a change to the first that is as fast as those before `end`, as is most of it and the next two; None: never."""
    fast = statistics.median(seconds[(change + end) // 2 : end]) * (1 + tolerance)
    for step in range(change, end - 2):
        if seconds[step] <= fast and statistics.median(seconds[step : step + 3]) <= fast:
            return step - change
    return None
