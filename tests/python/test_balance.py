"""`paceline.balance`: the closed loop from Python, its ledger and its replay."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline import InvalidArgument
from paceline.balance import Balancer, replay
from paceline.sim import simulate


def run_steps(balancer: Balancer, speeds: list[float], batch_size: int, steps: int) -> list[int]:
    shares: list[int] = []
    for _ in range(steps):
        shares = balancer.next_plan(batch_size).shares
        balancer.record(
            [[(n, 0.001 * n / s)] if n else [] for n, s in zip(shares, speeds, strict=True)], step_seconds=0.0
        )
    return shares


def test_a_faster_device_gets_more() -> None:
    balancer = Balancer(["a", "b"])
    assert run_steps(balancer, [3.0, 1.0], 400, 20) == [300, 100]
    plan = balancer.next_plan(400)
    assert not plan.moved
    assert plan.models[0].seconds(300) == pytest.approx(plan.models[1].seconds(100), rel=0.02)
    assert plan.predicted_seconds == pytest.approx(0.1, rel=0.02)


def test_excluded_timings_are_no_evidence() -> None:
    balancer = Balancer(["a", "b"], calibrate=False)
    for _ in range(10):
        plan = balancer.next_plan(100)
        balancer.record([[(n, 9.0 if i else 0.1, True)] for i, n in enumerate(plan.shares)])
    assert balancer.next_plan(100).shares == [50, 50]
    assert balancer.next_plan(100).models == []


def test_weights_classes_and_caps_go_through() -> None:
    assert Balancer(["a", "b"], "weighted", weights=[3, 1]).next_plan(100).shares == [75, 25]
    assert Balancer(["a", "b"], "even", maximum=[30, None]).next_plan(100).shares == [30, 70]
    classes = Balancer(["a", "b"], device_classes=["x", "y"])
    run_steps(classes, [1.0, 1.0], 100, 3)
    assert [device["device_class"] for device in classes.report()["devices"]] == ["x", "y"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Balancer([]), "at least one device"),
        (lambda: Balancer(["a"], "fastest"), "fastest"),
        (lambda: Balancer(["a", "b"], "weighted", weights=[1]), "1 weights for 2 devices"),
        (lambda: Balancer(["a", "b"], maximum=[1]), "maximum has 1 entries"),
        (lambda: Balancer(["a"]).next_plan(0), "0 items"),
        (lambda: Balancer(["a"]).record([[]]), "next_plan"),
        (lambda: Balancer(["a"]).ledger(), "ledger=True"),
        (lambda: Balancer(["a"]).retire(0), "last device"),
    ],
)
def test_mistakes_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        make()


def test_explains_and_reports() -> None:
    balancer = Balancer(["a", "b"])
    run_steps(balancer, [3.0, 1.0], 400, 20)
    assert "b: share 100, speed 0.33" in balancer.explain()
    report = balancer.report()
    assert report["steps"] == 20
    assert report["moves"] == balancer.move_count > 0
    assert report["devices"][1]["speed"] == pytest.approx(1 / 3, rel=0.02)
    assert {move["outcome"] for move in report["recent_moves"]} <= {"kept", "overtaken", "unjudged", "pending"}


def test_a_ledger_replays_and_a_tampered_one_is_noticed(tmp_path: Path) -> None:
    balancer = Balancer(["a", "b", "c"], ledger=True)
    run_steps(balancer, [3.0, 1.0, 1.0], 500, 20)
    balancer.retire(2)
    run_steps(balancer, [3.0, 1.0, 1.0], 500, 5)
    text = balancer.ledger()
    path = tmp_path / "ledger.jsonl"
    path.write_text(text, encoding="utf-8")
    for source in (path, str(path), text.splitlines(), text.splitlines(keepends=True)):
        result = replay(source)
        assert (result.plans, result.records, result.mismatches) == (25, 25, [])
    path.write_text(text.replace('"shares": [300, 100, 100]', '"shares": [301, 99, 100]', 1), encoding="utf-8")
    (mismatch,) = replay(path).mismatches
    assert "301" in mismatch.what
    assert text.splitlines()[mismatch.line - 1].startswith('{"plan"')


def test_a_broken_ledger_names_its_line() -> None:
    lines = simulate([1.0, 1.0], steps=3, ledger=True).ledger.splitlines()
    with pytest.raises(InvalidArgument, match="line 3 of the ledger: column"):
        replay([*lines[:2], lines[2][:-5]])
    with pytest.raises(InvalidArgument, match="line 1"):
        replay([])


def test_importing_it_loads_neither_numpy_nor_torch() -> None:
    code = "import sys, paceline.balance, paceline.sim; print(sorted({'numpy', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_what_if_answers_by_name_and_touches_nothing() -> None:
    balancer = Balancer(["a", "b"], ledger=True)
    for _ in range(10):
        plan = balancer.next_plan(100)
        balancer.record([[(share, 0.001 * share * factor)] for share, factor in zip(plan.shares, (1, 2), strict=True)])
    before = balancer.ledger()
    answer = balancer.what_if(speeds={"b": 2.0})
    assert answer.names == ["a", "b"]
    assert answer.shares == [50, 50]
    assert answer.seconds < answer.best_seconds
    assert balancer.what_if(remove=["b"]).shares == [100, 0]
    assert balancer.what_if(add=[("a", 1.0)]).names == ["a", "b", "another a"]
    assert balancer.ledger() == before
    with pytest.raises(InvalidArgument, match="no device 'c'; the devices are a, b"):
        balancer.what_if(remove=["c"])
