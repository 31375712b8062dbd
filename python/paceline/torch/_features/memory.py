"""Memory that runs out: the step runs again in smaller pieces."""

from __future__ import annotations

from typing import Any

from paceline import OutOfMemory
from paceline.torch._run.executor import Executor
from paceline.torch._run.feature import Feature
from paceline.torch._run.memory import is_out_of_memory
from paceline.torch._run.recipe import Retry

_MOST = 256  # each one halves the pieces of some device


class SmallerPieces(Feature):
    """Halves the pieces of the device whose memory has run out, and remembers it for this kind of work."""

    def mend(self, run: Executor, error: BaseException, outcome: Any) -> Retry | BaseException | None:
        may = run.repeatable and not run.constraints.undivided and run.failed_device is not None
        if may and is_out_of_memory(error) and run.call.work.step_loop.shrink(outcome, isinstance(error, OutOfMemory)):
            return Retry("memory ran out", most=_MOST, out_of_memory=True)
        return None
