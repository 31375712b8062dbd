"""Soak a pool: a million requests, with everything at random that may come between, and a check that none is lost, none ends twice and each answer is right.

    python benchmarks/python/soak_pool.py                        a million requests
    python benchmarks/python/soak_pool.py --requests 20000       some seconds, as the tests do

Several threads submit requests of two shapes to a module, requests to functions of which some fail, jobs, gangs, and jobs that come after others. They use all
priorities and deadlines, and cancel some. One more thread retires devices and restores them. The last line is one JSON object; the exit
status is 1 if something was wrong. Memory counts as flat if the process is at most BOUND_MIB larger in the end than after a tenth of the requests.
What is drawn depends on the seed alone; how the threads interleave does not.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import random
import sys
import threading
import time
from collections import Counter, deque
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as WaitTimeoutError
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import paceline
from paceline import Cancelled, Expired, Rejected
from paceline.torch import Pool, PoolFuture
from race import script

BOUND_MIB = 32.0  # the allocator's arenas of some threads; a leak of 36 bytes a request shows in a million
OPEN = 200  # requests that a thread has open at most
SHAPES = (3, 8)
PRIORITIES = ("interactive", "normal", "batch", "background")
PATIENCE_SECONDS = 120.0  # what has not ended by then is lost


class PoisonError(Exception):
    """What a request fails with that is meant to fail."""


class Sums(nn.Module):
    """Each answer names its request: its first number is the request's."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.step


def poisoned(x: torch.Tensor) -> torch.Tensor:
    """The same as `Sums`, but a batch with a poisoned request fails."""
    if bool((x[:, 1] < 0).any()):
        raise PoisonError
    return x + 1.0


class Open(NamedTuple):
    number: int
    future: PoolFuture[Any]
    what: str
    may: set[str]  # how it may end


class Soak:
    """One run."""

    def __init__(self, requests: int, threads: int, seed: int, devices: list[str]) -> None:
        self._requests, self._threads, self._seed = requests, threads, seed
        self.pool = Pool(devices)
        self._module = self.pool.serve(Sums().eval(), max_batch=16)
        self._fails_alone = self.pool.serve(poisoned, max_batch=8, idempotent=True)
        self._fails_together = self.pool.serve(poisoned, max_batch=4)
        self._ended = bytearray(requests)  # how often each one was told
        self._ran = bytearray(requests)  # how often each job began
        self._lock = threading.Lock()
        self._numbers = iter(range(requests))
        self._over = threading.Event()
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.lost = 0
        self.mib: list[float] = []  # after a tenth, and in the end

    def run(self) -> dict[str, Any]:
        begin = time.monotonic()
        threads = [threading.Thread(target=self._client, args=(number,)) for number in range(self._threads)]
        beside = threading.Thread(target=self._retire_and_restore)
        for thread in (*threads, beside):
            thread.start()
        for thread in threads:
            thread.join()
        self._over.set()
        beside.join()
        self.mib.append(resident_mib())
        self.pool.close()
        told = Counter(self._ended)
        counted = sum(self.pool.report()["outcomes"].values())
        found = {
            "requests": self._requests,
            "outcomes": dict(self.outcomes),
            "counted_by_the_pool": counted,
            "lost": self.lost + told[0],
            "ended_twice": sum(count for times, count in told.items() if times > 1),
            "wrong": len(self.wrong),
            "examples": self.wrong[:5],
            "mib": [round(one, 1) for one in self.mib],
            "seconds": round(time.monotonic() - begin, 1),
        }
        flat = self.mib[-1] - self.mib[0] <= BOUND_MIB
        right = not (found["lost"] or found["ended_twice"] or self.wrong) and counted == self._requests
        return found | {"flat": flat, "passed": right and flat}

    def _next(self) -> int | None:
        with self._lock:
            number = next(self._numbers, None)
            if number == self._requests // 10:
                self.mib.append(resident_mib())
            return number

    def _client(self, thread: int) -> None:
        draws = random.Random(1000 * self._seed + thread)
        waiting: deque[Open] = deque()
        try:
            while (number := self._next()) is not None:
                one = self._submit(number, draws, waiting)
                one.future.add_done_callback(functools.partial(self._tell, number))
                waiting.append(one)
                if draws.random() < 0.05:
                    cancelled = waiting[draws.randrange(len(waiting))]
                    if cancelled.future.cancel():
                        cancelled.may.clear()
                    cancelled.may.add("cancelled")
                if len(waiting) >= OPEN:
                    self._check(waiting.popleft())
            while waiting:
                self._check(waiting.popleft())
        except BaseException as error:  # the run would end as if all were right
            self.wrong.append(f"a client has failed: {error!r}")
            raise

    def _submit(self, number: int, draws: random.Random, waiting: deque[Open]) -> Open:
        deadline = draws.choice((0.0005, 0.005, 0.05)) if draws.random() < 0.1 else None
        wait = draws.random() < 0.8
        options: Any = {"priority": draws.choice(PRIORITIES), "deadline": deadline, "wait": wait}
        may = {"completed"} | ({"rejected", "expired"} if deadline else set()) | (set() if wait else {"rejected"})
        draw = draws.random()
        if draw < 0.85:
            x = torch.zeros(draws.choice(SHAPES), dtype=torch.float64)
            x[0] = number
            if draw < 0.6:
                return Open(number, self._module(x, **options), "request", may)
            bad = draws.random() < 0.03
            x[1] = -1.0 if bad else 1.0
            alone = draws.random() < 0.7
            batcher = self._fails_alone if alone else self._fails_together
            if bad:
                may.remove("completed")
            if bad or not alone:
                may.add("failed")
            return Open(number, batcher(x, **options), "request", may)
        if draw < 0.88 and len(self.pool.devices) > 1:
            options["gang"] = 2
        elif draw < 0.9 and waiting:
            before = waiting[draws.randrange(len(waiting))]
            options["after"] = [before.future]
            may.add("dropped")
        return Open(number, self.pool.submit(self._job, number, kind="job", **options), "job", may)

    def _job(self, _: object, number: int) -> int:
        self._ran[number] += 1
        return number

    def _tell(self, number: int, _: object) -> None:
        self._ended[number] += 1

    def _check(self, one: Open) -> None:
        outcome = "completed"
        value: Any = None
        try:
            value = one.future.result(PATIENCE_SECONDS)
        except PoisonError:
            outcome = "failed"
        except CancelledError:
            outcome = "cancelled"
        except Rejected:
            outcome = "rejected"
        except Expired:
            outcome = "expired"
        except Cancelled:
            outcome = "dropped"
        except WaitTimeoutError:
            self.lost += 1
            return
        number, right = one.number, outcome in one.may
        if outcome == "completed":
            right = right and (value == number if one.what == "job" else float(value[0]) == number + 1)
        if one.what == "job":
            right = right and self._ran[number] == (outcome == "completed")
        with self._lock:
            self.outcomes[outcome] += 1
            if not right:
                self.wrong.append(f"{one.what} {number}: {outcome} with {value}, of {sorted(one.may)}")

    def _retire_and_restore(self) -> None:
        draws = random.Random(1000 * self._seed - 1)
        names = [one.name for one in self.pool.devices]
        while not self._over.wait(draws.uniform(0.001, 0.02)):
            name = draws.choice(names)
            self.pool.retire(name)
            self._over.wait(draws.uniform(0.0, 0.01))
            self.pool.restore(name)


def resident_mib() -> float:
    """What the process holds of the memory now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> int:
    args = arguments()
    devices = [one.name for one in paceline.devices() if one.kind == "host"][: args.devices]
    found = Soak(args.requests, args.threads, args.seed, devices).run()
    versions = {"paceline": paceline.__version__, "torch": torch.__version__}
    options = {"seed": args.seed, "threads": args.threads, "devices": devices, "bound_mib": BOUND_MIB}
    print(json.dumps(options | found | {"versions": versions}))
    return 0 if found["passed"] else 1


def arguments() -> argparse.Namespace:
    parser = script.parser(__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000, help="(default: a million)")
    parser.add_argument("--threads", type=int, default=4, help="that submit (default: 4)")
    parser.add_argument("--devices", type=int, default=2, help="how many host devices (default: 2)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if min(args.requests, args.threads, args.devices) < 1:
        parser.error("--requests, --threads and --devices must be at least 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
