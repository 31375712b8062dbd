"""Batch normalisation over the batch of all devices, of all ranks if there are several (``batch_norm="synchronised"``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from paceline import InvalidArgument
from paceline.torch._devices.meeting import Meeting, MeetingPoint
from paceline.torch._replicas.batch_norm import using_batch_statistics
from paceline.torch._replicas.replicas import Replicas
from paceline.torch._replicas.synchronised import synchronised
from paceline.torch._run.call import Call
from paceline.torch._run.executor import Executor
from paceline.torch._run.feature import Bound, Context, Feature
from paceline.torch._run.rank_rounds import Rounds
from paceline.torch._run.ranks import Ranks
from paceline.torch._run.recipe import Constraints, Retry
from paceline.torch._run.workload import Workload

_LEFT = Retry("another rank left the attempt, while this one waited for it in a normalisation", most=8)


class SynchronisedNorms(Feature):
    """Lets the devices meet in their normalisations. In statistics over the batch items without weight count, too.

    The devices of all `ranks` meet in calls that all ranks make: those whose gradients they sum. In all others those of this process do.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.point = MeetingPoint()
        self._ranks = ranks

    def constraints(self, replicas: Replicas, work: Workload | None) -> Constraints:
        return Constraints(undivided=True, all_items=True) if using_batch_statistics(replicas.norms) else Constraints()

    def bind(self, call: Call) -> Bound | None:
        if not call.recipe.constraints.undivided:
            return None
        if call.asked.costs is not None:
            raise InvalidArgument(
                "batch_norm='synchronised' together with cost=, which deals items out to several micro-batches of a device. Statistics of the batch "
                "need one. Leave cost= out, or use batch_norm='apart'."
            )
        rounds = self._ranks.rounds if self._ranks is not None and call.keep else None
        if call.seen.compiled and (len(call.places) > 1 or rounds is not None):
            raise InvalidArgument(
                "batch_norm='synchronised' together with torch.compile: devices wait for each other inside of the forward, and a compiled forward "
                "runs alone while it compiles. Train without torch.compile, or use batch_norm='apart'."
            )
        return _Meets(self.point, rounds)


class _Meets(Bound):
    def __init__(self, point: MeetingPoint, rounds: Rounds | None) -> None:
        self._point = point
        self._rounds = rounds  # of all ranks, if they meet
        self._meeting: Meeting | None = None  # none, if one device has all items and so their statistics
        self._begun: set[int] = set()

    @contextlib.contextmanager
    def run(self, run: Executor) -> Iterator[None]:
        if run.claims is not None:
            parts = [len(part) for part in run.claims]
        else:
            parts = [int(share > 0) for share in run.plan.shares] if run.plan is not None else []
        if max(parts) > 1:
            raise InvalidArgument(
                "batch_norm='synchronised': the ledger that is replayed has several micro-batches of a device in one step. Statistics of the batch "
                "need one. Replay it with batch_norm='apart', as it was written."
            )
        self._meeting, self._begun = None, set()
        beyond = None if self._rounds is None else self._rounds.meet
        if sum(parts) < 2 and beyond is None:
            yield
            return
        replicas = run.call.all_replicas
        pairs = [
            (name, replica.counterparts.get(id(part), part))
            for replica in replicas.list
            for name, part in replicas.norms
        ]
        devices = [device for device, count in enumerate(parts) if count]
        self._meeting = self._point.now = Meeting(run.places.names, devices, beyond)
        run.waited = self._meeting.waited
        try:
            with synchronised(pairs, self._point):
                yield
        finally:
            self._point.now = None
            self._meeting.over()  # it stays, for workers that are left behind

    def micro_batch(self, run: Executor, device: int, begin: int, end: int) -> Context:
        if device in self._begun:
            raise InvalidArgument(
                "batch_norm='synchronised': a device would run its share in several micro-batches, as memory ran out earlier or as replayed "
                "claims say. Statistics of the batch need one. Make a new trainer, with a smaller batch if that was too large, or use batch_norm='apart'."
            )
        self._begun.add(device)
        if self._meeting is not None:
            self._meeting.begin(device)
        return contextlib.nullcontext()

    def failed(self, device: int) -> None:
        if self._meeting is not None:
            self._meeting.call_off()

    def ended(self, device: int) -> None:
        if self._meeting is not None:
            self._meeting.end(device)

    def retry(self, run: Executor, outcome: Any, *, failed: bool) -> Retry | None:
        """If this rank was left alone, it says so to all ranks before its next attempt, and hears why."""
        off = self._rounds is not None and self._rounds.is_off
        return _LEFT if off and failed and not run.failures else None
