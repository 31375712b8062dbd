"""What becomes of jobs of a pool, counted."""

from __future__ import annotations

import bisect
import itertools
import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from paceline._page.run import milliseconds
from paceline._words import plural

# Seconds that jobs wait, from what an idle worker takes to what a night of batch work takes.
BOUNDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0)
NEVER_RAN = ("rejected", "expired", "cancelled")
OUTCOMES = ("completed", "failed", *NEVER_RAN)
# Of two versions this many requests each are compared: of late, whenever they came, and ten of them are above the 99 % quantile.
RECENT = 1000


def outcome_of(outcome: str) -> str:
    """As it is counted: what an error, lost devices, memory or time have ended has failed."""
    return outcome if outcome in OUTCOMES else "failed"


class Seconds:
    """How long something took: how often up to each of `BOUNDS`, the sum, and the last times."""

    def __init__(self) -> None:
        self.counts, self.sum = [0] * (len(BOUNDS) + 1), 0.0
        self._recent: deque[float] = deque(maxlen=RECENT)

    def add(self, seconds: float) -> None:
        """Once more."""
        self.counts[bisect.bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds
        self._recent.append(seconds)

    def recent(self) -> dict[str, float | None]:
        """The mean and quantiles of the last ones."""
        last = sorted(self._recent)
        if not last:
            return dict.fromkeys(("mean", "p50", "p99"))
        return {"mean": sum(last) / len(last), "p50": last[len(last) // 2], "p99": last[len(last) * 99 // 100]}


def up_to(counts: Sequence[int]) -> list[tuple[float, int]]:
    """How many took at most so many seconds."""
    return list(zip((*BOUNDS, math.inf), itertools.accumulate(counts), strict=True))


class VersionFigures:
    """What became of the requests of one version of a model. Threads: any."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # finalizers and signal handlers may come in while it is held
        self._outcomes = dict.fromkeys(OUTCOMES, 0)
        self._waits, self._runs = Seconds(), Seconds()

    def count(self, outcome: str, waited: float | None = None) -> None:
        """Count a request that has ended. `waited`: seconds from its submit to its first run, None if it never ran."""
        with self._lock:
            self._outcomes[outcome_of(outcome)] += 1
            if waited is not None:
                self._waits.add(waited)

    def count_run(self, seconds: float) -> None:
        """Count a batch that has completed."""
        with self._lock:
            self._runs.add(seconds)

    def report(self) -> dict[str, Any]:
        """See `Batcher.versions`."""
        with self._lock:
            return {
                "outcomes": dict(self._outcomes),
                "batches": sum(self._runs.counts),
                **{
                    name: {**one.recent(), "counts": up_to(one.counts), "seconds_sum": one.sum}
                    for name, one in (("wait", self._waits), ("run", self._runs))
                },
            }


def row_of(version: Mapping[str, Any]) -> tuple[str, ...]:
    """Its figures as words, in the order of `COLUMNS`."""
    ends = version["outcomes"]
    counts = ends["completed"], ends["failed"], sum(ends[one] for one in NEVER_RAN), version["batches"]
    return (*map(str, counts), *map(_words, (version["wait"], version["run"])))


COLUMNS = ("completed", "failed", "never ran", "batches", "wait: mean, p50, p99", "a batch: mean, p50, p99")


def _words(seconds: Mapping[str, float | None]) -> str:
    return ", ".join("–" if (value := seconds[one]) is None else milliseconds(value) for one in ("mean", "p50", "p99"))


def role_of(version: Mapping[str, Any]) -> str:
    """In words, with its part of the requests. A ledger knows neither."""
    if "role" not in version:
        return "–"
    return f"{version['role']}, {100 * version['weight']:.3g} %" if version["weight"] else version["role"]


def text_of(endpoint: str, versions: Sequence[Mapping[str, Any]]) -> str:
    """A line for each version."""
    lines = []
    for one in versions:
        done, failed, never, batches, wait, run = row_of(one)
        lines.append(
            f"{endpoint}, version {one['number']} ({role_of(one)}): {done} completed in {plural(int(batches), 'batch', 'batches')}, {failed} failed, {never} never ran; "
            f"mean, p50 and p99 of the last ones: wait {wait}; a batch {run}\n"
        )
    return "".join(lines)
