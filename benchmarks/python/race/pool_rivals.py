"""One process of `race_pool.py` (``python -m race.pool_rivals RIVAL CORES``): answers requests at the rates that it is told on standard input.

A rival answers one request by ``submit(x, told)``, which calls ``told()`` when the answer is there. Every rival runs the same module on one thread
per core, in batches of at most `MAX_BATCH`, but for the executor, which runs requests one by one. RIVAL is a name of `RIVALS`, or "http:" and a server of
`http_rivals`, or "empty:" and a server, whose model then returns what it is given.
"""

from __future__ import annotations

import abc
import functools
import json
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import nn

from race.worker import say

MAX_BATCH = 64
FEATURES, HIDDEN = 1024, 4096
MARGIN_SECONDS = 60.0  # after the last request: who has not answered by then has lost it


class Rival(Protocol):
    def submit(self, x: torch.Tensor, told: Callable[[], None]) -> None:
        """Answer one request, some time."""

    def close(self) -> None:
        """End its threads."""


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, FEATURES)
    return nn.Sequential(*layers).eval()


def pin(core: int) -> None:
    os.sched_setaffinity(0, [core])  # of this thread
    torch.set_num_threads(1)


def when_done(future: Future[Any], told: Callable[[], None]) -> None:
    def done(one: Future[Any]) -> None:
        if (error := one.exception()) is not None:  # no answer, so it must not count as a fast one
            print(f"a request has failed: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
        told()

    future.add_done_callback(done)


@torch.inference_mode()
def answers(module: nn.Module, items: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [row.clone() for row in module(torch.stack(list(items)))]


class Paceline:
    def __init__(self, cores: Sequence[int]) -> None:
        from paceline.torch import Pool

        self._pool = Pool([f"host:{index}" for index in range(len(cores))])
        self._batcher = self._pool.serve(network(), max_batch=MAX_BATCH)

    def submit(self, x: torch.Tensor, told: Callable[[], None]) -> None:
        when_done(self._batcher(x), told)

    def close(self) -> None:
        self._pool.close(cancel=True)


class Executor:
    """`ThreadPoolExecutor`, a thread per core, without batches."""

    def __init__(self, cores: Sequence[int]) -> None:
        left = list(cores)
        self._module = network()
        self._pool = ThreadPoolExecutor(len(cores), initializer=lambda: pin(left.pop()))

    def submit(self, x: torch.Tensor, told: Callable[[], None]) -> None:
        when_done(self._pool.submit(answers, self._module, [x]), told)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class Delayed:
    """What servers do by default: a free thread collects until its batch is full, or `seconds` after the first request of it."""

    def __init__(self, cores: Sequence[int], seconds: float) -> None:
        self._queue: queue.Queue[tuple[torch.Tensor, Callable[[], None]] | None] = queue.Queue()
        self._module, self._seconds, self._collects = network(), seconds, threading.Lock()
        self._threads = [threading.Thread(target=self._work, args=(core,), daemon=True) for core in cores]
        for thread in self._threads:
            thread.start()

    def submit(self, x: torch.Tensor, told: Callable[[], None]) -> None:
        self._queue.put((x, told))

    def _work(self, core: int) -> None:
        pin(core)
        while True:
            batch = []
            with self._collects:
                first = self._queue.get()
                end = time.monotonic() + self._seconds
                while first is not None:
                    batch.append(first)
                    if len(batch) == MAX_BATCH:
                        break
                    try:
                        left = end - time.monotonic()
                        first = self._queue.get(timeout=left) if left > 0 else self._queue.get_nowait()
                    except queue.Empty:
                        break
                if first is None:
                    self._queue.put(None)
            if batch:
                answers(self._module, [x for x, _ in batch])
            for _, told in batch:
                told()
            if first is None:
                return

    def close(self) -> None:
        self._queue.put(None)
        for thread in self._threads:
            thread.join()


class LeastOutstanding(abc.ABC):
    """An instance for each core, which batches by itself. A request goes to the instance with the fewest open ones."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._open = [0] * len(cores)
        self._lock = threading.Lock()

    @abc.abstractmethod
    def futures(self, index: int, x: torch.Tensor) -> Future[Any]:
        """The answer of one instance."""

    def submit(self, x: torch.Tensor, told: Callable[[], None]) -> None:
        with self._lock:
            index = self._open.index(min(self._open))
            self._open[index] += 1

        def done() -> None:
            with self._lock:
                self._open[index] -= 1
            told()

        when_done(self.futures(index, x), done)


class Batched(LeastOutstanding):
    """The package `batched`. Its calls wait for their answer, so its queue is used without them, which costs it less."""

    def __init__(self, cores: Sequence[int]) -> None:
        from batched import BatchProcessor  # type: ignore[import-not-found, unused-ignore]

        super().__init__(cores)
        module = network()

        def model(core: int, pinned: list[bool], items: list[torch.Tensor]) -> list[torch.Tensor]:
            if not pinned:
                pin(core)
                pinned.append(True)
            return answers(module, items)

        self._instances = [
            BatchProcessor(functools.partial(model, core, []), batch_size=MAX_BATCH, timeout_ms=5.0) for core in cores
        ]

    def futures(self, index: int, x: torch.Tensor) -> Future[Any]:
        instance = self._instances[index]
        future: Future[Any] = instance._schedule([x])[0].future
        return future

    def close(self) -> None:
        for instance in self._instances:
            instance.shutdown()


class TorchRL(LeastOutstanding):
    """torchrl's `InferenceServer` on threads."""

    def __init__(self, cores: Sequence[int]) -> None:
        from tensordict import TensorDict  # type: ignore[import-not-found, unused-ignore]
        from tensordict.nn import TensorDictModule  # type: ignore[import-not-found, unused-ignore]
        from torchrl.modules.inference_server import (  # type: ignore[import-not-found, unused-ignore]
            InferenceServer,
            ThreadingTransport,
        )

        super().__init__(cores)
        self._dictionary = TensorDict
        module, self._servers, self._clients = network(), [], []

        class OnCore(nn.Module):
            def __init__(self, core: int) -> None:
                super().__init__()
                self._core: int | None = core

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if self._core is not None:
                    pin(self._core)
                    self._core = None
                with torch.inference_mode():
                    y: torch.Tensor = module(x)
                return y

        for core in cores:
            transport = ThreadingTransport()
            policy = TensorDictModule(OnCore(core), in_keys=["x"], out_keys=["y"])
            self._servers.append(InferenceServer(policy, transport, max_batch_size=MAX_BATCH).start())
            self._clients.append(transport.client())

    def futures(self, index: int, x: torch.Tensor) -> Future[Any]:
        future: Future[Any] = self._clients[index].submit(self._dictionary({"x": x}, []))
        return future

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()


RIVALS: dict[str, Callable[[Sequence[int]], Rival]] = {
    "paceline": Paceline,
    "executor": Executor,
    "delayed": functools.partial(Delayed, seconds=0.010),
    "batched": Batched,
    "torchrl": TorchRL,
}


def made(name: str, cores: Sequence[int]) -> Rival:
    kind, _, server = name.partition(":")
    if not server:
        return RIVALS[name](cores)
    from race.http_rivals import OverHttp

    return OverHttp(cores, server, empty=kind == "empty")


class Tally:
    """Counts answers as they come, on any thread."""

    def __init__(self, requests: int) -> None:
        self.seconds = [float("inf")] * requests
        self._left, self._lock, self.all = requests, threading.Lock(), threading.Event()

    def told(self, index: int, due: float) -> None:
        self.seconds[index] = time.perf_counter() - due
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self.all.set()


def at_rate(rival: Rival, items: Sequence[torch.Tensor], rate: float, seconds: float, seed: int) -> dict[str, float]:
    """Requests whose gaps are drawn beforehand, so a rival that falls behind gets no rest. Times count from when a request was due."""
    draws = random.Random(seed)
    gaps = [draws.expovariate(rate) for _ in range(max(int(rate * seconds), 1))]
    tally = Tally(len(gaps))
    due = time.perf_counter() + 0.05
    begin = due
    for index, gap in enumerate(gaps):
        due += gap
        early = due - time.perf_counter()
        if early > 0:
            time.sleep(early)
        rival.submit(items[index % len(items)], functools.partial(tally.told, index, due))
    tally.all.wait(MARGIN_SECONDS)
    took = time.perf_counter() - begin
    found = sorted(min(one, took) for one in tally.seconds)  # who has not answered is that late at least
    return {
        "p50": found[len(found) // 2],
        "p99": found[min(int(0.99 * len(found)), len(found) - 1)],
        "seconds": took,
        "requests": len(found),
        "times": found,  # type: ignore[dict-item]
    }


def closed_loop(rival: Rival, items: Sequence[torch.Tensor], requests: int) -> float:
    """Seconds for requests that are all there from the beginning."""
    tally, begin = Tally(requests), time.perf_counter()
    for index in range(requests):
        rival.submit(items[index % len(items)], functools.partial(tally.told, index, begin))
    tally.all.wait(10 * MARGIN_SECONDS)
    return time.perf_counter() - begin


def one_by_one(rival: Rival, items: Sequence[torch.Tensor], requests: int) -> float:
    """Seconds of a request that is alone, the median."""
    return sorted(closed_loop(rival, [items[index % len(items)]], 1) for index in range(requests))[requests // 2]


def alone(core: int) -> dict[str, float]:
    """One core: seconds of a single request, and requests a second in full batches."""
    pin(core)
    module, items = network(), [torch.randn(FEATURES) for _ in range(MAX_BATCH)]

    def shortest(count: int, times: int) -> float:
        found = []
        for _ in range(times):
            begin = time.perf_counter()
            answers(module, items[:count])
            found.append(time.perf_counter() - begin)
        return sorted(found)[len(found) // 2]

    return {"single": shortest(1, 60), "rate": MAX_BATCH / shortest(MAX_BATCH, 40)}


def main() -> None:
    name, cores = sys.argv[1], json.loads(sys.argv[2])
    if name == "alone":
        say(alone(cores[0]))
        return
    try:
        rival = made(name, cores)
    except ImportError as error:
        say({"missing": str(error)})
        return
    torch.set_num_threads(1)
    items = [torch.randn(FEATURES) for _ in range(256)]
    more = [] if name == "executor" else [512, 512]
    for count in [*(1 << power for power in range(7)), *more]:  # batches of every size, and what there is to learn
        closed_loop(rival, items, count)
    say({"ready": True})
    for line in sys.stdin:
        what = json.loads(line)
        if not what:
            break
        if "all" in what:
            say({"seconds": closed_loop(rival, items, what["all"])})
        elif "alone" in what:
            say({"seconds": one_by_one(rival, items, what["alone"])})
        else:
            say(at_rate(rival, items, what["rate"], what["seconds"], what["seed"]))
    rival.close()


if __name__ == "__main__":
    main()
