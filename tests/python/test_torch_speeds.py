"""Speeds that a trainer's state holds, and the first plans of a trainer that got them."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.testing import faults
from paceline.torch import DataParallel
from torch_support import TWO, assert_same_gradients, classifier, classify, hosts, noting, plain

ITEMS = 48
FEW = 20  # what is right is 12, and noise moves it


def read_back(state: dict[str, Any]) -> dict[str, Any]:
    """The state after a file that no code can come from."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


slowly = noting(lambda _, part: time.sleep(3e-4 * len(part[0])))


def backward(module: Any, part: Any) -> None:
    part.backward(slowly(module, part.data))


@pytest.fixture(scope="module")
def learned() -> dict[str, Any]:
    """The state after steps in which host:1 took three times as long, with costs and without, and in runs of a batch."""
    module, batch = classifier(ITEMS)
    with (
        DataParallel(module, TWO, corrections=False) as trainer,
        faults.inject(trainer, faults.Slow("host:1", factor=3)),
    ):
        for _ in range(16):
            trainer.step(slowly, batch)
            trainer.step(slowly, batch, cost=torch.ones(ITEMS))
            with trainer.batch(batch) as whole:
                whole.run(backward)
        assert trainer.shares["host:1"] < FEW
        return read_back(trainer.state_dict())


def speeds_in(state: dict[str, Any]) -> dict[str, list[list[float]]]:
    return {kind: speeds for kind, rows in json.loads(state["speeds"]).items() for speeds in rows.values()}


def with_speeds(state: dict[str, Any], speeds: dict[str, Any]) -> dict[str, Any]:
    return {**state, "speeds": json.dumps(speeds)}


def first_shares(state: dict[str, Any], devices: list[str], tmp_path: Path, **options: Any) -> list[int]:
    """The shares of the first step of a new trainer that got this state, whose gradients are those of one device."""
    module, batch = classifier(ITEMS)
    _, wanted = plain(module, classify, batch)
    with DataParallel(module, devices, corrections=False, **options) as trainer:
        trainer.load_state_dict(state)
        trainer.write_ledger(tmp_path / "ledger.jsonl")
        trainer.step(classify, batch)
        assert_same_gradients(module, wanted)
        lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
        shares = list(trainer.shares.values())
        assert shares == next(line["plan"]["shares"] for line in lines if "plan" in line)
        return shares


def test_a_state_has_the_speed_of_each_device_by_kind_of_work(learned: dict[str, Any]) -> None:
    speeds = speeds_in(learned)
    assert set(speeds) == {"step", "step by cost", "run backward"}
    for kind, ((_, first), (_, second)) in speeds.items():
        assert second > 1.5 * first > 0, kind


def test_the_first_plan_has_the_learned_shares(learned: dict[str, Any], tmp_path: Path) -> None:
    first, second = first_shares(learned, TWO, tmp_path)
    assert second < FEW
    assert first + second == ITEMS


def test_other_devices_and_fixed_shares_work_too(learned: dict[str, Any], tmp_path: Path) -> None:
    assert first_shares(learned, ["host:0"], tmp_path) == [ITEMS]
    first, second, third = first_shares(learned, hosts(3), tmp_path)
    assert second < third  # a device that the state does not know counts as fast as the fastest
    assert abs(first - third) <= 1
    assert first_shares(learned, TWO, tmp_path, balance="even") == [ITEMS // 2, ITEMS // 2]


def test_a_class_of_devices_that_is_not_there_gives_no_hint(learned: dict[str, Any], tmp_path: Path) -> None:
    unknown = with_speeds(learned, {"step": {"a GPU": speeds_in(learned)["step"]}})
    without = {name: value for name, value in learned.items() if name != "speeds"}  # as earlier versions wrote it
    assert first_shares(unknown, TWO, tmp_path) == first_shares(without, TWO, tmp_path)


def test_steps_with_costs_and_runs_of_a_batch_begin_with_them_too(learned: dict[str, Any]) -> None:
    module, _ = classifier(ITEMS)
    with DataParallel(module, TWO, corrections=False, micro_batch=1) as trainer:
        trainer.load_state_dict(learned)
        assert speeds_in(trainer.state_dict()).keys() == speeds_in(learned).keys()  # also of what has not run yet
        loops = [trainer._works.of(kind).step_loop for kind in ("step", "run backward")]
        for plan in loops[0].plan([1.0] * ITEMS), loops[1].plan(ITEMS):
            assert plan.shares[1] < FEW


def test_wrong_speeds_are_corrected(learned: dict[str, Any]) -> None:
    (name,) = json.loads(learned["speeds"])["step"]
    wrong = with_speeds(learned, {"step": {name: speeds_in(learned)["step"][::-1]}})
    module, batch = classifier(ITEMS)
    with (
        DataParallel(module, TWO, corrections=False) as trainer,
        faults.inject(trainer, faults.Slow("host:1", factor=3)),
    ):
        trainer.load_state_dict(wrong)
        trainer.step(slowly, batch)
        assert trainer.shares["host:1"] > ITEMS // 2
        for _ in range(16):
            trainer.step(slowly, batch)
        assert trainer.shares["host:1"] < FEW
