"""`paceline.sim` and the command `paceline simulate`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline import InvalidArgument
from paceline._cli import main
from paceline.sim import run_suite, scenarios, simulate

EIGHT = ["--speeds", "1,1,1,1,1,1,1,1", "--batch", "512", "--noise", "0.03", "--fixed-ms", "4", "--per-item-ms", "0.1"]


def run_command(*words: str) -> int:
    return main(["simulate", *words])


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run_command(*words, "--json") == 0
    summary: dict[str, Any] = json.loads(capsys.readouterr().out)
    return summary


def test_json_has_all_policies_events_and_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--speeds", "1,1,1,0.5", "--noise", "0.03", "--throttle", "0:2.0@100-300", "--seed", "1"]
    summary = run_json(capsys, *words)
    assert set(summary["policies"]) == {"auto", "even", "weighted"}
    auto = summary["policies"]["auto"]
    assert auto["steps_to_recover"] == [2, 2]
    assert auto["loss_to_ideal"] < 0.02 < 0.3 < summary["policies"]["even"]["loss_to_ideal"]
    assert auto["moves_per_100_steps"] == auto["moves"] / 4
    assert sum(auto["final_shares"]) == 512
    assert summary["policies"]["even"]["steps_to_recover"] == [None, None]
    assert summary["events"] == [
        {"step": 100, "device": 0, "kind": "throttle"},
        {"step": 300, "device": 0, "kind": "release"},
    ]
    assert summary["ideal_ms"] > 0
    assert summary["config"]["throttle"] == [{"device": 0, "factor": 2.0, "from": 100, "to": 300}]
    assert run_json(capsys, *words) == summary, "equal arguments give equal results"


@pytest.mark.parametrize("steps", [400, 800])
def test_a_quiet_box_is_left_alone(capsys: pytest.CaptureFixture[str], steps: int) -> None:
    for seed in range(1, 6):
        auto = run_json(capsys, *EIGHT, "--steps", str(steps), "--seed", str(seed))["policies"]["auto"]
        assert auto["loss_to_ideal"] <= 0.0035
        assert auto["moves_per_100_steps"] <= 0.5


def test_a_throttle_is_followed_in_two_steps(capsys: pytest.CaptureFixture[str]) -> None:
    losses = []
    for seed in range(1, 6):
        words = [*EIGHT, "--steps", "800", "--throttle", "3:2.0@200-600", "--seed", str(seed)]
        auto = run_json(capsys, *words)["policies"]["auto"]
        assert all(steps <= 2 for steps in auto["steps_to_recover"])
        losses.append(auto["loss_to_ideal"])
    assert sum(losses) / len(losses) <= 0.005


def test_noise_that_lasts_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--speeds", "1,1", "--noise", "0.05", "--seed", "1"]
    plain = run_json(capsys, *words)
    assert plain["config"]["lasting_noise"] == []
    lasting = run_json(capsys, *words, "--lasting-noise", "0.06:4", "--lasting-noise", "0.08:40:common")
    assert lasting["config"]["lasting_noise"] == [
        {"deviation": 0.06, "steps": 4.0, "common": False},
        {"deviation": 0.08, "steps": 40.0, "common": True},
    ]
    assert lasting["policies"]["even"]["time_over_ideal"] > plain["policies"]["even"]["time_over_ideal"]


def test_table_is_aligned_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("--speeds", "1,0.5", "--steps", "100", "--throttle", "0:2@50-80", "--fail", "1@90") == 0
    text = capsys.readouterr().out
    assert text.isascii()
    rows = text.splitlines()[2:6]
    assert [row.split()[0] for row in rows] == ["policy", "auto", "even", "weighted"]
    ends = {row.index("%") for row in rows[1:]}
    assert len(ends) == 1, "the percentages stand below each other"
    assert "never" in text
    assert "failure of 1 at step 90" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "one of the arguments --speeds --suite --gpus is required"),
        (["--suite", "--speeds", "1,1"], "argument --speeds: not allowed with argument --suite"),
        (["--suite", "--seeds", "0"], "0 seeds"),
        (["--speeds", "1,x"], "argument --speeds: invalid numbers value: '1,x'"),
        (["--speeds", "1,0"], "the speed of sim:1 is 0: it must be above zero"),
        (["--speeds", "1,nan"], "the speed of sim:1 is nan"),
        (["--speeds", "1,1", "--batch", "0"], "0 items"),
        (["--speeds", "1,1", "--steps", "many"], "argument --steps: invalid count value: 'many'"),
        (["--speeds", "1,1", "--steps", "0"], "0 steps: simulate at least one"),
        (["--speeds", "1,1", "--noise", "3"], "noise is 3: give a fraction below 1"),
        (["--speeds", "1,1", "--lasting-noise", "0.1"], "argument --lasting-noise: invalid noise value: '0.1'"),
        (["--speeds", "1,1", "--lasting-noise", "0.1:5:both"], "invalid noise value: '0.1:5:both'"),
        (["--speeds", "1,1", "--lasting-noise", "0.1:0"], "a number of steps above zero"),
        (["--speeds", "1,1", "--lasting-noise", "3:5"], "give a fraction below 1"),
        (["--speeds", "1,1", "--throttle", "0:2.0"], "argument --throttle: invalid throttle value: '0:2.0'"),
        (["--speeds", "1,1", "--throttle", "0:2.0@300-100"], "end after it starts"),
        (["--speeds", "1,1", "--throttle", "0:0@1-2"], "above zero"),
        (["--speeds", "1,1", "--throttle", "2:2.0@1-2"], "a throttle names device 2: there are 2"),
        (["--speeds", "1,1", "--fail", "5@10"], "a failure names device 5: there are 2"),
        (["--speeds", "1,1", "--fail", "x"], "[--fail DEVICE@STEP]"),
        (["--speeds", "1,1", "--fail", "0@1", "--fail", "1@2"], "sim:1 failed and no device is left"),
        (["--speeds", "1,1", "--spikes", "0.1"], "argument --spikes: invalid spikes value: '0.1'"),
        (["--speeds", "1,1", "--spikes", "2:1.5"], "the probability of a spike is 2"),
        (["--speeds", "1,1", "--fixed-ms", "0", "--per-item-ms", "0"], "not both zero"),
        (["--speeds", "1,1", "--seed", "-1"], "argument --seed: invalid count value: '-1'"),
        (["--speeds", "1,1", "--seed", "1" + 30 * "0"], "argument --seed: invalid count value"),
    ],
)
def test_wrong_arguments_exit_with_two_and_say_why(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    try:
        status: Any = main(["simulate", *words])
    except SystemExit as exit:
        status = exit.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_wrong_options_are_named() -> None:
    with pytest.raises(InvalidArgument, match="device 4"):
        simulate([1.0, 1.0], throttles=[(4, 2.0, 0, 10)])
    with pytest.raises(InvalidArgument, match="device_classes is of length 1 instead of 2"):
        simulate([1.0, 1.0], device_classes=["a"])


def test_the_suite_keeps_its_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    summary = run_json(capsys, "--suite", "--seeds", "5")
    assert summary["seeds"] == 5
    results = {entry["name"]: entry for entry in summary["scenarios"]}
    expected = {"quiet", "noise", "flapping", "drift", "periodic neighbour", "warm-up", "first-step compile"}
    assert expected | {"correlated", "correlated, throttled", "drifting"} < set(results)
    assert {"garbage collection", "one bad sample", "lasting throttle", "a subset wins: reductions"} < set(results)
    for entry in results.values():
        assert entry["missed"] == []
        assert entry["regret"] == pytest.approx(entry["loss"] - entry["optimum_loss"])
        assert entry["optimum_source"]
        assert entry["about"]
    assert results["lasting throttle"]["steps_to_recover"] <= 2
    assert results["lasting throttle"]["even_loss"] > 0.4
    assert results["quiet"]["steps_to_recover"] is None


def test_the_suite_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("--suite", "--seeds", "3") == 0
    text = capsys.readouterr().out
    assert text.isascii()
    rows = [line for line in text.splitlines() if line.endswith("-") or line[-1:].isdigit()]
    assert len(rows) == len(scenarios())
    assert len({len(row) for row in rows}) == 1, "the columns stand below each other"
    assert "Every bound is kept." in text


def test_a_bound_that_is_missed_is_told_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Missed:
        name, missed, steps_to_recover = "quiet", ["too many moves"], None
        loss = worst_loss = even_loss = optimum_loss = regret = moves_per_100_steps = 0.0

    monkeypatch.setattr("paceline.sim.run_suite", lambda **_: [Missed()])
    assert run_command("--suite") == 1
    assert "quiet: too many moves" in capsys.readouterr().out


def test_scenarios_can_be_named() -> None:
    (result,) = run_suite(["quiet"], seeds=1)
    assert result.name == "quiet"
    with pytest.raises(InvalidArgument, match="no scenario 'x': the scenarios are 'quiet'"):
        run_suite(["x"])


def test_drifts_pauses_and_reductions_reach_the_box() -> None:
    plain = simulate([1.0, 1.0], policy="even", steps=20)
    drifted = simulate([1.0, 1.0], policy="even", steps=20, drifts=[(0, 1.0, 2.0, 0, 20)])
    assert drifted.ideal_seconds > plain.ideal_seconds
    paused = simulate([1.0, 1.0], policy="even", steps=20, pauses=[(0, 0.5, 3, 10)])
    assert paused.elapsed_seconds == pytest.approx(plain.elapsed_seconds + 1.0)
    reduced = simulate([1.0, 1.0], policy="even", steps=20, reduction_seconds=[0.0, 0.0, 0.001])
    assert reduced.elapsed_seconds == pytest.approx(plain.elapsed_seconds + 0.02)
    first = simulate([1.0, 1.0], policy="even", steps=20, first_run_seconds=0.25)
    assert first.elapsed_seconds == pytest.approx(plain.elapsed_seconds + 0.25)
    assert first.loss_to_ideal == pytest.approx(plain.loss_to_ideal + 0.25 / plain.ideal_seconds)
    late = simulate([1.0, 1.0], policy="even", steps=20, late_starts=[(0, 0.01, 5, 9)])
    assert late.elapsed_seconds == pytest.approx(plain.elapsed_seconds + 0.04)
    assert [(event.step, event.kind) for event in late.events] == [(5, "late start"), (9, "on time")]
