"""Forwards that write buffers: then the number of forwards changes the result."""

from __future__ import annotations

from typing import Any

from paceline.torch._replicas.buffers import KeptBuffers
from paceline.torch._run.call import Call
from paceline.torch._run.executor import Executor
from paceline.torch._run.feature import Bound, Feature
from paceline.torch._run.recipe import Retry


class WrittenBuffers(Feature):
    """Finds out, where a device may run its share in several micro-batches, whether a forward writes buffers. If so, it gets one."""

    def bind(self, call: Call) -> Bound | None:
        return self if call.work.writes_buffers is not True and call.all_replicas.any_buffers else None

    def begin(self, run: Executor) -> None:
        # Version counters are cheap, but batch_norm does not count its writes. So the first run of a mode compares values.
        self._marks: list[Any] | None = None
        self._first = False
        self._values: KeptBuffers | None = None
        if run.divides and run.claims is None:
            replicas = run.call.all_replicas
            self._marks = [replica.buffer_marks() for replica in replicas.list]
            self._first = run.call.work.mode != run.seen.mode
            self._values = KeptBuffers(replicas.modules) if self._first and not replicas.shared else None

    def retry(self, run: Executor, outcome: Any, *, failed: bool) -> Retry | None:
        if failed or self._marks is None:
            return None
        work, replicas = run.call.work, run.call.all_replicas
        work.mode = run.seen.mode
        marks = [replica.buffer_marks() for replica in replicas.list]
        work.writes_buffers = marks != self._marks or (self._first and self._wrote(run, outcome))
        self._values = None
        return Retry("buffers are written", complete=True) if work.writes_buffers and outcome.divided else None

    def _wrote(self, run: Executor, outcome: Any) -> bool:
        """Whether buffers have other values than before the run. Replicas began with those of the user's module."""
        if self._values is not None:
            return self._values.changed
        ran = [
            replica.buffers for replica, items in zip(run.call.all_replicas.list, outcome.items, strict=True) if items
        ]
        return any(buffers is not None and buffers.differ for buffers in ran)
