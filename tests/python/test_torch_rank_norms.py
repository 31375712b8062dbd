"""``batch_norm="synchronised"`` with ``group=``: statistics over the batch of all devices of all ranks, compared with one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from norm_cases import Synchronised, case, rows
from paceline import InvalidArgument
from paceline.torch import DataParallel
from rank_processes import Run, error_of, part_of
from test_torch_synchronised_waiting import Failing
from torch_support import classify, gradients, hosts, worst_difference

STEPS = 3


def trainer_of(module: nn.Module, devices: int = 1, **options: Any) -> DataParallel:
    given: Any = {"group": dist.group.WORLD, **Synchronised, **options}
    return DataParallel(module, hosts(devices), **given)


def recomputed(module: Any, part: Any) -> Any:
    hidden = checkpoint(module[:3], module[0].weight.sum() * 0 + part[0], use_reentrant=False)
    return nn.functional.cross_entropy(module[3:](hidden), part[1])


def recomputed_in_backward(module: Any, part: Any) -> Any:
    hidden = checkpoint(module[:3], module[0].weight.sum() * 0 + part[0], use_reentrant=True)
    return nn.functional.cross_entropy(module[3:](hidden), part[1])


def single(module: Any, part: Any) -> Any:
    return nn.functional.cross_entropy(module(part[0]), part[1], reduction="none")


Found = list[tuple[float, Any, list[torch.Tensor]]]


def noted(module: nn.Module, loss: torch.Tensor) -> Any:
    return loss.item(), gradients(module), [one.clone() for one in module.buffers()]


def stepping(module: nn.Module, step: Callable[[], torch.Tensor], steps: int = STEPS) -> Found:
    """The loss, the gradients and the running statistics of each step."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        found.append(noted(module, step()))
        optimizer.step()
    return found


def training(rank: int, kind: str, options: Any, sizes: list[int], devices: list[int], call: str, given: Any) -> Found:
    module, batch = case(kind, sum(sizes), **options)
    part = part_of(batch, rank, sizes)
    with trainer_of(module, devices[rank], **given.get(rank, {})) as trainer:

        def step() -> torch.Tensor:
            if call == "step":
                return trainer.step(classify, part)
            if call == "loss":
                loss = trainer.loss(classify, part)
                loss.backward()
                return loss.detach()
            with trainer.batch(part) as global_batch:
                return global_batch.run(lambda m, b: b.backward(classify(m, b.data)))

        return stepping(module, step)


def on_one_device(module: nn.Module, loss_fn: Any, batch: Any, steps: int = STEPS) -> Found:
    def step() -> torch.Tensor:
        loss: torch.Tensor = loss_fn(module, batch)
        loss.backward()
        return loss.detach()

    return stepping(module, step, steps)


def assert_like_one_device(ranks: list[Found], wanted: Found) -> None:
    """Every rank has the losses, gradients and running statistics of one device, and all have the same bits."""
    for found in ranks:
        assert len(found) == len(wanted)
        for (loss, gradient, buffers), (loss_, gradient_, buffers_) in zip(found, wanted, strict=True):
            assert loss == pytest.approx(loss_, rel=1e-12)
            assert worst_difference(gradient, gradient_) < 1e-11
            assert worst_difference(buffers, buffers_) < 1e-12
    for found in ranks[1:]:
        for (_, gradient, buffers), (_, gradient_, buffers_) in zip(found, ranks[0], strict=True):
            assert all(a is b is None or torch.equal(a, b) for a, b in zip(gradient, gradient_, strict=True))
            assert all(map(torch.equal, buffers, buffers_))


@pytest.mark.parametrize(
    ("kind", "options", "sizes", "devices", "call", "given"),
    [
        ("rows", {}, [9, 4], [1, 1], "step", {}),
        ("images", {}, [4, 9], [2, 2], "step", {0: {"balance": [3, 1]}, 1: {"balance": [1, 2]}}),
        ("images", {}, [4, 9], [1, 2], "loss", {}),
        ("rows", {"momentum": None}, [1, 12], [1, 3], "step", {}),
        ("rows", {"affine": False}, [7, 6], [1, 2], "batch", {1: {"balance": [1, 0]}}),
        ("images", {"track_running_stats": False}, [7, 6], [2, 1], "step", {}),
        ("rows", {}, [5, 1, 7], [2, 1, 1], "step", {}),
    ],
)
def test_loss_gradients_and_running_statistics_are_those_of_one_device(
    on_ranks: Run, kind: str, options: Any, sizes: list[int], devices: list[int], call: str, given: Any
) -> None:
    module, batch = case(kind, sum(sizes), **options)
    found = on_ranks(len(sizes), training, kind, options, sizes, devices, call, given)
    assert_like_one_device(found, on_one_device(module, classify, batch))


def training_on(rank: int, loss_fn: Any, devices: int) -> Found:
    module, batch = case("rows")
    part = part_of(batch, rank, [5, 8])
    with trainer_of(module, devices) as trainer:
        return stepping(module, lambda: trainer.step(loss_fn, part))


@pytest.mark.parametrize("loss_fn", [recomputed, recomputed_in_backward])
def test_activation_checkpointing_meets_again(on_ranks: Run, loss_fn: Any) -> None:
    module, batch = case("rows")
    assert_like_one_device(on_ranks(2, training_on, loss_fn, 2), on_one_device(module, loss_fn, batch))


# Failures


def failing(rank: int, where: str, devices: int) -> Any:
    module, (x, y) = case("rows", 12)
    bad = x.clone()
    bad[-1] = 1e9  # on the last device of rank 1
    before = copy.deepcopy(module.state_dict())
    with trainer_of(module, devices) as trainer:
        errors = [error_of(lambda: trainer.step(Failing(where), part_of((bad, y), rank, [6, 6]))) for _ in range(2)]
        kept = all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        kept = kept and gradients(module) == [None] * len(gradients(module))
        part = part_of((x, y), rank, [6, 6])
        return errors, kept, stepping(module, lambda: trainer.step(classify, part))


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("where", ["0", "2", "5", "backward"])
def test_a_device_that_fails_leaves_no_rank_waiting_and_no_rank_commits(
    on_ranks: Run, where: str, devices: int
) -> None:
    module, batch = case("rows", 12)
    (first, kept, found), (second, kept_too, found_too) = on_ranks(2, failing, where, devices)
    assert kept
    assert kept_too
    for (kind, text), (other, _) in zip(first, second, strict=True):
        assert other is ArithmeticError
        assert kind.__name__ == "Error"
        assert "rank 1: ArithmeticError: on purpose" in text
    assert_like_one_device([found, found_too], on_one_device(module, classify, batch))


def branching(rank: int, kind: str) -> Any:
    module: Any
    module, batch = case("rows", 12)
    part = part_of(batch, rank, [6, 6])

    def loss_fn(replica: Any, b: Any) -> Any:
        hidden = replica[0](b[0])
        if kind == "none" and rank == 0:
            return hidden.square().mean()
        if kind == "other":
            return replica[4 if rank else 1](hidden).square().mean()
        if kind == "channels":
            return replica[1](hidden if rank else hidden[:, :4]).square().mean()
        hidden = replica[1](hidden)
        return replica[3:](replica[1](hidden) if rank and kind == "more" else hidden).square().mean()

    if kind == "channels":
        module = rows(affine=False, track_running_stats=False).double()
    with trainer_of(module, 2) as trainer:
        error = error_of(lambda: trainer.step(loss_fn, part))
        return error, stepping(module, lambda: trainer.step(classify, part))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("none", "rank 0 has ended its part, and rank 1 runs the forward of 1."),
        ("other", "rank 0 runs the forward of 1, and rank 1 runs the forward of 4."),
        ("more", "rank 0 runs the forward of 4, and rank 1 runs the forward of 1."),
        ("channels", "rank 0 runs the forward of 1, and rank 1 runs the forward of 1 with another number of channels."),
    ],
)
def test_parts_that_run_other_norms_are_an_error_on_all_ranks_that_says_which_rank_runs_what(
    on_ranks: Run, kind: str, said: str
) -> None:
    (first, found), (second, found_too) = on_ranks(2, branching, kind)
    for error, text in (first, second):
        assert error is InvalidArgument
        assert said in text
    options = {"affine": False, "track_running_stats": False} if kind == "channels" else {}
    module, batch = case("rows", 12)
    module = rows(**options).double() if options else module
    if not options:
        assert_like_one_device([found, found_too], on_one_device(module, classify, batch))


def too_wide(rank: int) -> Any:
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(4, affine=False, track_running_stats=False), nn.Linear(8, 3))
    with trainer_of(module.double()) as trainer:
        return error_of(lambda: trainer.step(classify, part_of(case("rows")[1], rank, [5, 8])))


def test_more_channels_than_a_norm_says_are_refused(on_ranks: Run) -> None:
    for kind, text in on_ranks(2, too_wide):
        assert kind is InvalidArgument
        assert "the forward of 1 has more channels than num_features of any normalisation of the module, 4" in text


# What one rank has to repeat


def repeating(rank: int, how: str) -> Any:
    """Rank 1 has to run its part again: at the end of an attempt, or in the middle of it."""
    from paceline import OutOfMemory

    module: Any
    module, batch = case("rows")
    part, calls = part_of(batch, rank, [5, 8]), 0
    attempts: list[int] = []

    def loss_fn(replica: Any, b: Any) -> Any:
        nonlocal calls
        calls += 1
        if rank and how == "draws" and len(attempts) > 0:
            torch.rand(1)
        hidden = replica[:2](b[0])
        if rank and how == "memory" and len(attempts) == 1 and calls == 2:
            raise OutOfMemory("on purpose")
        return nn.functional.cross_entropy(replica[2:](hidden), b[1])

    with trainer_of(module, 2 if how == "draws" else 1) as trainer:

        def step() -> torch.Tensor:
            loss = trainer.step(loss_fn, part)
            attempts.append(trainer._execution.attempts)
            return loss

        return stepping(module, step), attempts


@pytest.mark.parametrize("how", ["draws", "memory"])
def test_an_attempt_that_one_rank_repeats_is_repeated_by_all(on_ranks: Run, how: str) -> None:
    module, batch = case("rows")
    (first, attempts), (second, attempts_too) = on_ranks(2, repeating, how)
    assert attempts[1] > 1
    assert attempts == attempts_too
    assert_like_one_device([first, second], on_one_device(module, classify, batch))


# Ranks without items, and items without weight


def idle(rank: int) -> Any:
    module, batch = case("rows", 8)
    part = part_of(batch, rank, [8, 0])
    with trainer_of(module) as trainer:
        error = error_of(lambda: trainer.step(classify, part))
        module.eval()
        loss = trainer.step(classify, part)
        module.train()
        module.zero_grad()
        half = part_of(batch, rank, [3, 5])
        return error, loss, stepping(module, lambda: trainer.step(classify, half))


def test_a_rank_without_items_is_an_error_on_all_ranks_while_norms_train(on_ranks: Run) -> None:
    module, batch = case("rows", 8)
    found = on_ranks(2, idle)
    for (kind, text), loss, _ in found:
        assert kind is InvalidArgument
        assert "step: rank 1 has no items" in text
        assert loss.item() == pytest.approx(classify(copy.deepcopy(module).eval(), batch).item(), rel=1e-12)
    assert_like_one_device([one[2] for one in found], on_one_device(module, classify, batch))


WEIGHT = torch.tensor([1.0, 0, 2, 1, 1, 0, 0, 0, 0, 0]).double()


def weighing(rank: int, devices: int) -> Found:
    module, batch = case("rows", 10)
    x, y, weight = part_of((*batch, WEIGHT), rank, [6, 4])
    with trainer_of(module, devices) as trainer:
        return stepping(module, lambda: trainer.step(single, (x, y), weight=weight))


@pytest.mark.parametrize("devices", [1, 2])
def test_items_without_weight_count_in_the_statistics_also_if_a_rank_has_no_others(on_ranks: Run, devices: int) -> None:
    module, batch = case("rows", 10)
    wanted = on_one_device(module, lambda m, b: (single(m, b) * WEIGHT).sum() / WEIGHT.sum(), batch)
    assert_like_one_device(on_ranks(2, weighing, devices), wanted)


def changing(rank: int) -> tuple[Found, Found, Found]:
    """Norms go, and come back, while all items of rank 1 are without weight."""
    module: Any
    module, batch = case("rows", 10)
    x, y, weight = part_of((*batch, WEIGHT), rank, [6, 4])
    norms = module[1], module[4]
    with trainer_of(module) as trainer:

        def found() -> Found:
            return stepping(module, lambda: trainer.step(single, (x, y), weight=weight), 1)

        with_norms = found()
        module[1], module[4] = nn.Identity(), nn.Identity()
        without = found()
        module[1], module[4] = norms
        return with_norms, without, found()


def test_norms_may_go_and_come_while_a_rank_has_only_items_without_weight(on_ranks: Run) -> None:
    module: Any
    module, batch = case("rows", 10)
    norms = module[1], module[4]

    def wanted() -> Found:
        return on_one_device(module, lambda m, b: (single(m, b) * WEIGHT).sum() / WEIGHT.sum(), batch, 1)

    ranks = on_ranks(2, changing)
    for at, present in enumerate((True, False, True)):
        module[1], module[4] = norms if present else (nn.Identity(), nn.Identity())
        assert_like_one_device([found[at] for found in ranks], wanted())


def sampled(rank: int) -> Any:
    module, (x, y) = case("rows", 38)
    data = TensorDataset(x, y)
    with trainer_of(module) as trainer:
        refused = [
            error_of(lambda: trainer.batch_sampler(37, 12)),
            error_of(lambda: trainer.batch_sampler(37, 8, balance=[1, 0])),
        ]
        sampler = trainer.batch_sampler(38, 9, balance=[1, 100])
        items = [
            (len(batch[0]), trainer.step(classify, batch).isfinite().item())
            for batch in sampler.batches(DataLoader(data, batch_sampler=sampler))
        ]
    return refused, items


def test_a_sampler_gives_every_rank_an_item(on_ranks: Run) -> None:
    (refused, first), (refused_too, second) = on_ranks(2, sampled)
    for (_, text), (_, other) in [refused, refused_too]:
        assert "the last batch of an epoch has 1 item for 2 ranks" in text
        assert "each rank needs items" in other
    assert first == [(1, True)] * 5
    assert second == [*[(8, True)] * 4, (1, True)]
