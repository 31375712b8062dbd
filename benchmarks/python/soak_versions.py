"""Soak the versions of a served model: requests come all the time while versions are published, promoted, rolled back, fail to load and fail on some inputs.

    python benchmarks/python/soak_versions.py                               a hundred thousand requests
    python benchmarks/python/soak_versions.py --requests 10000 --width 128   some seconds, as the tests do

Requests come at random times (Poisson), at a part of the measured rate, whatever the answers take. In the first half the version is exchanged again and again, with
breaks in between. That gives p99 in the breaks and during a swap, from the call of `publish` on. The goal is a ratio of at most 1.2. In the second half
everything comes at random that may come, and devices are retired and restored, too.

Each answer names its request and the version that has computed it. No request may be lost, end twice, or be answered by a version that did not answer at the time
of its submit. The last line is one JSON object; the exit status is 1 if something was wrong. The ratio does not count for that. What is drawn depends on
the seed alone; how the threads interleave does not.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as WaitTimeoutError
from typing import Any, NamedTuple

import torch
from torch import nn

import paceline
from paceline import Rejected
from paceline.torch import Batcher, Pool, PoolFuture

GOAL = 1.2
LAYERS, BATCH = 8, 16
BREAK_SECONDS, AFTER_SECONDS = 0.5, 0.1  # between two swaps; a swap's requests may end so much later
POISONED = 0.01  # the part of the requests on which some versions fail
PATIENCE_SECONDS = 120.0  # what has not ended by then is lost


class PoisonError(Exception):
    """What a request fails with that is meant to fail."""


class LoadError(Exception):
    """What a version fails with that is meant to fail."""


class Model(nn.Module):
    """Each answer names its request and the version."""

    def __init__(self, version: int, width: int, *, picky: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
        self.version, self.picky = version, picky

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.picky and bool((x[:, 1] < 0).any()):
            raise PoisonError
        return torch.stack([x[:, 0], self.version + 0 * self.layers(x)[:, 0]], dim=1)


class Broken(Model):
    """A version that fails with the first batch of four."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 4:
            raise LoadError
        return super().forward(x)


class Sent(NamedTuple):
    number: int
    future: PoolFuture[Any]
    due: float
    what: str  # went on at that time
    poisoned: bool
    may: frozenset[int]  # versions


class Soak:
    """One run."""

    def __init__(self, requests: int, load: float, seed: int, devices: Sequence[str], width: int) -> None:
        self._requests, self._load, self._seed, self._width = requests, load, seed, width
        self.pool = Pool(devices)
        self.batcher: Batcher = self.pool.serve(Model(1, width).eval(), max_batch=BATCH)
        self._answering = frozenset({1})  # versions that may be given to a request now
        self._picky: set[int] = set()
        self._number = 1  # the last version
        self._what = "warming up"
        self._ended = bytearray(requests)  # how often each request was told
        self._seconds = [math.nan] * requests
        self._second_half, self._over = threading.Event(), threading.Event()
        self.calls: Counter[str] = Counter()
        self.shadows = 0
        self.wrong: list[str] = []

    def run(self) -> dict[str, Any]:
        begin = time.monotonic()
        rate = self._load * self._measure()
        beside = [threading.Thread(target=self._guarded, args=(one,)) for one in (self._change, self._retire)]
        for thread in beside:
            thread.start()
        sent = self._send(rate)
        self._over.set()
        self._second_half.set()
        for thread in beside:
            thread.join()
        outcomes: Counter[str] = Counter(self._outcome(one) for one in sent)
        self.pool.close()
        told = Counter(self._ended)
        swaps = {what: self._p99(sent, what) for what in ("break", "swap")}
        found = {
            "requests": self._requests,
            "outcomes": dict(outcomes),
            "by_version": dict(Counter(one.future.version for one in sent)),
            "calls": dict(self.calls),
            "shadow_answers": self.shadows,
            "lost": outcomes["lost"] + told[0],
            "ended_twice": sum(count for times, count in told.items() if times > 1),
            "wrong": len(self.wrong),
            "examples": self.wrong[:5],
            "rate_per_second": round(rate, 1),
            "p99_ms_before": round(1e3 * swaps["break"], 3),
            "p99_ms_during_a_swap": round(1e3 * swaps["swap"], 3),
            "ratio": round(swaps["swap"] / swaps["break"], 3),
            "goal": GOAL,
            "seconds": round(time.monotonic() - begin, 1),
        }
        return found | {"passed": not (found["lost"] or found["ended_twice"] or self.wrong)}

    def _measure(self) -> float:
        """Requests per second, if there are always enough of them."""
        count, begin = 0, time.perf_counter()
        for _ in self.batcher.map(torch.zeros(self._width) for _ in range(10**9)):
            count += 1
            if count % 100 == 0 and time.perf_counter() - begin > 1.0:
                break
        return count / (time.perf_counter() - begin)

    def _send(self, rate: float) -> list[Sent]:
        draws, sent = random.Random(self._seed), []
        due = time.perf_counter()
        for number in range(self._requests):
            due += draws.expovariate(rate)
            time.sleep(max(0.0, due - time.perf_counter()))
            if number == self._requests // 2:
                self._second_half.set()
            x = torch.zeros(self._width)
            x[0], x[1] = number, (poisoned := draws.random() < POISONED) * -1.0
            key = draws.randrange(100) if draws.random() < 0.2 else None
            may, what = self._answering, self._what
            future = self.batcher(x, key=key)
            sent.append(Sent(number, future, due, what, poisoned, may | self._answering))
            future.add_done_callback(functools.partial(self._tell, number, due))
        return sent

    def _tell(self, number: int, due: float, _: object) -> None:
        self._ended[number] += 1
        self._seconds[number] = time.perf_counter() - due

    def _outcome(self, one: Sent) -> str:
        version = one.future.version
        try:
            answer = one.future.result(PATIENCE_SECONDS).tolist()
        except PoisonError:
            right, outcome = one.poisoned and version in self._picky, "failed"
        except WaitTimeoutError:
            return "lost"
        else:
            right = answer == [one.number, version] and not (one.poisoned and version in self._picky)
            outcome = "completed"
        if not right or version not in one.may:
            self.wrong.append(f"request {one.number}: {outcome} by version {version} of {sorted(one.may)}")
        return outcome

    def _p99(self, sent: Sequence[Sent], what: str) -> float:
        found = sorted(self._seconds[one.number] for one in sent if one.what == what)
        return found[int(0.99 * len(found))] if found else math.nan

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # the run would end as if all were right
            self.wrong.append(f"{call.__name__} has failed: {error!r}")
            raise

    def _change(self) -> None:
        self._second_half.wait(BREAK_SECONDS)  # the pool gets to know its devices
        self._what = "break"
        while not self._second_half.wait(BREAK_SECONDS):
            self._publish(timed=True)
        self._what = "anything"
        draws = random.Random(self._seed + 1)
        while not self._over.wait(draws.uniform(0.0, 0.1)):
            name = draws.choice(("publish", "candidate", "shadow", "promote", "rollback", "retire", "broken"))
            roles = {one["number"]: one["role"] for one in self.batcher.versions}
            if name == "publish":
                self._publish(picky=draws.random() < 0.5)
            elif name == "candidate" and "candidate" not in roles.values():
                self._publish(picky=draws.random() < 0.5, weight=draws.choice((0.1, 0.5)))
            elif name == "shadow" and "shadow" not in roles.values():
                self._publish(shadow=True, on_shadow=self._compare)
            elif name == "promote" and set(roles.values()) & {"candidate", "shadow"}:
                self._answering |= roles.keys()
                self.batcher.promote()
            elif name == "rollback" and set(roles.values()) & {"candidate", "previous"}:
                self._answering |= roles.keys()
                self.batcher.rollback()
            elif name == "retire" and set(roles.values()) != {"live"}:
                self.batcher.retire(draws.choice([one for one, role in roles.items() if role != "live"]))
            elif name == "broken":
                self._number += 1
                try:
                    self.batcher.publish(Broken(self._number, self._width).eval())
                    self.wrong.append("a broken version was taken")
                except Rejected as error:
                    if not isinstance(error.__cause__, LoadError):
                        raise
            else:
                continue  # nothing that it could change
            self.calls[name] += 1
            self._answering = frozenset(one["number"] for one in self.batcher.versions if one["weight"] > 0)

    def _publish(self, *, picky: bool = False, timed: bool = False, **options: Any) -> None:
        self._number += 1
        model = Model(self._number, self._width, picky=picky).eval()
        if picky:
            self._picky.add(self._number)
        if not options.get("shadow"):
            self._answering |= {self._number}
        self._what = "swap" if timed else "anything"
        made = self.batcher.publish(model, **options)
        assert made.number == self._number
        self._answering = frozenset(one["number"] for one in self.batcher.versions if one["weight"] > 0)
        if timed:
            time.sleep(AFTER_SECONDS)
            self._what = "break"

    def _compare(self, item: torch.Tensor, live: PoolFuture[Any], shadow: PoolFuture[Any]) -> None:
        if shadow.result().tolist() != [float(item[0]), shadow.version] or shadow.version == live.version:
            self.wrong.append(f"request {item[0]}: {shadow.result()} in the shadow, by version {shadow.version}")
        self.shadows += 1

    def _retire(self) -> None:
        self._second_half.wait()
        draws = random.Random(self._seed + 2)
        names = [one.name for one in self.pool.devices]
        while not self._over.wait(draws.uniform(0.0, 0.2)):
            name = draws.choice(names)
            self.pool.retire(name)
            self._over.wait(draws.uniform(0.0, 0.05))
            self.pool.restore(name)


def main() -> int:
    args = arguments()
    torch.set_num_threads(1)
    devices = [one.name for one in paceline.devices() if one.kind == "host"][: args.devices]
    found = Soak(args.requests, args.load, args.seed, devices, args.width).run()
    print(
        f"p99 {found['p99_ms_before']} ms before, {found['p99_ms_during_a_swap']} ms during a swap: {found['ratio']} times, goal {GOAL}"
    )
    versions = {"paceline": paceline.__version__, "torch": torch.__version__}
    print(json.dumps({"seed": args.seed, "load": args.load, "devices": devices} | found | {"versions": versions}))
    return 0 if found["passed"] else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000, help="(default: a hundred thousand)")
    parser.add_argument("--load", type=float, default=0.5, help="of the measured rate (default: 0.5)")
    parser.add_argument("--devices", type=int, default=2, help="how many host devices (default: 2)")
    parser.add_argument("--width", type=int, default=1024, help="of the model (default: 1024)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="changes nothing: the last line is always JSON")
    args = parser.parse_args()
    if min(args.requests, args.devices, args.width - 1) < 1 or not args.load > 0:
        parser.error("--requests, --devices and --load must be positive, and --width at least 2")
    return args


if __name__ == "__main__":
    sys.exit(main())
