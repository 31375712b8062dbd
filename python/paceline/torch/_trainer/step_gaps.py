"""What the devices wait for between two steps: the next batch, an optimizer, whatever else the script does."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

_T = TypeVar("_T")

_RECENT = 50  # steps
_LEAST = 8  # that say something: the first ones compile and allocate
_MUCH = 0.2  # of the time from step to step
_LEAST_SECONDS = 1e-3  # worth a word


class StepGaps:
    """How long a trainer's steps are apart. On the host its devices have nothing to do in between; GPUs may still compute."""

    def __init__(self) -> None:
        self._ended: float | None = None  # the last step, if nothing has failed since
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=_RECENT)  # between, of that for a batch, inside
        self._waited = 0.0  # for batches, since the last step

    def begin(self) -> float:
        """A step begins; what `end` is told."""
        return time.perf_counter()

    def end(self, began: float) -> None:
        """It was committed."""
        now = time.perf_counter()
        if self._ended is not None:
            self._recent.append((began - self._ended, self._waited, now - began))
        self._ended, self._waited = now, 0.0

    def interrupted(self) -> None:
        """A step failed, or something else ran: the time until the next one says nothing."""
        self._ended, self._waited = None, 0.0

    def watched(self, batches: Iterable[_T]) -> Iterator[_T]:
        """The batches; how long each was waited for is remembered."""
        iterator = iter(batches)
        while True:
            began = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._waited += time.perf_counter() - began
            yield batch

    def explain(self) -> str:
        """A line if much of the time goes by between steps, else nothing."""
        if len(self._recent) < _LEAST:
            return ""
        between, waited, inside = (statistics.median(column) for column in zip(*self._recent, strict=True))
        if between <= max(_LEAST_SECONDS, _MUCH * (between + inside)):
            return ""
        text = (
            f"Between two steps the devices wait {1e3 * between:.1f} ms, beside {1e3 * inside:.1f} ms that a step takes (medians of the last "
            f"{len(self._recent)}). "
        )
        if waited > between / 2:
            return (
                f"{text}Input-bound: {1e3 * waited:.1f} ms of that are for the next batch. More workers of the loader, or less work "
                "for each item, would help; more or faster devices would not.\n"
            )
        named = f"{1e3 * waited:.1f} ms of that are for the next batch; the rest is" if waited else "That is"
        return f"{text}{named} the optimizer, the loader or what else the script does there; more or faster devices would not help.\n"
