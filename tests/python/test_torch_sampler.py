"""Items of unequal length dealt out to the ranks of DDP and FSDP: each one once, by cost, and with the gradient of the whole batch."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import InvalidArgument
from paceline.torch import BalancedRanks, GlobalBatchSampler
from paceline.torch._batch.by_cost import ByCost
from paceline.torch._trainer.sampler_arguments import sampler_of
from rank_processes import Run


def lengths_of(items: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.exp(torch.randn(items, generator=generator) * 0.8 + 5.5).ceil()


def samplers(
    lengths: Any, ranks: int, batch_size: int, speeds: list[float] | None = None, **options: Any
) -> list[GlobalBatchSampler]:
    """Those of `BalancedRanks` on each rank, with shares that nothing has measured."""
    options = {"cost": None, "padded": False, "seed": 0, "every_rank": True} | options
    found = [
        sampler_of("BalancedRanks", lengths, batch_size, rank=rank, ranks=ranks, **options) for rank in range(ranks)
    ]
    for sampler in found if speeds else ():
        assert speeds is not None
        sampler.follow(0, 1, [round(1e6 * speed / sum(speeds)) for speed in speeds])
    return found


both_ways = pytest.mark.parametrize("padded", [False, True], ids=["sums", "padded"])


@both_ways
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(("items", "batch_size"), [(96, 16), (100, 16), (97, 8), (101, 24), (8, 8), (8, 64), (17, 16)])
def test_every_index_comes_once_an_epoch_and_all_ranks_have_as_many_batches(
    ranks: int, items: int, batch_size: int, padded: bool
) -> None:
    all_ranks = samplers(lengths_of(items), ranks, batch_size, padded=padded)
    batches = [list(sampler) for sampler in all_ranks]
    assert [len(of_rank) for of_rank in batches] == [len(sampler) for sampler in all_ranks] == [len(batches[0])] * ranks
    assert all(batch for of_rank in batches for batch in of_rank), "a rank without items would stall the others"
    for sampler in all_ranks:
        assert [stamp.shares for stamp in sampler._stamps] == [stamp.shares for stamp in all_ranks[0]._stamps]
    shares = [stamp.shares for stamp in all_ranks[0]._stamps]
    kept = [
        batch
        for rank, of_rank in enumerate(batches)
        for batch, share in zip(of_rank, shares, strict=True)
        if share[rank]
    ]
    assert sorted(index for batch in kept for index in batch) == list(range(items))
    assert [sum(share) for share in shares[:-1]] == [min(batch_size, items)] * (len(shares) - 1)


@both_ways
def test_without_shuffle_batches_are_in_the_order_of_the_data(padded: bool) -> None:
    for step, parts in enumerate(zip(*samplers(lengths_of(30), 2, 10, shuffle=False, padded=padded), strict=True)):
        assert sorted(parts[0] + parts[1]) == list(range(10 * step, 10 * step + 10))


@pytest.mark.parametrize("cost", ["length", "function", "tensor"])
def test_ranks_cost_nearly_the_same(cost: str) -> None:
    lengths = lengths_of(2048)
    square = lengths**2
    given = {"length": None, "function": lambda length: length**2, "tensor": square}[cost]
    costs = lengths if cost == "length" else square
    worst_of_slices = 1.0
    for parts in zip(*samplers(lengths, 4, 256, cost=given), strict=True):
        loads = [float(costs[part].sum()) for part in parts]
        largest = max(float(costs[part].max()) for part in parts)
        assert max(loads) <= max(sum(loads) / 4 * 1.001, largest)
        batch = torch.tensor(sorted(index for part in parts for index in part))
        slices = [float(costs[part].sum()) for part in batch.chunk(4)]
        worst_of_slices = max(worst_of_slices, max(slices) / (sum(slices) / 4))
    assert worst_of_slices > 1.1, "equal counts would have done"


@both_ways
def test_faster_ranks_get_more_and_no_rank_nothing(padded: bool) -> None:
    def counts(costs: list[float], speeds: list[float]) -> list[int]:
        parts = ByCost(costs, None, padded).parts(list(range(len(costs))), speeds, 0)
        return [len(part) for part in parts]

    assert counts([1.0] * 12, [1.0, 3.0]) == [3, 9]
    assert counts([1.0] * 4, [1.0, 1000.0]) == [1, 3]
    assert sorted(counts([0.0] * 4, [1.0] * 3)) == [1, 1, 2]


def worst_padded(lengths: torch.Tensor, parts: Any, speeds: list[float]) -> float:
    """When the last rank is done, if each pads its items to the longest of them."""
    return max(len(part) * float(lengths[part].max()) / speed for part, speed in zip(parts, speeds, strict=True))


@pytest.mark.parametrize("speeds", [[1.0, 1.0], [1.0] * 8, [1.0, 2.0, 1.0, 0.5]])
@pytest.mark.parametrize("squared", [False, True])
def test_with_padding_no_rank_is_later_than_by_sums_or_with_equal_counts(speeds: list[float], squared: bool) -> None:
    lengths = lengths_of(1030)
    ranks = len(speeds)
    options: dict[str, Any] = {"speeds": speeds, "cost": (lambda n: n * n) if squared else None, "drop_last": True}
    costs = lengths**2 if squared else lengths
    by_sums = zip(*samplers(lengths, ranks, 64, **options), strict=True)
    padded = zip(*samplers(lengths, ranks, 64, padded=True, **options), strict=True)
    gains: list[float] = []
    for plain, parts in zip(by_sums, padded, strict=True):
        items = sorted(index for part in parts for index in part)
        assert items == sorted(index for part in plain for index in part), "the global batches are the same"
        slowest = worst_padded(costs, parts, speeds)
        assert slowest <= worst_padded(costs, plain, speeds) * (1 + 1e-5)  # shares are whole numbers
        random = torch.tensor(items)[torch.randperm(len(items), generator=torch.Generator().manual_seed(len(gains)))]
        assert slowest <= worst_padded(costs, random.tensor_split(ranks), speeds) * (1 + 1e-5)
        gains.append(worst_padded(costs, plain, speeds) / slowest)
    assert statistics.median(gains) > 1.2, "dealt by sums it would have been as good"


@pytest.mark.parametrize(("speeds", "alike"), [([1.0] * 4, [0, 1, 2, 3]), ([1.0, 4.0, 1.0, 2.0], [0, 2])])
def test_ranks_of_one_speed_have_the_long_items_by_turns(speeds: list[float], alike: list[int]) -> None:
    lengths = lengths_of(64 * 9)
    have_longest = [
        max(alike, key=lambda rank: float(lengths[parts[rank]].max()))
        for parts in zip(*samplers(lengths, 4, 64, padded=True, speeds=speeds), strict=True)
    ]
    assert have_longest == (alike * 9)[:9]


def test_padded_items_that_are_longer_must_not_cost_less() -> None:
    ByCost([1, 2, 2, 3], lambda length: length**2, padded=True)
    ByCost([1, 2, 3, 4], lambda length: 10 - length, padded=False)
    with pytest.raises(InvalidArgument, match="an item of length 2 costs 8, one of length 1 costs 9"):
        ByCost([1, 2, 3], lambda length: 10 - length, padded=True)


def under_ddp(rank: int, padded: bool, balance: Any) -> list[int]:
    """How many items a rank has in each step of which every rank has some."""
    torch.manual_seed(0)
    x, y = torch.randn(19, 4, dtype=torch.float64), torch.randint(0, 3, (19,))
    model: Any = nn.Linear(4, 3).double()
    parallel = nn.parallel.DistributedDataParallel(model)
    lengths = (torch.arange(19) % 7 + 1) ** 3
    ranks = BalancedRanks(lengths, 8, padded=padded, balance=balance, drop_last=True)
    loader: Any = DataLoader(TensorDataset(torch.arange(19)), batch_sampler=ranks.sampler)
    counts = []
    parts = zip(
        *samplers(lengths, 2, 8, None if balance == "even" else balance, padded=padded, drop_last=True), strict=True
    )
    for (indices,) in ranks.batches(loader):
        dealt = next(parts)
        mine, whole = indices.tolist(), [*dealt[0], *dealt[1]]
        assert mine == dealt[rank]
        loss = nn.functional.cross_entropy(model(x[whole]), y[whole])
        expected = torch.autograd.grad(loss, list(model.parameters()))
        parallel.zero_grad()
        with ranks.step():
            ranks.weigh(nn.functional.cross_entropy(parallel(x[mine]), y[mine])).backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-14)
        counts.append(len(mine))
    return counts


@both_ways
@pytest.mark.parametrize("balance", ["even", [1.0, 3.0]])
def test_with_known_speeds_gradients_are_those_of_the_whole_batch(on_ranks: Run, padded: bool, balance: Any) -> None:
    first, second = on_ranks(2, under_ddp, padded, balance)
    assert len(first) == 2
    assert first != second, "with equal counts this test would show nothing"
