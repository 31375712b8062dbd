"""The race of pipelines: its figures, and that its rivals train the same model. No speed is tested."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="the rivals need torch")

from race.job import Job
from race.pipeline_figures import Rounds, goals


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
    import torch

    from race import pipeline_rivals

    job = Job(rival="pipeline-single", folder="", batch=4, steps=1, micro_batches=2, blocks=3, width=16, parts=2)
    tokens, _ = next(pipeline_rivals.batches(job))
    x = tokens
    for rank in range(2):
        stage = pipeline_rivals.stage_of(pipeline_rivals.network(job), Job(**vars(job) | {"rank": rank}))
        assert len(list(stage.get_submodule("blocks").children())) == (1, 2)[rank]
        x = stage(x)
    assert torch.equal(x, pipeline_rivals.network(job)(tokens))
