"""What a job of a pool costs beside its own work: from submit to result, beside `concurrent.futures.ThreadPoolExecutor`.

    python benchmarks/python/pool_overhead.py                     one worker, which sleeps between the jobs
    python benchmarks/python/pool_overhead.py --jobs 200 --json   quick; the last line is one JSON object

Each job is empty and is submitted when the one before has ended, so the worker is parked each time. The rounds of the rivals alternate. `many`
submits all jobs of a round and then waits for all. There `submit` of the pool waits while eight jobs wait, which is the limit of its queue, so its
caller and its worker take turns. The executor has no limit. `request` is one request of a served function of one number, and `asked` the same by
asyncio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from paceline.torch import Pool
from race import script

Round = Callable[[int], list[float]]  # so many jobs, to seconds of each


def nothing(device: object = None) -> None:
    """The job."""


def each(once: Callable[[], object]) -> Round:
    """One job after the other."""

    def measure(jobs: int) -> list[float]:
        found = []
        for _ in range(jobs):
            begin = time.perf_counter()
            once()
            found.append(time.perf_counter() - begin)
        return found

    return measure


def many(submit: Callable[[], Callable[[], object]]) -> Round:
    """All at once: the mean, once."""

    def measure(jobs: int) -> list[float]:
        begin = time.perf_counter()
        for result in [submit() for _ in range(jobs)]:
            result()
        return [(time.perf_counter() - begin) / jobs]

    return measure


def main() -> int:
    args = arguments()
    with Pool(["host:0"]) as pool, ThreadPoolExecutor(1) as executor:
        batcher, item = pool.serve(lambda x: x, max_batch=1), torch.tensor(1.0)

        def asked(jobs: int) -> list[float]:
            async def ask() -> list[float]:
                found = []
                for _ in range(jobs):
                    begin = time.perf_counter()
                    await batcher.ask(item)
                    found.append(time.perf_counter() - begin)
                return found

            return asyncio.run(ask())

        rounds: dict[str, Round] = {
            "pool": each(lambda: pool.submit(nothing).result()),
            "executor": each(lambda: executor.submit(nothing).result()),
            "request": each(lambda: batcher(item).result()),
            "asked": asked,
            "pool, many": many(lambda: pool.submit(nothing).result),
            "executor, many": many(lambda: executor.submit(nothing).result),
        }
        times: dict[str, list[float]] = {name: [] for name in rounds}
        for number in range(args.rounds + 1):
            for name, measure in rounds.items():
                found = measure(args.jobs)
                times[name] += found if number else []  # the first round warms up
    rows = {}
    for name, seconds in times.items():
        hundredths = statistics.quantiles(seconds, n=100) if len(seconds) > 1 else seconds * 99
        rows[name] = {"p50_us": round(1e6 * hundredths[49], 1), "p99_us": round(1e6 * hundredths[98], 1)}
        print(f"{name:15} {rows[name]['p50_us']:8.1f} µs p50 {rows[name]['p99_us']:8.1f} µs p99")
    if args.json:
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        print(json.dumps({"jobs": args.jobs, "rounds": args.rounds, "microseconds": rows, "versions": versions}))
    return 0


def arguments() -> argparse.Namespace:
    parser = script.parser(__doc__)
    parser.add_argument("--jobs", type=int, default=2000, help="of a round (default: 2000)")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
