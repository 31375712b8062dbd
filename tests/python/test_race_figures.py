"""The figures that the races compute from their measurements."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paceline
import race_gpu
from race import findings, gpu_parts, recovery
from race.figures import median_interval, ratio_summary, steps_to_recover
from race.gpu_field import Paced, Plain
from race.gpu_networks import MAKERS, Network
from race.job import Job
from race.pipeline_figures import Rounds, goals


def test_recovery_is_counted_from_the_change_to_the_first_step_that_is_fast_again() -> None:
    quiet = [1.0] * 10
    assert steps_to_recover(quiet + [3.0, 2.5] + [1.5] * 8, 10, 20) == 2
    assert steps_to_recover(quiet + [3.0] * 4 + [1.5] * 6, 10, 20) == 4
    assert steps_to_recover(quiet + [1.5] * 10, 10, 20) == 0
    assert steps_to_recover(quiet + [3.0, 1.5, 3.0, 3.0, 3.0] + [1.5] * 5, 10, 20) == 5  # one fast step is no recovery
    assert steps_to_recover(quiet + [3.0, 1.5, 3.0] + [1.5] * 7, 10, 20) == 1  # one slow step is no relapse


def test_what_is_never_fast_enough_never_recovers() -> None:
    assert steps_to_recover([1.0] * 4 + [5.0] * 8, 4, 12, tolerance=-0.5) is None


def test_a_ratio_has_its_interval_where_there_are_enough_pairs() -> None:
    assert ratio_summary([1.0, 1.1, 0.9])["interval"] is None
    summary = ratio_summary([0.9, 1.0, 1.0, 1.0, 1.1, 1.2])
    assert summary == {"median": 1.0, "interval": [0.9, 1.2], "spread": 0.15, "pairs": 6}


def test_the_interval_of_a_median_holds_it_as_often_as_it_says() -> None:
    # From binomial tables: the first of 6 values from either end (96.9 %), the second of 10 (97.9 %), the sixth of 20.
    assert median_interval([1, 2, 3, 4, 5]) is None
    assert median_interval([3, 1, 2, 4, 5, 6]) == (1, 6)
    assert median_interval(list(range(1, 11))) == (2, 9)
    assert median_interval(list(range(1, 21))) == (6, 15)


def batches(**auto_over_best_alone: float) -> dict[int, dict[str, Any]]:
    return {
        int(name[1:]): {"auto_over_best_alone": ratio, "milliseconds": {"auto": 10.0 * ratio}}
        for name, ratio in auto_over_best_alone.items()
    }


def test_splitting_pays_from_the_batch_on_where_all_larger_ones_gain_too() -> None:
    found = findings.splitting(batches(b8=1.2, b16=0.9, b64=1.5, b512=1.9))
    assert (found["pays_from_batch"], found["pays_from_step_milliseconds"]) == (64, 15.0)
    assert findings.splitting_text(found, 8).startswith("Below batch 64, a step of 15.0 ms, one should not split")
    everywhere = findings.splitting(batches(b8=1.2, b16=1.3))
    assert findings.splitting_text(everywhere, 8).startswith("Splitting pays at every size measured, down to batch 8")
    nowhere = findings.splitting(batches(b8=1.2, b16=1.04))
    assert nowhere["pays_from_batch"] is None
    assert findings.splitting_text(nowhere, 8).startswith("Splitting did not pay at any size measured")


def test_goals_count_for_long_steps_only() -> None:
    summary: dict[str, Any] = {"milliseconds": {"auto": 40.0}, "auto_over_ddp": 1.49, "auto_over_ideal": 0.97}
    summary["auto_over_ideal_in_micro_batches"] = 0.92
    short = summary | {"milliseconds": {"auto": 39.9}}
    found = findings.goals("convolution", True, {64: short, 512: summary})
    assert [(each["batch"], each["figure"], each["met"]) for each in found] == [
        (512, "auto_over_ddp", False),
        (512, "auto_over_ideal", True),
        (512, "auto_over_ideal_in_micro_batches", False),
    ]
    assert [each["goal"] for each in findings.goals("transformer", False, {512: summary})] == [1.02]


def micro_batch(device: str, items: tuple[int, int], start: float, duration: float, step: int = 7) -> dict[str, Any]:
    return {
        "kind": "micro_batch",
        "device": device,
        "step": step,
        "begin": items[0],
        "end": items[1],
        "start_seconds": start,
        "duration_seconds": duration,
    }


def test_a_step_is_late_by_what_its_devices_would_have_shared() -> None:
    events = [
        micro_batch("a", (0, 90), 1.0, 9.0, step=6),  # belongs to an earlier step
        {"kind": "step", "step": 7},
        micro_batch("a", (0, 40), 10.0, 4.0),
        micro_batch("b", (40, 80), 10.0, 8.0),
    ]
    hit = recovery.last_step(events)
    assert hit.seconds == pytest.approx(8.0)
    assert hit.ideal_seconds == pytest.approx(80 / (10 + 5))
    assert hit.late_micro_batches == pytest.approx((8 - 80 / 15) / 8)
    assert hit.largest_micro_batch == 40


def test_recovery_is_judged_by_its_median_and_never_counts_as_long() -> None:
    hits = [recovery.Hit(1.0, ideal, 0.5, 8) for ideal in (0.4, 0.75, 1.0)]
    found = recovery.summary([2, None, 1], hits)
    assert (found["steps"]["median"], found["steps"]["met"]) == (2, True)
    assert (found["step_that_is_hit"]["late_micro_batches"], found["step_that_is_hit"]["met"]) == (0.5, True)
    assert "2 steps (goal 2: met)" in recovery.text(found)
    lost = recovery.summary([None, None, 1], [recovery.Hit(1.0, 0.2, 0.5, 8)])
    assert (lost["steps"]["median"], lost["steps"]["met"]) == (None, False)
    assert lost["step_that_is_hit"]["met"] is False
    assert "never (goal 2: missed)" in recovery.text(lost)


@pytest.mark.parametrize(
    ("figures", "counts", "met"),
    [
        ({"fraction_of_ideal": 0.96, "goal": 0.95}, True, True),
        ({"fraction_of_ideal": 0.94, "goal": 0.95, "launch_bound": False}, True, False),
        ({"fraction_of_ideal": 0.96, "goal": 0.95, "launch_bound": True}, False, None),
        ({"fraction_of_ideal": 0.9, "goal_steps": 2, "steps_to_recover": 2}, True, True),
        ({"fraction_of_ideal": 0.9, "goal_steps": 2, "steps_to_recover": 3}, True, False),
        ({"fraction_of_ideal": 0.9, "goal_steps": 2, "steps_to_recover": None}, True, False),
        ({"fraction_of_ideal": None}, True, None),
    ],
)
def test_a_launch_bound_run_does_not_count(figures: dict[str, object], counts: bool, met: bool | None) -> None:
    found = race_gpu.verdict(figures)
    assert (found["counts"], found["met"]) == (counts, met)


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["race_gpu.py", "--json"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert race_gpu.main() == 0
    assert '"available": false' in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "count", "moved"), [("cuda", 2, 5), ("cuda", 4, 11), ("cpu", 2, 4)])
def test_a_sum_is_held_against_a_copy_by_what_it_moves(kind: str, count: int, moved: int) -> None:
    assert gpu_parts.buffers_moved(count, torch.device(kind)) == moved


@pytest.mark.parametrize("update", [True, False])
def test_both_sides_of_a_race_update_or_neither(update: bool) -> None:
    network = Network("memory-bound", MAKERS["memory-bound"], torch.device("cpu"))
    devices = [paceline.find_device(name) for name in ("host:0", "host:1")]
    plain = Plain(network, 8, update=update)
    with Paced(network, devices, 8, "even", update=update) as paced:
        for racer, module in ((plain, plain._module), (paced, paced.trainer.module)):
            before = [parameter.clone() for parameter in module.parameters()]
            racer()
            assert update != all(map(torch.equal, before, module.parameters()))
            assert all(parameter.grad is None for parameter in module.parameters())


# The race of pipelines: its figures, and that its rivals train the same model. No speed is tested.


def rounds(*, busy: bool = False, block_seconds: float = 0.006) -> Rounds:
    """Two rounds of steps of 64 items. Speeds are 64 over the seconds of a step."""
    made = Rounds(64, 8, busy=busy)
    for round_ in (1.0, 2.0):  # the second round is half as fast
        for name, seconds in {"torch_gpipe": 1.0, "torch_1f1b": 1.6, "even": 1.28, "data_parallel": 0.64}.items():
            made.add(name, {name: [[seconds * round_] * 3]})
        auto = 0.8 * round_ if round_ == 1.0 else 1.0
        # A slow step raises the mean, by which speeds go, but not the median, which is compared with the prediction.
        made.add(
            "auto",
            {
                "auto": [[auto] * 3],
                "inside": [[auto * 0.96, auto * 0.96, 9.0]],
                "predicted": [[auto * 0.8, auto * 0.8, 9.0]],
                "placed": [[4.0, 2.0]],
            },
        )
        made.add_alone(
            {
                "host:0": {"single": [[1.6 * round_]], "block": [[block_seconds, block_seconds, 1.0]]},
                "host:1": {"single": [[3.2 * round_]], "block": [[1.0, 1.0, 1.0]]},
            }
        )
    return made


def test_the_result_begins_with_the_promised_figures() -> None:
    found = rounds().summary()
    assert list(found)[:10] == [
        *("busy", "torch_gpipe", "torch_1f1b", "even", "auto", "single", "data_parallel", "predicted"),
        *("auto_over_torch", "measured_over_predicted"),
    ]
    assert found["busy"] is False
    assert (found["torch_gpipe"], found["torch_1f1b"], found["even"]) == (48.0, 30.0, 37.5)
    assert (found["auto"], found["single"], found["data_parallel"]) == (72.0, 30.0, 75.0)
    assert found["predicted"] == 90.0  # the median of 100 and 80
    assert found["measured_over_predicted"] == 1.2
    assert found["blocks_of_devices"] == [[4, 2], [4, 2]]


def test_ratios_are_taken_within_rounds_and_against_the_better_of_torch() -> None:
    found = rounds().summary()
    assert found["better_of_torch"] == "torch_gpipe"
    assert found["auto_over_torch"] == 1.625  # the median of 1.25 and 2, not 72 / 48
    assert found["auto_over_1f1b"] == 2.6
    assert found["auto_over_even"] == pytest.approx((1.6 + 2.56) / 2)


def test_the_ideal_is_what_all_cores_do_alone_without_the_bubble() -> None:
    found = rounds().summary()
    assert found["alone"] == {"host:0": 30.0, "host:1": 15.0}
    assert found["ideal"] == pytest.approx((30 + 15) * 8 / 9)
    assert found["auto_of_ideal"] == pytest.approx(72 / 40)
    assert found["block_milliseconds"] == 6.0  # on the core where it is shortest


@pytest.mark.parametrize(
    ("busy", "micro_batches", "wanted"),
    [
        (False, 8, {"auto_over_torch": "0.97", "auto_over_1f1b": "1.3", "measured_over_predicted": "1 ± 0.05"}),
        (True, 8, {"auto_over_torch": "1.3", "measured_over_predicted": "1 ± 0.05"}),
        (True, 16, {"auto_over_torch": "1.38", "measured_over_predicted": "1 ± 0.05"}),
        (False, 4, {"measured_over_predicted": "1 ± 0.05"}),
    ],
)
def test_goals_depend_on_load_and_micro_batches(busy: bool, micro_batches: int, wanted: dict[str, str]) -> None:
    found: dict[str, Any] = {
        "busy": busy,
        "block_milliseconds": 5.0,
        "auto_over_torch": 1.29,
        "auto_over_1f1b": 1.3,
        "measured_over_predicted": 0.94,
    }
    judged = goals(found, micro_batches)
    assert {each["figure"]: each["goal"] for each in judged} == wanted
    met = {each["figure"]: each["met"] for each in judged}
    assert met["measured_over_predicted"] is False
    assert met.get("auto_over_torch", not busy) is not busy
    assert met.get("auto_over_1f1b", True)
    assert goals(found | {"block_milliseconds": 4.9}, micro_batches) == []


def test_the_table_has_every_rival_and_says_if_blocks_are_too_short() -> None:
    text = rounds().text()
    assert "auto over torch 1.625, goal 0.97: met" in text
    assert "measured over predicted 1.200, goal 1 ± 0.05: missed" in text
    assert [line.split()[-4:-2] for line in text.splitlines() if line.startswith("paceline, planned")] == [
        ["±11.1%", "889"]
    ]
    short = rounds(block_seconds=0.002).text()
    assert "Goals count from 5 ms a block on." in short
    assert "goal 0.97" not in short


def test_the_stages_of_torch_are_together_the_model_of_all_others() -> None:
    from race import pipeline_rivals

    job = Job(rival="pipeline-single", folder="", batch=4, steps=1, micro_batches=2, blocks=3, width=16, parts=2)
    tokens, _ = next(pipeline_rivals.batches(job))
    x = tokens
    for rank in range(2):
        stage = pipeline_rivals.stage_of(pipeline_rivals.network(job), Job(**vars(job) | {"rank": rank}))
        assert len(list(stage.get_submodule("blocks").children())) == (1, 2)[rank]
        x = stage(x)
    assert torch.equal(x, pipeline_rivals.network(job)(tokens))
