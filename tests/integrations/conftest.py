"""Makes torchvision importable beside a PyTorch for CPUs, and the examples. Ends with a table of the differences to one device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import servers_support
import torchvision_operators  # noqa: F401
from frameworks_support import differences

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "python"))


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with ranker.py, from which the programs of the guide to servers import."""
    (tmp_path / "ranker.py").write_text(servers_support.block(""))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    servers_support.forget()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The largest difference of a parameter to the run on one device, by test."""
    if differences:
        terminalreporter.section("differences to one device")
        for test, difference in sorted(differences.items()):
            terminalreporter.write_line(f"{difference:8.1e}  {test}")
