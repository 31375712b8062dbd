"""Schedules and stages of pipelines from Python: the same answers as in C++, for arguments that a Python user would pass."""

from __future__ import annotations

import itertools

import pytest

from paceline import InvalidArgument, OutOfMemory
from paceline.plan import BlockCost, StageDevice, gpipe, one_f_one_b, pipeline_times, plan_stages

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


def test_sends_and_unequal_micro_batches_take_their_time() -> None:
    times = pipeline_times(
        one_f_one_b(2, 2), [1.0, 1.0], [2.0, 2.0], send_forward=[0.5, 0.0], send_backward=[0.0, 0.25], scale=[1.0, 0.5]
    )
    # F0 there 1.5, stage 1 busy 4.5, back 0.125, B1 1.
    assert times.seconds == pytest.approx(1.5 + 4.5 + 0.125 + 1.0)


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
