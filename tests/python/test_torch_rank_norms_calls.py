"""``batch_norm="synchronised"`` with ``group=``: what a rank may do alone, what is refused, which processes are the ranks, and ranks that are lost."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from norm_cases import ITEMS, Synchronised, case, rows
from paceline import Cancelled, DeviceLost, Error, InvalidArgument, Timeout
from paceline.torch import DataParallel
from paceline.torch._run import rank_rounds
from pool_support import soon
from rank_processes import DEAD, Processes, Run, error_of, part_of
from test_torch_rank_norms import WEIGHT, Found, assert_like_one_device, on_one_device, single, stepping, trainer_of
from test_torch_reducer import Alone
from torch_support import classify, gradients, hosts

# Calls that ranks do not make together


def alone(rank: int) -> Any:
    module, (x, y) = case("rows")
    before = copy.deepcopy(module.state_dict())
    with trainer_of(module, 2) as trainer:
        if rank:
            return error_of(lambda: trainer.step(classify, (x[:1], y[:1])))
        refused = error_of(lambda: trainer.predict(x))
        report = trainer.check(classify, (x, y))
        agree = trainer.verify_replicas(classify, (x, y)).agree
        size = trainer.find_batch_size(classify, lambda n: case("rows", n)[1], smallest=4, largest=4, seconds=0.0)
        kept = all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        module.eval()
        predicted = trainer.predict(x)
        with torch.no_grad():
            same = torch.allclose(predicted, module(x), rtol=1e-12) and torch.allclose(
                predicted, trainer(x), rtol=1e-12
            )
        module.train()
        trainer.step(classify, (x[1:], y[1:]))
        return refused, report.exact, agree, list(size.seconds), kept, same


def test_what_a_rank_does_alone_meets_nobody_and_does_not_change_running_statistics(on_ranks: Run) -> None:
    (refused, *rest), error = on_ranks(2, alone)
    assert refused[0] is InvalidArgument
    assert "predict: 1 is in training mode" in refused[1]
    assert rest == [True, True, [4], True, True]
    assert error == (type(None), "")


def predicting(rank: int) -> Any:
    module, (x, _) = case("rows", track_running_stats=False)
    with trainer_of(module, 2) as trainer:
        return torch.allclose(trainer.predict(x[rank:]), module(x[rank:]), rtol=1e-12)


def test_a_prediction_without_running_statistics_is_over_its_own_batch(on_ranks: Run) -> None:
    assert on_ranks(2, predicting) == [True, True]


# What does not go together


def disagreeing(rank: int, how: str) -> Any:
    module: Any
    module, batch = case("rows", 12)
    part = part_of(batch, rank, [6, 6])
    options: Any = {}
    if how == "batch_norm" and rank:
        options = {"batch_norm": "apart"}
    if how == "sync":
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    if how == "prove":
        options = {"prove": "raise"}
    try:
        trainer = trainer_of(module, **options)
    except InvalidArgument as refused:
        return type(refused), str(refused)
    with trainer:
        if how == "modes" and rank:
            module[1].eval()
        loss_fn = torch.compile(classify) if how == "compile" else classify
        call = trainer.loss if how == "call" and rank else trainer.step

        def weight(_: Any) -> torch.Tensor:
            return torch.ones(5 if rank and how == "weight" else 6)

        error = error_of(lambda: call(loss_fn, part, weight=weight))
        module.train()
        trainer.step(classify, part)
        return error


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("batch_norm", "rank 1 has other normalisations with the statistics of the batch than rank 0"),
        ("modes", "rank 1 has other normalisations with the statistics of the batch than rank 0"),
        ("call", "rank 1 has called something else than rank 0"),
        ("compile", "together with torch.compile"),
        ("sync", "1 is a SyncBatchNorm, which meets other processes by itself"),
        ("weight", "raised on rank 1; no rank has committed anything"),
        ("prove", "together with group= and prove='raise'"),
    ],
)
def test_what_ranks_do_not_agree_on_or_cannot_do_is_an_error_on_all_before_anything_waits(
    on_ranks: Run, how: str, said: str
) -> None:
    for rank, (kind, text) in enumerate(on_ranks(2, disagreeing, how)):
        if how == "weight" and rank == 0:  # fails before it has told anything
            assert kind is Error
            assert "rank 1: InvalidArgument: weight" in text
        else:
            assert kind is InvalidArgument
            assert said in text


def test_a_reducer_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="together with reducer=, whose ranks come and go"):
        DataParallel(rows(), hosts(2), reducer=Alone(), **Synchronised)


# Groups


def some_of_them(rank: int) -> Any:
    group = dist.new_group([0, 2])
    if rank == 1:
        return []
    module, batch = case("rows")
    part = part_of(batch, rank // 2, [5, 8])
    known = len(rank_rounds._groups)
    with trainer_of(module, group=group) as trainer, trainer_of(rows().double(), group=group):
        assert len(rank_rounds._groups) == known + 1
        return stepping(module, lambda: trainer.step(classify, part))


def test_ranks_may_be_some_of_all_processes_and_two_trainers_have_one_group(on_ranks: Run) -> None:
    module, batch = case("rows", ITEMS)
    first, _, second = on_ranks(3, some_of_them)
    assert_like_one_device([first, second], on_one_device(module, classify, batch))


def waiting(rank: int) -> Any:
    module, batch = case("rows", 12)
    part = part_of(batch, rank, [6, 6])

    def loss_fn(replica: Any, b: Any) -> Any:
        hidden = replica[:3](b[0])
        if rank:
            time.sleep(0.4)
        return nn.functional.cross_entropy(replica[3:](hidden), b[1])

    figures = []
    with trainer_of(module, 2) as trainer:
        for step in range(4):
            if rank and step % 2:
                time.sleep(0.4)  # before the ranks begin together
            trainer.step(loss_fn, part)
            figures.append([one["seconds"] for one in trainer.report()["ranks"]])
    return figures


@pytest.mark.alone
def test_what_a_rank_waits_for_others_in_norms_is_not_its_own_work(on_ranks: Run) -> None:
    for figures in on_ranks(2, waiting):
        assert min(rank_1 for _, rank_1 in figures) > 0.3
        assert max(rank_0 for rank_0, _ in figures) < 0.25


def beginning_to_train(rank: int) -> Found:
    """The norms train from after the batch was given on. All items of rank 1 are without weight."""
    module: Any
    module, batch = case("rows", 10)
    x, y, weight = part_of((*batch, WEIGHT), rank, [6, 4])
    module.eval()
    with trainer_of(module) as trainer, trainer.batch((x, y), weight=weight) as whole:
        whole.run(lambda m, b: b.backward(single(m, b.data)))

        def run() -> torch.Tensor:
            module.train()
            return whole.run(lambda m, b: b.backward(single(m, b.data)))

        return stepping(module, run, 1)


def test_a_run_looks_at_the_module_as_it_is_then(on_ranks: Run) -> None:
    module, batch = case("rows", 10)
    wanted = on_one_device(module, lambda m, b: (single(m, b) * WEIGHT).sum() / WEIGHT.sum(), batch, 1)
    assert_like_one_device(on_ranks(2, beginning_to_train), wanted)


def between(module: Any, part: Any, call: Any) -> Any:
    """The loss, with a call between the two norms."""
    hidden = module[:3](part[0])
    call()
    return nn.functional.cross_entropy(module[3:](hidden), part[1])


def losing(rank: int, how: str, devices: int) -> Any:
    """Rank 1 dies, or never comes back."""
    module, batch = case("rows", 12)
    part = part_of(batch, rank, [6, 6])
    with trainer_of(module, devices) as trainer:
        trainer.step(classify, part)
        before = gradients(module)

        def leave() -> None:
            if rank and how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if rank:
                threading.Event().wait(12)

        errors = []
        for _ in range(1 if rank else 2):
            try:
                trainer.step(lambda m, b: between(m, b, leave), part)
            except Error as error:
                errors.append((type(error), error.device, str(error)))
        return errors, all(torch.equal(a, b) for a, b in zip(before, gradients(module), strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_rank_that_dies_in_the_middle_is_named(on_ranks: Run, devices: int) -> None:
    (errors, kept), dead = on_ranks(2, losing, "dies", devices)
    assert dead == DEAD
    assert [error[:2] for error in errors] == [(DeviceLost, "rank 1")] * 2
    assert all("rank 1 is gone" in text for _, _, text in errors)
    assert kept


def test_a_rank_that_does_not_come_is_a_timeout(processes: Processes, tmp_path: Path) -> None:
    (errors, kept), (others, _) = processes.results(2, tmp_path / "store", losing, "hangs", 1, seconds=6)
    assert [error[:2] for error in errors] == [(Timeout, "rank 1"), (DeviceLost, "rank 1")]
    assert all("rank 1 did not answer in time" in text for _, _, text in errors)
    assert kept
    assert others[0][0] in (DeviceLost, Timeout)


def leaving(rank: int, how: str, devices: int, told: Path) -> Any:
    """A rank is interrupted in the middle of a step: the one that others wait for, or one that waits."""
    module, batch = case("rows", 12)
    part = part_of(batch, rank, [6, 6])
    before = [one.clone() for one in module.buffers()]
    left, first = threading.Event(), threading.Lock()
    with trainer_of(module, devices) as trainer:
        work = trainer._works.steps.step_loop

        def interrupt() -> None:
            if how == "cancelled":
                work.cancel()
            else:
                os.kill(os.getpid(), signal.SIGINT)
            told.touch()

        def call() -> None:
            if rank and how == "waits":  # rank 0 is interrupted while it waits for this one
                assert soon(told.exists)
                left.wait(1.0)
            elif rank:
                if first.acquire(blocking=False):  # a second Ctrl-C would meet what handles the first
                    interrupt()
                left.wait(0.5)

        signal.signal(signal.SIGINT, signal.default_int_handler)
        if how == "waits" and not rank:
            threading.Timer(0.5, interrupt).start()
        try:
            error = error_of(lambda: trainer.step(lambda m, b: between(m, b, call), part))
        except KeyboardInterrupt as caught:
            error = type(caught), ""
        kept = gradients(module) == [None] * len(gradients(module)) and all(map(torch.equal, before, module.buffers()))
        return error, kept, stepping(module, lambda: trainer.step(classify, part))


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("how", ["cancelled", "interrupted", "waits"])
def test_a_rank_that_is_interrupted_leaves_nobody_waiting(
    on_ranks: Run, tmp_path: Path, how: str, devices: int
) -> None:
    module, batch = case("rows", 12)
    (first, kept, found), (second, kept_too, found_too) = on_ranks(2, leaving, how, devices, tmp_path / "told")
    interrupted, (other, text) = (first, second) if how == "waits" else (second, first)
    assert interrupted[0] is (Cancelled if how == "cancelled" else KeyboardInterrupt)
    assert other is Error
    assert f"rank {0 if how == 'waits' else 1}: {interrupted[0].__name__}" in text
    assert kept
    assert kept_too
    assert_like_one_device([found, found_too], on_one_device(module, classify, batch))
