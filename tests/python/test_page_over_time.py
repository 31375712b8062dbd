"""What the page of a trainer has of its loop: waits for batches, and memory, by step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from operator import add
from pathlib import Path
from typing import Any

import pytest

from paceline._page.document import page_of_runs
from paceline._page.run import Move, Row, Run, sentences
from paceline.torch import DataParallel
from paceline.torch._trainer.memory_log import MemoryLog
from paceline.torch._trainer.step_gaps import StepGaps
from paceline.torch._trainer.thinned import Thinned
from page_support import MOST_BYTES, Reader, charts_in
from torch_support import TWO, classifier, classify

NAP = 0.02


def with_input(steps: int, *, waits: float, devices: int = 2) -> Run:
    """Steps of 4 ms, of which 1 ms is lost, and what the loop waited before each."""
    names = [f"host:{at}" for at in range(devices)]
    return Run(
        "run",
        names,
        [
            Row(at, 1, [4] * devices, [0.003] * devices, 0.004, 0.003, 0.004, 0.004, [4] * devices, input=waits)
            for at in range(steps)
        ],
    )


# The split of a step.


def test_the_wait_for_batches_is_a_part_of_the_loss_and_is_drawn_on_top() -> None:
    run = with_input(10, waits=0.006)
    assert run.parts == pytest.approx({"waiting, launching and reduction": 0.1, "input": 0.6})
    good, cost, change = sentences(run)
    assert "a step took 10 ms in the mean with 6 ms of waiting for its batch, and 3 ms would do" in good
    assert "70.0% was lost: 10.0% by the split, 60.0% by the wait for batches." in good
    assert cost == "Most of the loss was input, 60.0% of the steps' time."
    assert change.startswith("Give the loader more workers")
    times = charts_in(page_of_runs("run", [run]))[2]
    drawn = {one["label"]: one for one in times["series"]}
    assert [one["label"] for one in times["series"]][:3] == ["input", "waiting, launching and reduction", "ideal"]
    assert drawn["input"]["says"] == [6.0] * 10
    assert drawn["input"]["data"] == [10.0] * 10
    assert drawn["a step"]["data"] == [4.0] * 10
    assert times["high"] > 10
    steps = Reader(page_of_runs("run", [run])).tables["Steps"]
    assert (steps[0][4], steps[1][4]) == ("input", "6 ms")


def test_the_advice_is_about_the_input_if_that_cost_most_and_short_waits_are_not_told() -> None:
    run = with_input(10, waits=0.006)
    run.advice = "Small steps: one device would be faster."
    assert sentences(run)[2].startswith("Give the loader more workers")
    run = with_input(10, waits=1e-6)
    run.advice = "Small steps: one device would be faster."
    assert sentences(run)[2] == run.advice
    assert "waiting for its batch" not in sentences(run)[0]


def test_a_slow_loader_makes_no_split_poor() -> None:
    run = with_input(10, waits=0.006)
    run.rows = [replace(row, ideal=0.0039) for row in run.rows]
    assert sentences(run)[0].startswith("The split was close to ideal")


def test_one_move_has_its_reason() -> None:
    run = with_input(10, waits=0.0)
    run.moves = [Move(3, "[4, 4] to [5, 3]", "promised")]
    assert "1 move with its reason" in page_of_runs("run", [run])
    run.moves *= 2
    assert "2 moves with their reasons" in page_of_runs("run", [run])


def test_a_run_without_waits_for_batches_has_no_such_part() -> None:
    run = Run("run", TWO, [Row(0, 1, [4, 4], [0.003, 0.003], 0.004, 0.003, 0.004)])
    assert list(run.parts) == ["waiting, launching and reduction"]
    assert "input" not in [one["label"] for one in charts_in(page_of_runs("run", [run]))[2]["series"]]


@pytest.mark.parametrize("watched", [True, False])
def test_the_page_of_a_trainer_draws_what_its_loop_waited(tmp_path: Path, watched: bool) -> None:
    module, batch = classifier(16)

    def batches() -> Iterator[Any]:
        for number in range(6):
            if number == 3:
                time.sleep(NAP)
            yield batch

    with DataParallel(module, TWO, balance="even") as trainer:
        for one in trainer.live(batches()) if watched else batches():
            trainer.step(classify, one)
        trainer.page(tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text(encoding="utf-8")
    drawn = {one["label"]: one for one in charts_in(text)[2]["series"]}
    assert ("input" in drawn) == watched
    assert ("A loop over progress or live also tells how long it waits for its input." in text) != watched
    if watched:
        assert drawn["input"]["says"][3] >= 1e3 * NAP
        assert len(drawn["input"]["says"]) == 6


@pytest.mark.usefixtures("proved")
def test_what_was_waited_before_a_proved_step_counts_for_the_next_one() -> None:
    module, batch = classifier(16)

    def batches() -> Iterator[Any]:
        time.sleep(NAP)
        yield from itertools.repeat(batch, 3)

    with DataParallel(module, TWO, balance="even") as trainer:
        for one in trainer.live(batches()):
            trainer.step(classify, one)
        assert [row["steps"] for row in trainer.history()] == [1, 1], "the first step is proved"
        assert (trainer._gaps.waited.of(0, 1) or 0.0) >= NAP
        assert trainer._gaps.waited.of(2, 1) is None


def test_a_replay_leaves_the_waits_and_the_memory_of_the_history_as_they_are(tmp_path: Path) -> None:
    module, batch = classifier(16)
    with DataParallel(module, TWO, balance="even") as trainer:
        trainer.write_ledger(tmp_path / "ledger")
        for replays in (None, tmp_path / "ledger", None):
            trainer.replay_claims(replays)
            trainer.step(classify, batch)
        assert [row["steps"] for row in trainer.history()] == [1, 1]
        assert trainer._gaps.waited.of(1, 1) is not None
        assert trainer._gaps.waited.of(2, 1) is None
        assert trainer._reports.memory.of(2, 1) is None


def test_a_failed_step_leaves_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = StepGaps()
    for _ in gaps.watched(range(1)):
        gaps.interrupted()
    gaps.end(time.perf_counter())
    assert gaps.waited.of(0, 1) == 0.0


# Memory.


def test_memory_is_drawn_by_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = iter(range(100, 1000, 10))
    monkeypatch.setattr("paceline.torch._trainer.memory_log.resident_bytes", lambda: 2**20 * next(sizes))
    monkeypatch.setattr("paceline.torch._trainer.memory_log._EVERY", 0.0)
    module, batch = classifier(16)
    with DataParallel(module, TWO, balance="even") as trainer:
        for _ in range(5):
            trainer.step(classify, batch)
        trainer.page(tmp_path / "run.html")
    (memory,) = charts_in((tmp_path / "run.html").read_text(encoding="utf-8"))[3:]
    assert [(one["label"], one["data"]) for one in memory["series"]] == [
        ("this process (resident)", [100, 110, 120, 130, 140])
    ]


def test_memory_is_read_at_most_ten_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []

    def read() -> int:
        reads.append(7)
        return 7

    monkeypatch.setattr("paceline.torch._trainer.memory_log.resident_bytes", read)
    now = iter(0.03 * step for step in range(100))
    monkeypatch.setattr("paceline.torch._trainer.memory_log.time.monotonic", lambda: next(now))
    log = MemoryLog([])
    for step in range(10):
        log.after_step(step)
    assert len(reads) == 3
    assert log.of(0, 10) == [7]
    assert log.of(10, 1) is None


def test_steps_that_the_history_lacks_have_no_figures() -> None:
    rows = Thinned(max)
    for step, value in enumerate([1.0, 2.0, 9.0, 9.0]):
        rows.put(step, value)
    rows.put(2, 3.0)  # the last two were dropped with a lost device
    assert [rows.of(step, 1) for step in range(4)] == [1.0, 2.0, 3.0, None]
    rows.put(5, 4.0)  # an interrupt has left two without a figure
    assert [rows.of(step, 1) for step in range(6)] == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]
    before = copy(rows)
    rows.put(0, 7.0)
    assert (before.of(5, 1), rows.of(0, 1), rows.of(1, 1)) == (4.0, 7.0, None)


# Long runs.


@pytest.mark.parametrize(("merge", "whole"), [(add, sum), (max, max)])
@pytest.mark.parametrize("steps", [5, 1024, 1025, 5000])
def test_rows_are_those_of_the_history(merge: Any, whole: Callable[[Any], float], steps: int) -> None:
    values = [float(7 * step % 1013) for step in range(steps)]
    rows = Thinned(merge)
    for value in values:
        rows.add(value)
    each = 1
    while each * 1024 < steps:
        each *= 2
    for first in range(0, steps, each):
        assert rows.of(first, each) == whole(values[first : first + each])
    assert rows.of(0, steps) == whole(values)
    assert len(rows._rows[1]) <= 1024


def test_the_history_of_a_trainer_has_such_rows() -> None:
    module, batch = classifier(4)
    with DataParallel(module, ["host:0"]) as trainer:
        for _ in range(1026):
            trainer.step(classify, batch)
        assert {row["steps"] for row in trainer.history()} == {trainer._gaps.waited._rows[0]} == {2}


def test_steps_of_another_thread_while_a_page_is_made_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = classifier(4)
    with DataParallel(module, ["host:0"]) as trainer:
        for _ in trainer.live(range(1024)):
            trainer.step(classify, batch)
        reports: Any = trainer._reports
        history, waited = reports.history, reports._gaps.waited
        whole = waited.of(0, 1024)

        def late() -> Any:
            rows = history()
            waited.add(1.0)  # merges the rows
            return rows

        monkeypatch.setattr(type(reports), "history", lambda _: late())
        (run,) = reports._runs()
        assert sum(row.input for row in run.rows) == pytest.approx(whole)


def test_a_page_of_10000_steps_with_input_and_memory_is_small() -> None:
    run = with_input(10_000, waits=0.0012345, devices=12)
    run.rows = [replace(row, memory=[1e9 + row.first_step] * 9) for row in run.rows]
    run.memory_of = [f"cuda:{at}" for at in range(9)]
    page = page_of_runs("long", [run])
    assert len(page.encode()) < MOST_BYTES
    assert len(charts_in(page)[3]["series"]) == 9


def test_the_device_whose_speed_changed_most_is_named_where_shares_move_often() -> None:
    moves = [Move(step, "", "") for step in range(10, 15)]
    for slow, advice in (
        (2.0, "Look for what disturbs b: its speed was between 10000 and 20000 items/s, and shares moved 5 times."),
        (1.02, "Look at the slowest device in the chart of speeds: explain() names what may slow it."),
    ):
        busy = [[0.5, 0.5 * (slow if 20 <= step < 40 else 1.0)] for step in range(60)]
        rows = [Row(step, 1, [12000, 10000], one, 1.5, 0.5, 1.5) for step, one in enumerate(busy)]
        assert sentences(Run("one", ["a", "b"], rows, moves))[2] == advice
