"""`paceline.sim.simulate_pipeline` and the command `paceline simulate --pipeline`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline import InvalidArgument, OutOfMemory
from paceline._cli import main
from paceline.sim import simulate_pipeline

BOX = ["--speeds", "1,1,0.5", "--memory", "8,8,4", "--micro-batches", "16"]


def run_command(*words: str) -> int:
    return main(["simulate", "--pipeline", *words])


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run_command(*words, "--json") == 0
    summary: dict[str, Any] = json.loads(capsys.readouterr().out)
    return summary


def test_the_plan_fits_each_device_and_beats_the_even_cut(capsys: pytest.CaptureFixture[str]) -> None:
    summary = run_json(capsys, *BOX, "--blocks", "24")
    planned = summary["planned"]
    assert planned["ideal_seconds"] < planned["bound_seconds"] <= planned["seconds"]
    for stage in planned["stages"]:
        device = int(stage["device"].split(":")[1])
        assert 0 < stage["bytes"] <= (8, 8, 4)[device] * 2**30
        assert len(stage["actions"]) == 2 * 16
    assert sum(planned["sizes"]) == 512
    for usual in ("one_f_one_b", "gpipe"):
        assert "sim:" in summary[usual]["does_not_fit"]
        assert summary[usual]["seconds"] > planned["seconds"]
    free = run_json(capsys, "--speeds", "1,1,0.5", "--micro-batches", "16")
    assert free["one_f_one_b"]["does_not_fit"] is None
    assert free["one_f_one_b"]["seconds"] > 1.1 * free["planned"]["seconds"]
    assert summary["run"] is None
    assert summary["config"]["memory"] == [8, 8, 4]


def test_a_slow_device_moves_blocks_while_steps_go_by(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--speeds", "1,1,1", "--blocks", "12", "--micro-batches", "8", "--steps", "60", "--slow", "0:2@20-40"]
    summary = run_json(capsys, *words, "--noise", "0.02")
    run = summary["run"]
    moves = [move for move in run["moves"] if move["kind"] == "cuts"]
    assert moves
    assert 21 <= moves[0]["step"] <= 26
    assert moves[0]["reason"].startswith("sim:0 takes ")
    assert run["oracle_seconds"] < run["elapsed_seconds"] < run["unmoved_seconds"]
    assert summary["config"]["slow"] == [{"device": 0, "factor": 2.0, "from": 20, "to": 40}]
    assert run_json(capsys, *words, "--noise", "0.02") == summary, "equal arguments give equal results"


def test_moves_over_a_link_take_time(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--speeds", "1,1", "--blocks", "12", "--micro-batches", "8", "--steps", "120", "--slow", "0:2@20-120"]
    run = run_json(capsys, *words, "--link", "20", "--activations", "4")["run"]
    paid = [move for move in run["moves"] if move["moved_bytes"]]
    assert paid
    assert paid[0]["step"] > 23, "the rent comes first"
    for move in paid:
        assert move["cost_seconds"] == pytest.approx(move["moved_bytes"] / 20e9)
    assert run["elapsed_seconds"] == pytest.approx(
        sum(run["step_seconds"]) + sum(move["cost_seconds"] for move in run["moves"])
    )


def test_the_text_names_stages_and_the_usual_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(*BOX, "--slow", "1:3@5-30", "--steps", "30") == 0
    text = capsys.readouterr().out
    for part in (
        "16 micro-batches",
        "planned",
        "1F1B on the even cut",
        "GPipe on the even cut",
        "does not fit: stage",
        "GiB",
        "30 steps:",
    ):
        assert part in text
    assert any(line.startswith("step ") and "cuts [" in line for line in text.splitlines()), text


def test_plot_draws_the_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / "schedule.svg"
    assert run_command(*BOX, "--plot", str(path)) == 0
    assert "planned" in capsys.readouterr().out
    assert path.stat().st_size > 10_000
    assert main(["simulate", "--speeds", "1,1", "--plot", str(path)]) == 2
    assert "--plot draws the schedule of a pipeline: add --pipeline" in capsys.readouterr().err


def test_what_does_not_fit_is_an_error_with_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("--speeds", "1,1", "--memory", "1,1") == 2
    assert "sim:" in capsys.readouterr().err
    with pytest.raises(OutOfMemory):
        simulate_pipeline([1.0], memory_bytes=[10], parameter_bytes=1000)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--speeds", "1,1", "--memory", "8"), "--memory has 1 value for 2 devices"),
        (("--speeds", "1,1", "--blocks", "0"), "blocks"),
        (("--speeds", "1,1", "--slow", "2:2@0-5"), "device 2"),
        (("--speeds", "1,1", "--fail", "1@5"), "--fail"),
        (("--suite",), "--suite"),
    ],
)
def test_bad_arguments_end_with_two_and_say_why(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(*words) == 2
    assert message in capsys.readouterr().err


def test_a_speed_of_zero_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="speed"):
        simulate_pipeline([1.0, 0.0])
