"""The cost of balancing if there is nothing to balance: automatic against even shares on a quiet machine.

    python quiet.py --json              run it alone on the machine

Two trainers of the same network run on the same devices in one process, one with automatic and one with even shares. They take turns in
blocks of steps (A B, B A, ...) until the time is up, or until the 95 % interval of the median ratio of neighbouring blocks is within
--tolerance of its middle. A ratio above 1 means that automatic shares are faster. The goals: the interval holds 1 or lies above it, and
automatic shares move at most once in 100 steps. On a virtual machine it also prints how much of the cores' time the host gave to others.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.torch import DataParallel
from race import data, host, model, script
from race.figures import median_interval, ratio_summary

WARM_UP_STEPS = 40
MOST_MOVES = 1.0  # per 100 steps


class Trainer:
    """One of the two trainers."""

    def __init__(self, trainer: DataParallel, batches: Sequence[model.Pair]) -> None:
        self._trainer = trainer
        self._optimizer = model.optimizer(trainer.module)
        self._batches: Iterator[model.Pair] = itertools.cycle(batches)

    @property
    def moves(self) -> int:
        return int(self._trainer.report()["moves"])

    @property
    def steps(self) -> int:
        return int(self._trainer.report()["steps"])

    @property
    def shares(self) -> dict[str, int]:
        return self._trainer.shares

    def run(self, steps: int) -> float:
        """Run a block and return its seconds."""
        start = time.perf_counter()
        for batch in itertools.islice(self._batches, steps):
            self._trainer.step(model.loss_fn, batch)
            self._optimizer.step()
            self._optimizer.zero_grad()
        return time.perf_counter() - start


def compare(args: argparse.Namespace, names: list[str], batches: Sequence[model.Pair]) -> dict[str, Any]:
    """Run blocks in turns until the ratio is known well enough."""
    with contextlib.ExitStack() as stack:
        even, auto = (
            Trainer(stack.enter_context(DataParallel(model.network(), names, balance=balance)), batches)
            for balance in ("even", "auto")
        )
        for trainer in (even, auto):
            trainer.run(WARM_UP_STEPS)
        steps_before, moves_before = auto.steps, auto.moves
        ratios: list[float] = []
        blocks: list[float] = []  # seconds of the blocks with automatic shares
        tight = False
        begin = time.monotonic()
        while not ratios or (not tight and time.monotonic() - begin < args.seconds):
            pair = (even, auto) if len(ratios) % 2 == 0 else (auto, even)
            seconds = {trainer: trainer.run(args.block) for trainer in pair}
            ratios.append(seconds[even] / seconds[auto])
            blocks.append(seconds[auto])
            interval = median_interval(ratios)
            tight = interval is not None and interval[1] - interval[0] <= 2 * args.tolerance
        steps = auto.steps - steps_before
        moves = 100.0 * (auto.moves - moves_before) / steps
        shares = auto.shares
    interval = median_interval(ratios)
    return {
        "even_over_auto": ratio_summary(ratios),
        "tight": tight,
        "never_slower": interval is not None and interval[1] >= 1.0,
        "moves_per_100_steps": round(moves, 3),
        "calm": moves <= MOST_MOVES,
        "steps": steps,
        "step_ms": round(1e3 * statistics.median(blocks) / args.block, 2),
        "shares": shares,
    }


def main() -> int:
    args = arguments()
    devices = script.cores(args.cores)
    cores = [core for device in devices for core in device.cores]
    before = host.core_seconds(cores)
    with tempfile.TemporaryDirectory(prefix="quiet") as folder:
        data.save(Path(folder))
        result = compare(args, [device.name for device in devices], model.batches(folder, args.batch))
    after = host.core_seconds(cores)
    if before is not None and after is not None:
        result["stolen"] = round((after.stolen - before.stolen) / (after.passed - before.passed), 4)
    ratio = result["even_over_auto"]
    print(
        f"even / auto: {ratio['median']}, 95 % {ratio['interval']}, {ratio['pairs']} pairs of blocks of {args.block} steps\n"
        f"moves of auto: {result['moves_per_100_steps']} in 100 steps; shares now {result['shares']}"
    )
    if args.json:
        print(json.dumps(result | {"batch": args.batch} | script.facts(devices, torch=torch.__version__)))
    return 0


def arguments() -> argparse.Namespace:
    parser = script.parser(__doc__)
    parser.add_argument("--batch", type=int, default=512, help="global batch (default: 512)")
    parser.add_argument("--cores", type=int, default=2, help="how many devices (default: 2)")
    parser.add_argument(
        "--block", type=int, default=10, help="steps of one trainer until it is the other's turn (default: 10)"
    )
    parser.add_argument("--tolerance", type=float, default=0.005, help="half of the interval (default: 0.005)")
    parser.add_argument("--seconds", type=float, default=240.0, help="at most (default: 240)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
