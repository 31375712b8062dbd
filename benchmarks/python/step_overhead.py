"""The cost of a step beside its work, from Python: the library's own time per device and step.

    python step_overhead.py             run it alone on the machine

Four levels. `engine` is the lowest level that Python has: the compiled StepLoop plans, hands out work, waits and records, and calls empty
Python functions on the workers. All of its time is the library's. `trainer` is `paceline.torch.DataParallel.step` on a network of one
parameter with one item per device. In turns with it, plain PyTorch runs the same forward and backward on the calling thread, once per
device, because Python runs one thread at a time. Its time is subtracted. `pipeline` is `paceline.torch.Pipeline.step` with one stage per
device, each of two blocks of one parameter, and eight micro-batches. In turns with it, plain PyTorch accumulates the same micro-batches.
The difference is divided by the actions, which are a forward and a backward per stage and micro-batch: that is what an action costs beside
its work. `hand-over` is the part of it in which a device's turn goes from one micro-batch to the next: 1F1B with lanes that do nothing else.

`before the forward` is the time from the call of `DataParallel.step` on one device to the entry of the forward of a module with as many
parameters and buffers as ResNet-50 has, beside the same time of plain PyTorch. What the library does per parameter and buffer is in it.

Each level runs on one device and on two, in two states. Spinning: steps follow each other at once. Parked: a pause before each step, which
is not counted, lets the workers go to sleep. Shares are even, because balanced shares would leave a device without work out. Figures are
microseconds per device and step, for pipelines per action; they are medians over all steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import paceline
from paceline._core.engine import Lanes, LaneThreads, StepLoop, run_pipeline
from paceline.torch import DataParallel, Pipeline
from race import script

NORMS = 53  # of ResNet-50: with a convolution each and one linear layer these are 161 parameters and 159 buffers
PAUSE_SECONDS = 0.002  # long enough for every worker to go to sleep
BLOCK = 20  # steps of one variant before the next one's turn
WARM_UP_STEPS = 200
MICRO_BATCHES = 8

Step = Callable[[], object]


def main() -> int:
    args = arguments()
    devices = paceline.devices()[:2]
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"note: the load average is {load:.1f}: somebody else computes here", file=sys.stderr)
    torch.set_num_threads(1)
    rows = []
    for count in range(1, len(devices) + 1):
        names = [device.name for device in devices[:count]]
        for state, pause in (("spinning", 0.0), ("parked", PAUSE_SECONDS)):
            rows.append({"devices": count, "state": state, **engine(names, pause, args.steps)})
            rows[-1] |= trainer(names, pause, args.steps)
            rows[-1] |= before_the_forward(names, pause, args.steps) if count == 1 else {}
            rows[-1] |= pipeline(names, pause, args.steps)
    print(table(rows))
    if args.json:
        result = {"rows": rows, "load_before": round(load, 2)}
        print(json.dumps(result | script.facts(devices, torch=torch.__version__)))
    return 0


def engine(names: list[str], pause: float, steps: int) -> dict[str, float]:
    """The compiled StepLoop with empty functions."""

    def body(device: int, begin: int, end: int, flags: int) -> int:
        return 0

    def finish(device: int) -> list[None]:
        return []

    with paceline.DeviceGroup(names) as group:
        step_loop = StepLoop(group, balance="even")

        def step() -> None:
            step_loop.commit(step_loop.run(step_loop.plan(len(names)), body, finish))

        (seconds,) = in_turns([step], pause, steps)
    return {"engine_us": round(1e6 * statistics.median(seconds) / len(names), 1)}


def trainer(names: list[str], pause: float, steps: int) -> dict[str, float]:
    """`DataParallel.step`, and plain PyTorch with as many forward and backward passes."""

    def loss_fn(module: nn.Module, items: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = module(items).sum()
        return loss

    plain = nn.Linear(1, 1, bias=False)
    item = torch.ones(1, 1)

    def plain_step() -> None:
        for _ in names:
            loss_fn(plain, item).backward()

    batch = torch.ones(len(names), 1)
    with DataParallel(nn.Linear(1, 1, bias=False), names, balance="even", reduction="sum") as parallel:
        ours, theirs = in_turns([lambda: parallel.step(loss_fn, batch), plain_step], pause, steps)
    whole, work = (1e6 * statistics.median(seconds) / len(names) for seconds in (ours, theirs))
    return {"trainer_us": round(whole, 1), "plain_us": round(work, 1), "trainer_own_us": round(whole - work, 1)}


def before_the_forward(names: list[str], pause: float, steps: int) -> dict[str, float]:
    """From the call of `DataParallel.step` to the entry of the module's forward, and the same of plain PyTorch."""
    entered = 0.0

    class Counts(nn.Module):
        """As many parameters, buffers and modules as ResNet-50 has, of which the forward uses two."""

        def __init__(self) -> None:
            super().__init__()
            pairs = [(nn.Conv2d(1, 1, 1, bias=False), nn.BatchNorm2d(1)) for _ in range(NORMS)]
            self.layers = nn.Sequential(*(layer for pair in pairs for layer in pair))
            self.last = nn.Linear(1, 1)

        def forward(self, items: torch.Tensor) -> torch.Tensor:
            nonlocal entered
            entered = time.perf_counter()
            found: torch.Tensor = self.last(items)
            return found

    def loss_fn(module: nn.Module, items: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = module(items).mean()
        return loss

    batch = torch.ones(2, 1)  # batch normalisation takes two items at least
    ours, plain = Counts(), Counts()

    def step() -> float:
        parallel.step(loss_fn, batch)
        ours.zero_grad()
        return entered

    def plain_step() -> float:
        loss_fn(plain, batch).backward()
        plain.zero_grad()
        return entered

    with DataParallel(ours, names, balance="even") as parallel:
        seconds = in_turns([step, plain_step], pause, steps)
    until, work = (1e6 * statistics.median(each) for each in seconds)
    return {"before_forward_us": round(until, 1), "plain_before_forward_us": round(work, 1)}


def pipeline(names: list[str], pause: float, steps: int) -> dict[str, float]:
    """`Pipeline.step`, and plain PyTorch that accumulates the same micro-batches."""

    def loss_fn(module: nn.Module, items: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = module(items).sum()
        return loss

    def blocks() -> nn.Module:
        return nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(2 * len(names))))

    plain = blocks()
    batch = torch.ones(MICRO_BATCHES, 1)

    def plain_step() -> None:
        for item in batch.split(1):
            loss_fn(plain, item).backward()

    def hand_over() -> None:
        lanes: Any = None

        def carry(lane: int, micro_batch: int) -> int:
            for _ in range(2 * len(names) - 1):
                lanes.advance(micro_batch)
            return 0

        lanes = Lanes(threads, schedule, carry)
        run_pipeline(group, lanes, schedule, list(range(len(names))))

    cuts = list(range(0, 2 * len(names), 2))
    with Pipeline(blocks(), names, cuts=cuts, micro_batches=MICRO_BATCHES, reduction="sum") as trainer:
        ours, theirs = in_turns([lambda: trainer.step(loss_fn, batch), plain_step], pause, steps)
        schedule = trainer.report()["pipeline"]["schedule"]
    with paceline.DeviceGroup(names) as group:
        threads = LaneThreads()
        (empty,) = in_turns([hand_over], pause, steps)
        threads.close()
    actions = 2 * MICRO_BATCHES * len(names)
    whole, work, alone = (1e6 * statistics.median(seconds) / actions for seconds in (ours, theirs, empty))
    return {
        "hand_over_us": round(alone, 1),
        "pipeline_us": round(whole, 1),
        "accumulation_us": round(work, 1),
        "pipeline_own_us": round(whole - work, 1),
    }


def in_turns(variants: list[Step], pause: float, steps: int) -> list[list[float]]:
    """The seconds of each variant's steps, in blocks A B, B A, ..., so that slow changes affect both alike.

    The time of a variant that returns a moment ends then.
    """
    seconds: list[list[float]] = [[] for _ in variants]
    for variant in variants:
        for _ in range(WARM_UP_STEPS):
            variant()
    order = list(range(len(variants)))
    for _ in range(-(-steps // BLOCK)):
        for index in order:
            for _ in range(BLOCK):
                if pause:
                    time.sleep(pause)
                start = time.perf_counter()
                moment = variants[index]()
                seconds[index].append((moment if isinstance(moment, float) else time.perf_counter()) - start)
        order.reverse()
    return seconds


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'us per device and step':<24}{'engine':>8}{'trainer':>9}{'plain':>8}{'trainer - plain':>17}{'before forward':>16}{'plain':>8}{'per action: hand-over':>24}{'pipeline':>10}{'plain':>8}{'difference':>12}"
    ]
    for row in rows:
        name = f"{row['devices']} device{'s' if row['devices'] > 1 else ''}, {row['state']}"
        before, plain = (row.get(f"{kind}before_forward_us", "") for kind in ("", "plain_"))
        lines.append(
            f"{name:<24}{row['engine_us']:>8.1f}{row['trainer_us']:>9.1f}{row['plain_us']:>8.1f}{row['trainer_own_us']:>17.1f}"
            f"{before:>16}{plain:>8}{row['hand_over_us']:>24.1f}{row['pipeline_us']:>10.1f}{row['accumulation_us']:>8.1f}{row['pipeline_own_us']:>12.1f}"
        )
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = script.parser(__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="of each variant (default: 2000)")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
