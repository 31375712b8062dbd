"""Ledgers of pools for other decisions: jobs whose submit waits while the queue of their kind is full."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container
from typing import Any

from paceline._core.plan import PoolState


class Waiting:
    """The submits of a ledger, which wait for room in their order by kind and tenant. `taken`: the jobs of the ledger that `submit` has given to the pool."""

    def __init__(self, pool: PoolState, taken: Container[int], submit: Callable[[dict[str, Any]], None]) -> None:
        self._pool, self._taken, self._submit = pool, taken, submit
        self._held: dict[int, dict[str, Any]] = {}  # by job
        self._queues: dict[tuple[int, int], deque[int]] = {}

    def comes(self, entry: dict[str, Any]) -> None:
        """A job comes. It has to wait for room, and for a job before it that waits for room."""
        call = entry["submit"]
        queue = self._queues.setdefault((call["kind"], call.get("tenant", 0)), deque())
        if self._may_go_on(call) and not (queue and call.get("waits")):
            return self._submit(entry)
        self._held[entry["job"]] = entry
        queue.append(entry["job"])

    def go_on(self) -> None:
        """Submit what has to wait no longer."""
        for queue in self._queues.values() if self._held else ():
            while queue and (queue[0] not in self._held or self._may_go_on(self._held[queue[0]]["submit"])):
                self.let_in(queue.popleft())

    def let_in(self, job: int) -> None:
        """Submit a job that waits here, whether or not there is room."""
        if (entry := self._held.pop(job, None)) is not None:
            self._submit(entry)

    def _may_go_on(self, call: dict[str, Any]) -> bool:
        room = not call.get("waits") or self._pool.has_room(kind=call["kind"], tenant=call.get("tenant", 0))
        return room and all(job in self._taken for job in call.get("after", ()))
