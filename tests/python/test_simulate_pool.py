"""`paceline.sim.simulate_pool` and the command `paceline simulate --pool`."""

from __future__ import annotations

import json

import pytest

from paceline import InvalidArgument
from paceline._cli import main
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
