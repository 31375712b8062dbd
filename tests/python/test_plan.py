"""The planners from Python: the same answers as in C++, for arguments that a Python user would pass."""

from __future__ import annotations

import doctest
import itertools
import random

import pytest

from paceline import InvalidArgument, plan
from paceline.plan import CostModel, correction_floor, split_batch, split_even, split_weighted


def test_split_batch_equals_brute_force_over_the_models() -> None:
    rng = random.Random(1)
    for _ in range(200):
        models = [CostModel.affine(rng.choice([0.0, 1.0, rng.random()]), rng.random()) for _ in range(3)]
        batch = rng.randrange(1, 12)
        best = min(
            max((model.seconds(n) for model, n in zip(models, shares, strict=True) if n), default=0.0)
            for shares in itertools.product(range(batch + 1), repeat=3)
            if sum(shares) == batch
        )
        split = split_batch(batch, models)
        assert sum(split.shares) == batch
        assert split.makespan_seconds == best


def test_plain_pairs_are_affine_models() -> None:
    assert split_batch(10, [(6.0, 1.0), (0.0, 1.0)]).shares == [2, 8]
    assert split_batch(10, [CostModel.affine(6.0, 1.0), (0, 1)]).makespan_seconds == 8.0


def test_limits_are_given_for_all_devices_or_for_each() -> None:
    pairs = [(0.0, 1.0)] * 3
    assert split_batch(12, pairs, minimum=5).shares == [6, 6, 0]
    assert split_batch(12, pairs, maximum=[None, 2, None]).shares == [5, 2, 5]
    assert split_batch(9, pairs[:2], startup_seconds=[0.0, 5.0]).shares == [7, 2]
    assert split_batch(10, [(0.0, 1.0), (50.0, 1.0)], may_be_zero=False).shares == [9, 1]
    assert split_batch(10, [(0.0, 1.0), (50.0, 1.0)], may_be_zero=[True, True]).shares == [10, 0]


def test_granularity_reduction_and_previous_reach_the_planner() -> None:
    pairs = [(0.0, 1.0), (0.0, 0.9)]
    assert split_batch(18, pairs, granularity=8).shares == [8, 10]
    assert split_batch(12, [(0.0, 1.0)] * 3, reduction_seconds=[0, 0, 1, 9]).shares == [6, 6, 0]
    assert split_batch(10, [(0.0, 1.0)] * 4, previous=[2, 3, 2, 3]).shares == [2, 3, 2, 3]


def test_infeasible_limits_raise_a_value_error_that_names_them() -> None:
    with pytest.raises(ValueError, match="maximums of the 2 devices add up to 7"):
        split_batch(8, [(0.0, 1.0)] * 2, maximum=[3, 4])
    with pytest.raises(InvalidArgument, match="minimum is of length 1 instead of 2; pass one per device"):
        split_batch(8, [(0.0, 1.0)] * 2, minimum=[1])
    with pytest.raises(InvalidArgument, match="not negative"):
        split_batch(8, [(-1.0, 1.0)])


def test_cost_models_show_and_compare_what_they_are() -> None:
    model = CostModel.affine(0.004, 0.0001)
    assert repr(model) == "CostModel.affine(fixed_seconds=0.004, per_item_seconds=0.0001)"
    assert repr(CostModel.affine(1, 0)) == "CostModel.affine(fixed_seconds=1.0, per_item_seconds=0.0)"
    assert model == CostModel.affine(0.004, 0.0001)
    assert hash(model) == hash(CostModel.affine(0.004, 0.0001))
    assert model != CostModel.affine(0.004, 0.0002)
    assert model != "model"
    assert eval(repr(model), {"CostModel": CostModel}) == model
    assert CostModel.affine(0.0, 0.5).items_within(1.0, 100) == 2
    assert CostModel.affine(1.0, 0.5).scaled(2.0).seconds(2) == 4.0
    with pytest.raises(InvalidArgument, match="negative"):
        CostModel().seconds(-1)


def test_split_repr_is_readable() -> None:
    assert repr(split_batch(4, [(0.0, 0.5)] * 2)) == "Split(shares=[2, 2], makespan_seconds=1.0)"


def test_weighted_even_and_correction_floor() -> None:
    assert split_weighted(512, [2, 1]) == [341, 171]
    assert split_weighted(10, [1, 0, 4]) == [2, 0, 8]
    assert split_even(10, 4) == [3, 3, 2, 2]
    assert correction_floor(CostModel.affine(4.0, 0.5), 0.5) == 8


def test_examples_in_docstrings_are_true() -> None:
    for name in plan.__all__:
        function = getattr(plan, name)
        for example in doctest.DocTestFinder(recurse=False).find(function, name, module=False):
            assert doctest.DocTestRunner().run(example).failed == 0
