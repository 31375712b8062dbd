"""Small steps: one device alone may be faster, which is measured and told."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.balance import replay
from paceline.torch import DataParallel
from paceline.torch._run import alone as _alone
from paceline.torch._run.alone import AloneTrials
from torch_support import TWO, assert_same_gradients, classifier, classify, noting, plain

KIND = (8, "shapes")


def run(
    trials: AloneTrials, steps: int, together: float, *alone: tuple[float, float], shares: Sequence[int] = (3, 5)
) -> list[tuple[int, int]]:
    """At which steps a device ran alone, and which. `alone`: of each device the seconds of such a step, and of computing in it."""
    tries = []
    for step in range(steps):
        device = trials.device(KIND, list(shares))
        if device is None:
            trials.add(KIND, 8, together)
        else:
            tries.append((step, device))
            trials.add_alone(*alone[device])
    return tries


def test_trials_are_short_and_ever_more_seldom_and_begin_with_the_two_devices_that_have_most() -> None:
    tries = run(AloneTrials(), 1000, 5e-3, (1e-3, 1e-3), (1e-3, 1e-3))
    assert [step for step, _ in tries] == [*range(32, 44), *range(140, 152), *range(536, 548)]
    assert [device for _, device in tries[:12]] == [1] * 6 + [0] * 6
    tries = run(AloneTrials(), 100, 5e-3, *[(1e-3, 1e-3)] * 4, shares=[1, 4, 0, 3])
    assert [device for _, device in tries] == [1] * 6 + [3] * 6
    assert run(AloneTrials(), 1000, 0.05) == [], "of long steps"


FASTER = "a batch of 8 items takes 7.50 ms as usual, and took 3.00 ms on host:1 alone"


@pytest.mark.parametrize(
    ("together", "first", "second", "said", "silent"),
    [
        (7.5, (4.0, 3.2), (3.0, 2.2), [FASTER, "devices=['host:1']", "still: 0.80 ms of a step are the trainer's"], []),
        (1.2, (1.2, 0.8), (1.3, 0.8), ["would be faster: 0.40 ms of a step are the trainer's own work"], ["devices="]),
        (6, (10, 9.5), (10, 9.5), [], [" "]),
    ],
    ids=["one device", "plain PyTorch", "together"],
)
def test_what_is_faster_is_named_with_its_times(
    together: float, first: Any, second: Any, said: list[str], silent: list[str]
) -> None:
    trials = AloneTrials()
    run(trials, 50, 1e-3 * together, *((1e-3 * step, 1e-3 * busy) for step, busy in (first, second)))
    assert trials.measured is not None
    text = trials.explain(TWO)
    assert all(part in text for part in said)
    assert not any(part in text for part in silent)


def test_batches_of_another_kind_wait_until_they_are_the_usual_ones() -> None:
    trials = AloneTrials()
    other = (3, "shapes")
    for _ in range(20):  # epochs that end with a short batch
        run(trials, 10, 5e-3, (1e-3, 1e-3), (1e-3, 1e-3))
        assert trials.device(other, [3, 5]) is None
        trials.add(other, 3, 1.0)
    assert trials.measured is not None
    assert (trials.measured.size, trials.measured.together) == (8, 5e-3)
    for _ in range(60):
        trials.add(other, 3, 2e-3)
    assert trials.device(other, [3, 5]) == 1
    assert trials.device(KIND, [3, 5]) is None
    assert trials.measured is None


@pytest.mark.alone
def test_a_trainer_measures_what_one_device_would_take_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_alone, "_MOST_SECONDS", 60.0)  # also on a busy machine
    module, batch = classifier(2)  # so few items that the balancer tries no other sizes by itself

    def hindered(_: nn.Module, part: Any) -> None:
        time.sleep(10e-3 if len(part[0]) == 2 else 30e-3)

    with DataParallel(module, TWO) as trainer:
        ran = []
        for step in range(60):
            trainer.step(noting(hindered), batch)
            ran.append(tuple(trainer.shares.values()))
            if step == 30:
                assert "alone" not in trainer.explain()
                assert "not measured" in trainer.what_if(remove=["host:1"]).text
        assert trainer.report()["steps"] == 60
        explained = trainer.explain()
        answer = trainer.what_if(remove=["host:1"])
    assert set(ran[32:44]) == {(2, 0), (0, 2)}
    assert (1, 1) in ran[44:]
    assert "One device would be faster: DataParallel(model, devices=['host:" in explained, explained
    assert answer.shares == [2, 0]
    assert answer.seconds < 0.8 * answer.present_seconds
    assert "it rests on steps that one device ran alone" in answer.text


def test_gradients_and_ledger_hold_in_steps_of_one_device(tmp_path: Path) -> None:
    module, batch = classifier(64)
    _, wanted = plain(module, classify, batch)
    path = tmp_path / "ledger.jsonl"
    with DataParallel(module, TWO) as trainer:
        trainer.write_ledger(path)
        for step in range(50):
            module.zero_grad()
            trainer.step(classify, batch)
            assert_same_gradients(module, wanted)
            if step == 4:  # no trial yet, so the answer says what it takes for granted
                told = trainer.what_if(remove=["host:1"]).text
                assert "as fast alone as beside each other, which was not measured" in told
                assert trainer.what_if(remove=iter(["host:1"])).shares[1] == 0  # type: ignore[call-overload]
                assert "alone" not in trainer.what_if(speeds={"host:1": 2.0}).text
    result = replay(path)
    assert (result.records, result.mismatches) == (50, [])
    for options in (
        {"balance": "even"},
        {"balance": [1, 1]},
        {"micro_batch": 8},
        {"hold_back": False},
        {"granularity": 2},
    ):
        with DataParallel(module, TWO, **options) as trainer:
            assert trainer._works.steps.alone is None, "what the user chose is kept"


@pytest.mark.alone
def test_a_failure_in_a_step_of_one_device_leaves_it_to_the_next() -> None:
    module, batch = classifier(64)
    failing = False

    def fail(_: nn.Module, part: Any) -> None:
        if failing and len(part[0]) == 64:
            raise ZeroDivisionError

    with DataParallel(module, TWO) as trainer:
        for _ in range(32):
            trainer.step(noting(fail), batch)
        failing = True
        with pytest.raises(ZeroDivisionError):
            trainer.step(noting(fail), batch)
        failing = False
        trainer.step(noting(fail), batch)
        assert max(trainer.shares.values()) == 64
        assert isinstance(trainer.step(classify, batch), torch.Tensor)


@pytest.mark.parametrize("part", ["batch norm", "spectral norm"])
@pytest.mark.filterwarnings("ignore:DataParallel. .*each micro-batch is normalised")
def test_one_device_is_tried_where_forwards_write_buffers_too(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_alone, "_FIRST_TRIAL", 4)
    monkeypatch.setattr(_alone, "_MOST_SECONDS", 60.0)
    module, batch = classifier(16)
    if part == "batch norm":
        module.insert(1, nn.BatchNorm1d(10).double())
    else:
        nn.utils.parametrizations.spectral_norm(module[0])
    ran = []
    with DataParallel(module, TWO) as trainer:
        for step in range(24):
            module.zero_grad()
            _, wanted = plain(module, classify, batch)
            trainer.step(classify, batch)
            if 4 <= step < 16:
                assert_same_gradients(module, wanted)
            ran.append(sorted(trainer.shares.values()))
    assert ran[4:16] == [[0, 16]] * 12
    # A late worker may have its share taken over, but not in all of them.
    assert any(one != [0, 16] for one in ran[:4] + ran[16:])
