"""Signals: Ctrl-C in the middle of a step, and those that ask a training loop to stop (`paceline.stop_on`)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline import InvalidArgument
from paceline.torch import DataParallel
from paceline.torch._run import participants
from paceline.torch._run.pushing import Pushing
from torch_support import TWO, classifier, classify, gradients, output_of, plain, run_script, worst_difference

SETUP = """
_, reference = None, nn.Linear(4, 2).double()
reference.load_state_dict(module.state_dict())
mean_of_squares(reference, batch).backward()
rows = torch.ones(800, 4, dtype=torch.double)
two = ["host:0", "host:1"]
began, leave = threading.Event(), threading.Event()

# From now, or since an event. Python has handled one before the next one comes.
def interrupt_after(*seconds, since=None):
    handled = threading.Semaphore(0)
    def handler(*_):
        handled.release()
        raise KeyboardInterrupt
    signal.signal(signal.SIGINT, handler)
    def press():
        if since is not None:
            since.wait()
        begin = time.monotonic()
        for one in seconds:
            time.sleep(max(0, begin + one - time.monotonic()))
            os.kill(os.getpid(), signal.SIGINT)
            handled.acquire()
    threading.Thread(target=press, daemon=True).start()

def same_gradients():
    return all(torch.allclose(a.grad, b.grad, rtol=1e-12, atol=0) for a, b in zip(module.parameters(), reference.parameters()))

def untouched():
    return all(parameter.grad is None for parameter in module.parameters())

def interrupted(call):
    begin = time.monotonic()
    try:
        call()
    except KeyboardInterrupt:
        return time.monotonic() - begin
    raise SystemExit("no KeyboardInterrupt")

def slow(replica, part):
    time.sleep(0.05)
    return mean_of_squares(replica, part)

def stuck(replica, part):
    began.set()
    loss = mean_of_squares(replica, part)
    leave.wait(30)
    return loss
"""
PROMPT = """
trainer = DataParallel(module, two[:{devices}], micro_batch=1)
for _ in range(2):
    interrupt_after(0.3)
    seconds = interrupted(lambda: trainer.step(slow, rows))
    assert 0.2 < seconds < 15, seconds                    # the whole step takes at least 20 s
    assert untouched()
trainer.step(mean_of_squares, batch)
print(same_gradients())
"""
WITH_BLOCK = """
def train():
    from paceline import DeviceGroup
    with DeviceGroup(two) as devices, DataParallel(module, devices if {group} else "auto", balance="even") as trainer:
        trainer.step(stuck, batch)

interrupt_after(0.3, 0.8, since=began)
assert 0.7 < interrupted(train) < 25
leave.set()
time.sleep(0.5)  # PyTorch aborts the program if an operator ends in another thread while the interpreter ends
print(untouched())
"""
PROGRAMS: dict[str, str] = {
    "raises promptly, and the next step works: one device": PROMPT.format(devices=1),
    "raises promptly, and the next step works: two devices": PROMPT.format(devices=2),
    "whose handler outlasts the step raises what the handler raised": """
handling = threading.Event()
def handler(*_):
    handling.set()
    time.sleep(0.4)
    raise KeyboardInterrupt
signal.signal(signal.SIGINT, handler)

def interrupt(replica, part):
    if part.data_ptr() == batch.data_ptr():
        os.kill(os.getpid(), signal.SIGINT)
    handling.wait(30)
    return mean_of_squares(replica, part)

trainer = DataParallel(module, two, balance="even")
interrupted(lambda: trainer.step(interrupt, batch))
assert untouched()
trainer.step(mean_of_squares, batch)
print(same_gradients())
""",
    "while gradients are written comes after them": """
add = torch._foreach_add_
def add_and_interrupt(*arguments, **options):
    add(*arguments, **options)
    torch._foreach_add_ = add
    signal.raise_signal(signal.SIGINT)

trainer = DataParallel(module, two, balance="even")
trainer.step(mean_of_squares, batch)
torch._foreach_add_ = add_and_interrupt
interrupted(lambda: trainer.step(mean_of_squares, batch))
mean_of_squares(reference, batch).backward()
assert same_gradients()
assert trainer.report()["steps"] == 2
trainer.step(mean_of_squares, batch)
mean_of_squares(reference, batch).backward()
print(same_gradients() and trainer.report()["steps"] == 3)
""",
    "in predict raises": """
trainer = DataParallel(module, two, micro_batch=1)
interrupt_after(0.3)
assert interrupted(lambda: trainer.predict(slow, rows)) < 15
print(trainer.predict(batch).shape == (8, 2))
""",
    # And when the worker returns after all, its gradients are nobody's.
    "a second time leaves a worker behind that does not return": """
import paceline
trainer = DataParallel(module, two, balance="even")
interrupt_after(0.3, 0.8, since=began)
assert 0.7 < interrupted(lambda: trainer.step(stuck, batch)) < 25
for call in (lambda: trainer.step(mean_of_squares, batch), lambda: trainer.predict(batch)):
    try:
        call()
    except paceline.Unavailable as error:
        assert "has not ended" in str(error), error
    else:
        raise SystemExit("not refused")
leave.set()
while trainer.group.busy:
    time.sleep(0.01)
assert untouched()
trainer.step(mean_of_squares, batch)
print(same_gradients())
""",
    "a second time leaves a with block at once: of a trainer": WITH_BLOCK.format(group=False),
    "a second time leaves a with block at once: of a group": WITH_BLOCK.format(group=True),
    "ends a close": """
trainer = DataParallel(module, two, balance="even")
interrupt_after(0.3, 0.6, since=began)
interrupted(lambda: trainer.step(stuck, batch))
interrupt_after(0.5)
print(0.4 < interrupted(trainer.close) < 25)
leave.set()
time.sleep(0.5)  # PyTorch aborts the program if an operator ends in another thread while the interpreter ends
""",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_ctrl_c(program: str) -> None:
    assert output_of(SETUP + PROGRAMS[program]) == "True"


def test_these_tests_run_where_sigint_is_ignored() -> None:
    """As in a background job of a shell script."""
    chosen = f"{__file__}::test_ctrl_c[in predict raises]"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", chosen]
    ignores = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]
    done = subprocess.run(ignores, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ctrl_c_that_nobody_catches_ends_the_program() -> None:
    program = "interrupt_after(0.3)\nDataParallel(module, two, micro_batch=1).step(slow, rows)\n"
    done = run_script(SETUP + program)
    assert done.returncode in (-2, 130), done.stderr
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")


class Told:
    """A `StepLoop`, and Ctrl-C that comes when it has been told about a step."""

    def __init__(self, step_loop: Any) -> None:
        self._step_loop = step_loop
        self._presses = iter([KeyboardInterrupt])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step_loop, name)

    def commit(self, outcome: Any) -> None:
        self._step_loop.commit(outcome)
        for press in self._presses:
            raise press


def pressed_after(name: str, trainer: DataParallel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Ctrl-C come once, after this part of the next commit."""
    if name == "balancer":
        trainer._works.steps.step_loop = Told(trainer._works.steps.step_loop)  # type: ignore[assignment]
        return
    part, presses = getattr(Pushing, name), iter([KeyboardInterrupt])

    def part_and_press(self: Pushing, *given: Any) -> None:
        part(self, *given)
        for press in presses:
            raise press

    monkeypatch.setattr(Pushing, name, part_and_press)


def loss_of(module: Any, part: Any) -> Any:
    return module(part).pow(2).mean()


def counting() -> nn.Module:
    """A module with a buffer that each step in training writes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()


@pytest.fixture
def batch() -> torch.Tensor:
    return torch.randn(8, 4, dtype=torch.double, generator=torch.Generator().manual_seed(1))


def test_ctrl_c_while_a_step_lets_go_of_what_it_noted_leaves_the_next_step_whole(
    batch: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, presses = participants._Gradients.release, iter([KeyboardInterrupt])

    def press_and_release(self: Any) -> None:
        for press in presses:
            raise press
        release(self)

    monkeypatch.setattr(participants._Gradients, "release", press_and_release)
    with DataParallel(counting(), TWO) as trainer:
        with pytest.raises(KeyboardInterrupt):
            trainer.step(loss_of, batch)
        assert trainer.report()["steps"] == 1
        trainer.step(loss_of, batch)
        assert trainer.report()["steps"] == 2


CALLS = [("step", 1), ("step", 2), ("loss", 2)]
COMMITS = [(place, *call) for place in ("buffers", "attributes", "balancer") for call in CALLS]


@pytest.mark.parametrize(("place", "call", "devices"), [*COMMITS, ("attributes", "predict", 2)])
def test_ctrl_c_in_a_commit_completes_the_step(
    place: str, call: str, devices: int, batch: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the first one, whose gradients are set and not added. A loss is lost with its gradients."""
    module: Any = counting()
    with DataParallel(module, TWO[:devices], balance=[1, 0][:devices]) as trainer:
        wanted = plain(module, loss_of, batch)[1] if call == "step" else [None] * 4
        pressed_after(place, trainer, monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            getattr(trainer, call)(*([] if call == "predict" else [loss_of]), batch)
        assert worst_difference(gradients(module), wanted) < 1e-12
        assert module[1].num_batches_tracked == 1
        if call != "predict":
            assert trainer.report()["steps"] == trainer._execution.steps == 1
            assert sum(trainer.shares.values()) == 8


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
