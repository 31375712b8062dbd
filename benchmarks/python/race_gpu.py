"""Races on a GPU: the cost of paceline on one device, and its gain on several devices.

    python race_gpu.py --json                               the first GPU, whole and in parts
    python race_gpu.py --json --devices host:0,host:1       on these devices; only to try the program

(a) One device: plain PyTorch against paceline. (b) Two and three unequal partitions: auto and even shares, against the
sum of the partitions running the same work alone but *at the same time*, because they share memory, caches and the
clock. Forward and backward only, because paceline updates the parameters once and the partitions alone would do it
several times. (c) A partition with other work in the middle third: how many steps until steps are as fast as possible
again. (d) The sum over buffers of one GPU against copying them. (e) With several GPUs: nn.DataParallel and
DistributedDataParallel beside paceline.

One network is limited by arithmetic (bfloat16 matrix products), the other by memory (norms and element-wise work). Blocks
of all rivals take turns; figures are medians of rounds with their spread. Python's launch time is measured, too. If a
micro-batch keeps the GPU busy for less than 3 x devices x launch time, the run is marked launch-bound and does not count,
because it measures Python's lock. A CUDA graph helps such a network.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import paceline
from race import gpu_parts, script
from race.gpu_field import partition
from race.gpu_networks import MAKERS, Network
from race.gpu_parts import Length

CUTS = ((0.75, 0.25), (0.5, 0.3, 0.2))
HALVES = (0.5, 0.5)


def main() -> int:
    args = arguments()
    named = args.devices.split(",") if args.devices else None
    if named is None and not torch.cuda.is_available():
        print(
            "skipped: PyTorch sees no GPU; --devices host:0,host:1 tries the program on host devices", file=sys.stderr
        )
        print(json.dumps({"available": False, "why": "PyTorch sees no GPU"}))
        return 0
    length = Length(5, 4, 0.5) if args.short else Length(15, 8, 1.5)
    begin = time.monotonic()
    races: list[dict[str, Any]] = []

    def race(part: str, network: str | None, run: Callable[..., dict[str, Any]], *what: Any) -> None:
        if args.parts and part[0] not in args.parts:
            return
        start = time.monotonic()
        try:
            figures = run(*what, length)
        except Exception as error:  # a failed race must not lose the figures of the others
            figures = {"failed": f"{type(error).__name__}: {error}"}
        races.append(
            {"part": part, "network": network, **verdict(figures), "seconds": round(time.monotonic() - start, 1)}
        )
        print(line(races[-1]), file=sys.stderr)

    def parts(network: Network, cut: tuple[float, ...], length: Length) -> dict[str, Any]:
        return gpu_parts.partitions(network, on(named, cut), cut, length)

    def disturbed(network: Network, length: Length) -> dict[str, Any]:
        return gpu_parts.disturbed(network, on(named, HALVES), length)

    def reduction(length: Length) -> dict[str, Any]:
        return gpu_parts.reduction(on(named, HALVES), home, length)

    home = torch.device("cuda:0" if named is None else "cpu")
    if named is not None:
        torch.set_num_threads(1)  # like a worker
    first = paceline.find_device("cuda:0" if named is None else named[0])
    gpus = [device.name for device in paceline.devices() if device.kind == "cuda"]
    for name, make in MAKERS.items():
        network = Network(name, make, home)
        race("a: one device", name, gpu_parts.overhead, network, first)
        for cut in CUTS if named is None else ((1.0,) * len(named),):
            race(f"b: {len(cut)} parts", name, parts, network, cut)
        race("c: disturbed", name, disturbed, network)
        if len(gpus) > 1 or args.rivals:
            from race.gpu_rivals import several_gpus

            race("e: several GPUs", name, several_gpus, network, on(named or gpus, ()))
    race("d: reduction", None, reduction)
    if args.json:
        print(json.dumps({"available": True, "races": races, "launch": launches(races), **setting(args, begin)}))
    return 1 if any("failed" in entry for entry in races) else 0


def on(named: list[str] | None, cut: tuple[float, ...]) -> list[paceline.Device]:
    return partition(cut) if named is None else [paceline.find_device(name) for name in named]


def verdict(figures: dict[str, Any]) -> dict[str, Any]:
    """Whether the figure counts, and whether the goal is met."""
    if "failed" in figures:
        return figures
    counts = not figures.get("launch_bound", False)
    met: bool | None = None
    if counts and "goal_steps" in figures:
        steps = figures["steps_to_recover"]
        met = steps is not None and steps <= figures["goal_steps"]
    elif counts and "goal" in figures:
        met = figures["fraction_of_ideal"] >= figures["goal"]
    fraction = figures["fraction_of_ideal"]
    return {
        **figures,
        "fraction_of_ideal": None if fraction is None else round(fraction, 4),
        "counts": counts,
        "met": met,
    }


def line(entry: dict[str, Any]) -> str:
    what = f"{entry['part']:<16} {entry['network'] or '':<14}"
    if "failed" in entry:
        return f"{what} failed: {entry['failed']}"
    fraction = entry["fraction_of_ideal"]
    words = {True: "goal met", False: "goal missed", None: "no goal"}
    text = "launch-bound, does not count" if not entry["counts"] else words[entry["met"]]
    return f"{what} {'' if fraction is None else f'{fraction:.3f} of the ideal'}  {text}"


def launches(races: list[dict[str, Any]]) -> dict[str, Any]:
    """By network, Python's time to enqueue a micro-batch's forward, backward and update."""
    found = {entry["network"]: entry["launch_milliseconds"] for entry in races if "launch_milliseconds" in entry}
    return {"milliseconds": found}


def setting(args: argparse.Namespace, begin: float) -> dict[str, Any]:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
    facts = script.facts(paceline.devices(), torch=torch.__version__, cuda=torch.version.cuda, nccl=nccl)
    facts["hardware"]["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"short": args.short, "seconds": round(time.monotonic() - begin, 1), **facts}


def arguments() -> argparse.Namespace:
    parser = script.parser(__doc__)
    parser.add_argument("--devices", help="race on these host devices, to try the program (default: the first GPU)")
    parser.add_argument("--parts", metavar="abcde", help="only these parts")
    parser.add_argument("--rivals", action="store_true", help="part (e) also without a second GPU, over gloo")
    parser.add_argument("--short", action="store_true", help="about two minutes instead of ten, with a wider spread")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
