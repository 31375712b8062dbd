"""Programs with a pipeline: Ctrl-C, an end without close(), and forked children."""

from __future__ import annotations

import pytest

from torch_support import output_of, run_script

SETUP = """
from paceline.torch import Pipeline
torch.manual_seed(0)
module = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
batch = torch.linspace(-1, 1, 64).view(16, 4)
plain = __import__("copy").deepcopy(module)
trainer = Pipeline(module, ["host:0", "host:1"], cuts=[0, 2], micro_batches=16, schedule="1f1b")
for _ in range(4):
    module.zero_grad()
    trainer.step(mean_of_squares, batch)
module.zero_grad()
for part in batch.split(1):
    (mean_of_squares(plain, part) * (1 / 16)).backward()

def same_gradients():
    return all(torch.equal(a.grad, b.grad) for a, b in zip(module.parameters(), plain.parameters()))

def slow(replica, part):
    loss = mean_of_squares(replica, part)
    time.sleep(0.2)
    return loss
"""


def test_ctrl_c_raises_promptly_and_the_next_step_works() -> None:
    program = (
        SETUP
        + """
ran = 0
def interrupted(replica, part):
    global ran
    ran += 1
    if ran == 2:
        os.kill(os.getpid(), signal.SIGINT)
    return slow(replica, part)

for _ in range(2):
    ran = 0
    try:
        trainer.step(interrupted, batch)
    except KeyboardInterrupt:
        assert ran < 16, "the step ran to its end"
    else:
        raise SystemExit("no KeyboardInterrupt")
    assert all(parameter.grad is None for parameter in module.parameters())
trainer.step(mean_of_squares, batch)
print(same_gradients())
"""
    )
    assert output_of(program) == "True"


def test_a_second_ctrl_c_leaves_a_lane_behind_that_does_not_return() -> None:
    program = (
        SETUP
        + """
import paceline
leave = threading.Event()
def stuck(replica, part):
    loss = mean_of_squares(replica, part)
    leave.wait(30)
    return loss

for seconds in (0.3, 0.8):
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
begin = time.monotonic()
try:
    trainer.step(stuck, batch)
except KeyboardInterrupt:
    assert 0.7 < time.monotonic() - begin < 8
try:
    trainer.step(mean_of_squares, batch)
except paceline.Unavailable as error:
    assert "has not ended" in str(error), error
else:
    raise SystemExit("not refused")
leave.set()
for _ in range(500):
    if not trainer.group.busy:
        break
    time.sleep(0.01)
time.sleep(0.1)
assert all(parameter.grad is None for parameter in module.parameters())
trainer.step(mean_of_squares, batch)
print(same_gradients())
"""
    )
    assert output_of(program) == "True"


def test_a_program_may_end_without_closing_and_in_the_middle_of_a_step() -> None:
    assert output_of(SETUP + "print('end')") == "end"
    program = (
        SETUP
        + """
inside = threading.Event()
def endless(replica, part):
    loss = mean_of_squares(replica, part)
    inside.set()
    time.sleep(0.3)
    return loss
def loop():
    while True:
        trainer.step(endless, batch)
threading.Thread(target=loop, daemon=True).start()
inside.wait()
print("end")
"""
    )
    done = run_script(program, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr
    assert "Fatal" not in done.stderr


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_cannot_step_but_may_leave_in_every_way() -> None:
    program = (
        SETUP
        + """
import paceline, warnings
warnings.simplefilter("ignore")
faulthandler.cancel_dump_traceback_later()  # a child that ends would wait for its thread, which the fork did not copy
def child(what):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        if what == "step":
            try:
                trainer.step(mean_of_squares, batch)
            except paceline.Unavailable as error:
                os._exit(3 if "fork" in str(error) else 4)
        if what == "close":
            trainer.close()
        if what == "drop":
            globals().pop("trainer")
            gc.collect()
        if what == "exit":
            sys.exit(0)
    except Exception:
        os._exit(5)
    os._exit(0)
print([child(what) for what in ("step", "close", "drop", "exit", "nothing")], flush=True)
trainer.step(mean_of_squares, batch)
assert same_gradients()
"""
    )
    assert output_of(program, timeout=60) == "[3, 0, 0, 0, 0]"
