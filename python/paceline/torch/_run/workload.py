"""One kind of work of a trainer."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Any

from paceline import DeviceGroup
from paceline._core.engine import StepLoop
from paceline.torch._devices.places import Places
from paceline.torch._replicas.replicas import Replicas
from paceline.torch._run.alone import AloneTrials
from paceline.torch._run.launch import LaunchClock
from paceline.torch._run.recipe import Constraints
from paceline.torch._run.seen import Seen

_MOST_KINDS = 256  # kinds of batches that keep their number; the engine remembers fewer


class Workload:
    """One kind of work, with its own times, sizes and memory. These say nothing about another kind."""

    proved = 0  # steps that one device ran, as proofs; they are not among those of `step_loop`

    def __init__(
        self, group: DeviceGroup, places: Places, limits: list[int | None], *, searches: bool = False, **options: Any
    ) -> None:
        self.step_loop = StepLoop(
            group, memory_limits=[limit or 0 for limit in limits], search_sizes=searches, **options
        )
        self.limits = limits
        self.searches = searches  # whether to search for the size of micro-batches
        self.fixed = options.get("balance") != "auto"  # whether shares stay the same whatever the times
        self.seen = Seen(len(group))
        self.launches = LaunchClock(places.on_gpu)
        # Whether corrections are on by default.
        self.corrects = len(group) > 1 and not any(places.on_gpu) and options.get("balance", "auto") == "auto"
        self.corrects &= not options.get("micro_batch") and options.get("corrections") is None
        # Whether the forward writes buffers. If it does, the number of forwards changes the result. None: not known yet.
        self.writes_buffers: bool | None = None
        self.mode: Any = None  # the mode in which `writes_buffers` was found out
        self.given: tuple[int, bool | None] | None = (
            None  # the least items and the corrections that the StepLoop was given
        )
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

    def kind(self, key: Hashable) -> int:
        """A number for all batches with this key, for the engine. The least recently used of many keys is forgotten."""
        number = self._kinds.pop(key, None)
        if number is None:
            number = next(self._numbers)
        if len(self._kinds) >= _MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        self._kinds[key] = number
        return number
