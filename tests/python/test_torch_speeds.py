"""Speeds that a trainer's state holds, and the first plans of a trainer that got them."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import plan
from paceline.testing import faults
from paceline.torch import DataParallel
from torch_support import TWO, assert_same_gradients, classifier, classify, noting, plain

ITEMS = 48


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
    with DataParallel(module, TWO, hold_back=False) as trainer, faults.inject(trainer, faults.Slow("host:1", factor=3)):
        for _ in range(16):
            trainer.step(slowly, batch)
            trainer.step(slowly, batch, cost=torch.ones(ITEMS))
            with trainer.batch(batch) as whole:
                whole.run(backward)
        return read_back(trainer.training_state())


def speeds_in(state: dict[str, Any]) -> dict[str, list[list[float]]]:
    return {kind: speeds for kind, rows in json.loads(state["speeds"]).items() for speeds in rows.values()}


def with_speeds(state: dict[str, Any], speeds: dict[str, Any]) -> dict[str, Any]:
    return {**state, "speeds": json.dumps(speeds)}


def first_shares(state: dict[str, Any], devices: list[str], tmp_path: Path, **options: Any) -> list[int]:
    """The shares of the first step of a new trainer that got this state, whose gradients are those of one device."""
    module, batch = classifier(ITEMS)
    _, wanted = plain(module, classify, batch)
    with DataParallel(module, devices, hold_back=False, **options) as trainer:
        trainer.load_training_state(state)
        trainer.write_ledger(tmp_path / "ledger.jsonl")
        trainer.step(classify, batch)
        assert_same_gradients(module, wanted)
        lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
        shares = list(trainer.shares.values())
        assert shares == next(line["plan"]["shares"] for line in lines if "plan" in line)
        return shares


def given(learned: dict[str, Any], *speeds: float) -> dict[str, Any]:
    """The state with these seconds per item for the host devices, in all kinds of work."""
    rows = [[0.0, 0.0003 / speed] for speed in speeds]
    return with_speeds(
        learned, {kind: dict.fromkeys(tables, rows) for kind, tables in json.loads(learned["speeds"]).items()}
    )


def test_a_state_has_the_speed_of_each_device_by_kind_of_work(learned: dict[str, Any]) -> None:
    speeds = speeds_in(learned)
    assert set(speeds) == {"step", "step by cost", "run backward"}
    for kind, devices in speeds.items():
        assert len(devices) == 2, kind
        assert all(fixed >= 0 and per_item > 0 for fixed, per_item in devices), kind


def test_the_first_plan_is_the_best_one_for_the_learned_speeds(learned: dict[str, Any], tmp_path: Path) -> None:
    models = [(fixed, per_item) for fixed, per_item in speeds_in(learned)["step"]]
    assert first_shares(learned, TWO, tmp_path) == plan.split_batch(ITEMS, models).shares
    assert first_shares(given(learned, 3, 1), TWO, tmp_path) == [36, 12]


def test_other_devices_and_fixed_shares_work_too(learned: dict[str, Any], tmp_path: Path) -> None:
    state = given(learned, 3, 1)
    assert first_shares(state, ["host:0"], tmp_path) == [ITEMS]
    # A device that the state does not know counts as fast as the fastest.
    assert first_shares(given(learned, 2, 1), [*TWO, "host:2", "host:3"], tmp_path) == pytest.approx(
        [14, 7, 14, 13], abs=1
    )
    assert first_shares(state, TWO, tmp_path, balance="even") == [ITEMS // 2, ITEMS // 2]


def test_a_class_of_devices_that_is_not_there_gives_no_hint(learned: dict[str, Any], tmp_path: Path) -> None:
    unknown = with_speeds(learned, {"step": {"a GPU": [[0.0, 0.003], [0.0, 0.0001]]}})
    without = {name: value for name, value in learned.items() if name != "speeds"}  # as earlier versions wrote it
    assert first_shares(unknown, TWO, tmp_path) == first_shares(without, TWO, tmp_path)


def test_steps_with_costs_and_runs_of_a_batch_begin_with_them_too(learned: dict[str, Any]) -> None:
    module, _ = classifier(ITEMS)
    state = given(learned, 3, 1)
    with DataParallel(module, TWO, hold_back=False, micro_batch=1) as trainer:
        trainer.load_training_state(state)
        assert trainer.training_state()["speeds"] == state["speeds"]  # also of what has not run yet
        loops = [trainer._works.of(kind).step_loop for kind in ("step", "run backward")]
        assert [loops[0].plan([1.0] * ITEMS).shares, loops[1].plan(ITEMS).shares] == [[36, 12], [36, 12]]


def test_wrong_speeds_are_corrected(learned: dict[str, Any]) -> None:
    module, batch = classifier(ITEMS)
    with DataParallel(module, TWO, hold_back=False) as trainer, faults.inject(trainer, faults.Slow("host:1", factor=3)):
        trainer.load_training_state(given(learned, 1, 15))
        trainer.step(slowly, batch)
        assert trainer.shares == {"host:0": 3, "host:1": 45}
        for _ in range(16):
            trainer.step(slowly, batch)
        assert trainer.shares["host:1"] < 36, trainer.explain()  # 12 is right, and noise moves it
