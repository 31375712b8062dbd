"""The race of pools: its rival over HTTP, and what it compares. Speeds are not tested."""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import paceline  # noqa: E402
from race.pool_rivals import closed_loop, made, one_by_one  # noqa: E402
from race.processes import FOLDER  # noqa: E402
from race_pool import HTTP, over_best  # noqa: E402


@pytest.mark.parametrize("kind", ["http", "empty"])
def test_a_server_over_http_answers_and_is_gone_when_it_is_closed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("starlette", "uvicorn"):
        pytest.importorskip(package)
    devices = paceline.devices()[:2]
    if not all(one.cores for one in devices):
        pytest.skip("needs cores that processes can be pinned to")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")])))
    rival: Any = made(f"{kind}:paceline", [one.cores[0] for one in devices])  # compares an answer with the network's
    try:
        items = [torch.randn(1024) for _ in range(4)]
        assert closed_loop(rival, items, 40) > 0
        assert one_by_one(rival, items, 3) > 0
        assert rival._process.poll() is None
    finally:
        rival.close()
    assert rival._process.poll() is not None


def test_ours_is_compared_with_the_best_of_each_figure() -> None:
    rows = {
        HTTP[0]: {"highest_part": 0.9, "p99_at_0.7": 10.0, "at_once": 300.0},
        HTTP[1]: {"highest_part": 0.6, "p99_at_0.7": 40.0, "at_once": 200.0},
        HTTP[2]: {"highest_part": 0.5, "p99_at_0.7": 20.0, "at_once": 400.0},
    }
    assert over_best(rows, HTTP[0], HTTP[1:]) == {"highest_rate": 1.5, "p99_at_0.7": 0.5, "at_once": 0.75}
    assert over_best(rows, HTTP[0], []) == {}
    assert over_best({}, HTTP[0], HTTP[1:]) == {}
