"""The soak of pools: a short run passes, and each thing that it looks for makes it fail."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import soak_pool
from paceline.torch import PoolFuture
from paceline.torch._pool.answerer import Answerer
from paceline.torch._pool.job import Work
from program_server import SERVER
from soak_pool import Soak
from torch_support import hosts


def test_a_short_soak_loses_nothing() -> None:
    done = SERVER.run_file(Path(soak_pool.__file__), "--requests", "20000", "--seed", "7")
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, found
    assert found["passed"] is True
    assert sum(found["outcomes"].values()) == found["counted_by_the_pool"] == found["requests"] == 20_000
    assert {"completed", "failed", "cancelled", "rejected"} <= set(found["outcomes"])


def every(count: int) -> Callable[[], bool]:
    numbers = itertools.count(1)
    return lambda: next(numbers) % count == 0


def swap_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    hand_out = Answerer._hand_out

    def swapped(self: Answerer, seat: Any, answers: Any, answer: Any, requests: Any) -> float:
        return hand_out(self, seat, answers.roll(1, 0) if len(requests) > 1 else answers, answer, requests)

    monkeypatch.setattr(Answerer, "_hand_out", swapped)


def tell_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    call, now = PoolFuture._call, every(100)

    def twice(self: PoolFuture[Any], fn: Any) -> None:
        call(self, fn)
        if now():
            call(self, fn)

    monkeypatch.setattr(PoolFuture, "_call", twice)


def lose_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    end, now = Work.end, every(200)

    def dropped(self: Work, *how: Any) -> None:
        if not now():
            end(self, *how)

    monkeypatch.setattr(Work, "end", dropped)
    monkeypatch.setattr(soak_pool, "PATIENCE_SECONDS", 0.3)


def run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Soak._job

    def twice(self: Soak, device: object, number: int) -> int:
        job(self, device, number)
        return job(self, device, number)

    monkeypatch.setattr(Soak, "_job", twice)


def leak(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, tell = [], Soak._tell

    def keeping(self: Soak, number: int, future: object) -> None:
        kept.append(bytes(range(256)) * 200)
        tell(self, number, future)

    monkeypatch.setattr(Soak, "_tell", keeping)


@pytest.mark.parametrize(
    ("fault", "what"),
    [(swap_answers, "wrong"), (tell_twice, "ended_twice"), (lose_requests, "lost"), (run_twice, "wrong"), (leak, "")],
)
def test_a_fault_is_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    found = Soak(2000, 2, 0, hosts(2)).run()
    assert found["passed"] is False
    assert {name: bool(found[name]) for name in ("wrong", "ended_twice", "lost")} == {
        name: name == what for name in ("wrong", "ended_twice", "lost")
    }, found
    assert found["flat"] is (fault is not leak)
