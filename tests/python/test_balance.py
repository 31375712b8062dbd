"""`paceline.balance`: the closed loop from Python, and its answers."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from paceline import InvalidArgument
from paceline.balance import Balancer


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
    assert run_steps(balancer, [3.0, 1.0], 400, 20) == [pytest.approx(300, abs=1), pytest.approx(100, abs=1)]
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
        (lambda: Balancer(["a", "b"], "weighted", weights=[1]), "1 weight for 2 devices"),
        (lambda: Balancer(["a", "b"], maximum=[1]), "maximum is of length 1 instead of 2"),
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
    assert re.search(r"b: share (99|100|101), speed 0\.33", balancer.explain())
    report = balancer.report()
    assert report["steps"] == 20
    assert report["moves"] == balancer.move_count > 0
    assert report["devices"][1]["speed"] == pytest.approx(1 / 3, rel=0.02)
    assert {move["outcome"] for move in report["recent_moves"]} <= {"kept", "overtaken", "unjudged", "pending"}
    described = Balancer.report.__doc__ or ""
    for entry in (report, *report["devices"], *report["recent_moves"]):
        assert [key for key in entry if f"``{key}``" not in described] == []


def test_importing_it_loads_neither_numpy_nor_torch() -> None:
    code = "import sys, paceline.balance, paceline.sim; print(sorted({'numpy', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.fixture
def balancer() -> Balancer:
    """With measured devices, the second half as fast as the first."""
    made = Balancer(["a", "b"], ledger=True)
    run_steps(made, [1.0, 0.5], 100, 10)
    return made


def test_what_if_answers_by_name_and_touches_nothing(balancer: Balancer) -> None:
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


def test_what_if_takes_any_mapping_any_iterable_and_any_number(balancer: Balancer) -> None:
    numpy = pytest.importorskip("numpy")
    speeds = types.MappingProxyType({"b": numpy.float32(2.0)})
    assert balancer.what_if(speeds=speeds, batch_size=numpy.int64(200)).shares == [100, 100]
    assert balancer.what_if(speeds={"b": 2}, add=None, remove=None, batch_size=None).shares == [50, 50]
    pairs: Any = (["a", speed] for speed in (1, 1.0))
    assert balancer.what_if(add=pairs).names == ["a", "b", "another a", "another a"]
    names: Any = {"b"}
    assert balancer.what_if(remove=names).shares == [100, 0]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"speeds": [("b", 2.0)]}, r"speeds is \[\('b', 2.0\)\]; give a dictionary"),
        ({"speeds": 2.0}, "speeds is 2.0; give a dictionary"),
        ({"speeds": {"b": "2"}}, "speeds is {'b': '2'}; give a dictionary with a factor for each name"),
        ({"speeds": {"b": True}}, "give a dictionary with a factor for each name"),
        ({"speeds": {1: 2.0}}, "no device 1; the devices are a, b"),
        ({"speeds": {"b": 0}}, "the speed of b is 0; it is a factor above zero"),
        ({"speeds": {"b": float("nan")}}, "the speed of b is nan"),
        ({"add": "a"}, "add is 'a'; give a list of pairs"),
        ({"add": ["ab"]}, r"add is \['ab'\]; give a list of pairs"),
        ({"add": ("a", 1.0)}, r"add is \('a', 1.0\); give a list of pairs"),
        ({"add": [("a", "1")]}, "give a list of pairs"),
        ({"add": [("a", 1.0, 2.0)]}, "give a list of pairs"),
        ({"add": [("c", 1.0)]}, "no device 'c'; the devices are a, b"),
        ({"remove": "b"}, r"remove is 'b'; give a list of names, such as \['host:1'\]"),
        ({"remove": [1]}, "no device 1; the devices are a, b"),
        ({"batch_size": "512"}, "batch_size is '512'; give a number of items of at least 1"),
        ({"batch_size": True}, "batch_size is True; give a number of items"),
        ({"batch_size": 0}, "batch_size is 0; give a number of items"),
        ({"batch_size": 1 << 80}, "batch_size is 1208925819614629174706176; give a number of items"),
    ],
    ids=str,
)
def test_what_if_says_which_argument_has_the_wrong_type_and_how_it_is_given(
    balancer: Balancer, asked: Any, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"what_if: .*{message}"):
        balancer.what_if(**asked)


def test_what_if_passes_on_what_an_argument_raises(balancer: Balancer) -> None:
    with pytest.raises(ZeroDivisionError):
        balancer.what_if(remove=(1 / 0 for _ in range(1)))  # type: ignore[arg-type]


def test_texts_name_what_batches_count() -> None:
    balancer = Balancer(["a", "b"], unit="units of work")
    for _ in range(4):
        balancer.record([[(share, 0.01 * share)] for share in balancer.next_plan(100).shares])
    assert balancer.report()["unit"] == "units of work"
    assert "shares of a batch of 100 units of work" in balancer.explain()
    assert "does not depend on the number of units of work" in balancer.explain()
    assert "a step of 100 units of work would take" in balancer.what_if().text
    with pytest.raises(InvalidArgument, match="give a number of units of work of at least 1"):
        balancer.what_if(batch_size=0)
