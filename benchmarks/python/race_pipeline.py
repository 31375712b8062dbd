"""Race pipelines: paceline's, in one process, beside torch.distributed.pipelining over gloo, with a process per core.

    python race_pipeline.py                               run it alone on the machine
    python race_pipeline.py --busy                        with a busy loop on the last core
    python race_pipeline.py --busy --micro-batches 16     a shorter bubble

All rivals train the transformer of examples/python/pipeline.py from the same weights on the same batches, with the same micro-batches and
optimizer. Each runs in its own processes while the others wait, and after some steps all must have the same loss. torch's pipelining cuts
the blocks evenly, with its schedules GPipe and 1F1B. paceline runs at the same cut, with the schedule that it chooses, and with the cut that it
chooses. Beside them: one core alone, which runs the micro-batches one after the other, and paceline's DataParallel, which needs memory for
the whole model on each device and chooses its own micro-batches.

The prediction is that of paceline's planner for the schedule that runs, from measured times and their noise; it is a median over steps, and
does not contain the optimizer. Measured / predicted compares it with the time in `Pipeline.step`. The ideal is the sum of what each core does
alone under the same load, times m / (m + k - 1): the part of a step of m micro-batches in which k stages of equal length compute. Figures are
medians over rounds, ± half of their range. Ratios are medians over the ratios of the rounds. Each round begins with another rival.

Goals apply if a block's forward takes 5 ms and more for a micro-batch on one core.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from race import command
from race.command import Command
from race.job import CHECKED_STEPS, Job, Rival
from race.pinned import Answers, Pinned
from race.pipeline_figures import HEAD, Blocks, Rounds, figure_name

WARM_UP_STEPS = 12  # paceline has measured its stages and settled its cuts by then
TORCH: tuple[Rival, ...] = ("pipeline-torch-gpipe", "pipeline-torch-1f1b")
OURS: tuple[Rival, ...] = ("pipeline-even", "pipeline-auto", "pipeline-data-parallel")


class Race:
    """The rivals on some cores of this machine."""

    def __init__(self, args: argparse.Namespace, pinned: Pinned, folder: Path) -> None:
        self._pinned = pinned
        self._job = Job(
            rival="pipeline-single",
            folder=str(folder),
            batch=args.micro_batches * args.items,
            steps=args.steps,
            warm_up=CHECKED_STEPS,
            parts=len(pinned.devices),
            micro_batches=args.micro_batches,
            blocks=args.blocks,
            width=args.width,
        )
        self._warm_up = args.warm_up
        self._loss: float | None = None
        self.rounds = Rounds(self._job.batch, args.micro_batches, busy=args.busy)

    def round(self, number: int) -> None:
        rivals: list[Callable[[], None]] = [partial(self._torch, rival) for rival in TORCH]
        rivals += [partial(self._ours, rival) for rival in OURS]
        command.in_turn([*rivals, self._alone], number)

    def _torch(self, rival: Rival) -> None:
        answers = self._pinned.ranks([dataclasses.replace(self._job, rival=rival)])
        self._check(rival, answers[-1])
        self.rounds.add(figure_name(rival), answers[0][0]["blocks"])

    def _ours(self, rival: Rival) -> None:
        job = dataclasses.replace(self._job, rival=rival, warm_up=self._warm_up)
        self.rounds.add(figure_name(rival), self._check(rival, self._pinned.one([job])))

    def _alone(self) -> None:
        job = dataclasses.replace(self._job, steps=-(-self._job.steps // 2))
        alone = {device.name: self._pinned.alone(device, [job]) for device in self._pinned.devices}
        self.rounds.add_alone({name: self._check(job.rival, answers) for name, answers in alone.items()})

    def _check(self, rival: str, answers: Answers) -> Blocks:
        """The blocks of one process, if it computed the same loss as all before it."""
        (answer,) = answers
        for loss in answer["losses"]:
            self._loss = loss if self._loss is None else self._loss
            if abs(loss - self._loss) > 1e-3 * self._loss:  # float32 sums in another order differ in the sixth digit
                raise RuntimeError(
                    f"{rival} does other work: its loss after the first steps is {loss}, not {self._loss}"
                )
        blocks: Blocks = answer["blocks"]
        return blocks


def main() -> int:
    args = arguments()
    run = Command(args)
    with tempfile.TemporaryDirectory(prefix="race_pipeline") as name:
        pinned = Pinned(run.devices, Path(name), busy=args.busy)
        race = Race(args, pinned, Path(name))
        run.rounds(race.round)
    setting = {name: getattr(args, name) for name in ("micro_batches", "items", "blocks", "width", "rounds", "warm_up")}
    print(f"{', '.join(f'{name} {value}' for name, value in setting.items())}, {run.place()}\n\n{race.rounds.text()}")
    stolen = {rival.removeprefix("pipeline-"): part for rival, part in pinned.stolen().items()}
    if stolen:
        parts = ", ".join(f"{rival} {part:.1%}" for rival, part in stolen.items())
        print(f"time of these cores that the host gave to others: {parts}")
    if args.json:
        extra = {"setting": setting, "stolen": {rival: round(part, 4) for rival, part in stolen.items()}}
        extra["tables"] = {run.place(): [HEAD, *race.rounds.rows()]}
        print(json.dumps(race.rounds.summary() | extra | run.record(pinned.versions)))
    return 0


def arguments() -> argparse.Namespace:
    parser = command.parser(__doc__, steps=(10, "measured in each round"), time_limit=900.0)
    parser.add_argument("--micro-batches", type=int, default=8, help="of a step (default: 8)")
    parser.add_argument("--items", type=int, default=8, help="of a micro-batch (default: 8)")
    parser.add_argument("--blocks", type=int, default=6, help="of the transformer (default: 6)")
    parser.add_argument("--width", type=int, default=256, help="of its blocks, a multiple of 4 (default: 256)")
    parser.add_argument(
        "--warm-up", type=int, default=WARM_UP_STEPS, help=f"steps before, of paceline (default: {WARM_UP_STEPS})"
    )
    args = parser.parse_args()
    if min(args.steps, args.rounds, args.items, args.width) < 1 or args.width % 4 or args.warm_up < CHECKED_STEPS:
        parser.error(
            f"--steps, --rounds and --items must be at least 1, --warm-up at least {CHECKED_STEPS}, --width a multiple of 4 (heads)"
        )
    if args.cores < 2 or args.blocks % args.cores or args.micro_batches < args.cores:
        parser.error(
            "--cores must be at least 2, --blocks a multiple of --cores (for the even cut), and --micro-batches at least --cores (torch's 1F1B)"
        )
    return args


if __name__ == "__main__":
    command.finish("race_pipeline", main)
