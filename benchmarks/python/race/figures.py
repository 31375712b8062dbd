"""Medians, their intervals, and ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """An interval that holds the true median with at least this probability, for any distribution.

    It is the k-th smallest and k-th largest value, because the number of values below the median is binomial (the inverted sign test; see
    Conover, *Practical Nonparametric Statistics*, 3.2). None if there are too few values: 95 % needs six.
    """
    ordered = sorted(values)
    count = len(ordered)
    outside = 0.0  # twice the probability that at most k values lie below the median
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
    """Items per second over all steps of all blocks."""
    return batch * sum(map(len, blocks)) / sum(map(sum, blocks))


def spread(values: Sequence[float]) -> float:
    """Half the distance between the smallest and the largest round, relative to the median."""
    return (max(values) - min(values)) / 2 / statistics.median(values)


def ratio_summary(ratios: Sequence[float]) -> dict[str, object]:
    """The median of the ratios of neighbouring blocks, the 95 % interval of the true median, and the spread."""
    interval = median_interval(ratios)
    return {
        "median": round(statistics.median(ratios), 4),
        "interval": None if interval is None else [round(end, 4) for end in interval],
        "spread": round(spread(ratios), 4),
        "pairs": len(ratios),
    }


def steps_to_recover(seconds: Sequence[float], change: int, end: int, tolerance: float = 0.05) -> int | None:
    """Steps from a change to the first step that is as fast as the steps before `end`. At least one of the two steps after it must be as fast,
    too. None if there is no such step."""
    fast = statistics.median(seconds[(change + end) // 2 : end]) * (1 + tolerance)
    for step in range(change, end - 2):
        if seconds[step] <= fast and statistics.median(seconds[step : step + 3]) <= fast:
            return step - change
    return None
