"""A pool whose scaler does what the test says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from paceline.torch import Autoscale, Pool
from paceline.torch._pool import released
from pool_support import soon


class Box:
    """A pool of which one device is released and comes back when the test says so."""

    def __init__(self, pool: Pool, name: str) -> None:
        self.pool, self.engine = pool, pool._jobs.engine
        self.scale: Any = pool._scale
        self.name, self.wanted = name, True
        decide = self.scale._decide

        def decides(jobs: Any) -> list[tuple[str, bool]]:
            decide(jobs)  # for its figures
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
