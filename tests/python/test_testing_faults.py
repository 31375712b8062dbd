"""Faults on request, and what a trainer does when they happen."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import DeviceLost, InvalidArgument
from paceline.testing import faults
from paceline.torch import DataParallel, Pipeline
from pipeline_models import squares, two_stages
from torch_support import (
    TWO,
    assert_same_gradients,
    classifier,
    classify,
    gradients,
    hosts,
    noting,
    plain,
    worst_difference,
)


def sleeping(module: Any, part: Any) -> Any:
    """A loss whose time is known: half a millisecond for each item."""
    time.sleep(5e-4 * len(part[0]))
    return classify(module, part)


@pytest.mark.alone
def test_shares_follow_a_slow_device_and_gradients_stay_exact() -> None:
    module, batch = classifier(32)
    _, wanted = plain(module, classify, batch)
    with DataParallel(module, TWO) as trainer:
        for _ in range(4):
            trainer.step(sleeping, batch)
        with faults.inject(trainer, faults.Slow("host:1", factor=5)) as injection:
            for _ in range(16):
                module.zero_grad()
                trainer.step(sleeping, batch)
                assert_same_gradients(module, wanted)
            slow = trainer.shares
        assert injection.log[0] == (0, "host:1", "slow")
        assert {entry.device for entry in injection.log} == {"host:1"}
    assert slow["host:1"] * 2 < slow["host:0"]


def test_a_step_that_runs_out_of_memory_runs_again_in_smaller_pieces() -> None:
    module, batch = classifier(32)
    _, wanted = plain(module, classify, batch)
    sizes: list[int] = []
    with DataParallel(module, TWO, balance="even") as trainer:
        with faults.inject(trainer, faults.OutOfMemory("host:1", steps=1)) as injection:
            for step in range(3):
                sizes.clear()
                module.zero_grad()
                trainer.step(noting(lambda _, part: sizes.append(len(part[0]))), batch)
                assert_same_gradients(module, wanted)
                assert trainer.report()["out_of_memory"] == (step > 0)
                if step == 0:
                    assert sorted(sizes) == [16, 16]
        assert injection.log == [(1, "host:1", "out_of_memory")]
    assert max(sizes) <= 8


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_an_error_keeps_its_type_names_the_device_and_leaves_gradients_as_before(devices: int) -> None:
    module, batch = classifier(12)
    name = f"host:{devices - 1}"
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        trainer.step(classify, batch)
        before = gradients(module)
        with faults.inject(
            trainer, faults.Error(name, steps=[0]), faults.Error(name, steps=[2], raises=ConnectionError)
        ):
            with pytest.raises(faults.InjectedError, match=name) as caught:
                trainer.step(classify, batch)
            assert name in "".join(getattr(caught.value, "__notes__", [str(caught.value.__cause__)]))
            assert worst_difference(gradients(module), before) == 0
            trainer.step(classify, batch)
            with pytest.raises(ConnectionError):
                trainer.step(classify, batch)
    assert_same_gradients(module, [2 * one for one in before if one is not None])


def test_a_lost_device_raises_device_lost_until_the_end() -> None:
    module, batch = classifier(12)
    _, wanted = plain(module, classify, batch)
    with DataParallel(module, TWO, balance="even") as trainer:
        with faults.inject(trainer, faults.Lost("host:1", steps=1)) as injection:
            trainer.step(classify, batch)
            for _ in range(2):
                with pytest.raises(DeviceLost, match="host:1") as caught:
                    trainer.step(classify, batch)
                assert caught.value.device == "host:1"
            assert_same_gradients(module, wanted)
            assert injection.log == [(1, "host:1", "lost")]
        module.zero_grad()
        trainer.step(classify, batch)
    assert_same_gradients(module, wanted)


def test_a_hang_lasts_until_it_is_released_and_the_watchdog_says_where(
    tmp_path: Path, warned: threading.Semaphore
) -> None:
    module, batch = classifier(12)
    _, wanted = plain(module, classify, batch)
    seen: list[str] = []
    with DataParallel(module, TWO, balance="even", watchdog=2, watchdog_path=tmp_path) as trainer:
        with faults.inject(trainer, faults.Hang("host:1")) as injection:

            def release() -> None:
                warned.acquire(timeout=30)
                seen.extend(injection.hanging)
                injection.release()

            helper = threading.Thread(target=release)
            helper.start()
            with pytest.warns(UserWarning, match=str(tmp_path)):
                trainer.step(classify, batch)
            helper.join()
        assert_same_gradients(module, wanted)
        assert injection.hanging == []
    assert seen == ["host:1"]
    (path,) = tmp_path.iterdir()
    text = path.read_text(encoding="utf-8")
    assert "host:1: inside of user code" in text
    assert "host:0: outside of user code" in text
    assert "in hang" in text  # the stack of the worker


def test_a_hang_ends_by_itself_after_its_seconds_and_with_the_block() -> None:
    module, batch = classifier(12)
    _, wanted = plain(module, classify, batch)
    with DataParallel(module, TWO) as trainer:
        with faults.inject(trainer, faults.Hang(TWO, seconds=0.01)) as injection:
            trainer.step(classify, batch)
        assert {entry.kind for entry in injection.log} == {"hang"}
        assert_same_gradients(module, wanted)
        module.zero_grad()
        with faults.inject(trainer, faults.Hang(TWO)) as injection:
            step = threading.Thread(target=trainer.step, args=(classify, batch))
            step.start()
            while not injection.hanging and step.is_alive():
                time.sleep(0.01)
            assert injection.hanging
        step.join(30)
        assert not step.is_alive()
    assert_same_gradients(module, wanted)


def steps_with_errors(seed: int, rate: float) -> list[tuple[int, str]]:
    module, batch = classifier(12)
    with DataParallel(module, TWO, balance="even") as trainer:
        with faults.inject(trainer, faults.Error(TWO, rate=rate), seed=seed) as injection:
            for _ in range(30):
                with contextlib.suppress(faults.InjectedError):
                    trainer.step(classify, batch)
    return [(entry.step, entry.device) for entry in injection.log]


def test_a_seed_decides_which_steps_have_faults() -> None:
    # An error on one device may end the step before the other one has run, so only the steps are compared.
    first, again, other = ({step for step, _ in steps_with_errors(seed, 0.2)} for seed in (1, 1, 2))
    assert first == again != other
    assert 4 <= len(first) <= 20
    assert steps_with_errors(1, 0.0) == []
    assert len({step for step, _ in steps_with_errors(1, 1.0)}) == 30


def test_runs_of_a_batch_and_losses_are_steps_and_predictions_are_not() -> None:
    module, batch = classifier(12)
    with DataParallel(module, TWO, balance="even") as trainer:
        with faults.inject(trainer, faults.Error("host:0", steps=[1, 2])) as injection:
            trainer.step(classify, batch)
            trainer.predict(batch[0])
            trainer.check(classify, batch)
            with pytest.raises(faults.InjectedError):
                trainer.loss(classify, batch)
            with trainer.batch(batch) as whole, pytest.raises(faults.InjectedError):
                whole.run(lambda one, part: part.backward(classify(one, part.data)))
            trainer.step(classify, batch)
        assert [entry.step for entry in injection.log] == [1, 2]


def in_stages() -> tuple[Any, Any, Pipeline]:
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    return module, torch.randn(8, 4), two_stages(module, schedule="auto")


@pytest.mark.parametrize("name", TWO)
def test_stages_of_a_pipeline_raise_hang_and_run_out_of_memory(name: str) -> None:
    module, batch, trainer = in_stages()
    with trainer:
        for _ in range(3):
            trainer.step(squares, batch)
        wanted = [one.grad / 3 for one in module.parameters()]
        plan = faults.Error(name, steps=0), faults.OutOfMemory(name, steps=1), faults.Hang(name, steps=2, seconds=0.01)
        with faults.inject(trainer, *plan) as injection:
            module.zero_grad()
            with pytest.raises(faults.InjectedError, match=name):
                trainer.step(squares, batch)
            assert all(one.grad is None for one in module.parameters())
            for _ in range(2):
                module.zero_grad()
                trainer.step(squares, batch)
                torch.testing.assert_close([one.grad for one in module.parameters()], wanted)
        assert injection.log == [(0, name, "error"), (1, name, "out_of_memory"), (2, name, "hang")]
        assert trainer.report()["out_of_memory"] == 1
        with faults.inject(trainer, faults.Lost(name, steps=0)):
            for _ in range(2):
                with pytest.raises(DeviceLost, match=name):
                    trainer.step(squares, batch)
        trainer.step(squares, batch)


@pytest.mark.alone
def test_a_slow_stage_takes_longer() -> None:
    _, batch, trainer = in_stages()

    def slowly(module: Any, part: Any) -> Any:
        time.sleep(0.002)  # in stage 0
        return squares(module, part)

    with trainer:
        for _ in range(3):
            trainer.step(slowly, batch)
        with faults.inject(trainer, faults.Slow("host:0", factor=5)) as injection:
            trainer.step(slowly, batch)
        busy = {stage["device"]: stage["busy_seconds"] for stage in trainer.report()["pipeline"]["stages"]}
        slow = trainer.report()["pipeline"]["stages"][0]["device"]
    assert injection.log == [(0, "host:0", "slow")]
    assert slow != "host:0" or busy["host:0"] > 4 * 5 * 0.002


def test_a_module_has_faults_in_its_backward() -> None:
    inner, batch = classifier(12)
    module = DataParallel(inner, TWO, balance="even")
    with faults.inject(module, faults.Error("host:1")):
        loss = nn.functional.cross_entropy(module(batch[0]), batch[1])
        with pytest.raises(faults.InjectedError):
            loss.backward()
    assert gradients(inner) == [None] * 4
    nn.functional.cross_entropy(module(batch[0]), batch[1]).backward()
    assert_same_gradients(inner, plain(inner, classify, batch)[1])
    module.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t: faults.inject(torch.nn.Linear(1, 1), faults.Error("host:0")), "trainer is a Linear"),  # type: ignore[arg-type]
        (lambda t: faults.inject(t, faults.Error("host:7")), "names host:7; the trainer has host:0, host:1"),
        (lambda t: faults.inject(t, faults.Error([])), "names no device"),
        (lambda t: faults.inject(t, faults.Error("host:0", rate=2)), "rate is a probability"),
        (lambda t: faults.inject(t, faults.Slow("host:0", factor=0.5)), "factor is at least 1"),
        (lambda t: faults.inject(t, "host:0"), "'host:0' is no fault"),  # type: ignore[arg-type]
    ],
    ids=["trainer", "device", "none", "rate", "factor", "fault"],
)
def test_what_cannot_be_injected_is_refused(make: Any, message: str) -> None:
    module, _ = classifier(4)
    with DataParallel(module, TWO) as trainer:
        with pytest.raises(InvalidArgument, match=message):
            with make(trainer):
                pass
        with faults.inject(trainer), pytest.raises(InvalidArgument, match="already"):
            with faults.inject(trainer):
                pass
        with faults.inject(trainer):
            pass
