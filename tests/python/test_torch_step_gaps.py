"""What `explain` says of the time between steps."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline.torch import DataParallel
from paceline.torch._trainer.step_gaps import StepGaps
from torch_support import TWO, classifier, classify


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("paceline.torch._trainer.step_gaps.time.perf_counter", lambda: self.now)

    def steps(self, gaps: StepGaps, count: int, *, inside: float, between: float, waiting: float = 0.0) -> None:
        def batches() -> Iterator[int]:
            for number in range(count):
                self.now += waiting
                yield number

        for _ in gaps.watched(batches()):
            began = gaps.begin()
            self.now += inside
            gaps.end(began)
            self.now += between - waiting


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize(
    ("count", "times", "said"),
    [
        (20, {"inside": 0.040, "between": 0.008}, ""),
        (60, {"inside": 0.0005, "between": 0.0009}, ""),  # less than a millisecond
        (8, {"inside": 0.010, "between": 0.090}, ""),  # seven gaps
        (
            20,
            {"inside": 0.030, "between": 0.012},
            "the devices wait 12.0 ms, beside 30.0 ms that a step takes (medians of the last 19). That is the optimizer,",
        ),
        (
            60,
            {"inside": 0.030, "between": 0.020, "waiting": 0.015},
            "(medians of the last 50). Input-bound: 15.0 ms of that are for the next batch.",
        ),
        (
            20,
            {"inside": 0.030, "between": 0.020, "waiting": 0.005},
            "5.0 ms of that are for the next batch; the rest is the optimizer",
        ),
    ],
    ids=["short", "below a millisecond", "few", "long", "input-bound", "a small part of waiting"],
)
def test_long_gaps_are_told_with_their_times(clock: Clock, count: int, times: dict[str, float], said: str) -> None:
    gaps = StepGaps()
    clock.steps(gaps, count, **times)
    assert said in gaps.explain()
    assert bool(gaps.explain()) == bool(said)


def test_single_long_gaps_do_not_count(clock: Clock) -> None:
    gaps = StepGaps()
    for _ in range(5):
        clock.steps(gaps, 9, inside=0.030, between=0.001)
        clock.now += 60.0  # validation
    assert gaps.explain() == ""


def test_the_time_after_a_failure_says_nothing(clock: Clock) -> None:
    gaps = StepGaps()
    for _ in range(20):
        clock.steps(gaps, 1, inside=0.030, between=0.500)
        gaps.interrupted()
    assert gaps.explain() == ""


@pytest.mark.alone
def test_what_the_devices_run_between_two_steps_is_no_waiting() -> None:
    module, batch = classifier(16)

    def slow(one: Any, part: Any) -> None:
        time.sleep(0.01)
        part.backward(classify(one, part.data))

    with DataParallel(module, TWO) as trainer:
        for _ in range(12):
            trainer.step(classify, batch)
            with trainer.batch(batch) as global_batch:
                global_batch.run(slow)
        assert "Between two steps" not in trainer.explain()
        for _ in range(12):
            trainer.step(classify, batch)
            time.sleep(0.02)
            trainer.predict(batch[0])
        assert "Between two steps" not in trainer.explain()


@pytest.mark.alone
def test_a_trainer_tells_that_it_is_input_bound() -> None:
    module, batch = classifier(16)

    def slow() -> Iterator[Any]:
        for _ in range(12):
            time.sleep(0.03)
            yield batch

    def broken(module: Any, batch: Any) -> torch.Tensor:
        raise RuntimeError("planned")

    with DataParallel(module, TWO) as trainer:
        for one in trainer.progress(slow(), file=io.StringIO()):
            trainer.step(classify, one)
        assert "Input-bound" in trainer.explain()
    with DataParallel(module, TWO) as trainer:
        for one in slow():
            trainer.step(classify, one)
        assert "Between two steps the devices wait" in trainer.explain()
        assert "Input-bound" not in trainer.explain()
    with DataParallel(module, TWO) as trainer:
        for one in slow():
            with pytest.raises(RuntimeError, match="planned"):
                trainer.step(broken, one)
        assert "Between two steps" not in trainer.explain()
