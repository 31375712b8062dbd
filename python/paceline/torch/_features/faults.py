"""Faults on the workers, for tests of scripts (`paceline.testing.faults`)."""

from __future__ import annotations

from collections.abc import Callable

from paceline.torch._run.call import Call
from paceline.torch._run.executor import Around, Executor
from paceline.torch._run.feature import Bound, Context, Feature


class Faults(Feature):
    """Surrounds each micro-batch of a step. `of` says with what, for the number of the call."""

    def __init__(self, of: Callable[[int], Around], names: list[str]) -> None:
        self._of, self._names = of, names

    def bind(self, call: Call) -> Bound | None:
        return self if call.keep else None

    def begin(self, run: Executor) -> None:
        self._faults = self._of(run.call.number)

    def micro_batch(self, run: Executor, device: int, begin: int, end: int) -> Context:
        if run.passage is None:
            return self._faults(device, begin, end)
        return run.passage.surrounded(lambda device: self._faults(self._names.index(device), begin, end))
