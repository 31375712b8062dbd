"""`paceline.sim.simulate_pool` and the command `paceline simulate --pool`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from paceline import InvalidArgument
from paceline._cli import main
from paceline.plan import PoolQuestion
from paceline.sim import simulate_pool

BOX = [
    "simulate",
    "--pool",
    "--speeds",
    "1,1,0.5,0.25",
    "--fixed-ms",
    "2",
    "--per-item-ms",
    "0.5",
    "--variation",
    "0.05",
    "--requests",
    "6000",
]


def test_planned_batches_have_half_the_p99_of_batches_that_take_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BOX, "--max-batch", "32", "--load", "0.5", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    found = summary["placements"]
    assert set(found) == {"auto", "any", "weighted", "least_outstanding", "earliest_finish", "round_robin"}
    assert found["auto"]["p99_seconds"] < 0.6 * found["any"]["p99_seconds"]
    assert summary["config"]["sizes"][-1] == 32


def test_requests_of_unlike_lengths_are_batched_with_their_padding_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BOX, "--max-batch", "32", "--load", "0.5", "--length-variation", "0.5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["placements"]
    assert 10 * found["auto"]["p99_seconds"] < found["any"]["p99_seconds"]


def test_the_table_names_placements_and_outcomes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BOX, "--load", "1.1", "--deadline-ms", "20"]) == 0
    text = capsys.readouterr().out
    assert "4 devices, 6000 requests, load 1.1" in text
    header, auto = text.splitlines()[2:4]
    assert header.split() == [
        "placement",
        "p50",
        "ms",
        "p99",
        "ms",
        "batch",
        "in",
        "time",
        "late",
        "refused",
        "expired",
        "busy",
    ]
    assert auto.startswith("auto")


def test_the_same_seed_gives_the_same_figures() -> None:
    assert simulate_pool([1.0, 0.5], requests=2000, seed=3) == simulate_pool([1.0, 0.5], requests=2000, seed=3)
    assert simulate_pool([1.0, 0.5], requests=2000, seed=3) != simulate_pool([1.0, 0.5], requests=2000, seed=4)


def test_deadlines_part_the_requests_into_four_outcomes() -> None:
    found = simulate_pool([1.0, 1.0, 0.5, 0.25], load=1.2, deadline_seconds=0.05, requests=6000)
    assert found["in_time"] > 0.75
    assert found["in_time"] + found["late"] + found["rejected"] + found["expired"] == pytest.approx(1.0)
    assert found["rejected"] > 0
    assert found["expired"] > 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--pool", "--gpus", "4"], "--speeds"),
        (["--pool", "--suite"], "--speeds"),
        (["--pool", "--speeds", "1,1", "--pipeline"], "not for pipelines"),
        (["--pool", "--speeds", "1,1", "--fail", "0@3"], "--fail is not for pools"),
        (["--pool", "--speeds", "1,1", "--max-batch", "0"], "--max-batch is 0"),
        (["--pool", "--speeds", "1,1", "--believed", "1"], "believed needs as many"),
        (["--pool", "--speeds", "1,1", "--load", "0"], "load is 0"),
        (["--pool", "--speeds", "1,1", "--length-variation", "-1"], "length_variation is -1"),
        (["--pool", "--speeds", "1,1", "--gangs", "0.5:3"], "gang is 3"),
        (["--pool", "--speeds", "1,1", "--gangs", "1.5:2"], "gang_part is 1.5"),
        (["--pool", "--speeds", "1,1", "--stages", "0"], "stages is 0"),
        (["--pool", "--speeds", "1,1", "--day", "--gangs", "0.5:2"], "--gangs is not for --day"),
    ],
)
def test_wrong_arguments_are_refused_with_what_to_do(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *words]) == 2
    assert told in capsys.readouterr().err


def test_an_unknown_placement_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InvalidArgument, match="'fastest'; it must be one of auto, any, round_robin"):
        simulate_pool([1.0], placement="fastest")


TENANTS = [(3.0, 0.5), (1.0, 0.3), (0.5, 0.2)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("options", [{}, {"sizes": [1, 2, 4, 8]}, {"burst": 10.0, "placement": "any"}])
def test_tenants_who_wait_are_served_by_their_weights(seed: int, options: dict[str, Any]) -> None:
    found = simulate_pool([1.0, 0.5, 0.25], load=1.3, requests=4000, seed=seed, tenants=TENANTS, **options)
    assert 0.3 < found["unfairness"] <= 1.0 + 1e-9
    parts = [one["served_while_all_wait"] for one in found["tenants"]]
    assert parts == pytest.approx([3 / 4.5, 1 / 4.5, 0.5 / 4.5], abs=0.03)
    assert [one["served"] for one in found["tenants"]] == pytest.approx([0.5, 0.3, 0.2], abs=0.04)
    waits = [one["mean_wait_seconds"] for one in found["tenants"]]
    assert waits[0] < waits[1]  # more weight for its share


def test_the_fairness_of_tenants_is_told_only_where_there_is_a_bound() -> None:
    assert simulate_pool([1.0], requests=100)["tenants"] == []
    assert simulate_pool([1.0], requests=100)["unfairness"] is None
    bound = simulate_pool([1.0, 0.5], requests=500, load=1.2, tenants=TENANTS, placement="round_robin")
    assert bound["unfairness"] is None
    assert simulate_pool([1.0], requests=500, load=1.2, tenants=TENANTS, deadline_seconds=1.0)["unfairness"] is None
    assert sum(one["served"] for one in bound["tenants"]) == pytest.approx(1.0)
    with pytest.raises(InvalidArgument, match="a positive weight and a positive share"):
        simulate_pool([1.0], tenants=[(1.0, 0.0)])


def test_the_command_prints_what_each_tenant_waits_for_and_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BOX, "--load", "1.2", "--tenants", "3:0.5,1:0.5"]) == 0
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines()]
    first, second = [row for row in rows if row[-1:] in (["75.0%"], ["25.0%"])][:2]
    assert first[:4] == ["auto", "0", "3", "50.0%"]
    assert second[:3] == ["1", "1", "50.0%"]
    assert re.search(r"\nauto +\d+\.\d%, kept\n", text)
    assert "round_robin       no bound: requests are bound to devices when they come" in text
    assert main([*BOX, "--tenants", "3:0.5,1:0.5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"]["tenants"] == [[3.0, 0.5], [1.0, 0.5]]
    assert len(found["placements"]["auto"]["tenants"]) == 2
    with pytest.raises(SystemExit):
        main([*BOX, "--tenants", "3"])
    assert "argument --tenants: '3' is not of the form W:S,W:S,...\n" in capsys.readouterr().err


def test_gangs_of_all_devices_wait_for_each_other() -> None:
    box: dict[str, Any] = {"per_item_seconds": 1.0, "load": 1e12, "variation": 0.0}  # all come at once
    found = simulate_pool([1.0, 0.5], requests=9, gangs=(1.0, 2), **box)
    assert found["elapsed_seconds"] == pytest.approx(18.0)
    assert found["gangs"]["waits"] == pytest.approx({"mean_seconds": 8.0, "p50_seconds": 8.0, "p99_seconds": 16.0})
    assert found["gangs"]["idle"] == pytest.approx(0.0)
    assert simulate_pool([1.0], requests=2, stages=3, **box)["mean_seconds"] == pytest.approx(4.5)
    assert simulate_pool([1.0], requests=2, **box)["gangs"] is None


def test_the_command_prints_what_gangs_wait_and_leave_idle(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*BOX, "--gangs", "0.1:3", "--stages", "2", "--load", "0.5"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "4 devices, 6000 requests of 2 stages, load 0.5" in text
    assert "gangs of 3 devices, 10.0% of the jobs" in text
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"]["gangs"] == [0.1, 3]
    assert found["config"]["stages"] == 2
    gangs = found["placements"]["auto"]["gangs"]
    row = next(line.split() for line in text.splitlines()[10:] if line.startswith("auto"))
    waits = [gangs[of][f"{name}_seconds"] for of in ("waits", "other_waits") for name in ("mean", "p50", "p99")]
    parts = [gangs[name] for name in ("idle", "reserved", "backfilled")]
    assert row == ["auto", *(f"{1e3 * one:.2f}" for one in waits), *(f"{one:.1%}" for one in parts)]
    assert gangs["waits"]["mean_seconds"] > gangs["other_waits"]["mean_seconds"]
    assert 0 < gangs["reserved"] < gangs["idle"] < 1
    with pytest.raises(SystemExit):
        main([*BOX, "--gangs", "3"])
    assert "argument --gangs: '3' is not of the form PART:K\n" in capsys.readouterr().err
    assert main([*BOX, "--tenants", "3:0.5,1:0.5", "--gangs", "0.1:2"]) == 0
    assert "auto              no bound: gangs wait while others start" in capsys.readouterr().out


def test_a_day_counts_deadlines_of_which_none_is_late_without_noise(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--pool", "--day", "--speeds", "1,1,0.5", "--fixed-ms", "0", "--per-item-ms", "2000"]
    words += ["--deadline-ms", "6000", "--variation", "0", "--activation-seconds", "1"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    day = summary["day"]
    assert summary["config"]["deadline_ms"] == 6000
    assert day["late"] == 0
    assert day["rejected"] + day["expired"] > 0
    assert day["in_time"] + day["rejected"] + day["expired"] == pytest.approx(1.0)
    assert text.splitlines()[-1] == (
        f"deadlines: {day['in_time']:.3%} in time, 0.000% late, {day['rejected']:.3%} refused, {day['expired']:.3%} expired; "
        f"all devices all day: {day['all_in_time']:.3%} in time"
    )
    assert main([*words[:9], "--deadline-ms", "0"]) == 2
    assert "deadline_seconds is 0" in capsys.readouterr().err


def earliest_finish(question: PoolQuestion) -> str | None:
    """Every waiting job in turn to the device that ends it first. The idle device that is given one takes the job."""
    free = {one.device: one.free_in_seconds for one in question.candidates}
    given = set()
    for _ in range(question.waiting):
        best = min(question.candidates, key=lambda one: free[one.device] + one.seconds)
        free[best.device] += best.seconds
        given.add(best.device)
    return next((one.device for one in question.candidates if one.idle and one.device in given), None)


# Bursts that seldom overlap: the built-in one takes a run to last at least a tenth of its prediction more, which a function does not see.
@pytest.mark.parametrize("burst", [2.0, 10.0, 30.0])
def test_a_function_that_reimplements_earliest_finish_decides_as_it_does(burst: float) -> None:
    box: dict[str, Any] = {
        "speeds": [1.0, 0.61, 0.37],
        "variation": 0.0,
        "load": 1e-3,
        "burst": burst,
        "requests": 1500,
    }
    built_in = simulate_pool(placement="earliest_finish", **box)
    own = simulate_pool(placement=earliest_finish, **box)
    assert own["batches"] == built_in["batches"]
    assert own["busy"] == pytest.approx(built_in["busy"], rel=1e-12)
    assert own["elapsed_seconds"] == built_in["elapsed_seconds"]
    assert (
        simulate_pool(
            placement=lambda question: next((one.device for one in question.candidates if one.idle), None), **box
        )["batches"]
        != built_in["batches"]
    )


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (lambda question: None, "leaves 1 requests waiting for ever"),
        (lambda question: "sim:9", "placement has answered 'sim:9'"),
    ],
)
def test_a_simulation_refuses_a_function_that_places_nothing(
    place: Callable[[PoolQuestion], str | None], told: str
) -> None:
    with pytest.raises(InvalidArgument, match=told):
        simulate_pool([1.0, 0.5], placement=place, requests=1)


def test_a_simulation_raises_what_the_function_raises() -> None:
    with pytest.raises(ZeroDivisionError):
        simulate_pool([1.0, 0.5], placement=lambda question: 1 / 0, requests=10)
