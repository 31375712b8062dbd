"""Shared by the tests of `paceline.torch.Pool`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from paceline.torch import Pool
from torch_support import hosts


def pool_of(count: int = 2, **options: Any) -> Pool:
    return Pool(hosts(count), **options)


def served_by(batcher: Any) -> Any:
    """What answers on each device."""
    return batcher._present.way.served


def give_up_after(pool: Pool, seconds: float) -> None:
    """From now on. What must not hang gets a minute: a busy machine may be slow at it."""
    pool._jobs.watchdog.seconds = seconds  # type: ignore[union-attr]


def soon(condition: Callable[[], Any]) -> bool:
    """Whether it holds within some seconds."""
    for _ in range(2000):
        if condition():
            return True
        time.sleep(0.005)
    return False


class Held:
    """Devices that jobs hold until the end of the block."""

    def __init__(self, pool: Pool, count: int = 1) -> None:
        self._pool, self._count, self._event = pool, count, threading.Event()

    def __enter__(self) -> Held:
        self.jobs = [self._pool.submit(self._hold, kind="hold") for _ in range(self._count)]
        while not all(job.running() for job in self.jobs):
            assert not any(job.done() for job in self.jobs)
            time.sleep(0.001)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let the jobs end."""
        self._event.set()

    def _hold(self, _: torch.device) -> bool:
        return self._event.wait(20)
