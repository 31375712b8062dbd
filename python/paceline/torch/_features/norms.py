"""Modules that normalise over a micro-batch: two items at least, and one micro-batch for each device."""

from __future__ import annotations

from typing import Any

from paceline.torch._replicas.batch_norm import (
    CURE,
    fails_over_one_item,
    normalised_apart,
    using_batch_statistics,
    warn_of_normalised_apart,
)
from paceline.torch._replicas.replicas import Replicas
from paceline.torch._run.call import Call
from paceline.torch._run.executor import Executor
from paceline.torch._run.feature import Bound, Feature
from paceline.torch._run.recipe import Constraints, Retry
from paceline.torch._run.workload import Workload


class NormsApart(Feature):
    """Gives each micro-batch two items where something normalises over it, and warns once that this differs from one device.

    Batch normalisation in training fails over one item. With it the result depends on the number of micro-batches, so each device gets only one.
    """

    def __init__(self, replicas: Replicas, *, cure: str = CURE, synchronised: bool = False) -> None:
        self._replicas, self._cure, self._synchronised = replicas, cure, synchronised
        self._warned = False

    def constraints(self, replicas: Replicas, work: Workload | None) -> Constraints:
        alone = not self._synchronised and bool(using_batch_statistics(replicas.norms))
        return Constraints(least=2 if alone or (work is not None and work.normalises) else 1)

    def bind(self, call: Call) -> Bound | None:
        return self if call.keep and call.recipe.constraints.least > 1 else None

    def mend(self, run: Executor, error: BaseException, outcome: Any) -> Retry | BaseException | None:
        if fails_over_one_item(error) and run.constraints.least == 1 < run.batch.size:
            run.call.work.normalises = True
            return Retry("something normalises over a micro-batch")
        return None

    def check(self, run: Executor, outcome: Any) -> None:
        if outcome.micro_batches > 1 and not self._warned:
            self._warned = True
            warn_of_normalised_apart(using_batch_statistics(self._replicas.norms), self._cure)

    def explain(self) -> str:
        norms = using_batch_statistics(self._replicas.norms) if self._warned else []
        return f"{normalised_apart(norms, self._cure)}\n" if norms else ""
