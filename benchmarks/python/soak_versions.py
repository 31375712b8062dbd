"""Soak the versions of a served model: requests come all the time while versions are published, promoted, rolled back, fail to load, and fail on some inputs.

    python benchmarks/python/soak_versions.py                               a hundred thousand requests
    python benchmarks/python/soak_versions.py --requests 10000 --width 128   some seconds, as the tests do

First the capacity is measured with requests of the same mix, of which as many are always open as fill two batches on each device (a closed loop). Then requests come at
random times (Poisson), at a part of the capacity, whatever the answers take. In the first half the version is exchanged again and again, with
breaks in between. That gives p99 in the breaks and during a swap, from the call of `publish` on. The goal is a ratio of at most 1.2. In the second half
everything comes at random that may come, and devices are retired and restored, too.

The thread that sends has no core of its own here, so a higher load measures how late it is. Python's collector is off: it stops all threads for some 80 ms as the
list of what was sent grows. Making a model counts for neither p99.

Each answer names its request and the version that has computed it. No request may be lost, be ended twice by the engine, or be answered by a version that did not answer at
the time of its submit. The last line is one JSON object; the exit status is 1 if something was wrong, or if the service was overloaded: if p99 in the breaks is more than
SANE times what a request takes in the closed loop. Then the ratio says nothing. The ratio itself does not count. What is drawn depends on the seed alone; how the
threads interleave does not.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import math
import random
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as WaitTimeoutError
from typing import Any, NamedTuple

import torch
from torch import nn

import paceline
from paceline import Rejected
from paceline.torch import Batcher, Pool, PoolFuture
from paceline.torch._pool.job import Work
from race import script

GOAL = 1.2
SANE = 3.0
LAYERS, BATCH = 8, 16
MEASURED_SECONDS = 3.0
CALLS = ("retire", "rollback", "promote", "candidate", "shadow", "publish", "broken", "unloadable")
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
    """A version that is loaded, and fails with the first batch of four."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 4:
            raise LoadError
        return super().forward(x)


def load_error(_: torch.device) -> Any:
    """What a version is loaded by that cannot be loaded."""
    raise LoadError


@contextlib.contextmanager
def ends_counted(soak: Soak) -> Iterator[None]:
    """Count what the engine ends again. A work that it has ended knows no future any more."""
    end = Work.end

    def counted(work: Work, *how: Any) -> None:
        soak.ended_twice += work.future is None
        end(work, *how)

    Work.end = counted  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Work.end = end  # type: ignore[method-assign]


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
        self._seconds = [math.nan] * requests
        self._open = 2 * BATCH * len(self.pool.devices)  # in the closed loop
        self.ended_twice = 0
        self._second_half, self._over = threading.Event(), threading.Event()
        self.calls: Counter[str] = Counter()
        self.shadows = 0
        self.wrong: list[str] = []

    def run(self) -> dict[str, Any]:
        with ends_counted(self):
            return self._run()

    def _run(self) -> dict[str, Any]:
        begin = time.monotonic()
        self.batcher(
            torch.zeros(self._width)
        ).result()  # versions are warmed with the first request, which no version fails on
        gc.freeze()
        gc.disable()
        capacity = self._measure()
        beside = [threading.Thread(target=self._guarded, args=(one,)) for one in (self._change, self._retire)]
        for thread in beside:
            thread.start()
        sent = self._send(self._load * capacity)
        self._over.set()
        self._second_half.set()
        for thread in beside:
            thread.join()
        outcomes: Counter[str] = Counter(self._outcome(one) for one in sent)
        self.pool.close()
        gc.enable()
        gc.unfreeze()
        before, during = (self._p99(sent, what) for what in ("break", "swap"))
        found = {
            "requests": self._requests,
            "outcomes": dict(outcomes),
            "by_version": dict(Counter(one.future.version for one in sent)),
            "calls": dict(self.calls),
            "shadow_answers": self.shadows,
            "lost": outcomes["lost"],
            "ended_twice": self.ended_twice,
            "wrong": len(self.wrong),
            "examples": self.wrong[:5],
            "capacity_per_second": round(capacity, 1),
            "ms_in_the_closed_loop": round(1e3 * self._open / capacity, 3),
            "p99_ms_before": rounded(1e3 * before),
            "p99_ms_during_a_swap": rounded(1e3 * during),
            "ratio": rounded(during / before),
            "goal": GOAL,
            "overloaded": before > SANE * self._open / capacity,
            "seconds": round(time.monotonic() - begin, 1),
        }
        return found | {"passed": not (found["lost"] or found["ended_twice"] or self.wrong)}

    def _measure(self) -> float:
        """Answers per second in the closed loop. The first third of the time does not count."""
        draws, waiting, count = random.Random(self._seed - 1), deque[Sent](), 0
        begin = time.perf_counter()
        while (now := time.perf_counter()) < begin + MEASURED_SECONDS:
            waiting.append(self._submit(0, draws, now))
            if len(waiting) == self._open:
                waiting.popleft().future.exception(PATIENCE_SECONDS)
                count += now > begin + MEASURED_SECONDS / 3
        for one in waiting:
            one.future.exception(PATIENCE_SECONDS)
        return max(count, 1) / (2 / 3 * MEASURED_SECONDS)

    def _send(self, rate: float) -> list[Sent]:
        draws, sent = random.Random(self._seed), []
        due = time.perf_counter()
        for number in range(self._requests):
            due += draws.expovariate(rate)
            if (early := due - time.perf_counter()) > 0:  # a sleep of no time, too, would hand the interpreter over
                time.sleep(early)
            if number == self._requests // 2:
                self._second_half.set()
            sent.append(self._submit(number, draws, due))
            sent[-1].future.add_done_callback(functools.partial(self._tell, number, due))
        return sent

    def _submit(self, number: int, draws: random.Random, due: float) -> Sent:
        x = torch.zeros(self._width)
        x[0], x[1] = number, (poisoned := draws.random() < POISONED) * -1.0
        key = draws.randrange(100) if draws.random() < 0.2 else None
        may, what = self._answering, self._what
        return Sent(number, self.batcher(x, key=key), due, what, poisoned, may | self._answering)

    def _tell(self, number: int, due: float, _: object) -> None:
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
        while not self._second_half.wait(AFTER_SECONDS):
            self._publish(timed=True)
            self.calls["swap"] += 1
        draws, left = random.Random(self._seed + 1), list(CALLS)  # each once, and then again in another order
        while not self._over.wait(draws.uniform(0.0, 0.1)):
            left = left or draws.sample(CALLS, len(CALLS))
            name = left.pop()
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
            elif name in ("broken", "unloadable"):
                self._refused(name)
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
        if timed:  # what making the model takes belongs to neither
            time.sleep(AFTER_SECONDS)
            self._what = "break"
            time.sleep(BREAK_SECONDS)
            self._what = "swap"
        made = self.batcher.publish(model, **options)
        assert made.number == self._number
        self._answering = frozenset(one["number"] for one in self.batcher.versions if one["weight"] > 0)
        if timed:
            time.sleep(AFTER_SECONDS)
            self._what = "anything"

    def _refused(self, name: str) -> None:
        self._number += 1
        try:
            if name == "broken":
                self.batcher.publish(Broken(self._number, self._width).eval())
            else:
                self.batcher.publish(lambda state, x: x, initializer=load_error)
            self.wrong.append(f"a version was taken that is {name}")
        except Rejected as error:
            if not isinstance(error.__cause__, LoadError) or (" loading " in str(error)) != (name == "unloadable"):
                raise

    def _compare(self, item: torch.Tensor, live: PoolFuture[Any], shadow: PoolFuture[Any]) -> None:
        if shadow.result().tolist() != [float(item[0]), shadow.version] or shadow.version == live.version:
            self.wrong.append(f"request {item[0]}: {shadow.result()} in the shadow, by version {shadow.version}")
        self.shadows += 1

    def _retire(self) -> None:
        self._second_half.wait()
        draws = random.Random(self._seed + 2)
        names = [one.name for one in self.pool.devices]
        while len(names) > 1 and not self._over.wait(draws.uniform(0.0, 0.2)):  # one at a time: others take versions
            name = draws.choice(names)
            self.pool.retire(name)
            self._over.wait(draws.uniform(0.0, 0.05))
            self.pool.restore(name)


def rounded(value: float) -> float | None:
    """For JSON, which has no NaN."""
    return None if math.isnan(value) else round(value, 3)


def main() -> int:
    args = arguments()
    torch.set_num_threads(1)
    devices = [one.name for one in paceline.devices() if one.kind == "host"][: args.devices]
    found = Soak(args.requests, args.load, args.seed, devices, args.width).run()
    if found["overloaded"]:
        print(
            f"The service was overloaded: p99 is more than {SANE} times the {found['ms_in_the_closed_loop']} ms of the closed loop."
        )
    print(
        f"p99 {found['p99_ms_before']} ms before, {found['p99_ms_during_a_swap']} ms during a swap: {found['ratio']} times, goal {GOAL}"
    )
    versions = {"paceline": paceline.__version__, "torch": torch.__version__}
    print(json.dumps({"seed": args.seed, "load": args.load, "devices": devices} | found | {"versions": versions}))
    return 0 if found["passed"] and not found["overloaded"] else 1


def arguments() -> argparse.Namespace:
    parser = script.parser(__doc__)
    parser.add_argument("--requests", type=int, default=100_000, help="(default: a hundred thousand)")
    parser.add_argument("--load", type=float, default=0.25, help="of the measured capacity (default: 0.25)")
    parser.add_argument("--devices", type=int, default=2, help="how many host devices (default: 2)")
    parser.add_argument("--width", type=int, default=1024, help="of the model (default: 1024)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if min(args.requests, args.devices, args.width - 1) < 1 or not args.load > 0:
        parser.error("--requests, --devices and --load must be positive, and --width at least 2")
    return args


if __name__ == "__main__":
    sys.exit(main())
