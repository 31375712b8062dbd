"""Automatic shares beside parts that were fixed by hand: how much of the noise is decisions?

    python fixed_parts.py --parts 86,42 --json      run it alone on the machine, with the parts that fit it

A busy loop halves the last core, unless the machine is to be --quiet. Two trainers of the same small transformer take turns in blocks of
steps in one process, so that slow changes of the host meet both. Prints items per second, the ratio of the two in each pair of blocks, and
the shares that were chosen.

--malloc has the fixed parts take turns with themselves instead: glibc keeps freed memory in every other block (mallopt), so that steps have
no page faults.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import resource
import statistics
import sys
import time
from collections import Counter
from typing import Any

import torch
from torch import nn

import paceline
from paceline.torch import DataParallel
from race import script
from race.processes import busy_loop

WARM_UP_STEPS = 20  # from then on automatic shares are measured
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt
KEEP = {M_MMAP_THRESHOLD: 1 << 30, M_TRIM_THRESHOLD: (1 << 31) - 1}
ADAPTED = {M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: 64 << 20}  # the most that glibc comes to by itself


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.layers, self.last = nn.TransformerEncoder(layer, 3), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.layers(x).mean(1))
        return result


def loss_fn(module: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(module(batch[0]), batch[1])


class Rival:
    """One way to train, and what its blocks took."""

    def __init__(self, trainer: DataParallel, malloc: dict[int, int] | None = None) -> None:
        self.rates: list[float] = []
        self.faults: list[float] = []
        self.shares: list[tuple[int, ...]] = []
        self._trainer = trainer
        self._malloc = malloc
        self._optimizer = torch.optim.AdamW(trainer.module.parameters(), lr=1e-4, fused=True)

    def step(self, batch: Any) -> None:
        self._trainer.step(loss_fn, batch)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.shares.append(tuple(self._trainer.shares.values()))

    def block(self, batch: Any, steps: int) -> None:
        if self._malloc is not None:
            libc = ctypes.CDLL("libc.so.6")
            for parameter, value in self._malloc.items():
                libc.mallopt(parameter, value)
            self.step(batch)  # memory that was freed before
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        begin = time.perf_counter()
        for _ in range(steps):
            self.step(batch)
        self.rates.append(steps * len(batch[0]) / (time.perf_counter() - begin))
        self.faults.append((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / steps)


def measure(args: argparse.Namespace, devices: list[paceline.Device]) -> dict[str, Any]:
    names = [device.name for device in devices]
    torch.manual_seed(0)
    batch = torch.randn(args.batch, 32, 128), torch.randint(0, 10, (args.batch,))
    with contextlib.ExitStack() as stack:

        def trainer(balance: Any) -> DataParallel:
            torch.manual_seed(0)
            return stack.enter_context(DataParallel(Network(), names, balance=balance))

        if args.malloc:
            fixed = trainer(args.parts)
            rivals = {"memory kept": Rival(fixed, KEEP), "memory returned": Rival(fixed, ADAPTED)}
        else:
            rivals = {"auto": Rival(trainer("auto")), "fixed": Rival(trainer(args.parts))}
        if not args.quiet:
            stack.enter_context(busy_loop(list(devices[-1].cores)))
        for rival in rivals.values():
            for _ in range(WARM_UP_STEPS):
                rival.step(batch)
        order = list(rivals)
        for _ in range(args.rounds):
            for name in order:
                rivals[name].block(batch, args.block)
            order.reverse()
    one, other = rivals.values()
    ratios = [mine / theirs for mine, theirs in zip(one.rates, other.rates, strict=True)]
    return {
        "items_per_second": {name: [round(rate) for rate in rival.rates] for name, rival in rivals.items()},
        "median": {name: round(statistics.median(rival.rates), 1) for name, rival in rivals.items()},
        "page_faults_per_step": {name: round(statistics.median(rival.faults)) for name, rival in rivals.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "shares": {str(list(shares)): count for shares, count in Counter(one.shares[WARM_UP_STEPS:]).most_common(5)},
    }


def main() -> int:
    args = arguments()
    devices = script.cores(len(args.parts), len(args.parts), pinned=True)
    result = measure(args, devices)
    first, second = result["median"]
    print(
        f"{first} {result['median'][first]} items/s, {second} {result['median'][second]}: {result['ratio']} (median of {args.rounds} pairs of blocks, "
        f"{min(result['ratios'])} to {max(result['ratios'])}); page faults a step {list(result['page_faults_per_step'].values())}\n"
        f"shares of {first}, in steps: {result['shares']}"
    )
    if args.json:
        setting = {"parts": args.parts, "quiet": args.quiet}
        print(json.dumps(result | setting | script.facts(devices, torch=torch.__version__)))
    return 0


def arguments() -> argparse.Namespace:
    parser = script.parser(__doc__)
    parser.add_argument("--parts", default="86,42", help="the fixed items of each device (default: 86,42)")
    parser.add_argument("--quiet", action="store_true", help="without the busy loop")
    parser.add_argument(
        "--malloc", action="store_true", help="the fixed parts with and without memory that glibc keeps"
    )
    parser.add_argument("--rounds", type=int, default=14, help="blocks of each (default: 14)")
    parser.add_argument("--block", type=int, default=10, help="steps in a block (default: 10)")
    args = parser.parse_args()
    args.parts = [int(part) for part in args.parts.split(",")]
    args.batch = sum(args.parts)
    if len(args.parts) < 2 or min(args.parts) < 1 or args.rounds < 1 or args.block < 1:
        parser.error("--parts names two numbers of items or more; --rounds and --block are at least 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
