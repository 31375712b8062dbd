"""Ctrl-C in the middle of a step."""

from __future__ import annotations

import pytest

from torch_support import output_of, run_script

SETUP = """
_, reference = None, nn.Linear(4, 2).double()
reference.load_state_dict(module.state_dict())
mean_of_squares(reference, batch).backward()

# From now, or since an event.
def interrupt_after(*seconds, since=None):
    def press():
        if since is not None:
            since.wait()
        begin = time.monotonic()
        for one in seconds:
            time.sleep(max(0, begin + one - time.monotonic()))
            os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=press, daemon=True).start()

def same_gradients():
    return all(torch.allclose(a.grad, b.grad, rtol=1e-12, atol=0) for a, b in zip(module.parameters(), reference.parameters()))

def interrupted(call):
    begin = time.monotonic()
    try:
        call()
    except KeyboardInterrupt:
        return time.monotonic() - begin
    raise SystemExit("no KeyboardInterrupt")
"""


@pytest.mark.parametrize("devices", [1, 2])
def test_ctrl_c_raises_promptly_and_the_next_step_works(devices: int) -> None:
    program = (
        SETUP
        + f"""
def slow(replica, part):
    time.sleep(0.05)
    return mean_of_squares(replica, part)

rows = torch.ones(800, 4, dtype=torch.double)
trainer = DataParallel(module, [f"host:{{i}}" for i in range({devices})], micro_batch=1)
for _ in range(2):
    interrupt_after(0.3)
    seconds = interrupted(lambda: trainer.step(slow, rows))
    assert 0.2 < seconds < 15, seconds                    # the whole step takes at least 20 s
    assert all(parameter.grad is None for parameter in module.parameters())
trainer.step(mean_of_squares, batch)
print(same_gradients())
"""
    )
    assert output_of(program) == "True"


def test_ctrl_c_whose_handler_outlasts_the_step_raises_what_the_handler_raised() -> None:
    program = (
        SETUP
        + """
def handler(*_):
    time.sleep(0.4)
    raise KeyboardInterrupt
signal.signal(signal.SIGINT, handler)

def slow(replica, part):
    time.sleep(0.25)
    return mean_of_squares(replica, part)

trainer = DataParallel(module, ["host:0", "host:1"], balance="even")
interrupt_after(0.1)
interrupted(lambda: trainer.step(slow, batch))
assert all(parameter.grad is None for parameter in module.parameters())
trainer.step(mean_of_squares, batch)
print(same_gradients())
"""
    )
    assert output_of(program) == "True"


def test_ctrl_c_while_gradients_are_written_comes_after_them() -> None:
    program = (
        SETUP
        + """
add = torch._foreach_add_
def add_and_interrupt(*arguments, **options):
    add(*arguments, **options)
    torch._foreach_add_ = add
    signal.raise_signal(signal.SIGINT)

trainer = DataParallel(module, ["host:0", "host:1"], balance="even")
trainer.step(mean_of_squares, batch)
torch._foreach_add_ = add_and_interrupt
interrupted(lambda: trainer.step(mean_of_squares, batch))
mean_of_squares(reference, batch).backward()
assert same_gradients()
assert trainer.report()["steps"] == 2
trainer.step(mean_of_squares, batch)
mean_of_squares(reference, batch).backward()
print(same_gradients(), trainer.report()["steps"])
"""
    )
    assert output_of(program) == "True 3"


def test_ctrl_c_in_predict_raises_too() -> None:
    program = (
        SETUP
        + """
def slow(replica, part):
    time.sleep(0.05)
    return replica(part)

rows = torch.ones(800, 4, dtype=torch.double)
trainer = DataParallel(module, ["host:0", "host:1"], micro_batch=1)
interrupt_after(0.3)
assert interrupted(lambda: trainer.predict(rows, slow)) < 15
print(trainer.predict(batch).shape == (8, 2))
"""
    )
    assert output_of(program) == "True"


def test_a_second_ctrl_c_leaves_a_worker_behind_that_does_not_return() -> None:
    """And when it returns after all, its gradients are nobody's."""
    program = (
        SETUP
        + """
import paceline
began, leave = threading.Event(), threading.Event()
def stuck(replica, part):
    began.set()
    loss = mean_of_squares(replica, part)
    leave.wait(30)
    return loss

trainer = DataParallel(module, ["host:0", "host:1"], balance="even")
interrupt_after(0.3, 0.8, since=began)
assert 0.7 < interrupted(lambda: trainer.step(stuck, batch)) < 25
for call in (lambda: trainer.step(mean_of_squares, batch), lambda: trainer.predict(batch)):
    try:
        call()
    except paceline.InvalidArgument as error:
        assert "has not ended" in str(error), error
    else:
        raise SystemExit("not refused")
leave.set()
while trainer.group.busy:
    time.sleep(0.01)
assert all(parameter.grad is None for parameter in module.parameters())
trainer.step(mean_of_squares, batch)
print(same_gradients())
"""
    )
    assert output_of(program) == "True"


@pytest.mark.parametrize("group", [False, True])
def test_a_second_ctrl_c_leaves_a_with_block_at_once(group: bool) -> None:
    program = (
        SETUP
        + f"""
began, leave = threading.Event(), threading.Event()
def stuck(replica, part):
    began.set()
    leave.wait(30)
    return mean_of_squares(replica, part)

def train():
    from paceline import DeviceGroup
    with DeviceGroup(["host:0", "host:1"]) as devices, DataParallel(module, devices if {group} else "auto", balance="even") as trainer:
        trainer.step(stuck, batch)

interrupt_after(0.3, 0.8, since=began)
assert 0.7 < interrupted(train) < 25
leave.set()
print(all(parameter.grad is None for parameter in module.parameters()))
"""
    )
    assert output_of(program) == "True"


def test_close_looks_for_signals() -> None:
    program = (
        SETUP
        + """
began, leave = threading.Event(), threading.Event()
def stuck(replica, part):
    began.set()
    leave.wait(30)
    return mean_of_squares(replica, part)

trainer = DataParallel(module, ["host:0", "host:1"], balance="even")
interrupt_after(0.3, 0.6, since=began)
interrupted(lambda: trainer.step(stuck, batch))
interrupt_after(0.5)
assert 0.4 < interrupted(trainer.close) < 25
leave.set()
time.sleep(0.5)  # PyTorch aborts the program if an operator ends in another thread while the interpreter ends
print("left")
"""
    )
    assert output_of(program) == "left"


def test_ctrl_c_that_nobody_catches_ends_the_program() -> None:
    program = (
        SETUP
        + """
def slow(replica, part):
    time.sleep(0.02)
    return mean_of_squares(replica, part)

trainer = DataParallel(module, ["host:0", "host:1"], micro_batch=1)
interrupt_after(0.3)
trainer.step(slow, torch.ones(4000, 4, dtype=torch.double))
"""
    )
    done = run_script(program)
    assert done.returncode in (-2, 130), done.stderr
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
