"""The thread that writes a save: the values of the call, a second save, errors, the end of the program."""

from __future__ import annotations

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
