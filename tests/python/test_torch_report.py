"""What a trainer tells about itself."""

from __future__ import annotations

import bisect
import inspect
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline import DeviceGroup, InvalidArgument, find_device
from paceline.balance import replay
from paceline.torch import DataParallel, Report
from paceline.torch._trainer.figures import DeviceFigures, WorkFigures
from torch_support import TWO, classifier, classify, hosts, noting

FIGURES = {"share", "items", "busy_seconds", "idle_seconds", "items_per_second"}
MOVE = {"step", "batch_size", "from", "to", "promised_gain", "measured_gain", "resolution", "outcome"}


def test_shares_are_what_each_device_ran_in_the_last_step() -> None:
    module, _ = classifier()
    with DataParallel(module, hosts(3), balance=[2, 0, 1]) as trainer:
        assert trainer.shares == {"host:0": 0, "host:1": 0, "host:2": 0}
        trainer.step(classify, classifier(512)[1])
        assert trainer.shares == {"host:0": 341, "host:1": 0, "host:2": 171}
        trainer.step(classify, classifier(9)[1])
        assert trainer.shares == {"host:0": 6, "host:1": 0, "host:2": 3}


def test_the_report_adds_up() -> None:
    module, batch = classifier(12)
    with DataParallel(module, TWO, balance=[2, 1]) as trainer:
        for _ in range(5):
            trainer.step(classify, batch)
        report = trainer.report()
        longest = max(row["longest_step_seconds"] for row in trainer.history())
    assert set(report) >= {"devices", "imbalance", "moves", "steps", "compute_seconds", "step_seconds"}
    assert (report["steps"], report["moves"]) == (5, 0)
    assert list(report["devices"]) == TWO
    for name, share in zip(TWO, (8, 4), strict=True):
        device = report["devices"][name]
        assert set(device) >= FIGURES
        assert (device["share"], device["items"]) == (share, 5 * share)
        assert device["busy_seconds"] > 0
        assert device["idle_seconds"] >= 0
        assert device["items_per_second"] > 0
        assert device["busy_seconds"] + device["idle_seconds"] == pytest.approx(report["compute_seconds"], rel=0.05)
    assert 0 < report["compute_seconds"] <= report["step_seconds"]
    bounds, counts = zip(*report["step_counts"], strict=True)
    assert list(bounds) == sorted(bounds)
    assert (bounds[0], bounds[-1]) == (0.001, 300.0)
    assert list(counts) == sorted(counts)  # each counts the shorter steps, too
    assert counts[-1] == report["steps"]
    assert counts[bisect.bisect_left(bounds, longest)] == report["steps"]
    assert report["imbalance"] >= 0


@pytest.mark.alone
def test_the_report_tells_what_moves_promised_and_brought() -> None:
    module, batch = classifier(64)
    slow: set[int] = set()

    def one_is_slow(_: Any, part: Any) -> None:
        if not slow:
            slow.add(threading.get_ident())
        time.sleep((1e-3 if threading.get_ident() in slow else 1e-4) * len(part[0]))

    def step_until(done: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        for _ in range(100):
            trainer.step(noting(one_is_slow), batch)
            moves: list[dict[str, Any]] = trainer.report()["recent_moves"]
            if done(moves):
                return moves
        pytest.fail(f"no such move in 100 steps\n{trainer.explain()}")

    with DataParallel(module, TWO, micro_batch=64) as trainer:
        assert (trainer.report()["recent_moves"], trainer.report()["taken_back"]) == ([], 0)
        (move, *_) = step_until(lambda moves: bool(moves))
        assert set(move) == MOVE
        assert move["batch_size"] == sum(move["from"]) == sum(move["to"]) == 64
        assert max(move["to"]) > max(move["from"])
        assert 0 < move["promised_gain"] < 1
        moves = step_until(lambda moves: moves[0]["outcome"] != "pending")
        decided = MOVE - {"measured_gain", "resolution", "outcome"}
        assert {key: moves[0][key] for key in decided} == {key: move[key] for key in decided}
        assert {entry["outcome"] for entry in moves} <= {"pending", "kept", "taken back", "overtaken", "unjudged"}
        assert trainer.report()["taken_back"] == sum(entry["outcome"] == "taken back" for entry in moves)
        assert len(moves) <= min(16, trainer.report()["moves"])
        trainer.step(classify, batch, cost=torch.ones(64))
        assert trainer.report()["recent_moves"] == []  # what steps with costs decide is their own
        trainer.step(classify, batch)
        again = trainer.report()["recent_moves"]  # one that was pending may be judged by now
        assert all(one[key] == move[key] for one, move in zip(again, moves, strict=False) for key in decided)
        assert len(again) >= len(moves)


def test_the_report_is_a_copy() -> None:
    module, batch = classifier()
    with DataParallel(module, TWO) as trainer:
        trainer.step(classify, batch)
        trainer.report()["devices"].clear()
        assert list(trainer.report()["devices"]) == TWO


def test_events_tell_what_ran_where_and_when() -> None:
    module, batch = classifier(12)
    with DataParallel(module, TWO, balance=[2, 1], micro_batch=4) as trainer:
        assert trainer.events() == []
        trainer.step(classify, batch)
        events = trainer.events()
    assert {event["kind"] for event in events} >= {"step", "micro_batch", "reduction"}
    ran = sorted((event["begin"], event["end"], event["device"]) for event in events if event["kind"] == "micro_batch")
    assert ran == [(0, 4, "host:0"), (4, 8, "host:0"), (8, 12, "host:1")]
    (step,) = [event for event in events if event["kind"] == "step"]
    assert (step["device"], step["begin"], step["end"]) == (None, 0, 12)
    for event in events:
        assert set(event) == {"kind", "device", "step", "begin", "end", "start_seconds", "duration_seconds"}
        assert event["duration_seconds"] >= 0
        assert event["start_seconds"] >= step["start_seconds"]
        end = event["start_seconds"] + event["duration_seconds"]
        assert end <= step["start_seconds"] + step["duration_seconds"] + 1e-6


def test_a_step_that_failed_leaves_the_figures_as_they_were() -> None:
    module, batch = classifier(12)
    with DataParallel(module, TWO, balance="even") as trainer:
        trainer.step(classify, batch)
        before, events = trainer.report(), len(trainer.events())
        with pytest.raises(ZeroDivisionError):
            trainer.step(lambda m, b: 1 / 0, batch)  # type: ignore[arg-type,return-value]
        assert trainer.report() == before
        assert len(trainer.events()) == events


def test_devices_are_given_in_several_ways() -> None:
    module, batch = classifier()
    with DeviceGroup(TWO) as group:
        for devices in ("auto", "host:0", TWO, [find_device("host:1"), "host:0"], group):
            with DataParallel(module, devices) as trainer:  # type: ignore[arg-type]
                trainer.step(classify, batch)
                assert sum(trainer.shares.values()) == 16
                assert all(device.name in trainer.explain() for device in trainer.group.devices)
                assert repr(trainer).endswith("auto, open>")
                assert list(trainer.shares) == [device.name for device in trainer.group.devices]
            assert repr(trainer).endswith("auto, closed>")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"module": (one for one in "")}, "module is a generator", id="generator"),
        ({"devices": 2}, "devices is 2; give 'auto'"),
        ({"devices": [0.5, 1]}, r"devices is \[0.5, 'host:1'\]"),
        ({"devices": ["host:0", "host:0"]}, "twice"),
        ({"devices": []}, "no devices|at least one"),
        ({"devices": ["gpu"]}, "'gpu'"),
        ({"balance": "fair"}, "'auto', 'even' or a list"),
        ({"balance": [1, "1"]}, "'auto', 'even' or a list"),
        ({"balance": [None, 1]}, "'auto', 'even' or a list"),
        ({"balance": None}, "balance is None"),
        ({"balance": [1, 2, 3]}, r"\[1, 2, 3\], which is not one ratio for each of 2 devices"),
        ({"balance": [0, 0]}, "zero|positive|sum"),
        ({"balance": [1, -1]}, "negative"),
        ({"micro_batch": 0}, "at least 1"),
        ({"micro_batch": -4}, "at least 1"),
        ({"micro_batch": 1.5}, "micro_batch is 1.5; it must be an integer"),
        ({"timeout": -1}, "timeout is -1; it must be a positive number of seconds"),
    ],
    ids=str,
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any], message: str) -> None:
    threads = torch.get_num_threads()
    with pytest.raises(InvalidArgument, match=message):
        DataParallel(**{"module": classifier()[0], "devices": TWO, **options})
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ((torch.ones(2, 6), classify), {}, "loss_fn is a Tensor, not a function"),
        ((classify, torch.ones(2, 6)), {"scaler": 1024}, "scaler is a int"),
        ((classify, (np.ones(2), np.ones(2))), {}, r"\(a tuple of ndarray\)"),
    ],
    ids=["swapped", "scaler", "numpy"],
)
def test_mistakes_of_a_step_are_named(given: Any, options: Any, message: str) -> None:
    with DataParallel(classifier(8)[0], TWO) as trainer, pytest.raises(InvalidArgument, match=message):
        trainer.step(*given, **options)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_ledger_that_cannot_be_written_is_refused_at_once() -> None:
    module, batch = classifier()
    with DataParallel(module, TWO) as trainer:
        with pytest.raises(InvalidArgument, match="/dev/full cannot be written to"):
            trainer.write_ledger("/dev/full")
        trainer.step(classify, batch)
        assert "ledger" not in trainer.explain()


def test_a_ledger_is_whole_as_soon_as_a_step_is_done_and_replays(tmp_path: Path) -> None:
    module, batch = classifier()
    path = tmp_path / "ledger.jsonl"
    with DataParallel(module, TWO) as trainer:
        trainer.write_ledger(path)
        for _ in range(5):
            trainer.step(classify, batch)
        open_lines = path.read_text().splitlines()
    assert path.read_text().splitlines() == open_lines
    assert len(open_lines) == 1 + 3 * 5  # plan, record and claims of each step
    result = replay(path)
    assert (result.plans, result.records, result.mismatches) == (5, 5, [])


def test_a_ledger_that_comes_too_late_leaves_the_file_alone(tmp_path: Path) -> None:
    module, batch = classifier()
    path = tmp_path / "ledger.jsonl"
    with DataParallel(module, TWO) as trainer:
        trainer.write_ledger(path)
        with pytest.raises(InvalidArgument, match="writes a ledger already"):
            trainer.write_ledger(tmp_path / "second.jsonl")
        trainer.step(classify, batch)
        written = path.read_text()
        with pytest.raises(InvalidArgument, match=r"called after 1 step, and a ledger.*right after making the trainer"):
            trainer.write_ledger(path)
        assert path.read_text() == written
        trainer.step(classify, batch)
    assert not (tmp_path / "second.jsonl").exists()
    assert replay(path).records == 2


def test_what_if_answers_without_a_trace() -> None:
    module, batch = classifier()
    with DataParallel(module, TWO) as trainer:
        with pytest.raises(InvalidArgument):
            trainer.what_if(speeds={TWO[0]: 2.0})
        for _ in range(3):
            trainer.step(classify, batch)
        shares, steps = trainer.shares, trainer.report()["steps"]
        alone = trainer.what_if(remove=[TWO[1]])
        more = trainer.what_if(add=[(TWO[0], 1.0)])
        assert list(alone.shares)[1] == 0
        assert len(more.shares) == 3
        assert (trainer.shares, trainer.report()["steps"]) == (shares, steps)
        with pytest.raises(
            InvalidArgument, match=r"no device to run the batch; the devices are host:0, host:1\. Leave one"
        ):
            trainer.what_if(remove=TWO)


@pytest.mark.parametrize("asked", [{}, {"prices": {"host": 1.0}}])
def test_what_if_says_that_it_is_about_steps_where_only_calls_have_run(asked: Any) -> None:
    module, batch = classifier()
    with DataParallel(module, TWO, prove="warn") as trainer:
        for _ in range(3):
            classify(trainer, batch).backward()
        with pytest.raises(
            InvalidArgument, match=r"what `step` takes, and no step has run\. It does not predict calls"
        ):
            trainer.what_if(**asked)
        trainer.step(classify, batch)  # a proof, of which no time counts
        with pytest.raises(InvalidArgument, match="nothing is measured yet"):
            trainer.what_if(**asked)


def test_methods_that_parts_carry_out_look_like_the_trainers_own() -> None:
    for name in ("batch", "check", "close", "explain", "predict", "report", "what_if"):
        method = getattr(DataParallel, name)
        assert method.__qualname__ == f"DataParallel.{name}"
        assert inspect.getdoc(method)
    assert list(inspect.signature(DataParallel.what_if).parameters) == [
        "self",
        "speeds",
        "add",
        "remove",
        "batch_size",
        "of",
        "prices",
    ]


def test_scalars_are_about_the_steps_since_the_last_call() -> None:
    module, batch = classifier(8)

    def slow(one: Any, part: Any) -> Any:
        time.sleep(0.02)
        return classify(one, part)

    with DataParallel(module, TWO, balance="even") as trainer:
        trainer.step(slow, batch)
        first = trainer.scalars()["paceline/step_seconds"]
        for _ in range(20):
            trainer.step(classify, batch)
        report = trainer.report()
        assert trainer.scalars()["paceline/step_seconds"] == pytest.approx((report["step_seconds"] - first) / 20)
        assert trainer.scalars()["paceline/step_seconds"] == pytest.approx(report["step_seconds"] / 21)


def test_the_types_of_the_figures_are_those_of_the_report() -> None:
    module, batch = classifier(32)
    with DataParallel(module, TWO, memory=10**9, prove=False) as trainer:
        before = trainer.report()
        trainer.step(classify, batch, cost=torch.ones(32))
        trainer.predict(batch[0])
        trainer(batch[0]).sum().backward()
        report: Any = trainer.report()
    assert before.keys() == Report.__required_keys__
    assert report.keys() == Report.__required_keys__ | {"items", "predictions", "calls"} < Report.__annotations__.keys()
    for part in (report, report["predictions"], report["calls"]):
        assert part.keys() >= WorkFigures.__required_keys__
        for device in part["devices"].values():
            assert device.keys() <= DeviceFigures.__annotations__.keys()
