"""The all-reduce of two host devices against that of two processes over gloo, by size.

    python all_reduce.py                run it alone on the machine

gloo: two processes, each pinned to a core with one thread (OMP_NUM_THREADS=1), over the loopback (GLOO_SOCKET_IFNAME=lo unless it is set),
with `torch.distributed.all_reduce` of a tensor. paceline: one process, with the workers of two devices on the same cores, and
`paceline.Communicator.all_reduce` of two tensors. Both sum float32 in place. Rounds run in fresh processes, in turns. A size's figure is the
median over rounds of the median over calls (for gloo, of the slower rank), ± half of the rounds' range.

Beside the ratio stands the amount of data that paceline moves: each of the two buffers is read once and written once.
benchmarks/cpp/all_reduce_benchmark.cpp compares it with what the same threads can move at most.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import paceline
from race import script
from race.command import in_turn
from race.figures import spread
from race.job import Job
from race.pinned import Answers, Pinned

SIZES = [1 << power for power in range(10, 29, 2)]  # 1 KiB to 256 MiB
SHORT_SIZES = [1 << 10, 1 << 20]


class Race:
    """Both rivals on two devices of this machine."""

    def __init__(self, args: argparse.Namespace, devices: list[paceline.Device], folder: Path) -> None:
        self.pinned = Pinned(devices, folder, busy=False, environment={"OMP_NUM_THREADS": "1"})
        sizes = SHORT_SIZES if args.short else SIZES
        self._job = Job("all-reduce-paceline", str(folder), batch=1, steps=args.calls, parts=len(devices), sizes=sizes)
        self.seconds: dict[str, dict[int, list[float]]] = {"gloo": defaultdict(list), "paceline": defaultdict(list)}

    def round(self, number: int) -> None:
        in_turn([self._gloo, self._paceline], number)

    def _gloo(self) -> None:
        self._add("gloo", self.pinned.ranks([dataclasses.replace(self._job, rival="all-reduce-gloo")]))

    def _paceline(self) -> None:
        self._add("paceline", [self.pinned.one([self._job])])

    def _add(self, name: str, processes: list[Answers]) -> None:
        for size in self._job.sizes:
            calls = zip(*(answers[0]["blocks"][str(size)][0] for answers in processes), strict=True)
            self.seconds[name][size].append(statistics.median(map(max, calls)))

    def rows(self) -> list[dict[str, Any]]:
        rows = []
        for size in self._job.sizes:
            gloo, ours = self.seconds["gloo"][size], self.seconds["paceline"][size]
            median = statistics.median(ours)
            rows.append(
                {
                    "bytes": size,
                    "gloo_us": round(1e6 * statistics.median(gloo), 1),
                    "gloo_spread": round(spread(gloo), 3),
                    "paceline_us": round(1e6 * median, 1),
                    "paceline_spread": round(spread(ours), 3),
                    "gloo_over_paceline": round(statistics.median(gloo) / median, 2),
                    "paceline_gb_per_s": round(4e-9 * size / median, 2),
                }
            )
        return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'size':>8}  {'gloo':>12} {'':>6}  {'paceline':>12} {'':>6}  {'gloo / paceline':>15}  {'paceline':>10}"]
    for row in rows:
        lines.append(
            f"{size_text(row['bytes']):>8}  {row['gloo_us']:>9.1f} us {'±' + format(row['gloo_spread'], '.0%'):>6}  "
            f"{row['paceline_us']:>9.1f} us {'±' + format(row['paceline_spread'], '.0%'):>6}  "
            f"{row['gloo_over_paceline']:>15.1f}  {row['paceline_gb_per_s']:>5.1f} GB/s"
        )
    return "\n".join(lines)


def size_text(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def main() -> int:
    args = arguments()
    devices = script.cores(2, pinned=True)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="all_reduce") as name:
        race = Race(args, devices, Path(name))
        for number in range(args.rounds):
            race.round(number)
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    rows = race.rows()
    print(table(rows))
    if args.json:
        setting = {"rounds": args.rounds, "load_before": round(load, 2)}
        print(json.dumps({"sizes": rows} | setting | script.facts(devices, **race.pinned.versions)))
    return 0


def arguments() -> argparse.Namespace:
    parser = script.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of both, in fresh processes (default: 5)")
    parser.add_argument("--calls", type=int, default=200, help="measured of a small size in a round (default: 200)")
    parser.add_argument("--short", action="store_true", help="only two sizes")
    args = parser.parse_args()
    if min(args.rounds, args.calls) < 1:
        parser.error("--rounds and --calls must be at least 1")
    return args


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RuntimeError as error:
        sys.exit(f"all_reduce: {error}")
