"""For all Python tests: Ctrl-C as in a terminal, and what some tests need when others run beside them."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest

# Each of several processes takes one thread for an operator. Together they have more tests than there are cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Most tests are about what a step does on its devices, also the first one. Those of proofs, and of exactness, turn them on.
os.environ.setdefault("PACELINE_PROVE", "off")

# Each step makes its recipe anew and compares it with the one that it would have used.
os.environ.setdefault("PACELINE_CHECK_RECIPES", "1")


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


def pytest_collection_finish() -> None:
    """Take what the imports made out of each later collection, which would look through all of torch for a fifth of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_is_not_ignored() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt while tests run, as it does in a program that a terminal has started.

    A background job of a shell script starts with SIGINT ignored, so Python installs no handler. Programs that the tests start inherit an
    ignored signal, but no handler, so they get Python's own again.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first step of each kind of work be proved, as it is by default."""
    monkeypatch.setenv("PACELINE_PROVE", "raise")


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Let nothing that was compiled in other tests count."""
    import torch

    torch.compiler.reset()
    yield
    torch.compiler.reset()
