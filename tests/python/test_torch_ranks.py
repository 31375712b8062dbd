"""`DataParallel(group=)`: what all ranks know, and which arguments are refused."""

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
from rank_processes import Run, part_of, trainer_of
from torch_support import assert_same_gradients, classifier, classify, hosts, plain


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
