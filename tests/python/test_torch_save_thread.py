"""The thread that writes a save: the values of the call, a second save, errors, the end of the program."""

from __future__ import annotations

import os
import re
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Timeout
from paceline.torch import DataParallel, PendingSave
from paceline.torch._save.folder import commit
from paceline.torch._trainer import saving
from save_cases import batches, network, states, train
from torch_support import TWO, classifier, classify, output_of, run_script


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Saves begin to be written when the event is set."""
    go = threading.Event()

    def late(*args: Any) -> Path:
        assert go.wait(60)
        return commit(*args)

    monkeypatch.setattr(saving, "commit", late)
    try:
        yield go
    finally:
        go.set()


def test_a_save_has_the_values_of_the_call_while_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = network()
    with DataParallel(module, TWO) as trainer, held(monkeypatch) as go:
        optimizer = trainer.optimizer(torch.optim.Adam, lr=0.1)
        train(trainer, optimizer, batches(1))
        before, extra = states(module, optimizer), {"list": [1], "tensor": torch.zeros(3)}
        pending = trainer.save_async(tmp_path, optimizer=optimizer, extra=extra)
        extra["list"].append(2)  # type: ignore[attr-defined]
        extra["tensor"] += 1  # type: ignore[operator]
        train(trainer, optimizer, batches(3))
        assert states(module, optimizer) != before
        assert not pending.done
        assert "being written" in repr(pending)
        with pytest.raises(Timeout, match=r"still being written after 0\.01 s"):
            pending.wait(0.01)
        assert list(tmp_path.iterdir()) == []
        go.set()
        assert pending.wait() == tmp_path / "save-00000001"
        assert "save-00000001" in repr(pending)
        found = trainer.load(tmp_path, optimizer=optimizer)
        assert found["list"] == [1]
        assert found["tensor"].tolist() == [0, 0, 0]
        assert states(module, optimizer) == before


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = classifier()
    with DataParallel(module, TWO) as trainer, held(monkeypatch) as go:
        first = trainer.save_async(tmp_path, extra=1)
        done: list[bool] = []
        waiter = threading.Thread(
            target=lambda: done.append(trainer.save_async(tmp_path, extra=2) is not first and first.done)
        )
        waiter.start()
        waiter.join(0.2)
        assert done == []
        go.set()
        waiter.join()
        assert done == [True]
        assert trainer.load(tmp_path) == 2


@contextmanager
def full_disk() -> Iterator[None]:
    """No file can become larger than 2 KiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def failed_save(trainer: Any, path: Path) -> PendingSave:
    with full_disk():
        pending: PendingSave = trainer.save_async(path, extra=torch.zeros(1000))
        pending.join()
    return pending


def test_an_error_of_the_thread_is_raised_once_by_the_next_call(tmp_path: Path) -> None:
    module, batch = classifier()
    with DataParallel(module, TWO) as trainer:
        trainer.save_async(tmp_path, extra="good").wait()
        assert "failed" in repr(failed_save(trainer, tmp_path))
        trainer.step(classify, batch)
        with pytest.raises(OSError, match="File too large"):
            trainer.save_async(tmp_path)
        assert trainer.load(tmp_path) == "good"
        pending = failed_save(trainer, tmp_path)
        for _ in range(2):
            with pytest.raises(OSError, match="File too large"):
                pending.wait()
        trainer.save_async(tmp_path, extra="better")
        assert trainer.load(tmp_path) == "better"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["save-00000001", "save-00000002"]


def test_an_error_of_the_thread_is_raised_by_close_but_hides_no_other(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="File too large"), DataParallel(classifier()[0], TWO) as trainer:
        failed_save(trainer, tmp_path)
    trainer.close()
    pending = []

    def fails() -> None:
        with DataParallel(classifier()[0], TWO) as trainer:
            pending.append(failed_save(trainer, tmp_path))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    with pytest.raises(OSError, match="File too large"):
        pending[0].wait()


def test_an_error_that_nobody_asks_for_is_a_warning(tmp_path: Path) -> None:
    trainer = DataParallel(classifier()[0], TWO)
    failed_save(trainer, tmp_path)
    with pytest.warns(RuntimeWarning, match="a save could not be written: OSError"):
        del trainer


def test_a_program_that_ends_waits_for_its_save(tmp_path: Path) -> None:
    program = f"""
    trainer = DataParallel(nn.Linear(2000, 1000), ["host:0", "host:1"])
    trainer.save_async({str(tmp_path)!r}, extra="all")
    print("end")
    """
    assert output_of(program) == "end"
    with DataParallel(nn.Linear(2000, 1000), TWO) as trainer:
        assert trainer.load(tmp_path) == "all"


def test_a_program_that_ends_tells_of_an_error(tmp_path: Path) -> None:
    program = f"""
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))
    trainer = DataParallel(nn.Linear(2000, 1000), ["host:0", "host:1"])
    trainer.save_async({str(tmp_path)!r}, extra="all")
    """
    done = run_script(program)
    assert done.returncode == 0
    assert "a save could not be written: OSError(27, 'File too large')" in done.stderr


# A process that is killed at any moment while it trains and saves.


# The moments of a kill are random, so more of them find more: PACELINE_KILLS=50 pytest -k kill
KILLS = int(os.environ.get("PACELINE_KILLS", "10"))

# One process imports PyTorch and forks the ones that are killed. It has no thread but its own until the end.
KILLED = """
import ctypes, os, random, signal, sys, time, warnings
os.environ |= {{"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}}  # NumPy's threads
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
from torch import nn
from paceline.torch import DataParallel
import save_cases as t
from torch_support import TWO

root, log, kills, seed = {root!r}, {log!r}, {kills}, random.randrange(10**6)
warnings.simplefilter("error")  # a save that is not complete would be a warning

def note(*words):
    line = " ".join(map(str, words)) + "\\n"
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)

def run(only_load):
    module = nn.Sequential(nn.Linear(6, 2000), nn.Dropout(0.5), nn.Linear(2000, 3)).double()
    t.seeded(module)
    with DataParallel(module, TWO, balance="even") as trainer:
        optimizer = trainer.optimizer(torch.optim.Adam, lr=0.01)
        try:
            step = trainer.load(root, optimizer=optimizer)["step"]
        except FileNotFoundError:
            step = 0
        note("loaded", step, t.states(module, optimizer))
        while not only_load:
            note("state", step, t.states(module, optimizer))
            trainer.save_async(root, optimizer=optimizer, extra={{"step": step}}, keep=2)
            note("begun", step)
            t.train(trainer, optimizer, t.batches(1))
            step += 1

def lines():
    return Path(log).read_text().splitlines() if os.path.exists(log) else []

# What PyTorch imports at the first step of an optimizer takes a second, so it is not left to every child.
weight = nn.Parameter(torch.ones(2))
weight.grad = torch.ones(2)
torch.optim.Adam([weight]).step()
assert len(os.listdir("/proc/self/task")) == 1, "only a process with one thread may fork"
random.seed(seed)
for kill in range(kills):
    seen = len(lines())
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the parent, whatever happens to it
        try:
            run(False)
        finally:
            os._exit(1)
    wanted = seen + 1 + random.randrange(10)
    while len(lines()) < wanted:
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child has failed by itself"
        time.sleep(0.002)
    time.sleep(random.uniform(0.0, 0.06))
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, "the child has failed by itself"
    note("killed", kill)
run(True)
print("seed", seed)
"""


def test_a_process_killed_at_any_moment_loses_at_most_the_steps_since_the_last_commit(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = KILLED.format(tests=str(Path(__file__).parent), root=str(tmp_path / "saves"), log=str(log), kills=KILLS)
    done = run_script(program, timeout=60 + 5 * KILLS, preamble=False, fork=False)
    assert done.returncode == 0, done.stdout + done.stderr
    digests: dict[str, str] = {}
    loaded, committed, reached, kills = 0, 0, 0, 0
    for line in log.read_text().splitlines():
        word, *rest = line.split()
        step = int(rest[0])
        if word == "killed":
            kills += 1
        elif word == "begun":  # then the save before is complete
            committed = max(loaded, step - 1)
        else:
            assert digests.setdefault(rest[0], rest[1]) == rest[1], f"step {step} has other bits; {done.stdout}"
            if word == "loaded":
                assert committed <= step <= reached, done.stdout
                loaded = committed = step
            reached = step
    assert kills == KILLS
    assert loaded > 0
    assert re.fullmatch(r"seed \d+", done.stdout.strip())
