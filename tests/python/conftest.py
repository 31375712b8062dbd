"""What every test of the package starts from."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say which copy of the package is tested, and with which torch: the usual question when a test fails elsewhere."""
    del config
    import paceline

    lines = [f"paceline {metadata.version('paceline')} from {Path(paceline.__file__).parent}"]
    try:
        lines.append(f"torch {metadata.version('torch')}")
    except metadata.PackageNotFoundError:
        lines.append("torch is not installed")
    return lines
