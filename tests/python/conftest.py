"""Setup for all tests of the package."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec

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
