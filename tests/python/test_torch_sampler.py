"""Batches balanced by cost for DDP and FSDP: torch's contract of samplers, and gradients that stay exact."""

from __future__ import annotations

import doctest
import statistics
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import InvalidArgument
from paceline.torch import BalancedBatchSampler
from paceline.torch._batch import sampler as _sampler
from rank_processes import Run


def lengths_of(items: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.exp(torch.randn(items, generator=generator) * 0.8 + 5.5).ceil()


def samplers(lengths: Any, ranks: int, **arguments: Any) -> list[BalancedBatchSampler]:
    return [BalancedBatchSampler(lengths, ranks=ranks, rank=rank, **arguments) for rank in range(ranks)]


both_ways = pytest.mark.parametrize("padded", [False, True], ids=["sums", "padded"])


@both_ways
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(("items", "batch_size"), [(96, 16), (100, 16), (97, 8), (101, 24), (8, 8), (8, 64), (17, 16)])
def test_every_index_comes_once_an_epoch_and_all_ranks_have_as_many_batches(
    ranks: int, items: int, batch_size: int, padded: bool
) -> None:
    all_ranks = samplers(lengths_of(items), ranks, batch_size=batch_size, padded=padded)
    batches = [list(sampler) for sampler in all_ranks]
    assert [len(of_rank) for of_rank in batches] == [len(sampler) for sampler in all_ranks] == [len(batches[0])] * ranks
    assert sorted(index for of_rank in batches for batch in of_rank for index in batch) == list(range(items))
    assert all(batch for of_rank in batches for batch in of_rank), "a rank without items would stall the others"
    sizes = [sum(len(of_rank[step]) for of_rank in batches) for step in range(len(batches[0]))]
    assert max(sizes) < batch_size + ranks
    assert sizes[:-2] == [batch_size] * len(sizes[:-2])


@both_ways
@pytest.mark.parametrize(("items", "batches"), [(96, 6), (100, 6), (111, 6)])
def test_drop_last_leaves_out_the_incomplete_batch(items: int, batches: int, padded: bool) -> None:
    all_ranks = samplers(lengths_of(items), 3, batch_size=16, drop_last=True, padded=padded)
    seen = [index for sampler in all_ranks for batch in sampler for index in batch]
    assert len(all_ranks[0]) == batches
    assert len(seen) == len(set(seen)) == batches * 16


@both_ways
def test_too_small_a_last_batch_takes_items_or_joins(padded: bool) -> None:
    def sizes(items: int, batch_size: int) -> list[int]:
        all_ranks = samplers([1.0] * items, 4, batch_size=batch_size, padded=padded)
        return [sum(step) for step in zip(*([len(batch) for batch in sampler] for sampler in all_ranks), strict=True)]

    assert sizes(21, 10) == [10, 7, 4]
    assert sizes(9, 4) == [4, 5]
    assert sizes(18, 5) == [5, 5, 4, 4]
    assert sizes(12, 5) == [5, 7]


@both_ways
def test_the_same_seed_and_epoch_give_the_same_batches_and_others_do_not(padded: bool) -> None:
    lengths = lengths_of(200)

    def batches(seed: int, epoch: int) -> list[list[int]]:
        sampler = BalancedBatchSampler(lengths, ranks=2, rank=1, batch_size=20, seed=seed, padded=padded)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert batches(0, 1) == batches(0, 1)
    assert batches(0, 1) != batches(0, 2)
    assert batches(0, 1) != batches(5, 1)
    sampler = BalancedBatchSampler(lengths, ranks=2, rank=1, batch_size=20, padded=padded)
    assert list(sampler) == list(sampler), "without set_epoch an epoch repeats, as with DistributedSampler"


@both_ways
def test_without_shuffle_batches_are_in_the_order_of_the_data(padded: bool) -> None:
    all_ranks = samplers(lengths_of(30), 2, batch_size=10, shuffle=False, padded=padded)
    for step, parts in enumerate(zip(*all_ranks, strict=True)):
        assert sorted(parts[0] + parts[1]) == list(range(10 * step, 10 * step + 10))
        assert all(part == sorted(part) for part in parts)


@pytest.mark.parametrize("cost", ["length", "function", "tensor"])
def test_ranks_cost_nearly_the_same(cost: str) -> None:
    lengths = lengths_of(2048)
    square = lengths**2
    given = {"length": None, "function": lambda length: length**2, "tensor": square}[cost]
    costs = lengths if cost == "length" else square
    worst_of_slices = 1.0
    for parts in zip(*samplers(lengths, 4, batch_size=256, cost=given), strict=True):
        loads = [float(costs[part].sum()) for part in parts]
        largest = max(float(costs[part].max()) for part in parts)
        assert max(loads) <= max(sum(loads) / 4 * 1.001, largest)
        batch = torch.tensor(sorted(index for part in parts for index in part))
        slices = [float(costs[part].sum()) for part in batch.chunk(4)]
        worst_of_slices = max(worst_of_slices, max(slices) / (sum(slices) / 4))
    assert worst_of_slices > 1.1, "equal counts would have done"


@both_ways
def test_faster_ranks_get_more_and_no_rank_nothing(padded: bool) -> None:
    def counts(costs: list[float], ranks: int, speeds: list[float] | None = None) -> list[int]:
        all_ranks = samplers(costs, ranks, batch_size=len(costs), speeds=speeds, padded=padded)
        return [len(next(iter(sampler))) for sampler in all_ranks]

    assert counts([1.0] * 12, 2, [1.0, 3.0]) == [3, 9]
    assert counts([1.0] * 4, 2, [1.0, 1000.0]) == [1, 3]
    assert sorted(counts([0.0] * 4, 3)) == [1, 1, 2]


def worst_padded(lengths: torch.Tensor, parts: Any, speeds: list[float]) -> float:
    """When the last rank is done, if each pads its items to the longest of them."""
    return max(len(part) * float(lengths[part].max()) / speed for part, speed in zip(parts, speeds, strict=True))


@pytest.mark.parametrize("speeds", [[1.0, 1.0], [1.0] * 8, [1.0, 2.0, 1.0, 0.5]])
@pytest.mark.parametrize("squared", [False, True])
def test_with_padding_no_rank_is_later_than_by_sums_or_with_equal_counts(speeds: list[float], squared: bool) -> None:
    lengths = lengths_of(1030)
    ranks = len(speeds)
    arguments: dict[str, Any] = {"batch_size": 64, "speeds": speeds, "cost": (lambda n: n * n) if squared else None}
    costs = lengths**2 if squared else lengths
    by_sums = zip(*samplers(lengths, ranks, **arguments), strict=True)
    padded = zip(*samplers(lengths, ranks, padded=True, **arguments), strict=True)
    gains: list[float] = []
    for plain, parts in zip(by_sums, padded, strict=True):
        items = sorted(index for part in parts for index in part)
        assert items == sorted(index for part in plain for index in part), "the global batches are the same"
        slowest = worst_padded(costs, parts, speeds)
        assert slowest <= worst_padded(costs, plain, speeds) * (1 + 1e-12)
        random = torch.tensor(items)[torch.randperm(len(items), generator=torch.Generator().manual_seed(len(gains)))]
        assert slowest <= worst_padded(costs, random.tensor_split(ranks), speeds) * (1 + 1e-12)
        gains.append(worst_padded(costs, plain, speeds) / slowest)
    assert statistics.median(gains) > 1.2, "dealt by sums it would have been as good"


@pytest.mark.parametrize(("speeds", "alike"), [([1.0] * 4, [0, 1, 2, 3]), ([1.0, 4.0, 1.0, 2.0], [0, 2])])
def test_ranks_of_one_speed_have_the_long_items_by_turns(speeds: list[float], alike: list[int]) -> None:
    lengths = lengths_of(64 * 9)
    all_ranks = samplers(lengths, 4, batch_size=64, padded=True, speeds=speeds)
    have_longest = []
    for epoch in range(4):
        for sampler in all_ranks:
            sampler.set_epoch(epoch)
        for parts in zip(*all_ranks, strict=True):
            have_longest.append(max(alike, key=lambda rank: float(lengths[parts[rank]].max())))
    assert have_longest == (alike * 36)[:36], "also from one epoch to the next"


@both_ways
def test_weights_make_the_averaged_gradient_that_of_the_whole_batch(padded: bool) -> None:
    items, ranks = 37, 3
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(items, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (items,), generator=generator)
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()

    def gradient(indices: list[int], weight: float = 1.0) -> list[torch.Tensor]:
        loss = nn.functional.cross_entropy(module(x[indices]), y[indices]) * weight
        return list(torch.autograd.grad(loss, list(module.parameters())))

    all_ranks = samplers(lengths_of(items), ranks, batch_size=10, padded=padded)
    unweighted_differs = False
    for parts in zip(*all_ranks, strict=True):
        whole = gradient(sorted(index for part in parts for index in part))
        weights = [sampler.weight for sampler in all_ranks]
        assert weights == [len(part) * ranks / sum(map(len, parts)) for part in parts]
        by_rank = [gradient(part, weight) for part, weight in zip(parts, weights, strict=True)]
        for expected, *of_ranks in zip(whole, *by_rank, strict=True):
            averaged = torch.stack(of_ranks).mean(0)  # what DDP and FSDP do
            torch.testing.assert_close(averaged, expected, rtol=1e-12, atol=1e-14)
        plain = [gradient(part) for part in parts]
        mean = torch.stack([of_rank[0] for of_rank in plain]).mean(0)
        unweighted_differs |= not torch.allclose(mean, whole[0], rtol=1e-6)
    assert unweighted_differs, "with equal counts this test would show nothing"


def test_padded_items_that_are_longer_must_not_cost_less() -> None:
    BalancedBatchSampler([1, 2, 2, 3], ranks=2, rank=0, batch_size=2, cost=lambda length: length**2, padded=True)
    BalancedBatchSampler([1, 2, 3, 4], ranks=2, rank=0, batch_size=2, cost=lambda length: 10 - length)
    with pytest.raises(InvalidArgument, match="an item of length 2 costs 8, one of length 1 costs 9"):
        BalancedBatchSampler([1, 2, 3], ranks=2, rank=0, batch_size=2, cost=lambda length: 10 - length, padded=True)


def under_ddp(rank: int, padded: bool) -> list[int]:
    """How many items a rank has in each step."""
    torch.manual_seed(0)
    x, y = torch.randn(19, 4, dtype=torch.float64), torch.randint(0, 3, (19,))
    model: Any = nn.Linear(4, 3).double()
    parallel = nn.parallel.DistributedDataParallel(model)
    lengths = (torch.arange(19) % 7 + 1) ** 3
    sampler = BalancedBatchSampler(lengths, batch_size=8, padded=padded)
    loader = DataLoader(TensorDataset(torch.arange(19)), batch_sampler=sampler)
    counts = []
    for (indices,), *parts in zip(loader, *samplers(lengths, 2, batch_size=8, padded=padded), strict=True):
        mine, whole = indices.tolist(), [*parts[0], *parts[1]]
        assert mine == parts[rank]
        loss = nn.functional.cross_entropy(model(x[whole]), y[whole])
        expected = torch.autograd.grad(loss, list(model.parameters()))
        parallel.zero_grad()
        (nn.functional.cross_entropy(parallel(x[mine]), y[mine]) * sampler.weight).backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-14)
        counts.append(len(mine))
    return counts


@both_ways
def test_under_ddp_gradients_are_those_of_the_whole_batch(on_ranks: Run, padded: bool) -> None:
    first, second = on_ranks(2, under_ddp, padded)
    assert first != second, "with equal counts this test would show nothing"


@both_ways
@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_takes_it_and_weights_are_by_step(workers: int, padded: bool) -> None:
    data = TensorDataset(torch.arange(50))
    sampler = BalancedBatchSampler(lengths_of(50), ranks=2, rank=0, batch_size=10, padded=padded)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=workers)
    assert len(loader) == len(sampler) == 5
    for epoch in range(2):
        sampler.set_epoch(epoch)
        expected = list(sampler)
        for step, (batch,) in enumerate(loader):
            assert batch.tolist() == expected[step]
            assert sampler.weights[step] == len(batch) * 2 / 10
            assert workers or sampler.weight == sampler.weights[step]


def test_ranks_come_from_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="init_process_group"):
        BalancedBatchSampler([1.0] * 8, batch_size=4)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    sampler = BalancedBatchSampler([1.0] * 8, batch_size=4)
    assert (sampler.ranks, sampler.rank) == (4, 3)


@pytest.mark.parametrize(
    ("lengths", "arguments", "message"),
    [
        ([1.0] * 8, {"ranks": 4, "batch_size": 3}, "pass at least 4"),
        ([1.0] * 3, {"ranks": 4, "batch_size": 4}, "the items are too few, 3: 4 are needed for one batch of 4 ranks"),
        ([1.0] * 7, {"batch_size": 8, "drop_last": True}, "8 are needed for one batch of 2 ranks with drop_last"),
        ([1.0] * 8, {"rank": 2, "batch_size": 4}, "rank is 2 of 2"),
        ([1.0, -1.0], {"batch_size": 2}, "the cost of item 1 is -1"),
        ([1.0] * 8, {"batch_size": 4, "cost": [1.0]}, "cost has 1 entry for 8 lengths"),
        ([1.0] * 8, {"batch_size": 4, "speeds": [1.0, 0.0]}, "one finite number above 0 for each of the 2 ranks"),
        (torch.ones(2, 2), {"batch_size": 4}, "shape"),
    ],
)
def test_what_does_not_fit_is_refused(lengths: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        BalancedBatchSampler(lengths, **{"ranks": 2, "rank": 0, **arguments})


def test_weight_before_the_first_batch_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no batch was drawn yet"):
        _ = BalancedBatchSampler([1.0] * 4, ranks=2, rank=0, batch_size=4).weight


def test_examples_in_docstrings_are_true() -> None:
    for example in doctest.DocTestFinder(recurse=False).find(BalancedBatchSampler, "sampler", module=_sampler):
        assert doctest.DocTestRunner().run(example).failed == 0
