"""`DataParallel(group=)`: what all ranks know and must agree on, which arguments are refused, and other calls than one step with gradients that are sent early."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline import InvalidArgument
from paceline.torch import DataParallel
from paceline.torch._trainer.arguments import group_of
from rank_processes import Run, error_of, part_of, trainer_of
from test_torch_rank_sums import WARM, Deep, items, mine, small_buckets, squares
from torch_support import assert_same_gradients, classifier, classify, gradients, hosts, plain, worst_difference


def stopping(rank: int) -> Any:
    module, batch = classifier(16)
    seen = []
    with paceline.stop_on() as stop, trainer_of(module, rank) as trainer:
        for step in range(4):
            if step == 2 and rank == 1:
                stop.request()
            seen.append(trainer.stop_requested)
            trainer.step(classify, part_of(batch, rank, [8, 8]))
        seen.append(trainer.stop_requested)
        figures = trainer.report()["ranks"]
    return seen, figures


def test_all_ranks_know_of_a_stop_after_the_same_step(on_ranks: Run) -> None:
    for seen, figures in on_ranks(2, stopping):
        assert seen == [False, False, False, True, True]
        assert [rank["items"] for rank in figures] == [8, 8]
        assert all(rank["seconds"] > 0 for rank in figures)


def buffers(rank: int) -> Any:
    torch.manual_seed(rank)
    module: Any = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).double().eval()
    module[0].running_mean.uniform_()
    module[0].num_batches_tracked += rank + 5
    module.register_buffer("mask", torch.tensor([rank == 0, rank == 1]))
    with trainer_of(module, rank):
        return module.state_dict()


def test_all_ranks_begin_with_the_parameters_and_buffers_of_rank_0(on_ranks: Run) -> None:
    first, second = on_ranks(2, buffers)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["0.num_batches_tracked"] == 5
    assert first["mask"].tolist() == [True, False]


# Arguments


@pytest.mark.parametrize(
    ("group", "message"),
    [(None, "init_process_group"), ("world", "ProcessGroup is needed"), (-100, r"new_group\(\) returns on a member")],
)
def test_what_is_no_process_group_is_refused(group: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        DataParallel(nn.Linear(2, 2), hosts(1), group=group)


def test_modules_that_cannot_be_shared_are_refused() -> None:
    parallel = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(parallel)  # its own needs a process group
    group: Any = "any"
    with pytest.raises(InvalidArgument, match="sums gradients over the ranks, and so does the trainer"):
        DataParallel(nn.Sequential(nn.Linear(2, 2), parallel), hosts(1), group=group)
    with pytest.raises(InvalidArgument, match="parameters without a shape"):
        DataParallel(nn.Sequential(nn.LazyLinear(3)), hosts(1), group=group)


def test_a_batch_of_none_needs_a_group() -> None:
    with DataParallel(nn.Linear(2, 2), hosts(1)) as trainer, pytest.raises(InvalidArgument, match="no tensor with"):
        trainer.step(classify, None)


def test_devices_may_be_those_of_pytorch() -> None:
    with pytest.raises(InvalidArgument, match="there is no device 'cuda:91'"):  # and not: this is of another type
        group_of("DataParallel", [torch.device("cuda:91"), "host:0"], nn.Linear(2, 2))


def test_a_module_alone_is_trained_as_before() -> None:
    module, batch = classifier(16)
    wanted = plain(copy.deepcopy(module), classify, batch)[1]
    with DataParallel(module, hosts(2), group="alone") as trainer:
        trainer.step(classify, batch)
        assert "ranks" not in trainer.report()
    assert_same_gradients(module, wanted)


SIZES = [9, 8]
SCALE = 2.0**10


def calling(rank: int, how: str) -> Any:
    module, part = Deep(), mine(rank, SIZES)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    with small_buckets() as sent, trainer_of(module) as trainer:
        for _ in range(WARM):
            trainer.step(squares, part)
        module.zero_grad()
        sent.clear()
        if how == "loss":
            trainer.loss(squares, part).backward()
        elif how == "two losses":
            (trainer.loss(squares, part) + trainer.loss(squares, part)).backward()
        elif how == "scaler":
            trainer.step(squares, part, scaler=scaler)
        else:
            for _ in range(2):
                trainer.step(squares, part)
    return gradients(module), sent


@pytest.mark.parametrize(
    ("how", "times"), [("loss", 1), ("two losses", 2), ("scaler", SCALE), ("two steps that accumulate", 2)]
)
def test_gradients_are_those_of_the_whole_batch(on_ranks: Run, how: str, times: float) -> None:
    wanted = [None if one is None else times * one for one in plain(Deep(), squares, items())[1]]
    for found, sent in on_ranks(2, calling, how):
        assert worst_difference(found, wanted) < 1e-12 * times
        assert len(sent) >= len(wanted), "each layer is a bucket"


def disagreeing(rank: int, how: str) -> Any:
    module, part = Deep(), mine(rank, SIZES)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE * (1 + rank)) if how == "scale" else None
    with small_buckets() as sent, trainer_of(module) as trainer:
        for _ in range(WARM):
            trainer.step(squares, part)
        module.zero_grad()
        sent.clear()
        if how == "call" and rank:
            error = error_of(lambda: trainer.loss(squares, part))
        else:
            error = error_of(
                lambda: trainer.step(squares, part, total=17 + rank if how == "total" else None, scaler=scaler)
            )
        sums, left = list(sent), gradients(module)
        trainer.step(squares, part)
    return *error, sums, left, gradients(module)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("call", "rank 1 has called something else than rank 0"),
        ("total", "rank 1 has total=18.0, rank 0 has total=17.0"),
        ("scale", "rank 1 has"),
    ],
)
def test_what_ranks_do_not_agree_on_is_told_before_anything_counts(on_ranks: Run, how: str, message: str) -> None:
    wanted = plain(Deep(), squares, items())[1]
    for kind, text, sums, left, found in on_ranks(2, disagreeing, how):
        assert kind is InvalidArgument
        assert message in text
        assert sums == []
        assert left == [None] * len(wanted)
        assert worst_difference(found, wanted) < 1e-12
