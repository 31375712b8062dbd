"""Data that replicas have in common, because no forward writes it."""

from __future__ import annotations

from typing import Any

from paceline.torch._run.call import Call
from paceline.torch._run.executor import Executor
from paceline.torch._run.feature import Bound, Feature
from paceline.torch._run.recipe import Retry


class CommonData(Feature):
    """Notices a forward that writes such data, puts it back and gives each replica its own."""

    def bind(self, call: Call) -> Bound | None:
        return None if call.all_replicas.common is None else self

    def begin(self, run: Executor) -> None:
        assert run.call.all_replicas.common is not None
        self._common = run.call.all_replicas.common
        self._common.note()

    def retry(self, run: Executor, outcome: Any, *, failed: bool) -> Retry | None:
        written = self._common.written
        if not written:
            return None
        run.call.all_places.drain()
        self._common.restore()
        run.call.all_replicas.hold_apart(written)
        return None if failed else Retry("forwards write data that replicas had in common", most=64, complete=True)
