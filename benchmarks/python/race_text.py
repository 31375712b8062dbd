"""Races paceline with costs against DistributedDataParallel on text of variable length.

    python race_text.py                 nobody else on the machine, which must be true
    python race_text.py --busy          with a busy loop on the last core

All train the transformer of examples/python/text.py on the same pieces of text, an epoch each a round, in processes of their own while
nobody else runs: DDP as one pinned process per core over gloo, with random batches, with batches of similar length (a length-grouped
sampler) and with paceline's BalancedBatchSampler; and paceline with `cost=` on random batches. Every rival trims what it runs at once to
its longest piece. Rounds go in turns, each in another order. Figures: milliseconds a step, the mean over an epoch (so that every rival
has run the same pieces), medians over rounds, ± half of their range.

Two fractions of an ideal stand beside paceline: the split's, which is the time that devices were busy over the time that they had,
from the first start to the last finish of each step; and the whole step's, against the sum of what paceline does on each core alone under
the same load.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import paceline
from race import host, processes
from race.figures import spread
from race.job import Job, Rival

LABELS: dict[Rival, str] = {
    "text-ddp-random": "DDP, gloo, random batches",
    "text-ddp-grouped": "DDP, gloo, length-grouped batches",
    "text-ddp-balanced": "DDP, gloo, BalancedBatchSampler",
    "text-paceline": "paceline, cost=",
}
FIGURES = ("split_of_ideal", "padded", "contiguous", "error")
PROCESS_SECONDS = 300  # after which a process counts as hung


class TextRace:
    """The rivals on some devices of this machine."""

    def __init__(self, args: argparse.Namespace, devices: list[paceline.Device], folder: Path) -> None:
        self._devices = devices
        self._folder = folder
        self._environment = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
        self._busy_cores = list(devices[-1].cores) if args.busy else []
        self._count = 0
        self.torch_version = ""
        self.milliseconds: dict[str, list[float]] = defaultdict(list)  # by rival, and by device alone
        self.figures: dict[str, list[float]] = defaultdict(list)
        self._job = Job(
            rival="text-paceline",
            folder=str(folder),
            cores=[core for device in devices for core in device.cores],
            devices=[device.name for device in devices],
            batch=args.batch,
            steps=args.steps,
            parts=len(devices),
        )

    def round(self, number: int) -> None:
        """Every rival once, each round in another order."""
        rivals = [*(lambda rival=rival: self.run(rival) for rival in LABELS), self.alone]
        first = number % len(rivals)
        for rival in rivals[first:] + rivals[:first]:
            rival()

    def run(self, rival: Rival) -> None:
        jobs = [dataclasses.replace(self._job, rival=rival)]
        environment = {}
        if rival != "text-paceline":
            self._count += 1
            rendezvous = str(self._folder / f"rendezvous-{self._count}")
            jobs = [
                dataclasses.replace(jobs[0], cores=list(device.cores), rank=rank, rendezvous=rendezvous)
                for rank, device in enumerate(self._devices)
            ]
            environment = {"OMP_NUM_THREADS": "1"}
        blocks = self._measure(jobs, environment)
        self.milliseconds[rival].append(1e3 * statistics.mean(blocks[rival][0]))
        for name, value in zip(FIGURES, blocks.get("figures", [[]])[0], strict=False):
            self.figures[name].append(value)

    def alone(self) -> None:
        for device in self._devices:
            job = dataclasses.replace(
                self._job, rival="text-alone", cores=list(device.cores), devices=[device.name], parts=1
            )
            blocks = self._measure([job], {})
            self.milliseconds[device.name].append(1e3 * statistics.mean(blocks["text-alone"][0]))

    def _measure(self, jobs: list[Job], environment: dict[str, str]) -> dict[str, list[list[float]]]:
        answers, self.torch_version = processes.run(
            jobs, self._environment | environment, self._busy_cores, PROCESS_SECONDS
        )
        for answer in answers:
            if not all(0.0 < loss < 6.0 for loss in answer["losses"]):  # 5.5 is what knowing nothing of bytes costs
                raise RuntimeError(f"{jobs[0].rival} does not learn: its last loss is {answer['losses']}")
        blocks: dict[str, list[list[float]]] = answers[0]["blocks"]
        return blocks

    def summary(self) -> dict[str, Any]:
        medians = {name: statistics.median(values) for name, values in self.milliseconds.items()}
        ideal = 1 / sum(1 / medians[device.name] for device in self._devices)
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
        lines += [f"{'  ' + device.name + ' alone':<40}{medians[device.name]:>9.1f}" for device in self._devices]
        lines.append(f"split: {summary['split_of_ideal']:.4f} of ideal (busy time over the time that devices had)")
        lines.append(
            f"padding: {summary['padded']:.3f} times the pieces' own tokens; in slices of the batch as it came "
            f"{summary['contiguous']:.3f}; times of micro-batches predicted within {summary['error']:.1%}"
        )
        return "\n".join(lines)


def main() -> int:
    args = arguments()
    begin = time.monotonic()
    devices = paceline.devices()[: args.cores]
    if len(devices) < 2 or not all(device.cores for device in devices):
        print("The race needs two cores or more that processes can be pinned to.", file=sys.stderr)
        return 2
    load = os.getloadavg()[0]
    if load > 0.2:
        print(
            f"note: the load average is {load:.1f} before the race: somebody else computes here, or did a minute ago",
            file=sys.stderr,
        )
    with tempfile.TemporaryDirectory(prefix="race") as name:
        race = TextRace(args, devices, Path(name))
        for number in range(args.rounds):
            start = time.monotonic()
            race.round(number)
            print(f"round {number + 1} of {args.rounds}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    neighbour = f"a busy loop on {devices[-1].name}" if args.busy else "quiet"
    print(f"\ntext, {args.batch} pieces a step, {', '.join(device.name for device in devices)}, {neighbour}\n")
    print(race.table())
    if args.json:
        settings = {
            "busy": args.busy,
            "batch": args.batch,
            "steps": args.steps,
            "load_before": round(load, 2),
            "seconds": round(time.monotonic() - begin, 1),
            "hardware": host.hardware(devices),
            "versions": {
                "paceline": paceline.__version__,
                "torch": race.torch_version,
                "python": platform.python_version(),
            },
            "milliseconds_of_rounds": {
                name: [round(one, 2) for one in values] for name, values in race.milliseconds.items()
            },
        }
        print(json.dumps(race.summary() | settings))
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--busy", action="store_true", help="hold a busy loop on the last core while anything is measured"
    )
    parser.add_argument("--steps", type=int, default=60, help="of an epoch, which is measured each round (default: 60)")
    parser.add_argument("--rounds", type=int, default=5, help="of every rival, in fresh processes (default: 5)")
    parser.add_argument("--batch", type=int, default=64, help="pieces of a global batch (default: 64)")
    parser.add_argument("--cores", type=int, default=2, help="how many devices to race on (default: 2)")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    if min(args.steps, args.rounds, args.batch, args.cores) < 1:
        parser.error("--steps, --rounds, --batch and --cores must be at least 1")
    return args


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RuntimeError as error:
        sys.exit(f"race_text: {error}")
