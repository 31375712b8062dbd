"""How long the devices wait between two steps: for the next batch, an optimizer, or whatever else the script does."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator
from operator import add
from typing import TypeVar

from paceline.torch._trainer.thinned import Thinned

_T = TypeVar("_T")

_RECENT = 50  # steps
_WAITS = 64  # for batches; some steps take several
_LEAST = 8  # steps before anything is said; the first ones compile and allocate
_MUCH = 0.2  # of the time from step to step is much
_LEAST_SECONDS = 1e-3  # shorter gaps are not mentioned


class StepGaps:
    """The times between a trainer's steps. Host devices have nothing to do then; GPUs may still compute."""

    def __init__(self) -> None:
        self._ended: float | None = None  # when the last step ended, if nothing has failed since
        # Seconds between two steps, how many of these went into waiting for a batch, and seconds inside of the step.
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=_RECENT)
        self._waited = 0.0  # for batches, since the last step
        self._untimed = 0.0  # the same, before steps whose times do not count
        self.watches = False  # whether a loop over batches was ever seen
        self.waited = Thinned(add)  # seconds before each step whose times count
        self.waits: deque[tuple[float, float]] = deque(maxlen=_WAITS)  # when waiting for a batch began and ended

    def end(self, began: float, *, timed: bool = True) -> None:
        """Note that the step that began then, by time.perf_counter(), was committed. `timed`: whether it is in the history."""
        now = time.perf_counter()
        self._untimed += self._waited
        if timed:
            self.waited.add(self._untimed)
            self._untimed = 0.0
        if self._ended is not None:
            self._recent.append((began - self._ended, self._waited, now - began))
        self._ended, self._waited = now, 0.0

    def interrupted(self) -> None:
        """Note that a step failed or something else ran, so that the time until the next step does not count."""
        self._ended, self._waited = None, 0.0

    def watched(self, batches: Iterable[_T]) -> Iterator[_T]:
        """Yield the batches, and remember how long each took to come."""
        iterator = iter(batches)
        self.watches = True
        while True:
            began = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            ended = time.perf_counter()
            self._waited += ended - began
            self.waits.append((began, ended))
            yield batch

    def medians(self) -> tuple[float, float, float] | None:
        """Seconds between two steps, of these waiting for the next batch, and inside of a step. None while too few steps are known."""
        if len(self._recent) < _LEAST:
            return None
        between, waited, inside = (statistics.median(column) for column in zip(*self._recent, strict=True))
        return between, waited, inside

    def explain(self) -> str:
        """A line if much of the time passes between steps, else nothing."""
        medians = self.medians()
        if medians is None:
            return ""
        between, waited, inside = medians
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
