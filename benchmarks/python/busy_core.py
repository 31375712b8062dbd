"""A core that other programs hold: automatic shares leave it out if that is faster.

    python busy_core.py --json              run it alone on the machine

Several busy loops hold the core of the last device, so that its worker comes late to short steps. Three trainers take turns in blocks of
steps: automatic shares, even shares, and one device alone on a free core. Prints the median time of a step with each, in how many steps of
its last half the trainer with automatic shares left the held core out, and when that core got work again after the loops had ended.
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
from pathlib import Path
from typing import Any

import torch

import paceline
from paceline.torch import DataParallel
from race import data, model, script
from race.processes import busy_loop

BLOCK = 20  # steps of one trainer before the next one's turn
WITH_WORK = 0.25  # of an even share; a device with less counts as left out


def measure(args: argparse.Namespace, devices: list[paceline.Device]) -> dict[str, Any]:
    names = [device.name for device in devices]
    held = names[-1]
    even_share = args.batch / len(names)
    seconds: dict[str, list[float]] = {"auto": [], "even": [], "alone": []}
    ran: list[int] = []  # the held device's items in each step with automatic shares
    with tempfile.TemporaryDirectory(prefix="busy_core") as folder, contextlib.ExitStack() as stack:
        data.save(Path(folder))
        batches = itertools.cycle(model.batches(folder, args.batch))

        def trainer(balance: Any, devices: list[str]) -> DataParallel:
            return stack.enter_context(DataParallel(model.network(), devices, balance=balance))

        trainers = {"auto": trainer("auto", names), "even": trainer("even", names), "alone": trainer("even", names[:1])}

        def step(name: str) -> None:
            begin = time.perf_counter()
            trainers[name].step(model.loss_fn, next(batches))
            seconds[name].append(time.perf_counter() - begin)
            trainers[name].module.zero_grad()
            if name == "auto":
                ran.append(trainers[name].shares[held])

        with contextlib.ExitStack() as loops:
            for _ in range(args.loops):
                loops.enter_context(busy_loop(list(devices[-1].cores)))
            order = list(trainers)
            for _ in range(args.steps // BLOCK):
                for name in order:
                    for _ in range(BLOCK):
                        step(name)
                order.reverse()
        half = len(ran) // 2
        before = len(ran)
        while len(ran) - before < args.patience and ran[-1] < WITH_WORK * even_share:
            step("auto")
        back = len(ran) - before if ran[-1] >= WITH_WORK * even_share else None
    medians = {name: statistics.median(each[len(each) // 2 :]) for name, each in seconds.items()}
    return {
        "milliseconds": {name: round(1e3 * value, 3) for name, value in medians.items()},
        "alone_over_auto": round(medians["alone"] / medians["auto"], 3),
        "even_over_auto": round(medians["even"] / medians["auto"], 3),
        "left_out": round(sum(items == 0 for items in ran[half:before]) / (before - half), 3),
        "mean_share": round(statistics.mean(ran[half:before]), 1),
        "steps_until_back": back,
    }


def main() -> int:
    args = arguments()
    devices = script.cores(args.cores)
    result = measure(args, devices)
    figures_text = ", ".join(f"{name} {value} ms" for name, value in result["milliseconds"].items())
    back = result["steps_until_back"]
    print(
        f"{args.loops} busy loops on the core of {devices[-1].name}, batch {args.batch}: {figures_text}\n"
        f"automatic shares left it out in {result['left_out']:.0%} of the last steps (mean share {result['mean_share']}); "
        f"when the loops had ended it had work again {f'after {back} steps' if back is not None else f'in none of {args.patience} steps'}"
    )
    if args.json:
        setting = {"batch": args.batch, "loops": args.loops}
        print(json.dumps(result | setting | script.facts(devices, torch=torch.__version__)))
    return 0


def arguments() -> argparse.Namespace:
    parser = script.parser(__doc__)
    parser.add_argument("--batch", type=int, default=32, help="global batch, of short steps (default: 32)")
    parser.add_argument("--loops", type=int, default=6, help="busy loops on the last core (default: 6)")
    parser.add_argument("--cores", type=int, default=2, help="how many devices (default: 2)")
    parser.add_argument("--steps", type=int, default=600, help="of each trainer (default: 600)")
    parser.add_argument("--patience", type=int, default=2000, help="steps to wait for its return (default: 2000)")
    args = parser.parse_args()
    if args.steps < 2 * BLOCK or args.loops < 0 or args.batch < args.cores:
        parser.error(f"--steps must be at least {2 * BLOCK}, --loops at least 0, --batch at least --cores")
    return args


if __name__ == "__main__":
    sys.exit(main())
