"""`paceline.sim` and the command `paceline simulate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline import InvalidArgument, OutOfMemory
from paceline._cli import main
from paceline.sim import launch_rate, run_suite, scenarios, simulate, simulate_data_path, simulate_pipeline


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
    assert auto["steps_to_recover"] == [1, 1]
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
        (["--speeds", "1,x"], "argument --speeds: '1,x' is not of the form S,S,..."),
        (["--speeds", "1,0"], "the speed of sim:1 is 0: it must be above zero"),
        (["--speeds", "1,nan"], "the speed of sim:1 is nan"),
        (["--speeds", "1,1", "--batch", "0"], "0 items"),
        (["--speeds", "1,1", "--steps", "many"], "argument --steps: 'many' is not a whole number from 0"),
        (["--speeds", "1,1", "--steps", "0"], "0 steps: simulate at least one"),
        (["--speeds", "1,1", "--noise", "3"], "noise is 3: give a fraction below 1"),
        (
            ["--speeds", "1,1", "--lasting-noise", "0.1"],
            "argument --lasting-noise: '0.1' is not of the form F:STEPS[:common]",
        ),
        (["--speeds", "1,1", "--lasting-noise", "0.1:5:both"], "'0.1:5:both' is not of the form F:STEPS[:common]"),
        (["--speeds", "1,1", "--lasting-noise", "0.1:0"], "a number of steps above zero"),
        (["--speeds", "1,1", "--lasting-noise", "3:5"], "give a fraction below 1"),
        (
            ["--speeds", "1,1", "--throttle", "0:2.0"],
            "argument --throttle: '0:2.0' is not of the form DEVICE:FACTOR@FROM-TO",
        ),
        (["--speeds", "1,1", "--throttle", "0:2.0@300-100"], "end after it starts"),
        (["--speeds", "1,1", "--throttle", "0:0@1-2"], "above zero"),
        (["--speeds", "1,1", "--throttle", "2:2.0@1-2"], "a throttle names device 2: there are 2"),
        (["--speeds", "1,1", "--fail", "5@10"], "a failure names device 5: there are 2"),
        (["--speeds", "1,1", "--fail", "x"], "[--fail DEVICE@STEP]"),
        (["--speeds", "1,1", "--fail", "0@1", "--fail", "1@2"], "sim:1 failed and no device is left"),
        (["--speeds", "1,1", "--spikes", "0.1"], "argument --spikes: '0.1' is not of the form P:FACTOR"),
        (["--speeds", "1,1", "--spikes", "2:1.5"], "the probability of a spike is 2"),
        (["--speeds", "1,1", "--fixed-ms", "0", "--per-item-ms", "0"], "not both zero"),
        (["--speeds", "1,1", "--seed", "-1"], "argument --seed: '-1' is not a whole number from 0"),
        (["--speeds", "1,1", "--seed", "1" + 30 * "0"], "argument --seed: '1000"),
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


def test_the_suite_is_told_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    summary = run_json(capsys, "--suite", "--seeds", "3")
    assert summary["seeds"] == 3
    results = {entry["name"]: entry for entry in summary["scenarios"]}
    assert results.keys() == {scenario.name for scenario in scenarios()}
    for entry in results.values():
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


def test_wrong_options_and_scenarios_are_named() -> None:
    with pytest.raises(InvalidArgument, match="device_classes is of length 1 instead of 2"):
        simulate([1.0, 1.0], device_classes=["a"])
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


# `paceline.sim.simulate_data_path` and the command `paceline simulate --gpus`.


CASE = ["simulate", "--gpus", "8", "--parameters", "1e9", "--tokens", "8192"]


def test_the_table_has_all_ways(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CASE, "--link", "nvlink4"]) == 0
    text = capsys.readouterr().out
    assert (
        "8 GPUs, nvlink4, 1e+09 parameters of type bfloat16, 8192 tokens each: forward 41.0 ms, backward 81.9 ms"
        in text
    )
    assert "not a measurement" in text
    assert "2000 operators takes a process for each GPU 36.4 ms, and threads of one process 219.2 ms" in text
    assert [line.split()[0] for line in text.splitlines()[5:]] == ["serial", "buckets", "ranges", "sharded", "ring"]


def test_json_says_what_a_step_takes_beyond_computing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CASE, "--link", "pcie4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    computing = 3 * found["forward_seconds"] + 28e9 / 2.7e12
    assert found["ways"]["buckets"]["step_seconds"] == pytest.approx(8 * 2000 / launch_rate(8))  # one process
    for figures in found["ways"].values():
        assert figures["step_seconds"] - figures["exposed_seconds"] == pytest.approx(computing)
    assert found["config"]["link"] == "pcie4"
    assert main([*CASE, "--link", "pcie4", "--json", "--operators", "0"]) == 0
    found = json.loads(capsys.readouterr().out)
    steps = {way: figures["step_seconds"] for way, figures in found["ways"].items()}
    assert sorted(steps, key=steps.__getitem__) == ["sharded", "buckets", "ring", "ranges", "serial"]


def test_a_bandwidth_and_a_latency_take_the_place_of_the_links() -> None:
    common = {"gpus": 4, "parameters": 1e8, "forward_seconds": 0.01, "backward_seconds": 0.02}
    usual = simulate_data_path(**common, link="pcie4")
    same = simulate_data_path(**common, link="nvlink4", bandwidth=25e9, latency_seconds=8e-6)
    assert usual == same
    later = simulate_data_path(**common, link="pcie4", latency_seconds=1e-3)
    assert all(later[way]["step_seconds"] > usual[way]["step_seconds"] for way in usual)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--link", "token-ring"], "--link is 'token-ring'; with --gpus it must be one of host, nvlink4"),
        (["--tokens", "0"], "--tokens and --tflops must be positive"),
        (["--bucket-mb", "0.001"], "give larger ones"),
        (["--bandwidth", "-1"], "bandwidth of a link is -1000000000; it must be positive"),
        (["--pipeline"], "--gpus is not for pipelines"),
    ],
)
def test_bad_values_are_refused(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main([*CASE, *words]) == 2
    assert message in capsys.readouterr().err


def test_a_single_gpu_and_a_pipelines_link_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--gpus", "1"]) == 2
    assert "1 GPUs; give 2 to 64" in capsys.readouterr().err
    assert main(["simulate", "--pipeline", "--speeds", "1,1", "--link", "pcie4"]) == 2
    assert "--link is 'pcie4'; with --pipeline it is a number of GB/s" in capsys.readouterr().err
    with pytest.raises(InvalidArgument, match="there is no link 'ring'"):
        simulate_data_path(gpus=2, parameters=1e6, forward_seconds=1.0, backward_seconds=1.0, link="ring")


# `paceline.sim.simulate_pipeline` and the command `paceline simulate --pipeline`.


BOX = ["--speeds", "1,1,0.5", "--memory", "8,8,4", "--micro-batches", "16"]


def run_pipeline(*words: str) -> int:
    return main(["simulate", "--pipeline", *words])


def pipeline_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run_pipeline(*words, "--json") == 0
    summary: dict[str, Any] = json.loads(capsys.readouterr().out)
    return summary


def test_the_plan_fits_each_device_and_beats_the_even_cut(capsys: pytest.CaptureFixture[str]) -> None:
    summary = pipeline_json(capsys, *BOX, "--blocks", "24")
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
    free = pipeline_json(capsys, "--speeds", "1,1,0.5", "--micro-batches", "16")
    assert free["one_f_one_b"]["does_not_fit"] is None
    assert free["one_f_one_b"]["seconds"] > 1.1 * free["planned"]["seconds"]
    assert summary["run"] is None
    assert summary["config"]["memory"] == [8, 8, 4]


def test_a_slow_device_moves_blocks_while_steps_go_by(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--speeds", "1,1,1", "--blocks", "12", "--micro-batches", "8", "--steps", "60", "--slow", "0:2@20-40"]
    summary = pipeline_json(capsys, *words, "--noise", "0.02")
    run = summary["run"]
    moves = [move for move in run["moves"] if move["kind"] == "cuts"]
    assert moves
    assert 21 <= moves[0]["step"] <= 26
    assert moves[0]["reason"].startswith("sim:0 takes ")
    assert run["oracle_seconds"] < run["elapsed_seconds"] < run["unmoved_seconds"]
    assert summary["config"]["slow"] == [{"device": 0, "factor": 2.0, "from": 20, "to": 40}]
    assert pipeline_json(capsys, *words, "--noise", "0.02") == summary, "equal arguments give equal results"


def test_the_text_names_stages_and_the_usual_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_pipeline(*BOX, "--slow", "1:3@5-30", "--steps", "30") == 0
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
    assert run_pipeline(*BOX, "--plot", str(path)) == 0
    assert "planned" in capsys.readouterr().out
    assert path.stat().st_size > 10_000
    assert main(["simulate", "--speeds", "1,1", "--plot", str(path)]) == 2
    assert "--plot draws the schedule of a pipeline: add --pipeline" in capsys.readouterr().err


def test_what_does_not_fit_is_an_error_with_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_pipeline("--speeds", "1,1", "--memory", "1,1") == 2
    assert "sim:" in capsys.readouterr().err
    with pytest.raises(OutOfMemory):
        simulate_pipeline([1.0], memory_bytes=[10], parameter_bytes=1000)
    with pytest.raises(InvalidArgument, match="speed"):
        simulate_pipeline([1.0, 0.0])


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
    assert run_pipeline(*words) == 2
    assert message in capsys.readouterr().err


def test_the_reference_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    guide = (Path(__file__).parents[2] / "python/guide/reference.md").read_text(encoding="utf-8")
    for command in ("--speeds 1,1,1,0.5 --batch", "--pipeline --blocks"):
        (line,) = [line for line in guide.splitlines() if line.startswith(f"paceline simulate {command}")]
        main(line.split()[1:])
        assert capsys.readouterr().out.strip() in guide
