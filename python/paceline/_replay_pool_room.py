"""Ledgers of pools for other decisions: jobs whose submit waits while the queue of their kind is full."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from paceline._core.plan import PoolState

_Entry = dict[str, Any]


class Waiting:
    """The submits of a ledger, which wait for room in their order by kind and tenant. `ids`: of the jobs of the ledger that `happens` has given to the pool."""

    def __init__(self, pool: PoolState, ids: Mapping[int, int], happens: Callable[..., None]) -> None:
        self._pool, self._ids, self._happens = pool, ids, happens
        self._queues: dict[tuple[int, int], deque[_Entry]] = {}  # for room
        self._early: dict[int, list[_Entry]] = {}  # by the job whose submit they wait for, whether or not there is room
        self._cancelled: set[int] = set()  # before their submit

    def comes(self, entry: _Entry) -> None:
        """A job comes. It has to wait for the submits of those that it comes after, then for room, and for a job before it that waits for room."""
        if not self._has_to_wait(entry):
            self._goes(entry)

    def cancel(self, job: int) -> None:
        """A job is cancelled: now, or when its submit waits no longer, and before it starts."""
        if job in self._ids:
            self._happens("cancel", {"job": self._ids[job]})
        else:
            self._cancelled.add(job)

    def go_on(self) -> None:
        """Submit what has to wait no longer."""
        for (kind, tenant), queue in [*self._queues.items()]:
            while queue and self._pool.has_room(kind=kind, tenant=tenant):
                self._goes(queue.popleft())

    def _goes(self, entry: _Entry) -> None:
        going = [entry]
        for one in going:
            if one is entry or not self._has_to_wait(one):
                self._submit(one)
                going += self._early.pop(one["job"], ())

    def _has_to_wait(self, entry: _Entry) -> bool:
        call = entry["submit"]
        early = next((job for job in call.get("after", ()) if job not in self._ids), None)
        kind, tenant = place = call["kind"], call.get("tenant", 0)
        if early is not None:
            self._early.setdefault(early, []).append(entry)
        elif call.get("waits") and (self._queues.get(place) or not self._pool.has_room(kind=kind, tenant=tenant)):
            self._queues.setdefault(place, deque()).append(entry)
        else:
            return False
        return True

    def _submit(self, entry: _Entry) -> None:
        call = {**entry["submit"], "after": [self._ids[job] for job in entry["submit"].get("after", ())]}
        if entry["job"] not in self._cancelled:
            return self._happens("submit", call, entry)
        self._happens("submit", {**call, "not_before_seconds": 1.0}, entry)
        self._happens("cancel", {"job": self._ids[entry["job"]]})
