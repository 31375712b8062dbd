"""The seconds of a rank's own work in a step."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from paceline.torch._devices import cuda

Mark = tuple[float, Any]  # the time on the host, and an event of the present GPU if there is one


class Reading(NamedTuple):
    """What a clock has counted in a step."""

    pieces: list[tuple[Mark, Mark]]
    on_gpu: bool  # whether the work ran on a GPU, so that the events count

    def ready(self) -> bool:
        """Whether the seconds are known. A GPU may not have come to the end of the step yet."""
        return not self.on_gpu or all(cuda.has_passed(end[1]) for _, end in self.pieces)

    def seconds(self) -> float:
        """The sum of the pieces."""
        if self.on_gpu:
            return sum(cuda.seconds_between(begin[1], end[1]) for begin, end in self.pieces)
        return sum(end[0] - begin[0] for begin, end in self.pieces)


class Clock:
    """Counts while a rank works, and stands while it waits for other ranks.

    On a GPU it marks the stream on which the work is enqueued, and nothing waits for the marks.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[Mark, Mark]] = []
        self._since: Mark | None = None  # None while it stands
        self._in_step = False
        self._gpu: int | None = None

    def begin(self) -> None:
        """Begin a step."""
        self._gpu, self._pieces, self._in_step = cuda.present(), [], True
        self._since = self._mark()

    def stop(self) -> None:
        """Stand still."""
        self.pause()

    def pause(self) -> bool:
        """Stand still. Returns whether it was counting."""
        if self._since is None:
            return False
        self._pieces.append((self._since, self._mark()))
        self._since = None
        return True

    def resume(self) -> None:
        """Count again, if a step has begun."""
        if self._in_step and self._since is None:
            self._since = self._mark()

    def end(self, on_gpu: bool = False) -> Reading:
        """End the step. `on_gpu`: whether the work ran on a GPU."""
        self.pause()
        self._in_step = False
        return Reading(self._pieces, on_gpu and self._gpu is not None)

    def _mark(self) -> Mark:
        return time.perf_counter(), None if self._gpu is None else cuda.mark_current(self._gpu)
