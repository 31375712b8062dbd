"""Whether `what_if(prices=)` predicts the steps of fewer devices: predicted beside measured step for each subset of two cores.

    python check_worth.py --json                run it alone on the machine
    python check_worth.py --batch 512 --json    with short steps

One trainer runs on all cores. After each of its blocks of steps it predicts the time from step to step with each subset of the cores. Then a trainer on each
subset runs a block, so that a machine whose speed changes changes both alike. That is done on a quiet machine, and with a busy loop that takes half of the last
core. Prints the median over the rounds of predicted over measured time. The goal: within 5 %. A missed goal is said, and is no error of the program.

Short steps differ more from the prediction than long ones, on the halved core, and where glibc gives large blocks back after a step, so that the next step pays for
page faults. Fewer devices run more items at once, in larger blocks. The page faults of a step and its time in the system stand beside each measurement.
MALLOC_TRIM_THRESHOLD_=4294967296 MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TOP_PAD_=268435456 let glibc keep its memory.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.torch import DataParallel
from race import data, model, script
from race.processes import busy_loop

GOAL = 0.05


def measure(args: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """By subset of the devices, as text: predicted and measured milliseconds, and their ratio."""
    subsets = [kept for size in range(len(names), 0, -1) for kept in itertools.combinations(names, size)]
    rounds: list[tuple[dict[str, float], dict[str, float]]] = []
    errors: dict[str, float] = {}
    paid: dict[str, list[tuple[float, float]]] = {}  # page faults and ms in the system, of a step
    with tempfile.TemporaryDirectory(prefix="check_worth") as folder, contextlib.ExitStack() as stack:
        data.save(Path(folder))
        batches = itertools.cycle(model.batches(folder, args.batch))
        trainers = [
            stack.enter_context(DataParallel(model.network(), list(kept), prove=False)) for kept in subsets
        ]  # the first one has all

        def block(trainer: DataParallel, steps: int) -> float:
            """The median time from step to step."""
            seconds, before = [], time.perf_counter()
            for _ in range(steps):
                trainer.step(model.loss_fn, next(batches))
                trainer.module.zero_grad()
                now = time.perf_counter()
                seconds.append(now - before)
                before = now
            return statistics.median(seconds)

        for trainer in trainers:
            block(trainer, args.warm_up)
        for _ in range(args.rounds):
            predicted: dict[str, float] = {}
            measured: dict[str, float] = {}
            rounds.append((predicted, measured))
            for kept, trainer in zip(subsets, trainers, strict=True):
                before = resource.getrusage(resource.RUSAGE_SELF)
                measured[" ".join(kept)] = 1e3 * block(trainer, args.block)
                after = resource.getrusage(resource.RUSAGE_SELF)
                faults = (after.ru_minflt - before.ru_minflt) / args.block
                system = 1e3 * (after.ru_stime - before.ru_stime) / args.block
                paid.setdefault(" ".join(kept), []).append((faults, system))
                if trainer is trainers[0]:
                    worth = trainer.what_if(prices={"host": 1.0})
                    for one in worth.choices:
                        name = " ".join(one.devices)
                        predicted[name] = one.seconds * args.batch  # ms of one batch
                        errors[name] = one.error
    found = compared(rounds)
    for name, error in errors.items():
        found[name]["error"] = round(error, 4)
    for name, rows in paid.items():
        faults, system = map(statistics.median, zip(*rows, strict=True))
        found[name] |= {"page_faults": round(faults), "system_ms": round(system, 2)}
    return found


def compared(rounds: Sequence[tuple[dict[str, float], dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """The medians by subset, and the ratios of what was predicted and measured in the same round.

    `rounds`: predicted and measured milliseconds by subset. A round has no prediction for a subset of which one device would get no work.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in rounds[0][1]:
        pairs = [(predicted[name], measured[name]) for predicted, measured in rounds if name in predicted]
        found[name] = {
            "measured_ms": round(statistics.median(measured[name] for _, measured in rounds), 3),
            "ratio": None,
        }
        if pairs:
            ratios = [one / other for one, other in pairs]
            found[name] |= {
                "predicted_ms": round(statistics.median(one for one, _ in pairs), 3),
                "ratio": round(statistics.median(ratios), 4),
                "ratios": [round(one, 3) for one in ratios],
            }
    return found


def main() -> int:
    args = arguments()
    devices = script.cores(args.cores)
    names = [device.name for device in devices]
    results: dict[str, Any] = {"quiet": measure(args, names)}
    with busy_loop(list(devices[-1].cores)):
        results["half of the last core"] = measure(args, names)
    ratios = [one["ratio"] for found in results.values() for one in found.values() if one["ratio"] is not None]
    for condition, found in results.items():
        print(f"{condition}, batch {args.batch}:")
        for name, one in found.items():
            if one["ratio"] is None:
                print(
                    f"  {name:<20} measured {one['measured_ms']:8.2f} ms, not predicted: one of the devices gets no work"
                )
            else:
                figures = f"predicted {one['predicted_ms']:8.2f} ms (+-{one['error']:.1%}), measured {one['measured_ms']:8.2f} ms"
                costs = f"{one['page_faults']} page faults and {one['system_ms']:.1f} ms in the system a step"
                print(f"  {name:<20} {figures}, ratio {one['ratio']:.3f}; {costs}")
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    met = abs(worst - 1) <= GOAL
    print(f"farthest from 1: {worst:.3f}; the goal, within {GOAL:.0%}, is {'met' if met else 'missed'}")
    if args.json:
        verdict = {"worst": worst, "goal": GOAL, "met": met, "batch": args.batch}
        print(json.dumps({"results": results} | verdict | script.facts(devices, torch=torch.__version__)))
    return 0


def arguments() -> argparse.Namespace:
    parser = script.parser(__doc__)
    parser.add_argument("--batch", type=int, default=2048, help="global batch (default: 2048)")
    parser.add_argument("--cores", type=int, default=2, help="how many devices (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="of blocks (default: 5)")
    parser.add_argument("--block", type=int, default=15, help="steps of a trainer in a round (default: 15)")
    parser.add_argument("--warm-up", type=int, default=20, help="steps of each trainer before (default: 20)")
    args = parser.parse_args()
    if min(args.rounds, args.block, args.warm_up) < 1 or args.batch < args.cores:
        parser.error("--rounds, --block and --warm-up must be at least 1, --batch at least --cores")
    return args


if __name__ == "__main__":
    sys.exit(main())
