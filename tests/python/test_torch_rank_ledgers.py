"""The ledger of ranks in a file: each line is there when it is decided, whatever happens then."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Error
from paceline.balance import replay
from paceline.torch import BalancedRanks, DataParallel
from rank_processes import DEAD, Run, error_of, trainer_of
from test_torch_balanced_ranks_use import BATCH as FEW
from test_torch_balanced_ranks_use import loader_of as numbered
from test_torch_balanced_ranks_use import parallel, trained
from test_torch_global_batches import BATCH, ITEMS, LENGTHS, loader_of, loss_of
from torch_support import classifier, hosts


class OfATrainer:
    """Steps of `DataParallel` with a `batch_sampler`."""

    def __init__(self, **options: Any) -> None:
        self._trainer = trainer_of(classifier(1)[0])
        self._sampler = self._trainer.batch_sampler(LENGTHS, BATCH, **options)
        self._batches = self._endless()

    def _endless(self) -> Iterator[Any]:
        loader = loader_of(self._sampler)
        while True:
            yield from self._sampler.batches(loader)

    def step(self) -> None:
        self._trainer.step(loss_of, next(self._batches))
        self._trainer.module.zero_grad()

    def text(self) -> str:
        return self._trainer.rank_ledger()

    def close(self) -> None:
        self._trainer.close()


class OfBalancedRanks:
    """Steps of DDP with `BalancedRanks`."""

    def __init__(self, **options: Any) -> None:
        self._ranks = BalancedRanks(40, FEW, **options)
        self._model = parallel()
        self._batches = self._endless()

    def _endless(self) -> Iterator[Any]:
        loader = numbered(self._ranks)
        while True:
            yield from self._ranks.batches(loader)

    def step(self) -> None:
        trained(self._ranks, self._model, next(self._batches))

    def text(self) -> str:
        return self._ranks.ledger()

    def close(self) -> None:
        pass


KINDS: dict[str, Any] = {"trainer": OfATrainer, "ranks": OfBalancedRanks}
EACH = pytest.mark.parametrize("kind", KINDS)


def growing(rank: int, kind: str, path: Path) -> Any:
    """After each step: how many records the file has."""
    training = KINDS[kind](ledger=path if rank == 0 else False)
    records = []
    for _ in range(12):
        training.step()
        records.append(replay(path).records if rank == 0 else 0)
    same = rank > 0 or training.text() == path.read_text()
    training.close()
    return records, same


@EACH
def test_each_line_is_in_the_file_when_it_is_decided(on_ranks: Run, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "ranks.jsonl"
    path.write_text("an older file")
    (records, same), (_, also) = on_ranks(2, growing, kind, path)
    assert same
    assert also
    assert records == sorted(records)
    assert records[-1] >= 5
    assert len(set(records)) > 4, "lines came together"
    found = replay(path)
    assert not found.mismatches
    assert not found.cut_off


def killed(rank: int, kind: str, path: Path) -> Any:
    training = KINDS[kind](ledger=os.fspath(path))
    for _ in range(9):
        training.step()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(training.step)


@EACH
def test_the_ledger_of_a_process_that_was_killed_replays(on_ranks: Run, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "ranks.jsonl"
    dead, (error, _) = on_ranks(2, killed, kind, path)
    assert dead is DEAD
    assert error is not type(None)
    found = replay(path)
    assert found.records >= 2
    assert not found.mismatches
    path.write_text(path.read_text()[:-10])  # as if it had been killed in the middle of the last line
    cut = replay(path)
    assert cut.cut_off
    assert not cut.mismatches
    assert cut.plans + cut.records == found.plans + found.records - 1


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """What a full disk does to a process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def full(rank: int, kind: str, path: Path, raises: bool) -> Any:
    """Train on while the ledger cannot grow. `raises`: whether warnings are errors."""
    training = KINDS[kind](ledger=path)
    done, errors = 0, []
    with warnings.catch_warnings(record=not raises) as caught:
        warnings.simplefilter("error" if raises else "always")
        with files_of_at_most(1500) if rank == 0 else contextlib.nullcontext():
            for _ in range(16):
                kind_of, text = error_of(training.step)
                done += kind_of is type(None)
                if text:
                    errors.append((kind_of, text))
    training.close()
    return done, errors, [(one.category, str(one.message)) for one in caught or [] if "ledger" in str(one.message)]


@EACH
def test_a_full_disk_is_warned_of_once_and_training_goes_on(on_ranks: Run, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "ranks.jsonl"
    (done, errors, warned), (also, others, theirs) = on_ranks(2, full, kind, path, False)
    assert (done, also) == (16, 16)
    assert errors == others == []
    assert [category for category, _ in warned] == [RuntimeWarning]
    assert "What was written can be replayed" in warned[0][1]
    assert theirs == []
    assert path.stat().st_size == 1500
    found = replay(path)
    assert found.cut_off
    assert found.plans > 0
    assert not found.mismatches


def test_a_warning_that_is_an_error_is_one_of_all_ranks_and_the_next_step_works(on_ranks: Run, tmp_path: Path) -> None:
    path = tmp_path / "ranks.jsonl"
    (done, errors, _), (also, others, _) = on_ranks(2, full, "trainer", path, True)
    assert (done, also) == (15, 15)
    assert [kind for kind, _ in errors] == [RuntimeWarning]
    assert [kind for kind, _ in others] == [Error]
    assert "rank 0: RuntimeWarning: a line of the ledger" in others[0][1]


def test_without_ranks_there_is_no_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ranks.jsonl"
    with DataParallel(nn.Linear(2, 2), hosts(1)) as trainer:
        trainer.batch_sampler(ITEMS, BATCH, ledger=path)
        _, text = error_of(trainer.rank_ledger)
        assert "only rank 0 of a group has one" in text
        _, text = error_of(lambda: trainer.batch_sampler(ITEMS, BATCH, ledger=torch.ones(1)))  # type: ignore[arg-type]
        assert "batch_sampler: ledger is tensor" in text
    assert not path.exists()
