"""The order of the blocks, where it is not given: that in which the forward calls them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from paceline.torch._pipeline.blocks import OtherOrderError
from paceline.torch._pipeline.gates import journey_here
from paceline.torch._run.call import Call
from paceline.torch._run.executor import Executor
from paceline.torch._run.feature import Bound, Feature
from paceline.torch._run.recipe import Retry

_MOST_ORDERS = 64


class OtherOrder(Feature):
    """Cuts the module anew if its blocks are called in another order than they were registered in."""

    def key(self, call: Call) -> bool:
        return bool(_planner(call).finds_order)

    def bind(self, call: Call) -> Bound | None:
        return self if _planner(call).finds_order else None

    def mend(self, run: Executor, error: BaseException, outcome: Any) -> Retry | BaseException | None:
        if not isinstance(error, OtherOrderError):
            return None
        _planner(run.call).reorder(error.calls)
        return Retry("blocks are called in another order", most=_MOST_ORDERS)

    def begin(self, run: Executor) -> None:
        self._ran_all = False

    @contextlib.contextmanager
    def micro_batch(self, run: Executor, device: int, begin: int, end: int) -> Iterator[None]:
        yield
        journey = journey_here()
        if journey is not None and journey.check_order() == len(_planner(run.call).blocks):
            self._ran_all = True

    def check(self, run: Executor, outcome: Any) -> None:
        if self._ran_all:
            _planner(run.call).finds_order = False


def _planner(call: Call) -> Any:
    work: Any = call.work
    return work.planner
