"""Race two machines of unequal speed, each played by a process on a core: DDP with equal parts, also in micro-batches, DDP with `BalancedRanks`, and paceline's own trainer.

    python race_ranks.py --busy                           run it alone on the machine; a busy loop halves the last core
    python race_ranks.py                                  both cores free

Each rank is one process, pinned to one core, with one thread or one host device. DDP over gloo gives the ranks equal parts of each batch.
With `BalancedRanks` the same DDP gets parts by how long the ranks take, and so does paceline's trainer with `group=` and its sampler. The trainer
also finds the fastest size of micro-batches for each rank, and one more DDP runs its equal parts in pieces of these sizes. All
train the same network from the same weights on the same global batches with the same optimizer, and after some steps all must have the same
loss. In a round each rival runs in fresh processes while the others wait; each round begins with another rival.

The ideal is the sum of what each core does alone under the same load, with the whole batch at once. A second sum lets each core choose the
fastest of several sizes of micro-batches, since a rank's part of the batch is smaller than the whole. Figures are medians over rounds, ± half
of their range. The ratio is the median over the ratios of the rounds. balanced_own_ms is the processor time of BalancedRanks' own code in a
step, on the first rank: step(), weigh() and its hooks, and batches() without the loader. Waiting takes none.

--malloc sets MALLOC_* for all processes, so that glibc keeps freed memory. Otherwise some processes pay for page faults in each step and
others do not, whoever the rival is.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, get_args

from race import command, data
from race.command import Command
from race.figures import rate, spread
from race.job import CHECKED_STEPS, Job, Network
from race.pinned import Answers, Pinned

WARM_UP_STEPS = 48  # paceline has found the shares and the size of micro-batches by then
LABELS = {
    "ddp": "DDP, gloo, equal parts",
    "ddp-balanced": "DDP, gloo, BalancedRanks",
    "ranks": "paceline, group= and its sampler",
    "ddp-micro-batches": "DDP, gloo, paceline's micro-batches",  # after "ranks", which finds them
}
OURS = {"ranks": "", "ddp-balanced": "balanced_"}  # before the names of their ratios
MOST = {"balanced_own_ms": 0.1}  # goals that are met below
GOALS = {  # with a busy core, and without
    True: {
        "over_ddp": 1.4,
        "of_ideal": 0.93,
        "of_ideal_in_micro_batches": 0.9,
        "balanced_over_ddp": 1.45,
        "balanced_of_ideal": 0.95,
    },
    False: {
        "over_ddp": 1.0,
        "over_ddp_in_micro_batches": 1.0,
        "of_ideal_in_micro_batches": 0.9,
        "balanced_over_ddp": 0.99,
    },
}


class Race:
    """The rivals on some cores of this machine, with one batch size."""

    def __init__(self, args: argparse.Namespace, pinned: Pinned, folder: Path) -> None:
        self._pinned = pinned
        self._job = Job(
            rival="ddp",
            folder=str(folder),
            network=args.network,
            batch=args.batch,
            steps=args.steps,
            warm_up=args.warm_up,
            parts=len(pinned.devices),
        )
        self._loss: float | None = None
        self._sizes: list[int] = []  # of paceline's micro-batches, by rank
        self._own: list[float] = []
        self.rates: dict[str, list[float]] = defaultdict(list)
        # By device, then by "whole" or the size of micro-batches.
        self.alone: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def round(self, number: int) -> None:
        command.in_turn([*(functools.partial(self._race, rival) for rival in LABELS), self._alone], number)

    def _race(self, rival: Any) -> None:
        sizes = self._sizes if rival == "ddp-micro-batches" else []
        ranks = self._pinned.ranks([dataclasses.replace(self._job, rival=rival, sizes=sizes)])
        figures = [answer["blocks"].pop("figures", [[]])[0] for (answer,) in ranks]
        if rival == "ranks":
            self._sizes = [size for (size,) in figures]
        self._own += figures[0] if rival == "ddp-balanced" else []
        self._add(ranks[0])

    def _alone(self) -> None:
        job = dataclasses.replace(self._job, rival="alone", steps=-(-self._job.steps // 2), warm_up=CHECKED_STEPS)
        for device in self._pinned.devices:
            for name, blocks in self._checked("alone", self._pinned.alone(device, [job])).items():
                self.alone[device.name][name].append(rate(self._job.batch, blocks))

    def _add(self, answers: Answers) -> None:
        for name, blocks in self._checked("one", answers).items():
            self.rates[name].append(rate(self._job.batch, blocks))

    def _checked(self, who: str, answers: Answers) -> dict[str, list[list[float]]]:
        """The blocks of one process, if it computed the same losses as all before it."""
        (answer,) = answers
        for loss in answer["losses"]:
            self._loss = loss if self._loss is None else self._loss
            if abs(loss - self._loss) > 1e-3 * self._loss:  # float32 sums in another order differ in the sixth digit
                raise RuntimeError(f"{who} does other work: its loss after the first steps is {loss}, not {self._loss}")
        blocks: dict[str, list[list[float]]] = answer["blocks"]
        return blocks

    def summary(self) -> dict[str, Any]:
        """Rates in samples per second, and their ratios."""
        medians = {name: statistics.median(self.rates[name]) for name in LABELS}
        alone = {
            device: {name: statistics.median(rates) for name, rates in ways.items()}
            for device, ways in self.alone.items()
        }
        ideal = sum(ways["whole"] for ways in alone.values())
        in_micro_batches = sum(max(ways.values()) for ways in alone.values())
        ratios: dict[str, Any] = {}
        for name, prefix in OURS.items():
            rounds = [ours / theirs for ours, theirs in zip(self.rates[name], self.rates["ddp"], strict=True)]
            ratios[f"{prefix}over_ddp"] = round(statistics.median(rounds), 4)
            ratios[f"{prefix}over_ddp_by_round"] = [round(one, 4) for one in rounds]
            ratios[f"{prefix}of_ideal"] = round(medians[name] / ideal, 4)
            ratios[f"{prefix}of_ideal_in_micro_batches"] = round(medians[name] / in_micro_batches, 4)
        pieces = zip(self.rates["ranks"], self.rates["ddp-micro-batches"], strict=True)
        return {
            "rates": {name: round(value, 1) for name, value in medians.items()},
            "spread": {name: round(spread(self.rates[name]), 4) for name in LABELS},
            **ratios,
            "over_ddp_in_micro_batches": round(statistics.median(ours / theirs for ours, theirs in pieces), 4),
            "micro_batches": self._sizes,
            "balanced_own_ms": round(statistics.median(self._own), 4),
            "ddp_of_ideal": round(medians["ddp"] / ideal, 4),
            "ideal": round(ideal, 1),
            "alone": {device: {name: round(one, 1) for name, one in ways.items()} for device, ways in alone.items()},
        }


def text(found: dict[str, Any], batch: int, busy: bool) -> str:
    lines = [f"{'':<36}{'of ideal':>9}  {'spread':>7}  {'samples/s':>10}  {'ms/step':>8}"]
    for name, label in LABELS.items():
        speed = found["rates"][name]
        part, milliseconds = speed / found["ideal"], 1e3 * batch / speed
        lines.append(f"{label:<36}{part:>9.3f}  ±{found['spread'][name]:>6.1%}  {speed:>10.0f}  {milliseconds:>8.2f}")
    for device, ways in found["alone"].items():
        each = ", ".join(f"{speed:.0f} {'whole' if name == 'whole' else f'in {name}'}" for name, speed in ways.items())
        lines.append(f"{device} alone, samples/s: {each}")
    for rival, prefix in OURS.items():
        rounds = found[f"{prefix}over_ddp_by_round"]
        lines.append(f"{LABELS[rival]} / DDP: {found[f'{prefix}over_ddp']:.3f} (rounds: {rounds})")
        lines.append(f"  of the ideal in micro-batches: {found[f'{prefix}of_ideal_in_micro_batches']:.3f}")
    for name, goal in GOALS[busy].items():
        lines.append(f"{name}: {found[name]:.3f}, goal {goal}: {'met' if found[name] >= goal else 'missed'}")
    for name, goal in MOST.items():
        lines.append(f"{name}: {found[name]:.3f}, goal at most {goal}: {'met' if found[name] <= goal else 'missed'}")
    return "\n".join(lines)


def main() -> int:
    args = arguments()
    run = Command(args)
    with tempfile.TemporaryDirectory(prefix="race_ranks") as name:
        data.save(Path(name), args.network)
        pinned = Pinned(run.devices, Path(name), busy=args.busy, malloc=args.malloc)
        race = Race(args, pinned, Path(name))
        run.rounds(race.round)
    found = race.summary()
    print(f"{args.network}, batch {args.batch}, {run.place()}\n\n{text(found, args.batch, args.busy)}")
    if stolen := pinned.stolen():
        parts = ", ".join(f"{rival} {part:.1%}" for rival, part in stolen.items())
        print(f"time of these cores that the host gave to others: {parts}")
    if args.json:
        setting = {
            "network": args.network,
            "batch": args.batch,
            "malloc": args.malloc,
            "goals": GOALS[args.busy] | MOST,
        }
        print(json.dumps(found | setting | run.record(pinned.versions)))
    return 0


def arguments() -> argparse.Namespace:
    parser = command.parser(__doc__, steps=(40, "measured in each round"), time_limit=240.0)
    parser.add_argument("--network", choices=get_args(Network), default="convolution", help="(default: convolution)")
    parser.add_argument("--batch", type=int, default=512, help="global batch (default: 512)")
    parser.add_argument(
        "--warm-up", type=int, default=WARM_UP_STEPS, help=f"steps before, of both rivals (default: {WARM_UP_STEPS})"
    )
    parser.add_argument("--malloc", action="store_true", help="let glibc keep freed memory, see above")
    args = parser.parse_args()
    if min(args.steps, args.rounds, args.cores) < 1 or args.warm_up < CHECKED_STEPS or args.batch % args.cores:
        parser.error(
            f"--steps, --rounds and --cores must be at least 1, --warm-up at least {CHECKED_STEPS}, and --batch a multiple of --cores, as DDP's mean "
            "over ranks takes it"
        )
    return args


if __name__ == "__main__":
    command.finish("race_ranks", main)
