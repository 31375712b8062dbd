"""For all Python tests: what some of them need when others run beside them."""

from __future__ import annotations

import os

import pytest

# Each of several processes takes one thread for an operator. Together they have more tests than there are cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let tests/run choose without ``-m``, of which pytest takes only the last."""
    parser.addoption("--alone", choices=["only", "skip"], help="only the tests that are marked `alone`, or all others")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what ``--alone`` names."""
    wanted = config.getoption("alone")
    if wanted is None:
        return
    kept = [item for item in items if (item.get_closest_marker("alone") is not None) == (wanted == "only")]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept
