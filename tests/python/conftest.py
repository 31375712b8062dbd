"""What every test of the package starts from."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec

import pytest


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say which copies are tested, the usual question when a test fails elsewhere; without importing them."""
    del config
    lines = []
    for package in ("paceline", "torch"):
        spec = find_spec(package)
        lines.append(
            f"{package} {metadata.version(package)} from {spec.origin}" if spec else f"{package}: not installed"
        )
    return lines
