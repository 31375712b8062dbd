"""Shared by the tests of `paceline top`."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import _observe
from paceline._observe import Observed


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="top-", dir="/tmp") as made:  # the name of a socket has 107 bytes at most
        path = Path(made) / "sockets"
        monkeypatch.setenv("PACELINE_SOCKETS", str(path))
        monkeypatch.setattr(_observe, "SECONDS", 60.0)  # nobody is late on a busy machine
        yield path


class Thing:
    """Something that is shown."""

    def __init__(self, **figures: Any) -> None:
        self.figures = figures

    def __call__(self) -> dict[str, Any]:
        return self.figures


@contextlib.contextmanager
def shown(thing: Thing) -> Iterator[Path]:
    """The file of a process that shows this."""
    observed = Observed(thing)
    try:
        (path,) = Path(os.environ["PACELINE_SOCKETS"]).iterdir()
        yield path
    finally:
        observed.close()
