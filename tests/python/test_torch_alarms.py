"""What a trainer tells by itself: callbacks when something is wrong, and long times between steps in `explain`."""

from __future__ import annotations

import io
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline import InvalidArgument
from paceline._observe import resident_bytes
from paceline.testing import faults
from paceline.torch import Alarm, DataParallel
from paceline.torch._run import alone
from paceline.torch._trainer import alarms
from paceline.torch._trainer.step_gaps import StepGaps
from torch_support import TWO, classifier, classify, hosts, noting


@pytest.mark.alone
def test_a_device_that_idles_is_called_once_until_it_works_again() -> None:
    module, batch = classifier(8)
    loss_fn = noting(lambda _, part: time.sleep(8e-3 * len(part[0])))
    found: list[Alarm] = []
    with DataParallel(module, TWO, balance="even") as trainer:
        trainer.on_alarm(found.append, busy=0.4, every=2, memory_growth=None, throttled=False)

        def steps(count: int) -> list[tuple[str, str | None]]:
            found.clear()
            for _ in range(count):
                trainer.step(loss_fn, batch)
            return [(alarm.kind, alarm.device) for alarm in found]

        assert steps(4) == []
        with faults.inject(trainer, faults.Slow("host:1", factor=6)):
            assert steps(6) == [("busy", "host:0")]
        (alarm,) = found
        assert alarm.value < alarm.limit == 0.4
        assert "host:0 computes in" in str(alarm)
        assert "less than 40%" in str(alarm)
        assert alarm.step == 6
        assert steps(4) == []
        with faults.inject(trainer, faults.Slow("host:1", factor=6)):
            assert steps(4) == [("busy", "host:0")]


@pytest.mark.alone
def test_steps_that_one_device_runs_alone_as_a_trial_are_no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "_MOST_SECONDS", 1e9)  # also on a busy machine
    module, batch = classifier(32)
    found: list[Alarm] = []
    with DataParallel(module, TWO) as trainer:
        trainer.on_alarm(found.append, busy=0.6, memory_growth=None, throttled=False, every=24)
        trials = trainer._works.steps.alone
        assert trials is not None
        for _ in range(48):
            trainer.step(noting(lambda _, part: time.sleep(1e-4 * len(part[0]))), batch)
        assert trials.steps_alone == 12  # half of the second window, in which both devices idled
    assert found == []


@pytest.mark.alone
def test_a_callback_may_use_the_trainer_and_a_retired_device_is_no_alarm() -> None:
    module, batch = classifier(32)
    found: list[Any] = []
    with DataParallel(module, hosts(3), balance=[1, 0.0001, 1]) as trainer:

        def retire(alarm: Any) -> None:
            found.append(alarm.device)
            trainer.retire(alarm.device)

        trainer.on_alarm(retire, busy=0.05, every=1, memory_growth=None, throttled=False)
        for _ in range(6):  # of 32 ms and more, so that no device is idle because it came late
            trainer.step(noting(lambda _, part: time.sleep(2e-3 * len(part[0]))), batch)
        assert found == ["host:1"]
        assert trainer.report()["devices"]["host:1"]["retired"]


def test_long_steps_come_with_their_seconds_from_step_and_loss() -> None:
    module, batch = classifier(8)
    found: list[Alarm] = []
    with DataParallel(module, TWO) as trainer:
        options: dict[str, Any] = {"busy": None, "memory_growth": None, "throttled": False, "every": 2}
        handle = trainer.on_alarm(found.append, step_seconds=1e-9, **options)
        trainer.on_alarm(found.append, step_seconds=1e9, **options)
        for _ in range(3):
            trainer.step(classify, batch)
        assert found == []  # the first steps are only something to compare with
        trainer.loss(classify, batch).backward()
        (alarm,) = found
        assert (alarm.kind, alarm.device, alarm.limit, alarm.step) == ("step_seconds", None, 1e-9, 4)
        assert 2 * alarm.value <= trainer.report()["step_seconds"]  # of the last two of four steps
        handle.remove()
        trainer.on_alarm(found.append, step_seconds=1e-9, **options)
        for _ in range(3):
            trainer.step(classify, batch)
        assert len(found) == 1


def test_memory_that_grows_is_compared_with_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = classifier(8)
    found: list[Alarm] = []
    sizes = iter([100, 140, 149, 151, 160, 140, 170])
    monkeypatch.setattr(alarms, "resident_bytes", lambda: next(sizes))
    with DataParallel(module, TWO) as trainer:
        trainer.on_alarm(found.append, busy=None, throttled=False, every=1)
        steps: list[int] = []
        for step in range(7):
            trainer.step(classify, batch)
            steps += [step] * (len(found) - len(steps))
    assert steps == [3, 6]
    assert [alarm.value for alarm in found] == [pytest.approx(0.51), pytest.approx(0.7)]
    assert {(alarm.kind, alarm.device) for alarm in found} == {("memory_growth", "host")}


def test_the_memory_is_that_of_the_process() -> None:
    before = resident_bytes()
    kept = torch.ones(2**24)
    assert 2**25 < resident_bytes() - before < 2**28
    del kept


def test_runs_of_a_batch_are_looked_at_and_a_callback_may_use_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = classifier(8)
    found: list[Alarm] = []
    sizes = iter([100, 140, 151, 160])
    monkeypatch.setattr(alarms, "resident_bytes", lambda: next(sizes))

    def retire(alarm: Alarm) -> None:
        found.append(alarm)
        trainer.retire("host:1")

    with DataParallel(module, TWO) as trainer:
        trainer.on_alarm(retire, busy=None, throttled=False, every=2)
        with trainer.batch(batch) as global_batch:
            for run in range(8):
                global_batch.run(lambda module, part: part.backward(classify(module, part.data)))
                assert len(found) == (run >= 5)
    assert [alarm.kind for alarm in found] == ["memory_growth"]
    assert found[0].value == pytest.approx(0.51)


@pytest.mark.parametrize(
    ("before", "after", "part", "why"),
    [
        ({"limited_seconds": {"heat": 1.0}}, {"limited_seconds": {"heat": 1.6}}, 0.3, "heat"),
        ({"limited_seconds": {"the power cap": 1.0}}, {"limited_seconds": {"the power cap": 2.0}}, 0.0, ""),
        ({"quota": {"periods": 10, "throttled": 1}}, {"quota": {"periods": 20, "throttled": 6}}, 0.5, "CPU quota"),
        ({"quota": {"periods": 10, "throttled": 1}}, {"quota": {"periods": 10, "throttled": 1}}, 0.0, ""),
        ({"cores": {"stolen_seconds": 1.0}}, {"cores": {"stolen_seconds": 2.0}}, 0.25, "hypervisor"),
        ({}, {}, 0.0, ""),
    ],
    ids=["heat", "power cap", "quota", "no period", "stolen", "unknown"],
)
def test_throttling_is_read_from_what_the_device_says(before: Any, after: Any, part: float, why: str) -> None:
    got, text = alarms._throttled(before, {**after, "core_count": 2}, 2.0)
    assert got == pytest.approx(part)
    assert why in text


def test_a_throttled_device_is_called_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = classifier(8)
    found: list[Alarm] = []
    used_up = 0

    def health(name: str) -> dict[str, Any]:
        looks[name] += 1
        return {"quota": {"periods": 100 * looks[name], "throttled": used_up if name == "host:1" else 0}}

    looks: Counter[str] = Counter()
    monkeypatch.setattr(alarms, "device_health", health)
    with DataParallel(module, TWO) as trainer:
        trainer.on_alarm(found.append, busy=None, memory_growth=None, every=1)
        for step in range(4):
            used_up += 50 if step >= 2 else 0
            trainer.step(classify, batch)
    assert [(alarm.kind, alarm.device) for alarm in found] == [("throttled", "host:1")]
    assert found[0].value == pytest.approx(0.5)
    assert "CPU quota" in str(found[0])


def test_what_a_callback_raises_comes_out_of_a_step_that_is_committed() -> None:
    module, batch = classifier(8)

    def stop(alarm: Alarm) -> None:
        raise StopAsyncIteration(str(alarm))

    with DataParallel(module, TWO) as trainer:
        trainer.on_alarm(stop, step_seconds=1e-9, busy=None, every=1)
        trainer.step(classify, batch)
        with pytest.raises(StopAsyncIteration, match="a step takes"):
            trainer.step(classify, batch)
        assert trainer.report()["steps"] == 2
        trainer.step(classify, batch)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("log",), {}, "callback is a str"),
        ((print,), {"busy": 0}, "busy is 0; it must be a number above 0 and at most 1"),
        ((print,), {"busy": 70}, "busy is 70"),
        ((print,), {"memory_growth": -1}, "memory_growth is -1"),
        ((print,), {"step_seconds": "2"}, "step_seconds is '2'"),
        ((print,), {"every": 0}, "every is 0"),
        ((print,), {"every": None}, "every is None"),
    ],
)
def test_what_is_no_limit_is_refused(arguments: Any, options: Any, message: str) -> None:
    with DataParallel(classifier(4)[0], TWO) as trainer:
        with pytest.raises(InvalidArgument, match=message):
            trainer.on_alarm(*arguments, **options)


def _sample(step: int, idle: float, alone: int = 0) -> Any:
    device = {"busy_seconds": float(step), "idle_seconds": idle, "retired": False}
    return alarms.Sample(
        1.0 * step, {"steps": step, "step_seconds": 2.0 * step, "devices": {"host:0": device}}, {}, {}, alone
    )


def test_an_alarm_stays_on_while_it_cannot_be_judged() -> None:
    found: list[str] = []
    watch = alarms.Watch(lambda alarm: found.append(alarm.kind), alarms.Limits(0.7, None, False, None), 1)
    seen = []
    for given in ((1, 0), (2, 10), (3, 20, 1), (4, 30, 1), (5, 30, 1), (6, 40, 1)):
        watch.after_step(lambda limits, given=given: _sample(*given))  # type: ignore[misc]
        seen.append(len(found))
    assert seen == [0, 1, 1, 1, 1, 2]
    assert set(found) == {"busy"}


def test_an_alarm_whose_turn_another_callback_took_comes_the_next_time() -> None:
    found: list[str] = []

    def callback(alarm: Alarm) -> None:
        found.append(alarm.kind)
        assert len(found) > 1

    watch = alarms.Watch(callback, alarms.Limits(0.7, None, False, 1e-9), 1)
    watch.after_step(lambda limits: _sample(1, 0))
    with pytest.raises(AssertionError):
        watch.after_step(lambda limits: _sample(2, 10))
    watch.after_step(lambda limits: _sample(3, 20))
    assert found == ["step_seconds", "busy"]


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
            began = self.now
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
