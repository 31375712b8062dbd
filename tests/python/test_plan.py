"""The planners from Python: the same answers as in C++, for arguments that a Python user would pass."""

from __future__ import annotations

import doctest
import itertools

import pytest

from paceline import InvalidArgument, OutOfMemory, plan
from paceline.plan import (
    BlockCost,
    CostModel,
    StageDevice,
    correction_floor,
    fit_item_cost,
    gpipe,
    one_f_one_b,
    pipeline_times,
    plan_stages,
    split_batch,
    split_even,
    split_items,
    split_padded,
    split_weighted,
)


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


# Items of unequal cost from Python: the same answers as in C++, for arguments that a Python user would pass.


def test_models_are_pairs_or_lines() -> None:
    lines: list[CostModel | tuple[float, float]] = [CostModel.affine(0.5, 1.0), (0.0, 2.0)]
    assert split_items([1, 1, 1], lines).items == [[0, 2], [1]]


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


# Schedules and stages of pipelines from Python: the same answers as in C++, for arguments that a Python user would pass.


BLOCK = BlockCost(forward_per_item=1.0, backward_per_item=2.0, parameter_bytes=100, saved_bytes_per_item=10)


def test_schedules_are_lists_of_pairs() -> None:
    assert gpipe(1, 2) == [[("F", 0), ("F", 1), ("B", 0), ("B", 1)]]
    assert one_f_one_b(2, 2)[1] == [("F", 0), ("B", 0), ("F", 1), ("B", 1)]
    assert one_f_one_b(2, 4, [1, 0])[0][:4] == [("F", 0), ("F", 1), ("F", 2), ("B", 0)]
    with pytest.raises(InvalidArgument, match="at least one stage"):
        gpipe(0, 1)
    with pytest.raises(InvalidArgument, match=r"extra\[0\] is -1"):
        one_f_one_b(2, 4, extra=[-1, 0])


def test_pipeline_times_are_those_of_the_closed_formula() -> None:
    times = pipeline_times(gpipe(3, 5), [1.0, 2.0, 1.5], [2.0, 3.0, 4.0])
    assert times.seconds == pytest.approx(4.5 + 4 * 2.0 + 9.0 + 4 * 4.0)
    assert times.busy_seconds == pytest.approx([15.0, 25.0, 27.5])
    assert times.actions[0][0] == (0.0, 1.0)
    assert max(finish for _, finish in itertools.chain(*times.actions)) == times.seconds
    assert "seconds=37.5" in repr(times)


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        ([[("F", 0)], [("B", 0)]], "stage 1, action B0"),
        ([[("F", 0), ("B", 0)], [("F", 0), ("X", 0)]], r"action \('X', 0\)"),
        ([[("F", 0), ("B", 0), ("F", 1), ("B", 1)], [("F", 0), ("F", 1), ("B", 0), ("B", 1)]], "never starts"),
        ([], "at least one stage"),
    ],
)
def test_schedules_that_cannot_run_are_refused(schedule: list[list[tuple[str, int]]], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        pipeline_times(schedule, [1.0, 1.0], [1.0, 1.0])


def test_plan_stages_gives_a_plan_whose_times_are_those_of_its_schedule() -> None:
    devices = [StageDevice("host:0", speed=2.0), StageDevice("host:1", speed=1.0)]
    plan = plan_stages([BLOCK] * 6, devices, batch_size=8, micro_batches=4)
    assert (plan.cuts, plan.order, plan.sizes) == ([0, 2], [1, 0], [2, 2, 2, 2])
    assert pipeline_times(plan.schedule, [4.0, 4.0], [8.0, 8.0]).seconds == pytest.approx(plan.seconds)
    assert plan.ideal_seconds == pytest.approx(6 * 3 * 8 / 3)
    assert plan.ideal_seconds <= plan.bound_seconds <= plan.seconds
    assert plan.bytes == [200 + plan.in_flight[0] * 40, 400 + plan.in_flight[1] * 80]
    assert plan.schedule_text.splitlines()[1] == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert repr(plan).startswith("StagePlan(cuts=[0, 2], order=[1, 0], micro_batches=4, seconds=")


def test_given_parts_of_a_plan_are_kept_and_the_present_plan_counts() -> None:
    devices = [StageDevice(memory_space=i) for i in range(2)]
    plan = plan_stages([BLOCK] * 4, devices, batch_size=4, cuts=[0, 1], order=[1, 0], schedule="gpipe")
    assert (plan.cuts, plan.order, plan.in_flight) == ([0, 1], [1, 0], [len(plan.sizes)] * 2)
    kept = plan_stages(
        [BLOCK] * 4, devices, batch_size=4, previous_cuts=[0, 1], previous_order=[1, 0], indifference=10.0
    )
    assert (kept.cuts, kept.order, kept.moved_bytes) == ([0, 1], [1, 0], 0)


def test_what_does_not_fit_or_makes_no_sense_is_said() -> None:
    small = [StageDevice("host:0", memory_bytes=250), StageDevice("host:1", memory_bytes=150)]
    with pytest.raises(OutOfMemory, match=r"needs 220 bytes on host:1, which has 150.*checkpoint"):
        plan_stages([BLOCK] * 4, small, batch_size=4)
    with pytest.raises(InvalidArgument, match="it is 'auto', 'gpipe' or '1f1b'"):
        plan_stages([BLOCK], small, batch_size=4, schedule="zero-bubble")
    with pytest.raises(InvalidArgument, match="forward_per_item is -1"):
        plan_stages([BlockCost(forward_per_item=-1.0, backward_per_item=1.0)], small, batch_size=1)
    with pytest.raises(InvalidArgument, match="backward is of length 1 instead of 2"):
        pipeline_times(gpipe(2, 2), [1.0, 1.0], [1.0])
