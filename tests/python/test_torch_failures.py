"""Exceptions in a worker: raised once, as they are, and nothing is left of the step."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import time
import traceback
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from paceline import Error, Unavailable
from paceline.torch import DataParallel, Pipeline
from paceline.torch._devices.failures import noted
from paceline.torch._run.executor import Executor
from paceline.torch._trainer.host_workers import HostWorkers
from torch_support import (
    DEVICES,
    TWO,
    assert_same_gradients,
    cancelled_by_close,
    classifier,
    classify,
    gradients,
    hosts,
    noting,
    plain,
)


class Unlucky(RuntimeError):
    """Raised by the tests only."""


def failing_at(items: torch.Tensor) -> Any:
    """A loss that raises in the slices that hold one of `items` (rows of the batch)."""

    def deeper(part: Any) -> None:
        raise Unlucky("as planned")

    def loss_fn(module: Any, part: Any) -> Any:
        loss = classify(module, part)
        if bool((part[0][:, None] == items[None]).all(-1).any()):
            deeper(part)
        return loss

    return loss_fn


@DEVICES
def test_closing_the_trainer_or_a_step_in_loss_fn_is_refused_at_once(devices: int) -> None:
    module, batch = classifier(12)
    _, wanted = plain(module, classify, batch)
    begin = time.monotonic()
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        with pytest.raises(Unavailable, match="close: called by loss_fn on a worker"):
            trainer.step(lambda m, b: trainer.close(), batch)  # type: ignore[arg-type,return-value]
        with pytest.raises(Unavailable):
            trainer.step(lambda m, b: trainer.step(classify, b), batch)
        assert time.monotonic() - begin < 5
        trainer.step(classify, batch)
    assert_same_gradients(module, wanted)


@DEVICES
def test_an_exception_is_raised_once_with_its_own_traceback_and_the_device(devices: int) -> None:
    module, batch = classifier(12)
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        with pytest.raises(Unlucky, match="as planned") as caught:
            trainer.step(failing_at(batch[0][-1:]), batch)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-2:] == ["loss_fn", "deeper"]
    name = f"host:{devices - 1}"
    first = 12 - 12 // devices
    where = f"raised on {name} at items {first} to 11 of the batch; gradients and buffers are as before the step"
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == [where]
        assert caught.value.__cause__ is None
    else:
        assert isinstance(caught.value.__cause__, Error)
        assert str(caught.value.__cause__) == where


def told_by(caught: Any) -> str:
    return "".join(traceback.format_exception(caught.type, caught.value, caught.value.__traceback__))


@pytest.mark.parametrize("optimizer", [False, True])
def test_the_errors_of_other_devices_are_notes_of_the_one_that_is_raised(optimizer: bool) -> None:
    module, batch = classifier(12)
    together = threading.Barrier(3)

    def fail(number: int) -> Any:
        together.wait(30)  # all are inside before one fails
        try:
            raise KeyError(f"cause {number}")
        except KeyError as error:
            raise [Unlucky, ValueError, OSError][number](f"at {number}") from error

    def loss_fn(replica: Any, part: Any) -> Any:
        return fail(int(torch.nonzero((batch[0] == part[0][0]).all(1))[0]) // 4)

    with DataParallel(module, hosts(3), balance="even") as trainer:
        parts = [functools.partial(fail, one) for one in range(3)]  # of an optimizer, which run side by side
        workers = HostWorkers(trainer._lifetime, [])
        with pytest.raises((Unlucky, ValueError, OSError)) as caught:
            workers.run_parts(parts) if optimizer else trainer.step(loss_fn, batch)
    whole = told_by(caught)
    for number, name in enumerate(("Unlucky", "ValueError", "OSError")):
        assert f"{name}: at {number}" in whole
        assert f"KeyError: 'cause {number}'" in whole
        assert optimizer or f"raised on host:{number} at items {4 * number} to {4 * number + 3}" in whole


class Noteless(Unlucky):
    """An error before Python 3.11."""

    @property
    def add_note(self) -> Any:
        raise AttributeError


@pytest.mark.parametrize("explicit", [False, True])
def test_notes_hide_no_cause_where_python_prints_none(explicit: bool) -> None:
    module, batch = classifier(12)

    def loss_fn(replica: Any, part: Any) -> Any:
        try:
            raise KeyError("inner")
        except KeyError as error:
            if explicit:
                raise Noteless("outer") from error
            raise Noteless("outer")  # noqa: B904

    with DataParallel(module, hosts(1)) as trainer, pytest.raises(Noteless) as caught:
        trainer.step(loss_fn, batch)
    noted(noted(caught.value, "a second note"), "a third note")
    whole = told_by(caught)
    for text in ("KeyError: 'inner'", "Noteless: outer", "raised on host:0", "a second note", "a third note"):
        assert text in whole


@pytest.mark.parametrize("kind", [DataParallel, Pipeline])
def test_what_the_worker_itself_raises_is_raised(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as an interrupt between a micro-batch and its end, where nothing is caught."""

    def body(self: Executor, *_: Any) -> int:
        raise Unlucky("outside of user code")

    module, batch = classifier(12)
    with kind(module, TWO) as trainer:
        monkeypatch.setattr(Executor, "body", body)
        with pytest.raises(Unlucky, match="outside of user code") as caught:
            trainer.step(classify, batch)
        monkeypatch.undo()
        assert "body" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert gradients(module) == [None] * 4
        error = weakref.ref(caught.value)
        del caught
        gc.collect()
        assert error() is None
        trainer.step(classify, batch)
    assert_same_gradients(module, plain(module, classify, batch)[1])


@DEVICES
def test_gradients_are_as_before_and_the_next_step_works(devices: int) -> None:
    module, batch = classifier(12)
    _, wanted = plain(module, classify, batch)
    with DataParallel(module, hosts(devices), balance="even", micro_batch=2) as trainer:
        for count in range(3):
            own, before = [parameter.grad for parameter in module.parameters()], gradients(module)
            with pytest.raises(Unlucky):
                trainer.step(failing_at(batch[0][-1:]), batch)
            for parameter, grad, then in zip(module.parameters(), own, before, strict=True):
                assert parameter.grad is grad
                assert grad is then or torch.equal(grad, then)  # type: ignore[arg-type]
            assert trainer.report()["steps"] == count
            trainer.step(classify, batch)
            assert_same_gradients(module, [(count + 1) * gradient for gradient in wanted if gradient is not None])


def test_an_exception_stops_the_other_device_at_its_next_micro_batch() -> None:
    module, batch = classifier(200)
    ran, fails = list[int](), threading.Event()

    def fail_first(replica: Any, part: Any) -> None:
        if bool((part[0] == batch[0][0]).all(-1).any()):
            fails.set()
            raise Unlucky
        ran.append(len(part[0]))
        assert fails.wait(30)
        time.sleep(0.02)

    with DataParallel(module, TWO, balance="even", micro_batch=1) as trainer, pytest.raises(Unlucky):
        trainer.step(noting(fail_first), batch)
    assert len(ran) < 50


class Breaking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise Unlucky("in backward")


def test_an_exception_in_backward_is_raised_as_it_is() -> None:
    breaking: Any = Breaking.apply
    module, batch = classifier(12)
    with DataParallel(module, TWO) as trainer, pytest.raises(Unlucky, match="in backward"):
        trainer.step(lambda m, b: classify(lambda x: breaking(m(x)), b), batch)
    assert gradients(module) == [None] * 4


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, StopIteration, GeneratorExit, UserWarning])
def test_unusual_exceptions_come_through(error: type[BaseException]) -> None:
    module, batch = classifier(12)

    def loss_fn(replica: Any, part: Any) -> Any:
        warnings.warn("unusual", UserWarning, stacklevel=1)  # may be an error
        raise error("unusual")

    with DataParallel(module, TWO) as trainer:
        with warnings.catch_warnings():
            warnings.simplefilter("error" if error is UserWarning else "ignore")
            with pytest.raises(error, match="unusual") as caught:
                trainer.step(loss_fn, batch)
        assert len(getattr(caught.value, "__notes__", ["one"])) == 1
        trainer.step(classify, batch)


def test_a_closed_trainer_says_so() -> None:
    module, batch = classifier()
    trainer = DataParallel(module, TWO)
    trainer.step(classify, batch)
    trainer.close()
    trainer.close()
    assert repr(trainer) == "<paceline.torch.DataParallel Sequential on host:0, host:1, auto, closed>"
    for call in (lambda: trainer.step(classify, batch), lambda: trainer.predict(batch[0])):
        with pytest.raises(Unavailable, match="closed"):
            call()
    assert sum(trainer.shares.values()) == 16  # what was, can still be read


def test_a_second_step_at_the_same_time_is_refused_and_the_first_is_exact() -> None:
    module, batch = classifier(12)
    _, wanted = plain(module, classify, batch)
    inside, leave = threading.Event(), threading.Event()

    def wait(replica: Any, part: Any) -> None:
        inside.set()
        assert leave.wait(30)

    with DataParallel(module, TWO, balance="even", micro_batch=3) as trainer, ThreadPoolExecutor(1) as pool:
        first = pool.submit(trainer.step, noting(wait), batch)
        assert inside.wait(30)
        time.sleep(0.05)
        for call in (lambda: trainer.step(classify, batch), lambda: trainer.predict(batch[0])):
            with pytest.raises(Unavailable, match=r"step|predict"):
                call()
        leave.set()
        first.result(30)
        assert_same_gradients(module, wanted)


@DEVICES
def test_closing_the_trainer_in_another_thread_cancels_the_step(devices: int) -> None:
    module, batch = classifier(64)
    trainer = DataParallel(module, hosts(devices), balance="even", micro_batch=1)
    assert cancelled_by_close(trainer, classify, batch) < 64, "the step ran to its end"
    assert gradients(module) == [None] * 4
