"""A pool whose scaler does what the test says."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from paceline.torch import Autoscale, Pool
from paceline.torch._pool import released
from pool_support import soon
from torch_support import hosts


class Box:
    """A pool of which one device is released and comes back when the test says so."""

    def __init__(self, pool: Pool, name: str) -> None:
        self.pool, self.engine = pool, pool._jobs.engine
        self.scale: Any = pool._scale
        self.name, self.wanted = name, True
        decide = self.scale._decide

        def decides(*given: Any) -> list[tuple[str, bool]]:
            decide(*given)  # for its figures
            models = self.scale._models
            if self.wanted:
                away = self.scale.released - models.coming - models.failed()
                return [(self.name, True)] if self.name in away else []
            self.scale._models.coming.discard(self.name)
            return [(self.name, False)] if self.name in self.engine.active else []

        vars(self.scale)["_decide"] = decides

    @property
    def active(self) -> bool:
        return self.name in self.engine.active

    def look(self, condition: Any) -> None:
        """Look until it holds."""

        def looked() -> Any:
            self.scale.look()
            return condition()

        assert soon(looked)

    def release(self) -> None:
        """And what was kept there is freed."""
        self.wanted = False
        self.look(lambda: not self.active and not self.scale._models._full)

    def want(self) -> None:
        self.wanted = True
        self.scale.look()

    def fail(self) -> None:
        """It is wanted, and cannot be loaded."""
        self.want()
        self.look(lambda: self.scale._models.failed() and not self.scale._models._full)

    def come_back(self) -> None:
        self.want()
        self.look(lambda: self.active)


@contextmanager
def box(monkeypatch: pytest.MonkeyPatch, devices: list[str], **options: Any) -> Iterator[Box]:
    """Of the last of the devices."""
    monkeypatch.setattr(released, "_SETTLED", 0.0)
    with Pool(devices, autoscale=Autoscale(keep=1e6), **options) as pool:
        yield Box(pool, devices[-1])


class States:
    """Of devices, as `initializer` makes them, in their order."""

    def __init__(self) -> None:
        self.made: list[str] = []  # threads
        self.fails: BaseException | None = None
        self.waits: threading.Event | None = None  # of threads that load
        self._alive: list[weakref.ref[Any]] = []

    def __call__(self, _: torch.device) -> torch.Tensor:
        self.made.append(threading.current_thread().name)
        state = torch.ones(1)
        self._alive.append(weakref.ref(state))
        if self.loads_now:
            if self.waits is not None:
                assert self.waits.wait(20)
            if self.fails is not None:
                raise self.fails
        return state

    @property
    def loads_now(self) -> bool:
        return threading.current_thread().name.startswith("paceline host:")

    @property
    def alive(self) -> int:
        return sum(one() is not None for one in self._alive)


asked: Counter[str] = Counter()  # batches of `add`, by thread


def add(state: Any, batch: Any) -> Any:
    asked[threading.current_thread().name] += 1
    return batch + state


def on(box: Box, batcher: Any, name: str) -> None:
    """Each kind of device has answered."""
    other = next(one for one in hosts(2) if one != name)
    box.pool.retire(other)
    assert float(batcher(torch.zeros(1)).result(20)) == 1.0
    box.pool.restore(other)


def serve(box: Box, states: States, **options: Any) -> Any:
    """It has answered on both devices."""
    batcher = box.pool.serve(add, initializer=states, max_batch=4, **options)
    for name in hosts(2):
        on(box, batcher, name)
    return batcher
