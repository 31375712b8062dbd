"""Optuna's trials on the unequal devices of a `paceline.torch.Pool`, a rung at a time. trials.py shows it.

A trial is a row of rungs. Between two rungs its state waits in host memory, and any device may go on with it: trial_schedule.py says which one. Optuna is only
called on the caller's thread, by ask and tell.
"""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from concurrent.futures import TimeoutError as NotEndedError
from dataclasses import dataclass, field
from typing import Any

import optuna
import torch
from optuna.trial import TrialState

from paceline import DeviceLost, InvalidArgument, Unavailable
from paceline.torch import Pool, PoolFuture
from trial_schedule import Schedule

LOOK_SECONDS = 0.5  # how soon a device is noticed that was retired, restored or added


@dataclass(frozen=True)
class Experiment:
    """A study, and what its trials do.

    Parameters
    ----------
    study
        Its sampler says what to try. Its pruner is asked after each rung. A pruner that compares with the trials of the same rung suits best, such as
        ``optuna.pruners.SuccessiveHalvingPruner``: it waits for none.
    trials
        How many.
    rungs
        After how many epochs a trial is asked whether it goes on, ascending. The last one is the end.
    propose
        Makes the configuration of a trial, by ``trial.suggest_float`` and others. It may raise ``optuna.TrialPruned`` for one that is not worth a rung.
    train
        ``train(device, config, epochs, state)`` trains up to so many epochs, and returns the state then, in host memory, and the value. `state` is None at
        first, and must not be changed: where a device is lost, the rung runs again from there. All that is random comes from a seed in `config`.
    kind
        Trials of one kind take as long as their cost says, but for one factor, which is measured.
    cost
        Of an epoch with a configuration, in any unit.
    ahead
        How many trials are asked for before the first of them has ended, for samplers that learn. None: all, so that the longest starts first.
    """

    study: optuna.Study
    trials: int
    rungs: Sequence[int]
    propose: Callable[[optuna.Trial], Any]
    train: Callable[[torch.device, Any, int, Any], tuple[Any, float]]
    kind: Callable[[Any], str]
    cost: Callable[[Any], float]
    ahead: int | None = None

    def __post_init__(self) -> None:
        if self.trials < 1 or not self.rungs or (self.ahead is not None and self.ahead < 1):
            raise ValueError("Experiment: trials and ahead must be at least 1, and there must be a rung.")
        if any(first >= second for first, second in zip([0, *self.rungs], self.rungs, strict=False)):
            raise ValueError(f"Experiment: rungs={self.rungs!r} must be epochs from 1 on that ascend.")


@dataclass(eq=False)
class Progress:
    """What became of a trial. `outcome` is None while it goes on."""

    experiment: Experiment
    trial: optuna.Trial
    config: Any
    values: list[float] = field(default_factory=list)  # of its rungs
    devices: list[str] = field(default_factory=list)
    seconds: float = 0.0
    outcome: TrialState | None = None
    error: str = ""  # with its traceback
    state: Any = None

    @property
    def kind(self) -> str:
        return self.experiment.kind(self.config)


class Search:
    """Runs the trials of some experiments, together, on the devices of a pool.

    A trial that raises, hangs or runs out of memory has failed, and others go on. If its device was lost, it goes on elsewhere, from its last rung. Whatever ends
    the search, Ctrl-C too, no trial is left open in its study.

    The search waits for a device to be free before it hands a rung to it, so jobs of others in the same pool delay it. It cannot run in a job, which would keep a device.
    """

    def __init__(self, pool: Pool, experiments: Sequence[Experiment], reach: float = 1.0) -> None:
        self.all: list[Progress] = []
        self.busy: dict[str, float] = defaultdict(float)  # seconds of the rungs that have ended, by device
        self.schedule = Schedule(reach)
        self._pool, self._experiments = pool, experiments
        self._running: dict[PoolFuture[Any], tuple[Progress, str]] = {}

    def run(self, told: Callable[[Progress], None] = lambda _: None) -> float:
        """Run all trials, and return the seconds that they took. `told` is called with each that has ended."""
        begin = time.perf_counter()
        try:
            while self._ask(told):
                self._start()
                self._wait(told)
        finally:
            for future in self._running:
                future.cancel()
            with contextlib.ExitStack() as each:  # calls all, whatever some raise
                for one in self._open():
                    each.callback(one.experiment.study.tell, one.trial, state=TrialState.FAIL, skip_if_finished=True)
                    one.outcome = TrialState.FAIL
        return time.perf_counter() - begin

    def _open(self) -> list[Progress]:
        return [one for one in self.all if one.outcome is None]

    def _ask(self, told: Callable[[Progress], None]) -> bool:
        """Ask for as many trials as may be open. False: all have ended."""
        for experiment in self._experiments:
            mine = [one for one in self.all if one.experiment is experiment]
            still_open = sum(one.outcome is None for one in mine)
            most = experiment.trials if experiment.ahead is None else experiment.ahead
            for _ in range(min(experiment.trials - len(mine), most - still_open)):
                trial = experiment.study.ask()
                one = Progress(experiment, trial, None)
                self.all.append(one)
                try:
                    one.config = experiment.propose(trial)
                except optuna.TrialPruned:  # it is not worth a rung
                    self._close(one, TrialState.PRUNED, told, "")
                    continue
                steps = [end - start for start, end in zip([0, *experiment.rungs], experiment.rungs, strict=False)]
                self.schedule.add(one, one.kind, [step * experiment.cost(one.config) for step in steps])
        return len(self.all) < sum(one.trials for one in self._experiments) or bool(self._open())

    def _start(self) -> None:
        active = [name for name, one in self._pool.report()["devices"].items() if not one["retired"]]
        for future, (_, device) in list(self._running.items()):
            if device not in active and future.cancel():
                self._forget(future, goes_on=True)
        if not active and not self._running:
            raise Unavailable("trials: every device is retired or lost, so no trial can go on.")
        for one, device in self.schedule.starts(time.perf_counter(), active):
            epochs = one.experiment.rungs[len(one.values)]
            rung = one.experiment.train, one.config, epochs, one.state
            future = self._pool.submit(_run, *rung, needs=device, priority="batch", kind=one.kind)
            self._running[future] = one, device

    def _wait(self, told: Callable[[Progress], None]) -> None:
        """Wait until a rung has ended, or for `LOOK_SECONDS`. Keeps no future: the traceback of its error would keep what failed in memory."""
        for future in self._running:
            try:
                future.exception(0)
            except NotEndedError:
                pass
            except InvalidArgument:
                raise InvalidArgument(
                    "trials: this search is in a job, a step or a callback, and would keep a device that it waits for. Call run() on another thread."
                ) from None
        wait(self._running, LOOK_SECONDS, FIRST_COMPLETED)
        for future in [one for one in self._running if one.done()]:
            self._end(future, told)

    def _forget(self, future: PoolFuture[Any], *, goes_on: bool) -> Progress:
        one, device = self._running.pop(future)
        self.schedule.broke_off(device, goes_on=goes_on)
        return one

    def _end(self, future: PoolFuture[Any], told: Callable[[Progress], None]) -> None:
        error = future.exception()
        if isinstance(error, DeviceLost):
            self._forget(future, goes_on=True)
            return
        if error is not None and not isinstance(error, Exception):  # KeyboardInterrupt, SystemExit
            raise error
        if error is not None:
            why = "".join(traceback.format_exception(error)).strip()
            self._close(self._forget(future, goes_on=False), TrialState.FAIL, told, why)
            return
        if (found := future.result()) is None:
            self._close(self._forget(future, goes_on=False), TrialState.PRUNED, told, "")
            return
        one, device = self._running.pop(future)
        one.state, value = found
        one.values.append(value)
        one.devices.append(device)
        one.seconds += future.seconds
        self.busy[device] += future.seconds
        rungs = one.experiment.rungs
        one.trial.report(value, rungs[len(one.values) - 1])
        if math.isnan(value):
            outcome: TrialState | None = TrialState.FAIL
        elif len(one.values) == len(rungs):
            outcome = TrialState.COMPLETE
        else:
            outcome = TrialState.PRUNED if one.trial.should_prune() else None
        self.schedule.ended(device, future.seconds, goes_on=outcome is None)
        if outcome is not None:
            self._close(one, outcome, told, "The value is nan." if math.isnan(value) else "")

    def _close(self, one: Progress, outcome: TrialState, told: Callable[[Progress], None], error: str) -> None:
        one.experiment.study.tell(one.trial, one.values[-1] if outcome == TrialState.COMPLETE else None, outcome)
        one.outcome, one.error, one.state = outcome, error, None
        told(one)


def _run(
    device: torch.device, train: Callable[..., tuple[Any, float]], config: Any, epochs: int, state: Any
) -> tuple[Any, float] | None:
    """One rung, or None if it prunes its trial, which is no job that failed. What is no state with a value fails here, so only this trial does."""
    try:
        after, value = train(device, config, epochs, state)
    except optuna.TrialPruned:
        return None
    return after, float(value)
