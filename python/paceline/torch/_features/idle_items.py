"""Items without weight, which run only where each of them has extras."""

from __future__ import annotations

from typing import Any

from paceline.torch._run.call import Call
from paceline.torch._run.executor import Executor
from paceline.torch._run.feature import Bound, Feature
from paceline.torch._run.recipe import Retry
from paceline.torch._run.train_run import TrainRun


class IdleItems(Feature):
    """Runs a step again, with all items, if `loss_fn` turns out to return something for each of them beside the loss."""

    def bind(self, call: Call) -> Bound | None:
        return self

    def retry(self, run: Executor, outcome: Any, *, failed: bool) -> Retry | None:
        if failed or not isinstance(run, TrainRun) or not run.lacks_extras:
            return None
        run.note_extras()
        return Retry("items without weight have extras")
