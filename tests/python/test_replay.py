"""`paceline.balance.replay`: it repeats every decision in a ledger, and refuses malformed ledgers by line."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import InvalidArgument
from paceline.balance import Balancer, LedgerMismatch, replay
from paceline.sim import SimulationResult, simulate


def simulated(policy: str = "auto") -> SimulationResult:
    """300 noisy steps with a throttle, spikes and a failure."""
    return simulate(
        [1, 1, 1, 0.5],
        steps=300,
        policy=policy,
        noise=0.03,
        spike_probability=0.01,
        spike_factor=1.7,
        throttles=[(0, 2.0, 100, 200)],
        failures=[(2, 250)],
        seed=5,
        ledger=True,
    )


def eventful() -> list[str]:
    return simulated().ledger.splitlines()


@pytest.mark.parametrize("policy", ["auto", "even", "weighted"])
def test_every_policy_decides_the_same_again(policy: str) -> None:
    run = simulated(policy)
    result = replay(run.ledger.splitlines())
    assert (run.lost_steps, run.final_shares[2]) == (1, 0)
    assert (result.plans, result.records) == (301, 300)  # the failed step was planned twice
    assert result.mismatches == []
    assert result.moves == run.moves
    assert result.moves > (2 if policy == "auto" else -1)


STRANGE_NAMES = ['a "0"\\\n\t\x1f', "bé\u2028\x85"]


@pytest.mark.parametrize("proportional", [False, True])
def test_every_option_and_every_call_is_replayed(proportional: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "device_classes": ["host", "host", "other"],
        "granularity": 2,
        "minimum": [4, None, 0],
        "maximum": [None, 300, 301],
        "may_be_zero": [False, True, True],
        "startup_seconds": [0.001, 0.0, 1 / 3],
        "reduction_seconds": [0.0, 0.0, 1e-5, 2e-5],
        "calibrate": not proportional,
        "proportional": proportional,
    }
    balancer = Balancer([*STRANGE_NAMES, "c"], **options, ledger=True)
    rng = random.Random(7)
    balancer.hint([(0.0, 0.001), None, (0.001, 1 / 3000)])
    for step in range(120):
        if step in (0, 40, 60):
            balancer.set_least_items({0: 3, 40: 1, 60: 2}[step])
        if step == 100:
            balancer.retire(1)
        plan = balancer.next_plan(rng.choice([96, 300, 301]))
        balancer.record(
            [
                [(n, 0.0001 * n * slowness * rng.uniform(0.99, 1.01), rng.random() < 0.05)] if n else []
                for n, slowness in zip(plan.shares, (1.0, 1.0 + (step > 50), 3.0), strict=True)
            ],
            reduction_seconds=rng.choice([0.0, 0.001]),
            startup_seconds=[0.0001 * k if n else None for k, n in enumerate(plan.shares)],
        )
    path = tmp_path / "ledger.jsonl"
    path.write_text(balancer.ledger(), encoding="utf-8")
    lines = balancer.ledger().removesuffix("\n").split("\n")
    assert [device["name"] for device in json.loads(lines[0])["options"]["devices"]] == [*STRANGE_NAMES, "c"]
    for source in (path, str(path), lines, (line + "\n" for line in lines)):
        result = replay(source)
        assert (result.plans, result.records, result.mismatches) == (120, 120, [])
        assert result.moves == balancer.move_count > 0


def test_a_changed_plan_is_told_with_its_line() -> None:
    lines = eventful()
    number = next(n for n, line in enumerate(lines, 1) if '"plan": {"step": 150,' in line)
    plan = json.loads(lines[number - 1])["plan"]
    changed = plan | {"step": 151, "shares": [512, 0, 0, 0], "moved": not plan["moved"], "predicted_seconds": 1}
    lines[number - 1] = json.dumps({"plan": changed})
    # The step of the change is reported first; a record of step 150 follows.
    assert replay(lines).mismatches == [
        LedgerMismatch(number, 151, "step: the ledger says 151, replayed 150"),
        LedgerMismatch(number, 151, f"shares: the ledger says [512, 0, 0, 0], replayed {plan['shares']}"),
        LedgerMismatch(number, 151, "moved: the ledger says true, replayed false"),
        LedgerMismatch(number, 151, f"predicted_seconds: the ledger says 1, replayed {plan['predicted_seconds']}"),
    ]


def test_a_changed_timing_is_noticed() -> None:
    lines = eventful()
    number = next(n for n, line in enumerate(lines) if '"record"' in line)
    entry = json.loads(lines[number])
    entry["record"]["devices"][0][0][1] *= 1.01  # the change affects every later prediction
    lines[number] = json.dumps(entry)
    assert replay(lines).mismatches


def test_a_lost_record_is_noticed() -> None:
    lines = [line for line in eventful() if '{"record": {"step": 20,' not in line]
    with pytest.raises(InvalidArgument, match="a record of step 21 after the plan of step 20"):
        replay(lines)


GOOD = eventful()[:3]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"plan": {"step": 1}}', '"batch_size" is missing'),
        ('{"plan": {"step": 1, "batch_size": "x"}}', "next_plan"),
        ('{"plan": {"step": 1, "batch_size": 1.5}}', "next_plan"),
        ('{"plan": {"step": 1, "batch_size": 1' + 30 * "0" + "}}", "next_plan"),
        ('{"plan": 7}', "int"),
        ('{"plan": ', "column 10"),
        ('{"plan": 01}', "column 11"),
        ("[1, 2", "column 6"),
        ("[1, 2]", "neither"),
        ("nul", "column 1"),
        ("{} x", "column 4"),
        ("", "column 1"),
        ('{"weather": 1}', "neither"),
        ('{"retire": {"device": 17}}', "no device 17"),
        ('{"retire": {"device": -1}}', "-1"),
        ('{"hint": [[0.1, 0.2]]}', "1 model for a balancer of"),
        ('{"hint": [[1]]}', "hint"),
        ('{"least_items": 0}', "least_items is 0"),
        ('{"record": {"step": 1, "devices": []}}', "a record of step 1 after the plan of step 0"),
        ('{"record": {"step": 0, "devices": [[[1]]], "step_seconds": 1}}', "record"),
        ('{"record": {"step": 0, "devices": [[[1, 1.0]], [], [], []], "step_seconds": 1}}', "record without a plan"),
        ("[" * 100_000, ""),
        ("1" * 5000, ""),
    ],
)
def test_the_line_that_is_wrong_is_named(line: str, message: str) -> None:
    assert replay(GOOD).plans == 1
    with pytest.raises(InvalidArgument, match=r"^line 4 of the ledger: ") as raised:
        replay([*GOOD, line])
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header.clear(), '"paceline_ledger" is missing'),
        (lambda header: header.update(paceline_ledger=99), "version 99, this library reads version 7"),
        (lambda header: header["options"].update(policy="fastest"), "fastest"),
        (lambda header: header["options"].update(weights=7), "weights"),
        (lambda header: header["options"]["devices"].clear(), "at least one device"),
        (lambda header: header["options"]["devices"][0].pop("maximum"), '"maximum" is missing'),
        (lambda header: header["options"]["devices"][0].update(name="\ud800"), "Balancer"),
    ],
)
def test_a_header_that_is_wrong_is_line_1(change: Callable[[dict[str, Any]], object], message: str) -> None:
    header = json.loads(GOOD[0])
    change(header)
    with pytest.raises(InvalidArgument, match=r"^line 1 of the ledger: ") as raised:
        replay([json.dumps(header), *GOOD[1:]])
    assert message in str(raised.value)


def test_a_ledger_that_was_cut_off_names_its_last_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text("\n".join(GOOD)[:-5])
    with pytest.raises(InvalidArgument, match="line 3 of the ledger: column"):
        replay(path)
    with pytest.raises(InvalidArgument, match=r"line 1 of the ledger: .* empty"):
        replay([])
