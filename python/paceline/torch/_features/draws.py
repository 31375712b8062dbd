"""Random draws of host devices, which PyTorch has one generator for."""

from __future__ import annotations

from typing import Any

from paceline.torch._devices.failures import warn_caller
from paceline.torch._devices.run_draws import UnseededDrawsWarning
from paceline.torch._run.call import Call
from paceline.torch._run.executor import Executor
from paceline.torch._run.feature import Bound, Context, Feature
from paceline.torch._run.recipe import Retry


class Draws(Feature):
    """Runs a call again that drew without being expected to, and warns once of draws without a seed."""

    def __init__(self) -> None:
        self._warned = False

    def bind(self, call: Call) -> Bound | None:
        return _Looks(self) if call.seen.compiled or call.seen.drawing.draws is False else _Seeds(self)

    def warn(self, unseeded: str) -> None:
        """Warn of these draws, once."""
        if unseeded and not self._warned:
            self._warned = True
            warn_caller(
                f"random numbers drawn by {unseeded} come from a generator that all host devices share, whoever is first: the same seed gives "
                "others in each run. Nothing else is wrong with them. One device draws the same in each run.",
                UnseededDrawsWarning,
            )


class _Looks(Bound):
    def __init__(self, draws: Draws) -> None:
        self._draws = draws

    def retry(self, run: Executor, outcome: Any, *, failed: bool) -> Retry | None:
        if run.draws.must_run_again() and (run.places.hosts_share or (run.call.work.fixed and run.searches)):
            return Retry("random numbers are drawn", complete=not failed)
        return None

    def check(self, run: Executor, outcome: Any) -> None:
        self._draws.warn(run.draws.finish())


class _Seeds(_Looks):
    def run(self, run: Executor) -> Context:
        return run.draws.run()
