"""Setup for all tests of the package."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Print which copies of the packages are tested, without importing them, because that is the first question about a failure."""
    del config
    lines = []
    for package in ("paceline", "torch"):
        spec = find_spec(package)
        lines.append(
            f"{package} {metadata.version(package)} from {spec.origin}" if spec else f"{package}: not installed"
        )
    return lines


@pytest.fixture(scope="module")
def processes() -> Iterator[Any]:
    """Processes that are the ranks of a group, which start when they are needed."""
    from rank_processes import Processes  # imports torch

    found = Processes()
    yield found
    found.close()


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Released whenever the watchdog of a trainer has written the stacks and warned. What it writes of queues of GPUs comes later."""
    from paceline.torch._features.watchdog import Watchdog  # imports torch

    warn, done = Watchdog._warn, threading.Semaphore(0)

    def tell(message: str) -> None:
        warn(message)
        done.release()

    monkeypatch.setattr(Watchdog, "_warn", staticmethod(tell))
    return done


@pytest.fixture
def on_ranks(processes: Any, tmp_path: Path) -> Callable[..., list[Any]]:
    """A function that runs another function on so many ranks, and returns what they return."""
    return lambda size, call, *given: processes.results(size, tmp_path / "store", call, *given)
