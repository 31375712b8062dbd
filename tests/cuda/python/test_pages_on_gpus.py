"""What is shown of a run on GPUs: its page, prices, and figures that another thread reads while steps run, as a collector of metrics does."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_cases import BOXES, module_and_batch
from paceline import DeviceLost
from paceline._cli import main
from paceline._observe import reports
from paceline.torch import DataParallel, Pipeline
from page_support import Reader, charts_in
from pipeline_cases import Case
from pipeline_gpu_cases import text, words
from torch_support import classify


def read_while_steps_run(trainer: Any, step: Callable[[], Any], steps: int) -> None:
    """Run so many steps, and read figures all the while."""
    errors: list[BaseException] = []
    counts: list[int] = []
    over, read_once = threading.Event(), threading.Event()

    def read() -> None:
        try:
            while not over.is_set():
                counts.append(trainer.report()["steps"])
                assert sum(row["steps"] for row in trainer.history()) >= counts[-1] - 1, "the first step is proved"
                assert trainer.explain()
                assert isinstance(trainer.events(), list)
                read_once.set()
        except BaseException as error:
            errors.append(error)
        finally:
            read_once.set()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for _ in range(steps):
            step()
        read_once.wait()
    finally:
        over.set()
        thread.join()
    assert errors == []
    assert counts == sorted(counts)
    report = trainer.report()
    assert report["steps"] == steps
    assert sum(row["steps"] for row in trainer.history()) == steps - report["proved"]


@pytest.mark.parametrize("box", ["two", "mixed"])
def test_any_thread_may_read_figures_while_steps_run(fake: Any, box: str) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES[box]) as trainer:
        read_while_steps_run(trainer, lambda: trainer.step(classify, batch), 25)


@pytest.mark.own_gpus("pipelines in Python are refused on parts")
def test_any_thread_may_read_figures_of_a_pipeline(gpus: Any) -> None:
    case = Case(text(), words(), 2, {}, False)
    with Pipeline(case.model, BOXES["two"], cuts=[0, 2], micro_batches=3) as trainer:
        read_while_steps_run(trainer, lambda: trainer.step(case.loss_fn, case.batch), 8)


@pytest.mark.own_gpus("it tells GPUs apart by their numbers")
def test_a_lost_device_that_another_thread_has_found_is_told_to_whoever_steps(fake: Any) -> None:
    module, batch = module_and_batch()
    found: list[BaseException] = []

    def read() -> None:
        try:
            trainer.report()
        except DeviceLost as error:
            found.append(error)

    with DataParallel(module, BOXES["two"], balance="even", prove=False) as trainer:
        trainer.step(classify, batch)
        trainer.step(classify, batch)
        fake.poison(1)
        for _ in range(2):
            thread = threading.Thread(target=read)
            thread.start()
            thread.join()
        assert len(found) == 1, "readers are told once"
        trainer.retire("cuda:1")  # which is an answer to the failure, and does not raise it
        with pytest.raises(DeviceLost, match="cuda:1"):
            trainer.step(classify, batch)


@pytest.mark.parametrize("box", ["two", "mixed"])
def test_pages_of_trainers_and_of_their_ledgers(fake: Any, tmp_path: Path, box: str) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES[box], balance="even") as trainer:
        trainer.write_ledger(tmp_path / "run.jsonl")
        for _ in range(6):
            trainer.step(classify, batch)
        trainer.page(tmp_path / "run.html")
    assert main(["page", str(tmp_path / "run.jsonl"), "-o", str(tmp_path / "ledger.html")]) == 0
    for name in ("run", "ledger"):
        page = (tmp_path / f"{name}.html").read_text(encoding="utf-8")
        assert [row[0] for row in Reader(page).tables["Devices"][1:]] == list(BOXES[box])
        assert len(charts_in(page)[2]["x"]) == 6
        labels = {one["label"] for one in charts_in(page)[2]["series"]}
        assert labels == {"ideal", "launching", "waiting and reduction", "a step"}
    words = Reader((tmp_path / "run.html").read_text(encoding="utf-8")).words
    assert "On GPUs reductions are not timed." in words
    assert "Input and the rest of the loop" not in words


@pytest.mark.own_gpus("it tells GPUs apart by their numbers")
def test_memory_stays_with_its_steps_where_a_lost_gpu_takes_some_along(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, batch = module_and_batch()
    monkeypatch.setattr("paceline.torch._devices.cuda.reserved_memory", lambda index: 0)
    monkeypatch.setattr("paceline.torch._trainer.memory_log._EVERY", 0.0)
    with DataParallel(module, BOXES["two"], balance="even", prove=False) as trainer:

        def step(number: int) -> None:
            monkeypatch.setattr("paceline.torch._trainer.memory_log.resident_bytes", lambda: number)
            trainer.step(classify, batch)

        for number in range(4):
            step(number)
            if number == 1:
                trainer.report()  # waits for the GPUs
        fake.poison(1)
        with pytest.raises(DeviceLost, match="cuda:1"):
            step(4)
        trainer.retire("cuda:1")
        for number in (5, 6):
            step(number)
        kept = len(trainer.history()) - 2
        memory = [row.memory for row in trainer._reports._runs()[0].rows]
    assert kept < 4, "the last ones were dropped"
    assert memory == [[number, 0, 0] for number in [*range(kept), 5, 6]]


@pytest.mark.parametrize("box", ["two", "mixed"])
def test_a_terminal_looks_and_prices_are_asked(fake: Any, monkeypatch: pytest.MonkeyPatch, box: str) -> None:
    module, batch = module_and_batch()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, monkeypatch.context() as patch:
        patch.setenv("PACELINE_SOCKETS", folder)
        looked_at(module, batch, box)


def looked_at(module: Any, batch: Any, box: str) -> None:
    with DataParallel(module, BOXES[box], balance="even", prove=False, observe="socket") as trainer:
        for _ in range(6):
            trainer.step(classify, batch)
        trainer.report()  # waits for the GPUs
        (process,) = reports()
        (found,) = process["observed"]
        assert found["steps"] == 6
        assert {name: one["share"] for name, one in found["devices"].items()} == trainer.shares
        assert all((one["memory_bytes"] is None) == name.startswith("host") for name, one in found["devices"].items())
        worth = trainer.what_if(prices={"cuda": 2.0, "host": 0.1})
        assert worth.fastest.cost is not None
        assert "The time between steps does not count" in str(worth)


@pytest.mark.own_gpus("pipelines in Python are refused on parts")
def test_memory_of_a_pipeline_stays_with_its_steps_where_a_lost_gpu_takes_one_along(
    gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> Any:
        raise DeviceLost("cuda:1 is lost")

    monkeypatch.setattr("paceline.torch._trainer.memory_log._EVERY", 0.0)
    case = Case(text(), words(), 2, {}, False)
    with Pipeline(case.model, BOXES["two"], cuts=[0, 2], micro_batches=3) as trainer:
        for number in range(5):
            monkeypatch.setattr("paceline.torch._trainer.memory_log.resident_bytes", lambda now=number: now)
            if number == 3:
                loop: Any = trainer._works.steps.step_loop
                loop.last.pending = lost  # the step before
                with pytest.raises(DeviceLost, match="cuda:1 is lost"):
                    trainer.report()
            trainer.step(case.loss_fn, case.batch)
        rows = trainer._reports._runs()[0].rows
    assert [(row.first_step, row.memory and row.memory[0]) for row in rows] == [(0, 0), (1, 1), (2, 3), (3, 4)]
