"""Beginning and end: workers go when the trainer does, and no way to leave a program hangs or crashes it."""

from __future__ import annotations

import sys

import pytest

from torch_support import output_of, run_script

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")


@LINUX
@pytest.mark.parametrize("steps", [0, 3])
def test_dropping_a_trainer_without_close_ends_its_threads(steps: int) -> None:
    program = f"""
    before = thread_count()
    trainer = DataParallel(module, ["host:0", "host:1"])
    for _ in range({steps}):
        trainer.step(mean_of_squares, batch)
    assert thread_count(before + 2) == before + 2
    gc.disable()
    del trainer
    print(thread_count(before) - before)
    """
    assert output_of(program) == "0"


@LINUX
def test_a_dropped_trainer_in_a_cycle_ends_its_threads_when_it_is_collected() -> None:
    program = """
    before = thread_count()
    def use():
        trainer = DataParallel(module, ["host:0", "host:1"])
        holder = [trainer]
        holder.append(holder)
        try:
            trainer.step(lambda m, b: 1 / 0, batch)
        except ZeroDivisionError as error:
            trainer.kept = error          # the traceback refers to the trainer in turn
        trainer.step(mean_of_squares, batch)
    use()
    gc.collect()
    print(thread_count(before) - before)
    """
    assert output_of(program) == "0"


@LINUX
def test_collection_on_a_worker_ends_the_trainer_too() -> None:
    """The garbage collector runs wherever it likes, also on a thread of the trainer that it collects."""
    program = """
    before = thread_count()
    other = DataParallel(module, ["host:0", "host:1"], balance="even")
    def make():
        trainer = DataParallel(module, ["host:0", "host:1"])
        trainer.step(mean_of_squares, batch)
        trainer.cycle = trainer
    make()
    def collect(replica, part):
        gc.collect()
        return mean_of_squares(replica, part)
    gc.disable()
    other.step(collect, batch)
    other.close()
    print(thread_count(before) - before)
    """
    assert output_of(program) == "0"


def test_a_program_may_end_without_closing_the_trainer() -> None:
    program = """
    trainer = DataParallel(module, ["host:0", "host:1"])
    trainer.step(mean_of_squares, batch)
    print("end")
    """
    assert output_of(program) == "end"


def test_a_program_may_end_with_the_trainer_held_everywhere() -> None:
    program = """
    import atexit, builtins, threading
    builtins.trainer = trainer = DataParallel(module, ["host:0", "host:1"])
    local = threading.local()
    def loss_fn(replica, part):
        local.trainer = builtins.trainer
        return mean_of_squares(replica, part)
    trainer.step(loss_fn, batch)
    module.trainer = [trainer]
    sys.trainer = trainer
    print("end")
    """
    assert output_of(program) == "end"


def test_a_program_may_end_in_the_middle_of_a_step_of_a_daemon_thread() -> None:
    program = """
    inside = threading.Event()
    def endless(replica, part):
        inside.set()
        time.sleep(0.3)
        return mean_of_squares(replica, part)
    trainer = DataParallel(module, ["host:0", "host:1"], balance="even", micro_batch=1)
    def loop():
        while True:
            trainer.step(endless, batch)
    threading.Thread(target=loop, daemon=True).start()
    inside.wait()
    print("end")
    """
    done = run_script(program, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr
    assert "Fatal" not in done.stderr


def test_a_program_may_end_while_a_worker_computes_without_a_pause() -> None:
    program = """
    inside = threading.Event()
    def busy(replica, part):
        inside.set()
        for _ in range(10 ** 9):
            replica(part)
        return mean_of_squares(replica, part)
    trainer = DataParallel(module, ["host:0", "host:1"])
    def once():
        try:
            trainer.step(busy, batch)
        except Exception:
            pass
    threading.Thread(target=once, daemon=True).start()
    inside.wait()
    print("end", flush=True)
    """
    done = run_script(program, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr
    assert "Fatal" not in done.stderr


def test_a_program_may_end_while_a_worker_sleeps_on() -> None:
    program = """
    inside = threading.Event()
    def sleep(replica, part):
        inside.set()
        time.sleep(1000)
    trainer = DataParallel(module, ["host:0", "host:1"], balance="even")
    threading.Thread(target=trainer.step, args=(sleep, batch), daemon=True).start()
    inside.wait()
    print("end", flush=True)
    """
    done = run_script(program, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr
    assert "Fatal" not in done.stderr


def test_an_exception_that_nobody_catches_ends_the_program_with_its_traceback() -> None:
    program = """
    trainer = DataParallel(module, ["host:0", "host:1"], balance="even")
    def fail(replica, part):
        raise LookupError("not caught")
    trainer.step(fail, batch)
    """
    done = run_script(program)
    assert done.returncode == 1
    assert done.stderr.count("LookupError: not caught") == 1
    assert "raised on host:" in done.stderr
    assert "in fail" in done.stderr


def test_sys_exit_in_the_middle_of_an_open_trainer_keeps_the_status() -> None:
    program = """
    trainer = DataParallel(module, ["host:0", "host:1"])
    trainer.step(mean_of_squares, batch)
    sys.exit(7)
    """
    done = run_script(program)
    assert (done.returncode, done.stderr) == (7, "")


FORK = """
import warnings
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
from torch.utils.data import DataLoader, Dataset
trainer = DataParallel(module, ["host:0", "host:1"])
trainer.step(mean_of_squares, batch)
owner = os.getpid()
faulthandler.cancel_dump_traceback_later()  # a child that ends would wait for its thread, which the fork did not copy
"""


@LINUX
def test_data_loader_workers_are_forked_while_a_trainer_is_open() -> None:
    program = (
        FORK
        + """
class Rows(Dataset):
    def __init__(self):
        self.trainer = trainer
    def __len__(self):
        return 16
    def __getitem__(self, index):
        assert os.getpid() != owner
        if index % 4 == 0:                  # the child drops what it has of the trainer
            self.trainer = None
            globals().pop("trainer", None)
            gc.collect()
        return torch.full((4,), float(index), dtype=torch.double)

for epoch in range(2):
    seen = []
    for part in DataLoader(Rows(), batch_size=4, num_workers=2, multiprocessing_context="fork"):
        trainer.step(mean_of_squares, part)
        seen += part[:, 0].tolist()
    assert seen == list(range(16)), seen
print(sum(trainer.shares.values()))
"""
    )
    assert output_of(program, timeout=90) == "4"


@LINUX
def test_a_forked_child_cannot_step_but_may_leave_in_every_way() -> None:
    program = (
        FORK
        + """
import paceline
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
"""
    )
    assert output_of(program, timeout=60) == "[3, 0, 0, 0, 0]"
