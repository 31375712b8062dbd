"""`paceline.stop_on`: signals that ask a training loop to stop."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

import paceline
from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import TWO, classifier, classify, output_of


def test_a_signal_sets_the_flag_and_the_earlier_handler_runs_and_comes_back() -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: called.append(number))
    try:
        earlier = signal.getsignal(signal.SIGUSR1)
        with paceline.stop_on(signal.SIGTERM, signal.SIGUSR1) as stop:
            assert not stop
            assert "not requested" in repr(stop)
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop
            assert stop.signal == signal.SIGTERM
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.signal == signal.SIGTERM
            assert "by signal 15" in repr(stop)
        assert called == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is earlier
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_trainer_knows_and_finishes_the_step() -> None:
    module, batch = classifier()
    steps: list[bool] = []

    def loss_fn(replica: Any, part: Any) -> Any:
        if len(steps) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return classify(replica, part)

    with paceline.stop_on(signal.SIGTERM), DataParallel(module, TWO) as trainer:
        while not trainer.stop_requested:
            trainer.step(loss_fn, batch)
            steps.append(True)
        assert trainer.report()["steps"] == 3
    with DataParallel(module, TWO) as trainer:
        assert not trainer.stop_requested


def test_an_interrupt_is_a_request_too_and_any_number_may_be_given_twice() -> None:
    with paceline.stop_on(signal.SIGINT, signal.SIGRTMIN + 1, signal.SIGINT) as stop:
        os.kill(os.getpid(), signal.SIGRTMIN + 1)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == signal.SIGRTMIN + 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_stop_may_be_requested_without_a_signal_from_any_thread() -> None:
    found: list[bool] = []

    def elsewhere() -> None:
        with pytest.raises(InvalidArgument, match="main thread only"), paceline.stop_on(signal.SIGTERM):
            pass
        with paceline.stop_on() as stop:
            stop.request()
            found.append(bool(stop))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [True]


@pytest.mark.parametrize("wrong", [signal.SIGKILL, 999, "SIGTERM"])
def test_a_signal_that_cannot_be_caught_is_refused_and_nothing_is_left_behind(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="cannot be caught"), paceline.stop_on(signal.SIGTERM, wrong):
        pass
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_program_saves_and_ends_with_status_0() -> None:
    program = """
        import paceline
        with paceline.stop_on(signal.SIGTERM) as stop:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            while not stop:
                time.sleep(0.01)
        print("saved")
    """
    assert output_of(program) == "saved"


def test_a_forked_child_ends_by_the_signal_as_if_nothing_were_set() -> None:
    with paceline.stop_on(signal.SIGTERM) as stop:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not stop
