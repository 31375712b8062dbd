"""Race paceline with costs against DistributedDataParallel on text of variable length.

    python race_text.py                 run it alone on the machine
    python race_text.py --busy          with a busy loop on the last core

All rivals train the transformer of examples/python/text.py on the same pieces of text, one epoch per round, each in its own processes
while the others wait. DDP runs one pinned process per core over gloo: with random batches, with batches of similar length (a
length-grouped sampler), and with paceline's BalancedRanks(padded=True). paceline runs with `cost=` on random batches. Every rival
trims what it runs at once to its longest piece. Each round runs the rivals in another order. Figures are milliseconds per step, as the mean
over an epoch (so that every rival has run the same pieces), then the median over rounds, ± half of their range.

Two fractions of an ideal are shown for paceline. For the split: the time that devices were busy, divided by the time from the first start
to the last finish of each step. For the whole step: its rate divided by the sum of paceline's rates on each core alone under the same load.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from race import command
from race.command import Command
from race.figures import spread
from race.job import Job, Rival
from race.pinned import Answers, Pinned

LABELS: dict[Rival, str] = {
    "text-ddp-random": "DDP, gloo, random batches",
    "text-ddp-grouped": "DDP, gloo, length-grouped batches",
    "text-ddp-padded": "DDP, gloo, BalancedRanks, padded",
    "text-paceline": "paceline, cost=",
}
FIGURES = ("split_of_ideal", "padded", "contiguous", "error")


class TextRace:
    """The rivals on some devices of this machine."""

    def __init__(self, args: argparse.Namespace, pinned: Pinned, folder: Path) -> None:
        self._pinned = pinned
        self.milliseconds: dict[str, list[float]] = defaultdict(list)  # by rival, and by device alone
        self.figures: dict[str, list[float]] = defaultdict(list)
        self._job = Job(
            rival="text-paceline", folder=str(folder), batch=args.batch, steps=args.steps, parts=len(pinned.devices)
        )

    def round(self, number: int) -> None:
        command.in_turn([*(lambda rival=rival: self.run(rival) for rival in LABELS), self.alone], number)

    def run(self, rival: Rival) -> None:
        jobs = [dataclasses.replace(self._job, rival=rival)]
        processes = [self._pinned.one(jobs)] if rival == "text-paceline" else self._pinned.ranks(jobs)
        blocks = self._checked(rival, processes)
        self.milliseconds[rival].append(1e3 * statistics.mean(blocks[rival][0]))
        for name, value in zip(FIGURES, blocks.get("figures", [[]])[0], strict=False):
            self.figures[name].append(value)

    def alone(self) -> None:
        job = dataclasses.replace(self._job, rival="text-alone", parts=1)
        for device in self._pinned.devices:
            blocks = self._checked("text-alone", [self._pinned.alone(device, [job])])
            self.milliseconds[device.name].append(1e3 * statistics.mean(blocks["text-alone"][0]))

    def _checked(self, rival: Rival, processes: list[Answers]) -> dict[str, list[list[float]]]:
        """Record the first process's measurements, if all processes have learnt."""
        for (answer,) in processes:
            if not all(0.0 < loss < 6.0 for loss in answer["losses"]):  # an untrained network has a loss of 5.5
                raise RuntimeError(f"{rival} does not learn: its last loss is {answer['losses']}")
        blocks: dict[str, list[list[float]]] = processes[0][0]["blocks"]
        return blocks

    def summary(self) -> dict[str, Any]:
        medians = {name: statistics.median(values) for name, values in self.milliseconds.items()}
        ideal = 1 / sum(1 / medians[device.name] for device in self._pinned.devices)
        mine = medians["text-paceline"]
        return {
            "milliseconds": {name: round(value, 2) for name, value in medians.items()},
            "spread": {name: round(spread(values), 4) for name, values in self.milliseconds.items()},
            "ideal_milliseconds": round(ideal, 2),
            "of_ideal": round(ideal / mine, 4),
            **{name: round(statistics.median(values), 4) for name, values in self.figures.items()},
            "over": {rival: round(medians[rival] / mine, 4) for rival in LABELS if rival != "text-paceline"},
            "rounds": len(self.milliseconds["text-paceline"]),
        }

    def table(self) -> str:
        summary = self.summary()
        medians, ideal = summary["milliseconds"], summary["ideal_milliseconds"]
        lines = [f"{'':<40}{'ms/step':>9}  {'spread':>7}  {'paceline is':>12}  {'of ideal':>8}"]
        for rival, label in LABELS.items():
            faster = f"{medians[rival] / medians['text-paceline']:.3f} x"
            spread_text = f"±{summary['spread'][rival]:.1%}"
            lines.append(
                f"{label:<40}{medians[rival]:>9.1f}  {spread_text:>7}  {faster:>12}  {ideal / medians[rival]:>8.3f}"
            )
        lines.append(f"{'ideal: each core alone, summed':<40}{ideal:>9.1f}")
        lines += [f"{'  ' + device.name + ' alone':<40}{medians[device.name]:>9.1f}" for device in self._pinned.devices]
        lines.append(f"split: {summary['split_of_ideal']:.4f} of ideal (busy time over the time that devices had)")
        lines.append(
            f"padding: {summary['padded']:.3f} times the pieces' own tokens; in slices of the batch as it came "
            f"{summary['contiguous']:.3f}; times of micro-batches predicted within {summary['error']:.1%}"
        )
        return "\n".join(lines)


def main() -> int:
    args = arguments()
    run = Command(args)
    with tempfile.TemporaryDirectory(prefix="race") as name:
        pinned = Pinned(run.devices, Path(name), busy=args.busy)
        race = TextRace(args, pinned, Path(name))
        run.rounds(race.round)
    print(f"\ntext, {args.batch} pieces a step, {run.place()}\n")
    print(race.table())
    if args.json:
        rounds = {name: [round(one, 2) for one in values] for name, values in race.milliseconds.items()}
        settings = {"batch": args.batch, "milliseconds_of_rounds": rounds}
        print(json.dumps(race.summary() | settings | run.record(pinned.versions)))
    return 0


def arguments() -> argparse.Namespace:
    steps = (60, "of an epoch, which is measured each round")
    parser = command.parser(__doc__, steps=steps, time_limit=600.0)
    parser.add_argument("--batch", type=int, default=64, help="pieces of a global batch (default: 64)")
    args = parser.parse_args()
    if min(args.steps, args.rounds, args.batch, args.cores) < 1:
        parser.error("--steps, --rounds, --batch and --cores must be at least 1")
    return args


if __name__ == "__main__":
    command.finish("race_text", main)
