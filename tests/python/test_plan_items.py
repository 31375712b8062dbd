"""Items of unequal cost from Python: the same answers as in C++, for arguments that a Python user would pass."""

from __future__ import annotations

import itertools
import random

import pytest

from paceline import InvalidArgument
from paceline.plan import CostModel, fit_item_cost, split_items, split_padded


def test_split_items_equals_brute_force() -> None:
    rng = random.Random(1)
    for _ in range(50):
        costs = [rng.choice([1.0, 2.0, rng.random()]) for _ in range(rng.randrange(1, 8))]
        models = [(rng.random(), rng.random()) for _ in range(3)]
        best = min(
            max(
                fixed + per * load if count else 0.0
                for (fixed, per), load, count in (
                    (
                        model,
                        sum(c for c, p in zip(costs, place, strict=True) if p == device),
                        place.count(device),
                    )
                    for device, model in enumerate(models)
                )
            )
            for place in itertools.product(range(3), repeat=len(costs))
        )
        split = split_items(costs, models, tolerance=0.0)
        assert sorted(index for items in split.items for index in items) == list(range(len(costs)))
        assert split.loads == pytest.approx([sum(costs[index] for index in items) for items in split.items])
        assert split.makespan_seconds == pytest.approx(best)
        assert split.gap == pytest.approx(0.0, abs=1e-9)


def test_models_are_pairs_or_lines() -> None:
    lines: list[CostModel | tuple[float, float]] = [CostModel.affine(0.5, 1.0), (0.0, 2.0)]
    assert split_items([1, 1, 1], lines).items == [[0, 2], [1]]


def test_reprs_are_readable() -> None:
    assert repr(split_items([2, 1], [(0, 1)] * 2)) == "ItemSplit(items=[[0], [1]], makespan_seconds=2.0, gap=0)"
    assert repr(fit_item_cost([512], [0.5])) == (
        "ItemCostFit(fixed_seconds=0.5, per_token_seconds=0, per_squared_token_seconds=0, scales=[1.0], relative_rms=0)"
    )


def test_a_fit_gives_costs_and_models_to_the_split() -> None:
    lengths = [100.0, 300.0, 700.0, 1500.0] * 3
    devices = [0] * 4 + [1] * 8
    seconds = [
        (1 + device) * (0.01 + 2e-5 * length + 1e-8 * length**2)
        for device, length in zip(devices, lengths, strict=True)
    ]
    fit = fit_item_cost(lengths, seconds, devices=devices)
    assert fit.scales == pytest.approx([1.0, 2.0], rel=1e-6)
    assert fit.item_seconds(1000) == pytest.approx(0.03, rel=1e-6)
    assert fit.models[1] == pytest.approx((0.02, 2.0), rel=1e-6)
    assert fit.relative_rms < 1e-6
    split = split_items([fit.item_seconds(length) for length in lengths], fit.models)
    assert split.gap < 0.02
    batches = fit_item_cost([200, 400], [0.3, 0.5], squared_tokens=[20000, 40000])
    assert batches.fixed_seconds == pytest.approx(0.1)


def test_samples_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="seconds is of length 1 instead of 2; pass one per sample"):
        fit_item_cost([1, 2], [1])
    with pytest.raises(InvalidArgument, match="no samples"):
        fit_item_cost([], [])


def least_padded(costs: list[float], models: list[tuple[float, float]]) -> float:
    """The smallest makespan over all cuts of the sorted items and all orders of the devices; every device gets at least one item."""
    descending = sorted(costs, reverse=True)
    cuts = itertools.combinations(range(1, len(costs)), len(models) - 1)
    return min(
        max(
            fixed + per * ((end - begin) * descending[begin])
            for (fixed, per), begin, end in zip(order, (0, *cut), (*cut, len(costs)), strict=True)
        )
        for cut in cuts
        for order in itertools.permutations(models)
    )


def test_split_padded_equals_brute_force_to_the_bit() -> None:
    rng = random.Random(2)
    for _ in range(100):
        costs = [rng.choice([1.0, 2.0, 5 * rng.random()]) for _ in range(rng.randrange(4, 10))]
        models = [
            (rng.choice([0.0, rng.random()]), rng.choice([1.0, rng.random()])) for _ in range(rng.randrange(1, 5))
        ]
        split = split_padded(costs, models)
        assert sorted(index for items in split.items for index in items) == list(range(len(costs)))
        assert split.loads == [len(items) * max(costs[index] for index in items) for items in split.items]
        assert split.makespan_seconds == least_padded(costs, models)
        assert split.gap == 0.0


def test_split_padded_takes_models_as_split_items_does() -> None:
    lines: list[CostModel | tuple[float, float]] = [CostModel.affine(0.5, 1.0), (0.0, 2.0)]
    assert split_padded([1, 1, 1], lines).items == [[0, 1], [2]]
    assert split_padded([3, 7], [(0, 1)] * 3).items == [[1], [0], []]
    with pytest.raises(ValueError, match="pass one model per device"):
        split_padded([1], [])
    with pytest.raises(InvalidArgument, match="cost at 1 is -2; it must be finite and not negative"):
        split_padded([1, -2], [(0, 1)])
    with pytest.raises(InvalidArgument, match="check the units"):
        split_padded([1e308, 1e307], [(0, 1)])
