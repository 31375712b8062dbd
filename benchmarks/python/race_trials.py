"""Race searches on two cores: trials over a `paceline.torch.Pool` (examples/python/trials.py), Optuna's ``n_jobs=2``, and a queue of device ids.

    python race_trials.py --busy            run it alone on the machine; a busy loop halves the last core
    python race_trials.py                   both cores free

All rivals train the same trials with the same seeds, none of which is pruned. Each round draws other trials. Each rival runs in a process of its own, while the
others do not exist; each round begins with another one. PyTorch gives a trial as many threads as there are cores, which hinder each other where several
trials run, so Optuna is raced with one thread for each trial, too. Rivals with one thread must give the same values. The ideal is that of cores which are never
idle, by what each core needs for all trials alone, which is measured in each round, too. So the ideal is an estimate: it leaves out
that trials side by side may hinder each other.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from race import command
from race.command import Command
from race.processes import FOLDER, busy_loop
from race.worker import MARK

LABELS = {
    "paceline": "paceline.torch.Pool, longest first",
    "default": "Optuna, n_jobs=2, as it comes",
    "threads": "Optuna, n_jobs=2, one thread each",
    "ids": "Optuna, queue of ids, one thread each",
}
GOAL = 1.25  # the makespan of each rival over ours, with a busy loop
_PROCESS_SECONDS = 300.0


def answer(name: str, cores: Sequence[int], seed: int, trials: int) -> Any:
    """What a rival's process says."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if name == "default":
        del environment["OMP_NUM_THREADS"]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    words = [sys.executable, "-m", "race.trial_rivals", name, json.dumps(list(cores)), str(seed), str(trials)]
    try:
        done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, timeout=_PROCESS_SECONDS)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{name}: its process had no answer after {_PROCESS_SECONDS:.0f} s") from None
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    raise RuntimeError(f"{name}: its process ended with status {done.returncode} and without an answer")


class Race:
    """The rivals on some cores of this machine."""

    def __init__(self, run: Command) -> None:
        self._cores = [device.cores[0] for device in run.devices]
        self._trials = run.args.trials
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.optuna = ""

    def round(self, number: int) -> None:
        alone = [answer("alone", [core], number, self._trials)["seconds"] for core in self._cores]
        self.seconds["ideal"].append(1.0 / sum(1.0 / seconds for seconds in alone))
        values: dict[str, list[float]] = {}
        command.in_turn([functools.partial(self._race, name, number, values) for name in LABELS], number)
        values.pop("default")  # sums of several threads are rounded otherwise
        if any(given != values["paceline"] for given in values.values()):
            raise RuntimeError(f"the rivals have not computed the same: {values}")

    def _race(self, name: str, number: int, values: dict[str, list[float]]) -> None:
        said = answer(name, self._cores, number, self._trials)
        self.seconds[name].append(said["seconds"])
        values[name], self.optuna = said["values"], said["optuna"]

    def summary(self) -> dict[str, Any]:
        """Medians over rounds. Ratios are those of a round."""
        ours, ideal = self.seconds["paceline"], self.seconds["ideal"]
        return {
            "makespan": {name: round(statistics.median(each), 2) for name, each in self.seconds.items()},
            "of_ideal": {name: ratio(self.seconds[name], ideal) for name in LABELS},
            "over_ours": {name: ratio(self.seconds[name], ours) for name in LABELS if name != "paceline"},
            "rounds": {name: [round(one, 2) for one in each] for name, each in self.seconds.items()},
        }


def ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """The median of a round's ratio."""
    return round(statistics.median(a / b for a, b in zip(one, other, strict=True)), 3)


def text(found: dict[str, Any], goal: float | None) -> str:
    lines = [f"{'':<40}{'makespan':>10}{'of ideal':>10}{'over ours':>11}"]
    for name, label in LABELS.items():
        over = found["over_ours"].get(name)
        lines.append(
            f"{label:<40}{found['makespan'][name]:>8.1f} s{found['of_ideal'][name]:>10.2f}{over if over else '':>11}"
        )
    lines.append(f"{'ideal':<40}{found['makespan']['ideal']:>8.1f} s")
    if goal is not None:
        met = min(found["over_ours"].values()) >= goal
        lines.append(f"goal, each rival at least {goal} times ours: {'met' if met else 'missed'}")
    return "\n".join(lines)


def main() -> int:
    args = arguments()
    if importlib.util.find_spec("optuna") is None:
        raise RuntimeError("optuna is not installed: pip install 'paceline[trials]'")
    run = Command(args)
    race = Race(run)
    with busy_loop([run.devices[-1].cores[0]] if args.busy else []):
        run.rounds(race.round)
    found = race.summary()
    print(f"{args.trials} trials, {run.place()}\n\n{text(found, GOAL if args.busy else None)}")
    if args.json:
        print(json.dumps(found | {"trials": args.trials} | run.record({"optuna": race.optuna})))
    return 0


def arguments() -> argparse.Namespace:
    parser = command.parser(__doc__, steps=(0, "not used here"), time_limit=700.0)
    parser.add_argument("--trials", type=int, default=16, help="of each rival and round (default: 16)")
    args = parser.parse_args()
    if args.rounds < 1 or args.cores < 2 or args.trials < 1:
        parser.error("--rounds and --trials must be at least 1, and --cores at least 2")
    return args


if __name__ == "__main__":
    command.finish("race_trials", main)
