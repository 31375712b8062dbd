"""The soak of versions: a short run loses nothing, and each thing that it looks for makes it fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import soak_versions
from paceline.torch._pool.answerer import Answerer
from paceline.torch._pool.job import Work
from program_server import SERVER
from soak_versions import Soak
from torch_support import hosts


def test_a_short_soak_of_versions_loses_nothing() -> None:
    done = SERVER.run_file(
        Path(soak_versions.__file__), "--requests", "10000", "--width", "128", "--load", "0.2", "--seed", "3"
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, found
    assert found["passed"] is True
    assert sum(found["outcomes"].values()) == found["requests"] == 10_000
    assert len(found["by_version"]) > 1
    assert "times, goal 1.2" in done.stdout


def test_an_answer_of_another_version_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    put = Answerer.put

    def other(self: Answerer, *request: Any) -> Any:
        future = put(self, *request)
        future.version = 1
        return future

    monkeypatch.setattr(Answerer, "put", other)
    monkeypatch.setattr(soak_versions, "BREAK_SECONDS", 0.05)
    monkeypatch.setattr(Soak, "_measure", lambda _: 3000.0)
    found = Soak(3000, 1.0, 0, hosts(2), 128).run()
    assert found["passed"] is False
    assert found["wrong"]


def test_a_request_that_is_lost_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    end, count = Work.end, [0]

    def dropped(self: Work, *how: Any) -> None:
        count[0] += 1
        if count[0] % 500:
            end(self, *how)

    monkeypatch.setattr(Work, "end", dropped)
    monkeypatch.setattr(soak_versions, "PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(Soak, "_measure", lambda _: 3000.0)
    monkeypatch.setattr(Soak, "_change", lambda _: None)
    found = Soak(2000, 1.0, 0, hosts(2), 128).run()
    assert found["passed"] is False
    assert found["lost"]
