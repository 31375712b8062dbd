"""Shared by the tests of python/guide/servers.md: its programs as modules, and what their answers should be."""

from __future__ import annotations

import asyncio
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pool_support import soon

GUIDE = (Path(__file__).resolve().parents[2] / "python" / "guide" / "servers.md").read_text()
X = [0.5] * 8


def block(title: str, kind: str = "python") -> str:
    """The program below a heading; without one, the first of the page."""
    part = re.search(rf"\n## {title}\n(.*?)(?=\n## |\Z)", GUIDE, re.DOTALL) if title else None
    found = re.search(rf"```{kind}\n(.*?)```", part[1] if part else GUIDE, re.DOTALL)
    assert found is not None
    return found[1]


def forget() -> None:
    """The programs, so that the next test imports its own."""
    for name in ("ranker", "service"):
        sys.modules.pop(name, None)


def program(folder: Path, title: str) -> ModuleType:
    """The program as a module, on one host device and with a queue for eight requests."""
    text = block(title)
    for ours, small in (("Pool()", 'Pool(["host:0"])'), ("max_batch=64", "max_batch=1")):
        assert ours in text or "Pool(devices)" in text
        text = text.replace(ours, small)
    (folder / "service.py").write_text(text)
    return importlib.import_module("service")


def scores(*rows: list[float], version: int = 1) -> torch.Tensor:
    """What the model itself says."""
    with torch.no_grad():
        found: torch.Tensor = importlib.import_module("ranker").load(version)(torch.tensor(rows))
    return found


def same(answer: Any, expected: torch.Tensor) -> bool:
    return torch.allclose(torch.as_tensor(answer), expected, atol=1e-6)


async def until(condition: Callable[[], Any]) -> None:
    assert await asyncio.to_thread(soon, condition)
