"""Batch normalisation over the batch of all devices (``batch_norm="synchronised"``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from paceline import InvalidArgument
from paceline.torch._devices.meeting import Meeting, MeetingPoint
from paceline.torch._replicas.batch_norm import using_batch_statistics
from paceline.torch._replicas.replicas import Replicas
from paceline.torch._replicas.synchronised import synchronised
from paceline.torch._run.call import Call
from paceline.torch._run.executor import Executor
from paceline.torch._run.feature import Bound, Context, Feature
from paceline.torch._run.recipe import Constraints
from paceline.torch._run.workload import Workload


class SynchronisedNorms(Feature):
    """Lets the devices meet in their normalisations. In statistics over the batch items without weight count, too."""

    def __init__(self) -> None:
        self.point = MeetingPoint()

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
        if call.seen.compiled and len(call.places) > 1:
            raise InvalidArgument(
                "batch_norm='synchronised' together with torch.compile: devices wait for each other inside of the forward, and a compiled forward "
                "runs alone while it compiles. Train without torch.compile, or use batch_norm='apart'."
            )
        return _Meets(self.point)


class _Meets(Bound):
    def __init__(self, point: MeetingPoint) -> None:
        self._point = point
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
        if sum(parts) < 2:
            yield
            return
        replicas = run.call.all_replicas
        pairs = [
            (name, replica.counterparts.get(id(part), part))
            for replica in replicas.list
            for name, part in replicas.norms
        ]
        self._meeting = self._point.now = Meeting(
            run.places.names, (device for device, count in enumerate(parts) if count)
        )
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
