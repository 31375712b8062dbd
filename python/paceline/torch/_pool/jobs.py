"""The jobs of one pool: how they reach the engine, on which devices, and what becomes of them when the program ends."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import math
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from paceline import DeviceGroup, InvalidArgument
from paceline._core.engine import Pool as Engine
from paceline.torch._devices.worker_state import prepare_worker
from paceline.torch._pool.figures import Figures
from paceline.torch._pool.job import PoolFuture, Work
from paceline.torch._pool.needs import ANY, Place
from paceline.torch._pool.served import Served
from paceline.torch._pool.watchdog import Watchdog

Priority = Literal["interactive", "normal", "batch", "background"]
Placement = Literal["auto", "any", "weighted", "round_robin", "least_outstanding", "earliest_finish"]
Evicted = list[tuple[str, str]]  # devices, and models that leave their memory

_PRIORITIES = ("interactive", "normal", "batch", "background")


class Jobs:
    """What a pool and its batchers share. Jobs keep it until they have ended, so a pool that nobody knows any more ends them first."""

    def __init__(
        self, group: DeviceGroup, placement: Placement, memory: Mapping[str, float], hang_seconds: float | None
    ) -> None:
        self.devices = group.devices
        self.memory = memory
        self.engine = Engine(group, placement, dict(memory))
        self.served: weakref.WeakValueDictionary[str, Served] = weakref.WeakValueDictionary()  # by the batcher's name
        self.watchdog = None if hang_seconds is None else Watchdog(self, hang_seconds)
        self.figures = Figures([one.name for one in group.devices])
        self.closed = False
        self._threads = {one.name: max(1, len(one.cores)) for one in group.devices}
        self._process = os.getpid()
        self._numbers = itertools.count(1)
        _open.add(self)

    def put(
        self,
        work: Work,
        *,
        kind: str,
        priority: str,
        deadline: float | None,
        wait: bool,
        not_before: float = 0.0,
        gang: int = 1,
        after: Sequence[PoolFuture[Any]] = (),
        place: Place = ANY,
        cost: float = 1.0,
        memory: float = 0.0,
        batched: bool = False,
    ) -> None:
        """Give the engine a piece of work, and its future what the engine knows it by."""
        if priority not in _PRIORITIES:
            raise InvalidArgument(f"submit: priority is {priority!r}; it must be one of {', '.join(_PRIORITIES)}.")
        if not all(isinstance(one, PoolFuture) and one._job is not None for one in after):
            raise InvalidArgument("submit: after= has something else than futures of this pool.")
        future = work.future
        assert future is not None
        work.kind = kind
        future._job = self.engine.submit(
            work,
            kind=kind,
            priority=_PRIORITIES.index(priority),
            deadline=math.inf if deadline is None else deadline,
            not_before=not_before,
            gang=gang,
            after=[one._job for one in after],
            needs=place.labels,
            devices=place.names,
            cost=cost,
            memory=memory,
            wait=wait,
            batched=batched,
        )

    def prepare(self, device: str) -> None:
        """Prepare the calling worker."""
        prepare_worker(self._threads[device], None)

    def evict(self, models: Evicted) -> None:
        """Let devices forget models. Called on a worker, before what needs the memory."""
        for device, name in models:
            served = self.served.get(name)
            if served is not None:
                served.drop(device)

    def number(self) -> int:
        """The number of one more batcher."""
        return next(self._numbers)

    def devices_now(self) -> dict[str, dict[str, Any]]:
        """The figures of each device, and whether it is ``retired``, or lost."""
        active = self.engine.active  # first: it raises in a forked process, where a lock may be held for ever
        return {name: {**one, "retired": name not in active} for name, one in self.figures.devices().items()}

    def close(self, cancel: bool) -> None:
        """Wait until every job has ended. In another process than that of the pool it does nothing."""
        if os.getpid() == self._process:
            self.engine.close(cancel)
            self.closed = True
            if self.watchdog is not None:
                self.watchdog.end()


_open: weakref.WeakSet[Jobs] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End the jobs before the interpreter ends. After an error nobody waits for what has not started."""
    # In an interactive session it is that of some earlier line.
    failed = getattr(sys, "last_type", None) is not None and not hasattr(sys, "ps1")
    for jobs in list(_open):
        with contextlib.suppress(Exception):
            jobs.close(cancel=failed)
