"""Figures of trainers on GPUs that another thread reads while steps run, as a collector of metrics does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from gpu_cases import BOXES, module_and_batch
from paceline import DeviceLost
from paceline.torch import DataParallel, Pipeline
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
