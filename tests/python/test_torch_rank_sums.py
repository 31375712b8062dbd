"""`DataParallel(group=)`: gradients are sent bucket by bucket while backward goes on, and all ranks commit, or none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline import Error
from paceline.torch._run import rank_sums
from paceline.torch._run.group_ranks import GroupRanks
from rank_processes import Run, error_of, part_of, trainer_of
from torch_support import gradients, plain, worst_difference

DEPTH = 4  # layers, of which each is a bucket
WARM = 3  # steps after which rank 0 has told the order, and gradients are sent early


class At(torch.autograd.Function):
    """Calls something in backward, after the gradients of all later layers are there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.call()
        return gradient, None


class Deep(nn.Module):
    """Layers with one parameter each, and a call in the backward between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(DEPTH)).double()

    def forward(self, x: torch.Tensor, between: Callable[[int], None] = lambda left: None) -> torch.Tensor:
        for left, layer in enumerate(self.layers):
            x = At.apply(layer(x).tanh(), lambda left=left: between(left))  # type: ignore[no-untyped-call]
        return x


def squares(module: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = module(x).square().mean()
    return found


def items(count: int = 17) -> torch.Tensor:
    return torch.randn(count, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def mine(rank: int, sizes: list[int]) -> Any:
    part = part_of((items(sum(sizes)),), rank, sizes)
    return None if part is None else part[0]


@contextmanager
def small_buckets() -> Iterator[list[int]]:
    """Each layer is a bucket, and ranks begin their work when all have come. Yields the sizes of what is summed, as it is sent."""
    sent: list[int] = []
    start, post = GroupRanks._start, GroupRanks._post

    def met(self: GroupRanks, header: Any) -> Any:
        opening, arrived = post(self, header), time.perf_counter()
        deadline = time.monotonic() + 1.0  # if a rank has failed, the weight is never known
        while opening.weight() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        self._began += time.perf_counter() - arrived  # no work of this rank
        return opening

    def noted(self: GroupRanks, bucket: torch.Tensor) -> Any:
        sent.append(bucket.numel())
        return start(self, bucket)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_sums, "MOST_BYTES", 1)
        patch.setattr(rank_sums, "FIRST_BYTES", 1)
        patch.setattr(GroupRanks, "_start", noted)
        patch.setattr(GroupRanks, "_post", met)
        yield sent


def watching(rank: int, sizes: list[int]) -> Any:
    module, part = Deep(), mine(rank, sizes)
    seen: list[list[int]] = []
    with small_buckets() as sent, trainer_of(module) as trainer:
        for _ in range(WARM + 1):
            module.zero_grad()
            sent.clear()
            seen.append([])
            trainer.step(lambda m, x: m(x, lambda left: seen[-1].append(len(sent))).square().mean(), part)
    return seen, gradients(module)


def test_a_bucket_is_sent_before_the_backward_has_come_to_the_next_one(on_ranks: Run) -> None:
    wanted = plain(Deep(), squares, items())[1]
    for seen, found in on_ranks(2, watching, [9, 8]):
        assert seen[-1] == [0, 1, 2, 3], seen
        assert worst_difference(found, wanted) < 1e-12


def failing(rank: int, sizes: list[int], who: int) -> Any:
    module, part = Deep(), mine(rank, sizes)
    at = -1

    def between(left: int) -> None:
        if left == at and rank == who:
            raise KeyError("bad gradient")

    def loss_fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m(x, between).square().mean()  # type: ignore[no-any-return]

    found = []
    with small_buckets() as sent, trainer_of(module) as trainer:
        for _ in range(WARM):
            module.zero_grad()
            trainer.step(loss_fn, part)
        for at in range(DEPTH):  # noqa: B007
            before, count = gradients(module), len(sent)
            error = error_of(lambda: trainer.step(loss_fn, part))
            kept = all(torch.equal(a, b) for a, b in zip(before, gradients(module), strict=True))  # type: ignore[arg-type]
            found.append((*error, kept, len(sent) - count))
        at = -1
        module.zero_grad()
        trainer.step(loss_fn, part)
    return found, gradients(module)


@pytest.mark.parametrize(("sizes", "who"), [([9, 8], 0), ([9, 8], 1), ([9, 0, 8], 2)])
def test_a_rank_may_fail_at_any_bucket_and_no_rank_commits(on_ranks: Run, sizes: list[int], who: int) -> None:
    wanted = plain(Deep(), squares, items())[1]
    for rank, (found, last) in enumerate(on_ranks(len(sizes), failing, sizes, who)):
        assert len(found) == DEPTH
        for kind, text, kept, count in found:
            assert kind is (KeyError if rank == who else Error), text
            assert rank == who or f"rank {who}: KeyError" in text
            assert kept
            assert count == DEPTH  # zeros for those that were left
        assert worst_difference(last, wanted) < 1e-12


def short_of_memory(rank: int, sizes: list[int]) -> Any:
    module, part = Deep(), mine(rank, sizes)
    at, tried, count = -1, 0, 0

    def between(left: int) -> None:
        nonlocal tried
        if rank == 1 and tried == 0 and len(sent) - count == at:
            tried += 1
            raise torch.OutOfMemoryError("CUDA out of memory")

    def loss_fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m(x, between).square().mean()  # type: ignore[no-any-return]

    found = []
    with small_buckets() as sent, trainer_of(module) as trainer:
        for _ in range(WARM):
            trainer.step(loss_fn, part)
        for at in range(DEPTH):  # noqa: B007
            module.zero_grad()
            tried, count = 0, len(sent)
            trainer.step(loss_fn, part)
            found.append((gradients(module), tried, len(sent) - count))
    return found


def test_a_rank_that_ran_out_of_memory_sends_what_it_had_not_sent(on_ranks: Run) -> None:
    wanted = plain(Deep(), squares, items(128))[1]
    for rank, found in enumerate(on_ranks(2, short_of_memory, [64, 64])):
        for gradient, tried, count in found:
            assert tried == (rank == 1)
            assert count == DEPTH
            assert worst_difference(gradient, wanted) < 1e-12


class Branches(nn.Module):
    """Layers that are used in an order of the rank's own, so that backward comes to them in another one, too."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 2 + i, bias=False) for i in range(DEPTH)).double()
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.layers[i](x) for i in self.order], 1)


def in_orders(rank: int, orders: list[list[int]]) -> Any:
    module, part = Branches(orders[rank]), mine(rank, [9, 8])
    with small_buckets() as sent, trainer_of(module) as trainer:
        for _ in range(WARM):
            module.zero_grad()
            sent.clear()
            trainer.step(lambda m, x: m(x).square().sum(1).mean(), part)
    return sent, gradients(module)


def test_all_ranks_send_in_the_order_in_which_the_backward_of_rank_0_came_to_the_parameters(on_ranks: Run) -> None:
    orders = [[2, 0, 3, 1], [0, 1, 2, 3]]
    wanted = plain(Branches(orders[1]), lambda m, x: m(x).square().sum(1).mean(), items())[1]
    (first, found), (second, theirs) = on_ranks(2, in_orders, orders)
    assert first == second
    assert [one // 6 - 2 for one in first] == orders[0][::-1]
    assert worst_difference(found, wanted) < 1e-12
    assert all(torch.equal(a, b) for a, b in zip(found, theirs, strict=True))


class Twice(nn.Module):
    """A parameter that backward comes to twice, since each part of the forward that is recomputed has a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        for _ in range(2):
            x = checkpoint(lambda one: self.shared(one).tanh(), x, use_reentrant=True)
        return x


def coming_again(rank: int) -> Any:
    module, part = Twice(), mine(rank, [9, 8])
    attempts = []
    with small_buckets(), trainer_of(module) as trainer:
        for _ in range(WARM + 2):
            module.zero_grad()
            trainer.step(squares, part)
            attempts.append(trainer._execution.attempts)
    return attempts, gradients(module)


def test_a_gradient_that_changes_after_it_was_sent_makes_all_ranks_run_once_more(on_ranks: Run) -> None:
    wanted = plain(Twice(), squares, items())[1]
    for attempts, found in on_ranks(2, coming_again):
        assert max(attempts) == 2
        assert attempts[-1] == 1
        assert worst_difference(found, wanted) < 1e-12


def keeping(rank: int) -> Any:
    module, part = Deep(), mine(rank, [9, 8])
    kept: list[Any] = []
    copies: list[Any] = []
    addresses: set[int] = set()
    with trainer_of(module) as trainer:
        for step in range(WARM + 3):
            module.zero_grad()
            trainer.step(squares, part * (step + 1))
            kept.append([parameter.grad for parameter in module.parameters()])
            copies.append([one.clone() for one in kept[-1] if one is not None])
        unchanged = [worst_difference(a, b) for a, b in zip(kept, copies, strict=True)]
        kept.clear()
        for _ in range(4):
            module.zero_grad()
            trainer.step(squares, part)
            addresses.update(one.grad.data_ptr() for one in module.parameters() if one.grad is not None)
        trainer.step(squares, part)  # adds
    return unchanged, len(addresses), gradients(module)


def test_gradients_that_somebody_keeps_stay_and_others_make_room_for_the_next(on_ranks: Run) -> None:
    wanted = plain(Deep(), squares, items())[1]
    for unchanged, places, found in on_ranks(2, keeping):
        assert max(unchanged) == 0
        assert places == DEPTH  # one for each parameter
        assert worst_difference(found, [2 * one for one in wanted if one is not None]) < 1e-12


def coming_and_going(rank: int) -> Any:
    """Ranks without items, without a gradient, or with both, in turn."""
    module = Branches(list(range(DEPTH)))
    found = []

    def loss_fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        marked = x[:, 0] > 1
        used = x[marked] if bool(marked.any()) else x
        found: torch.Tensor = torch.stack(
            [m.layers[i](used).square().sum() for i in range(DEPTH - int(not marked.any()))]
        ).sum()
        return found

    with small_buckets(), trainer_of(module, reduction="sum", micro_batch=17) as trainer:
        for sizes in [[9, 8], [17, 0], [0, 17], [9, 8], [1, 16]]:
            x = items()
            x[:, 0] = 0
            x[12, 0] = 2.0
            module.zero_grad()
            part = part_of((x,), rank, sizes)
            trainer.step(loss_fn, None if part is None else part[0], total=1)
            reference = Branches(list(range(DEPTH)))
            for other in range(2):
                theirs = part_of((x,), other, sizes)
                if theirs is not None:
                    loss_fn(reference, theirs[0]).backward()
            found.append((gradients(module), gradients(reference)))
    return found


def test_ranks_may_have_no_items_and_parameters_no_gradient_in_any_step(on_ranks: Run) -> None:
    for found in on_ranks(2, coming_and_going):
        for mine_, wanted in found:
            assert [one is None for one in mine_] == [one is None for one in wanted]
            assert worst_difference(mine_, wanted) < 1e-12


BATCHES = [[9, 8], [4, 3], [20, 1], [6, 6], [2, 9]]


def of_other_sizes(rank: int) -> Any:
    module, found = Deep(), []
    early: list[int] = []
    with small_buckets() as sent, trainer_of(module) as trainer:

        def loss_fn(one: Any, x: torch.Tensor) -> Any:
            return one(x, lambda _: early.append(len(sent))).square().mean()

        for sizes in BATCHES:
            module.zero_grad()
            sent.clear()
            early.clear()
            loss = trainer.step(loss_fn, mine(rank, sizes))
            found.append((loss, gradients(module), early[-1]))
    return found


def test_what_was_divided_by_the_weight_of_the_last_batch_is_rescaled_before_it_is_sent(on_ranks: Run) -> None:
    for found in on_ranks(2, of_other_sizes):
        assert found[-1][2] == DEPTH - 1  # while backward went on
        for sizes, (loss, gradient, _) in zip(BATCHES, found, strict=True):
            wanted, gradients_ = plain(Deep(), squares, items(sum(sizes)))
            assert loss.item() == pytest.approx(wanted.item(), rel=1e-13)
            assert worst_difference(gradient, gradients_) < 1e-12
