"""Models, clients and figures for tests of versions."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import torch
from torch import nn

from paceline.torch import PoolFuture
from pool_support import pool_of, soon
from torch_support import hosts


class Adds(nn.Module):
    """Its answers name it."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor(float(number)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.number


def adds(number: float) -> nn.Module:
    return Adds(number).eval()


def versions_of(answers: list[PoolFuture[Any]]) -> Counter[int]:
    """How many requests of zero each version was given; each answer is ten times its version."""
    for one in answers:
        assert float(one.result()) == 10.0 * one.version
    return Counter(one.version for one in answers)


def ask(batcher: Any, count: int, **options: Any) -> list[PoolFuture[Any]]:
    return [batcher(torch.tensor(0.0), **options) for _ in range(count)]


def roles(batcher: Any) -> dict[int, tuple[str, float]]:
    return {one["number"]: (one["role"], one["weight"]) for one in batcher.versions}


class States:
    """Makes states for `initializer=`, and knows which ones there are on each device."""

    def __init__(self, *, alone: bool = False, seconds: float = 0.0) -> None:
        self.alive: Counter[tuple[str, int]] = Counter()
        self.made: list[tuple[int, str]] = []  # version and thread
        self.alone, self.seconds = alone, seconds
        self.fails: dict[int, BaseException] = {}  # by version: at the last device that is to be loaded
        self.crowded = False
        self._lock = threading.Lock()

    def of(self, version: int) -> Any:
        def initializer(_: torch.device) -> State:
            time.sleep(self.seconds)
            self.made.append((version, threading.current_thread().name))
            if version in self.fails and sum(one == version for one, _ in self.made) == len(hosts(2)):
                raise self.fails[version]
            return State(self, version)

        return initializer

    def count(self, version: int) -> int:
        return sum(count for (_, one), count in self.alive.items() if one == version)


class State:
    def __init__(self, states: States, version: int) -> None:
        self.states, self.version, self.where = states, version, threading.current_thread().name
        with states._lock:
            states.alive[self.where, version] += 1
            there = sum(count for (where, _), count in states.alive.items() if where == self.where)
            states.crowded |= states.alone and there > 1

    def __del__(self) -> None:
        with self.states._lock:
            self.states.alive[self.where, self.version] -= 1


def answer(state: State, x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.001)
    return x + 10 * state.version


class Clients:
    """Ask all the time, on threads of their own."""

    def __init__(self, batcher: Any, count: int = 2) -> None:
        self._batcher, self._over = batcher, threading.Event()
        self.answers: list[list[PoolFuture[Any]]] = [[] for _ in range(count)]
        self._threads = [threading.Thread(target=self._ask, args=(one,)) for one in self.answers]

    def _ask(self, answers: list[PoolFuture[Any]]) -> None:
        while not self._over.is_set():
            answers.append(self._batcher(torch.tensor(0.0)))
            answers[-1].exception()

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        assert soon(lambda: all(len(one) > 5 for one in self.answers))
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def versions(self) -> Counter[int]:
        """All answers are right, and each client's versions only go one way."""
        for one in self.answers:
            numbers = [answer.version for answer in one]
            assert numbers == sorted(numbers)
        return versions_of([answer for one in self.answers for answer in one])


def limited(count: int = 2, bytes_each: float = 150.0, **options: Any) -> Any:
    """Devices whose memory holds one state."""
    return pool_of(count, memory=dict.fromkeys(hosts(count), bytes_each), **options)
