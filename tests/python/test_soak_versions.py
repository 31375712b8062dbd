"""The soak of versions: a short run loses nothing, and each thing that it looks for makes it fail."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import soak_versions
from paceline.torch._pool.answerer import Answerer, Request
from paceline.torch._pool.job import Work
from program_server import SERVER
from soak_versions import Soak
from torch_support import hosts


def test_a_short_soak_of_versions_loses_nothing() -> None:
    done = SERVER.run_file(
        Path(soak_versions.__file__), "--requests", "5000", "--width", "128", "--load", "0.1", "--seed", "3"
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["passed"] is True, found
    assert done.returncode == int(found["overloaded"])  # which other programs may bring about
    assert sum(found["outcomes"].values()) == found["requests"] == 5000
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


def test_versions_that_fail_are_refused_or_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    soak = Soak(1, 1.0, 0, hosts(2), 128)
    with soak.pool:
        soak._submit(0, random.Random(0), 0.0).future.result()  # with which versions are warmed
        for name in ("broken", "unloadable"):
            soak._refused(name)
        assert not soak.wrong
        monkeypatch.setattr(soak_versions, "load_error", lambda _: None)
        soak._refused("unloadable")
        assert soak.wrong == ["a version was taken that is unloadable"]


def test_a_request_that_is_ended_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    end, numbers = Request.end, itertools.count(1)

    def again(self: Request, *how: Any) -> None:
        twice = next(numbers) % 500 == 0
        end(self, *how)
        if twice:
            end(self, *how)

    monkeypatch.setattr(Request, "end", again)
    monkeypatch.setattr(Soak, "_measure", lambda _: 3000.0)
    monkeypatch.setattr(Soak, "_change", lambda _: None)
    found = Soak(2000, 1.0, 0, hosts(2), 128).run()
    assert found["passed"] is False
    assert found["ended_twice"] == 4
    assert (found["lost"], found["wrong"]) == (0, 0)


@pytest.mark.parametrize(("times", "overloaded"), [(2.9, False), (3.1, True)])
def test_a_service_that_is_overloaded_is_told(
    times: float, overloaded: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Soak, "_measure", lambda _: 1000.0)
    monkeypatch.setattr(Soak, "_p99", lambda soak, *_: times * soak._open / 1000)  # of what a request takes then
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    monkeypatch.setattr(Soak, "_change", lambda _: None)
    monkeypatch.setattr("sys.argv", ["soak_versions.py", "--requests", "20", "--width", "128", "--load", "1"])
    assert soak_versions.main() == int(overloaded)
    assert ("The service was overloaded" in capsys.readouterr().out) is overloaded


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
