"""Makes torchvision importable beside a PyTorch for CPUs, and the examples. Ends with a table of the differences to one device."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import torchvision_operators  # noqa: F401
from frameworks_support import differences

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "python"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The largest difference of a parameter to the run on one device, by test."""
    if differences:
        terminalreporter.section("differences to one device")
        for test, difference in sorted(differences.items()):
            terminalreporter.write_line(f"{difference:8.1e}  {test}")
