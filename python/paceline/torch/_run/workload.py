"""One kind of work of a trainer."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

from paceline._core.engine import StepLoop
from paceline.torch._replicas.replicas import Replicas
from paceline.torch._run.alone import AloneTrials
from paceline.torch._run.beside import Beside
from paceline.torch._run.launch import LaunchClock
from paceline.torch._run.recipe import Constraints
from paceline.torch._run.seen import Seen

_MOST_KINDS = 256  # kinds of batches that keep their number; the engine remembers fewer


class Workload:
    """One kind of work, with its own times, sizes and memory. These say nothing about another kind."""

    proved = 0  # steps that one device ran, as proofs; they are not among those of `step_loop`
    trained = 0  # steps that train and were committed to `step_loop`

    def __init__(
        self,
        step_loop: Any,
        limits: Sequence[int | None],
        on_gpu: Sequence[bool],
        *,
        searches: bool = False,
        fixed: bool = False,
        corrects: bool = False,
        beside: Beside | None = None,
    ) -> None:
        self.step_loop: StepLoop = step_loop
        self.limits = limits
        self.searches = searches  # whether to search for the size of micro-batches
        self.fixed = fixed  # whether shares stay the same whatever the times
        self.corrects = corrects  # whether corrections are on by default
        self.beside = beside  # pools for which micro-batches may be short; None: their sizes are not free
        self._longest = 0.0  # seconds of a micro-batch that the StepLoop was given
        self.seen = Seen(len(on_gpu))
        self.launches = LaunchClock(on_gpu)
        # Whether the forward writes buffers. If it does, the number of forwards changes the result. None: not known yet.
        self.writes_buffers: bool | None = None
        self.mode: Any = None  # the mode in which `writes_buffers` was found out
        # The least items and the corrections that the StepLoop was given.
        self.given: tuple[int, bool | None] | None = None
        self.normalises = False  # whether something other than the known modules normalises over a micro-batch
        # Whether gradients may be sent to other ranks while backward goes on. None: not before a step was committed.
        self.sends_early: bool | None = None
        self.recipe: Any = None  # the features of the last attempt
        self.alone: AloneTrials | None = None  # set where one device may be faster than all
        self._kinds: dict[Hashable, int] = {}  # least recently used first
        self._numbers = itertools.count()

    def constrain(self, constraints: Constraints, replicas: Replicas) -> None:
        """Give each device one micro-batch if the result depends on their number. Corrections would divide it."""
        corrections = None
        if self.corrects:
            writes = replicas.any_buffers if self.writes_buffers is None else self.writes_buffers
            corrections = False if writes or constraints.least > 1 or constraints.undivided else None
        if self.given != (constraints.least, corrections):
            self.step_loop.set_least_items(constraints.least)
            if self.corrects:
                self.step_loop.set_corrections(corrections)
            self.given = (constraints.least, corrections)

    def shorten(self, seconds: float) -> None:
        """Let micro-batches of free sizes end within so many seconds from now on; 0: they take what they take."""
        if seconds != self._longest:
            self.step_loop.set_longest(seconds)
            self._longest = seconds

    def kind(self, key: Hashable) -> int:
        """A number for all batches with this key, for the engine. The least recently used of many keys is forgotten."""
        number = self._kinds.pop(key, None)
        if number is None:
            number = next(self._numbers)
        if len(self._kinds) >= _MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        self._kinds[key] = number
        return number
