"""Where the time of a step goes, beside the work itself.

    python step_profile.py --json                          run it alone on the machine
    python step_profile.py --network transformer --batch 64
    python step_profile.py --busy                          with a busy loop on the last core

Trains the network of the races on two devices or more, in turns with plain PyTorch on one thread. Divides each step into parts, by the
trainer's reports:

    work        the time of one core alone for the batch, divided by the number of devices
    crowding    how much longer the devices compute: shared caches, memory and page faults, micro-batches, Python's lock
    waiting     for the device that computes longest
    hand-over   from the call to the first micro-batch, and from the last one to the reduction
    reduction   of the gradients
    python      in the call, before the workers have the step and after they are done
    optimizer

With --busy, work is the step's time if all devices finished together at the speeds that they had in that step. It includes crowding.

Figures are medians over steps, in milliseconds and as fractions of the whole. Page faults are those of the process. If the machine has
hardware counters, they are more reliable (`perf stat -e cache-misses`).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.torch import DataParallel
from race import data, model, recovery, script
from race.processes import busy_loop

WARM_UP_STEPS = 40
BLOCK = 5  # steps of one variant before the other's turn
PARTS = ("work", "crowding", "waiting", "hand_over", "reduction", "python", "optimizer")
BUSY_PARTS = tuple(name for name in PARTS if name != "crowding")


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def profile(args: argparse.Namespace, names: list[str], batches: list[model.Pair]) -> dict[str, Any]:
    """Medians of the parts, in seconds."""
    alone = model.network(args.network)
    module = model.network(args.network)
    with DataParallel(module, names) as trainer:
        optimizer = model.optimizer(module)
        plain: list[float] = []
        faults: list[int] = []
        claims: list[int] = []

        def plain_step(batch: model.Pair) -> None:
            model.loss_fn(alone, batch).backward()
            alone.zero_grad()

        def parallel_step(batch: model.Pair) -> dict[str, float]:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            call = timed(lambda: trainer.step(model.loss_fn, batch))
            update = timed(optimizer.step)
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
            optimizer.zero_grad()
            events = trainer.events()
            last = max(event["step"] for event in events)
            mine = [event for event in events if event["step"] == last]
            whole = next(event for event in mine if event["kind"] == "step")["duration_seconds"]
            runs = [event for event in mine if event["kind"] == "micro_batch"]
            reduction = sum(event["duration_seconds"] for event in mine if event["kind"] == "reduction")
            busy = sum(event["duration_seconds"] for event in runs) / len(names)
            ends = [event["start_seconds"] + event["duration_seconds"] for event in runs]
            compute = max(ends) - min(event["start_seconds"] for event in runs)
            together = recovery.last_step(events).ideal_seconds if args.busy else busy
            claims.append(len(runs))
            return {
                "busy": together,
                "waiting": compute - together,
                "hand_over": whole - compute - reduction,
                "reduction": reduction,
                "python": call - whole,
                "optimizer": update,
                "step": call + update,
            }

        for number in range(WARM_UP_STEPS):
            trainer.step(model.loss_fn, batches[number % len(batches)])
            optimizer.step()
            optimizer.zero_grad()
        seconds: list[dict[str, float]] = []
        for number in range(args.steps):
            batch = batches[number % len(batches)]
            if number // BLOCK % 2 == 0:
                plain.append(timed(lambda batch=batch: plain_step(batch)))  # type: ignore[misc]
            else:
                seconds.append(parallel_step(batch))
    parts = {name: [each[name] for each in seconds] for name in (*PARTS[2:], "step")}
    if args.busy:
        parts["work"] = [each["busy"] for each in seconds]
    else:
        alone_seconds = statistics.median(plain) / len(names)
        parts |= {"work": [alone_seconds], "crowding": [each["busy"] - alone_seconds for each in seconds]}
    shown = BUSY_PARTS if args.busy else PARTS
    medians = {name: statistics.median(parts[name]) for name in (*shown, "step")}
    return {
        "ms": {name: round(1e3 * value, 3) for name, value in medians.items()},
        "part_of_step": {name: round(medians[name] / medians["step"], 4) for name in shown},
        "page_faults": statistics.median(faults),
        "micro_batches": statistics.median(claims),
    }


def main() -> int:
    args = arguments()
    torch.set_num_threads(1)
    devices = script.cores(args.cores)
    with tempfile.TemporaryDirectory(prefix="step_profile") as folder:
        data.save(Path(folder), args.network)
        batches = model.batches(folder, args.batch)
        with busy_loop(list(devices[-1].cores) if args.busy else []):
            result = profile(args, [device.name for device in devices], batches)
    rows = [["", "ms a step", "of the step"]]
    rows += [
        [name, f"{result['ms'][name]:.2f}", f"{result['part_of_step'][name]:.1%}"] for name in result["part_of_step"]
    ]
    rows.append(["step", f"{result['ms']['step']:.2f}", ""])
    for name, milliseconds, part in rows:
        print(f"{name.replace('_', '-'):<12}{milliseconds:>10}{part:>13}")
    print(f"{result['page_faults']:.0f} page faults and {result['micro_batches']:.0f} micro-batches a step")
    if args.json:
        setting = {"network": args.network, "batch": args.batch, "busy": args.busy}
        title = f"{args.network}, batch {args.batch}{', a busy loop on the last core' if args.busy else ''}"
        print(json.dumps(result | setting | script.facts(devices, torch=torch.__version__) | {"tables": {title: rows}}))
    return 0


def arguments() -> argparse.Namespace:
    parser = script.parser(__doc__)
    parser.add_argument("--network", choices=["convolution", "transformer"], default="convolution")
    parser.add_argument("--batch", type=int, default=512, help="global batch (default: 512)")
    parser.add_argument("--busy", action="store_true", help="with a busy loop on the last device's core")
    parser.add_argument("--cores", type=int, default=2, help="how many devices (default: 2)")
    parser.add_argument("--steps", type=int, default=200, help="half of them plain PyTorch's (default: 200)")
    args = parser.parse_args()
    if args.steps < 4 * BLOCK:
        parser.error(f"--steps must be at least {4 * BLOCK}")
    return args


if __name__ == "__main__":
    sys.exit(main())
