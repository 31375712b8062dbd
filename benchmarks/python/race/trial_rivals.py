"""One process of `race_trials.py` (``python -m race.trial_rivals RIVAL CORES SEED TRIALS``): runs a search, and says how long it took and what each trial gave.

All rivals train the same trials of examples/python/trials.py through the same rungs, each with its own seed. None is pruned, so all do the same work. The trials
come in the same order, that in which a sampler has drawn them. A trial has one thread, but for "default", where it has as many as PyTorch gives it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import optuna
import torch

from race.worker import say

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples" / "python"))
import trials
from trial_search import Experiment, Search

RUNGS = (1, 2, 4)
WIDTHS = (16, 64)  # so large that Python and its lock take little of the time, as where a search takes hours
Train = Callable[[torch.device, trials.Config, int, Any], tuple[Any, float]]
Rival = Callable[[optuna.Study, trials.Data, Sequence[int], int], float]


def propose(trial: optuna.Trial) -> trials.Config:
    model = trial.suggest_categorical("model", ["mlp", "cnn"])
    width = trial.suggest_int("width", *WIDTHS, log=True)
    return trials.Config(model, width, trial.suggest_float("rate", 1e-4, 3e-2, log=True), 1e-2, trial.number)


def paceline(study: optuna.Study, data: trials.Data, cores: Sequence[int], count: int) -> float:
    from paceline.torch import Pool

    train, cost = functools.partial(trials.train, data), functools.partial(trials.cost, data)
    experiment = Experiment(study, count, RUNGS, propose, train, lambda config: config.model, cost)
    with Pool([f"host:{index}" for index in range(len(cores))]) as pool:
        return Search(pool, [experiment]).run()


def optimize(
    study: optuna.Study, data: trials.Data, jobs: int, count: int, place: Callable[[], AbstractContextManager[None]]
) -> float:
    """Optuna's own loop, with so many threads. A trial runs in the context `place()`."""

    def objective(trial: optuna.Trial) -> float:
        with place():
            state, value = None, 0.0
            config = propose(trial)
            for epochs in RUNGS:
                state, value = trials.train(data, torch.device("cpu"), config, epochs, state)
                trial.report(value, epochs)
            return value

    begin = time.perf_counter()
    study.optimize(objective, n_trials=count, n_jobs=jobs)
    return time.perf_counter() - begin


def threads(study: optuna.Study, data: trials.Data, cores: Sequence[int], count: int) -> float:
    """The system places the threads."""
    return optimize(study, data, len(cores), count, contextlib.nullcontext)


def ids(study: optuna.Study, data: trials.Data, cores: Sequence[int], count: int) -> float:
    """A trial takes a device, and puts it back when it has ended: https://github.com/optuna/optuna/issues/1365."""
    free: queue.Queue[int] = queue.Queue()
    for core in cores:
        free.put(core)

    @contextlib.contextmanager
    def place() -> Iterator[None]:
        core = free.get()
        os.sched_setaffinity(0, [core])  # of this thread
        try:
            yield
        finally:
            free.put(core)

    return optimize(study, data, len(cores), count, place)


def alone(study: optuna.Study, data: trials.Data, _: Sequence[int], count: int) -> float:
    """What all trials take one after the other, by their first rung."""
    configs = [propose(study.ask()) for _ in range(count)]
    begin = time.perf_counter()
    for config in configs:
        trials.train(data, torch.device("cpu"), config, RUNGS[0], None)
    return (time.perf_counter() - begin) * RUNGS[-1] / RUNGS[0]


RIVALS: dict[str, Rival] = {"paceline": paceline, "threads": threads, "ids": ids, "default": threads, "alone": alone}


def search(name: str, cores: Sequence[int], seed: int, count: int) -> dict[str, Any]:
    """Let a rival run so many trials."""
    if name != "default":
        torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    data = trials.digits()
    for model in ("mlp", "cnn"):  # what PyTorch does the first time
        trials.train(data, torch.device("cpu"), trials.Config(model, WIDTHS[0], 1e-3, 0.0, 0), 1, None)
    drawn = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.NopPruner())
    for _ in range(count):  # before, so that all have the same, however their threads come to ask
        trial = drawn.ask()
        propose(trial)
        study.enqueue_trial(trial.params)
    seconds = RIVALS[name](study, data, cores, count)
    return {"seconds": seconds, "values": [one.value for one in study.trials], "optuna": optuna.__version__}


def main() -> None:
    name, cores, seed, count = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    os.sched_setaffinity(0, cores)
    say(search(name, cores, seed, count))


if __name__ == "__main__":
    main()
