"""Which trial runs where, in the example of a search: on a virtual clock, on devices whose speeds are known."""

from __future__ import annotations

import heapq
import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "python"))
from trial_schedule import Schedule

sys.path.pop(0)

SPEEDS = {"a": 1.0, "b": 1.0, "c": 0.5, "d": 0.25}
PACES = {name: 1.0 / speed for name, speed in SPEEDS.items()}
SEEDS = 200
BOUND = 1.1  # of the makespan over that of devices that are never idle
Way = Callable[[list[float]], float]


def drawn(seed: int, count: int = 16, variation: float = 0.3) -> list[float]:
    """Costs, log-normal with mean 1."""
    draws, variance = random.Random(seed), math.log(1 + variation * variation)
    return [math.exp(draws.gauss(-variance / 2, math.sqrt(variance))) for _ in range(count)]


def makespan(costs: Sequence[float], schedule: Schedule, told: Sequence[float] | None = None, rungs: int = 1) -> float:
    """When the last trial ends that a schedule has started, on devices of `SPEEDS`. `told`: what it takes the costs to be."""
    for trial, cost in enumerate(costs if told is None else told):
        schedule.add(trial, "kind", [cost / rungs] * rungs)
    now, left = 0.0, len(costs) * rungs
    runs: list[tuple[float, str, float]] = []  # end, device, seconds
    while left:
        for trial, device in schedule.starts(now, list(SPEEDS)):
            seconds = costs[trial] / rungs / SPEEDS[device]
            heapq.heappush(runs, (now + seconds, device, seconds))
        now, device, seconds = heapq.heappop(runs)  # raises if nobody would ever start what is left
        schedule.ended(device, seconds, goes_on=True)
        left -= 1
    return now


def pulled(costs: Sequence[float]) -> float:
    """The same if each device takes the next trial when it is free."""
    free = [(0.0, speed) for speed in SPEEDS.values()]
    ends = []
    for cost in costs:
        time, speed = heapq.heappop(free)
        ends.append(time + cost / speed)
        heapq.heappush(free, (ends[-1], speed))
    return max(ends)


def over_ideal(way: Way, seeds: int = SEEDS) -> float:
    """The mean over the seeds."""
    return statistics.fmean(way(costs) / (sum(costs) / sum(SPEEDS.values())) for costs in map(drawn, range(seeds)))


def test_sixteen_trials_of_known_costs_end_within_a_tenth_of_the_ideal() -> None:
    assert over_ideal(lambda costs: makespan(costs, Schedule(paces=PACES))) <= BOUND


def test_speeds_that_are_not_known_are_learned_between_rungs() -> None:
    assert over_ideal(lambda costs: makespan(costs, Schedule(), rungs=3), seeds=50) <= BOUND


@pytest.mark.parametrize(
    "worse",
    [
        pytest.param(pulled, id="random order"),
        pytest.param(lambda costs: pulled(sorted(costs)), id="shortest first"),
        pytest.param(lambda costs: pulled(sorted(costs, reverse=True)), id="longest first to whoever is free"),
        pytest.param(lambda costs: makespan(costs, Schedule(paces=PACES), told=[1.0] * len(costs)), id="costs unknown"),
    ],
)
def test_the_bound_is_one_that_worse_orders_exceed(worse: Way) -> None:
    assert over_ideal(worse) > BOUND


def test_a_slow_device_stays_idle_where_a_fast_one_ends_all_sooner() -> None:
    schedule = Schedule(paces={"fast": 1.0, "slow": 10.0})
    for trial in ("x", "y"):
        schedule.add(trial, "kind", [1.0])
    assert schedule.starts(0.0, ["fast", "slow"]) == [("x", "fast")]
    assert schedule.starts(0.5, ["fast", "slow"]) == []
    schedule.ended("fast", 1.0, goes_on=True)
    assert schedule.starts(1.0, ["fast", "slow"]) == [("y", "fast")]


def test_a_trial_moves_to_a_faster_device_that_is_free_when_its_rung_ends() -> None:
    schedule = Schedule()
    schedule.add("long", "kind", [1.0, 9.0])
    schedule.add("short", "kind", [1.0])
    assert schedule.starts(0.0, ["slow", "fast"]) == [("long", "slow"), ("short", "fast")]
    schedule.ended("fast", 1.0, goes_on=True)
    assert schedule.starts(1.0, ["slow", "fast"]) == []
    schedule.ended("slow", 4.0, goes_on=True)
    assert schedule.starts(4.0, ["slow", "fast"]) == [("long", "fast")]


def test_the_longest_is_told_by_measured_seconds_where_kinds_have_units_of_their_own() -> None:
    schedule = Schedule()
    schedule.add("x", "small unit", [1000.0])
    schedule.add("y", "large unit", [1.0])
    assert schedule.starts(0.0, ["device"]) == [("x", "device")]
    schedule.ended("device", 1.0, goes_on=True)
    assert schedule.starts(1.0, ["device"]) == [("y", "device")]
    schedule.ended("device", 10.0, goes_on=True)
    schedule.add("x again", "small unit", [2000.0])
    schedule.add("y again", "large unit", [1.0])
    assert schedule.starts(11.0, ["device"]) == [("y again", "device")]


@pytest.mark.parametrize(("reach", "first"), [(1.0, "deep"), (0.1, "flat")])
def test_what_is_left_counts_with_the_chance_to_reach_it(reach: float, first: str) -> None:
    schedule = Schedule(reach)
    schedule.add("flat", "kind", [2.0])
    schedule.add("deep", "kind", [1.0, 3.0])
    assert schedule.starts(0.0, ["device"]) == [(first, "device")]


def test_a_device_that_becomes_slow_is_known_after_two_runs() -> None:
    schedule = Schedule()

    def run(device: str, seconds: float) -> None:
        schedule.add(object(), "kind", [1.0])
        assert len(schedule.starts(0.0, [device])) == 1
        schedule.ended(device, seconds, goes_on=True)

    for device in ("a", "b"):
        for _ in range(3):
            run(device, 1.0)
    faster: list[str] = []
    for _ in range(2):
        run("b", 10.0)
        schedule.add(len(faster), "kind", [1.0])
        faster.append(schedule.starts(0.0, ["b", "a"])[0][1])  # at a tie the first one
        schedule.broke_off(faster[-1], goes_on=False)
    assert faster == ["b", "a"]


def test_a_rung_that_broke_off_runs_again_and_a_trial_that_failed_does_not() -> None:
    schedule = Schedule()
    schedule.add("x", "kind", [1.0, 2.0])
    assert schedule.starts(0.0, ["a"]) == [("x", "a")]
    schedule.broke_off("a", goes_on=True)
    assert schedule.starts(1.0, ["b"]) == [("x", "b")]
    schedule.ended("b", 1.0, goes_on=True)
    assert schedule.starts(2.0, ["b"]) == [("x", "b")]
    schedule.broke_off("b", goes_on=False)
    schedule.add("pruned", "kind", [1.0, 2.0])
    assert schedule.starts(3.0, ["b"]) == [("pruned", "b")]
    schedule.ended("b", 1.0, goes_on=False)
    assert schedule.starts(4.0, ["a", "b"]) == []


def test_the_ideal_weighs_the_seconds_of_devices_with_their_speeds() -> None:
    schedule = Schedule(paces={"fast": 1.0, "slow": 4.0})
    # 10 units on the fast one and 1 on the slow one, by 1.25 a second.
    assert schedule.ideal_seconds({"fast": 10.0, "slow": 4.0}) == pytest.approx(11 / 1.25)
    assert schedule.ideal_seconds({}) == 0.0


@pytest.mark.parametrize("costs", [[0.0], [1.0, -1.0], [math.nan]])
def test_costs_that_are_not_positive_are_refused(costs: list[float]) -> None:
    with pytest.raises(ValueError, match="must be positive, and rungs must ascend"):
        Schedule().add("x", "kind", costs)
