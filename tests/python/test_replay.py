"""`paceline.balance.replay`: it repeats every decision in a ledger, and refuses malformed ledgers by line."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import InvalidArgument
from paceline._cli import main
from paceline._cli_replay import stretches
from paceline._ledger import read
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
        "unit": "units of work" if proportional else "items",
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
            lent_parts=[0.0, 0.2 * rng.random(), 0.0] if 20 < step < 40 else [],
        )
    path = tmp_path / "ledger.jsonl"
    path.write_text(balancer.ledger(), encoding="utf-8")
    lines = balancer.ledger().removesuffix("\n").split("\n")
    assert [device["name"] for device in json.loads(lines[0])["options"]["devices"]] == [*STRANGE_NAMES, "c"]
    assert json.loads(lines[0])["options"].get("unit", "items") == options["unit"]
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


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, text = tmp_path / "ledger.jsonl", "".join(line + "\n" for line in GOOD)
    header = len(GOOD[0]) + 1
    for size in range(header, len(text) + 1):
        path.write_text(text[:size])
        found = replay(path)
        whole = text.endswith("\n", 0, size) or text[size] == "\n"
        assert found.cut_off == (not whole)
        assert found.plans + found.records == text[: size + whole].count("\n") - 1
    path.write_text(text[:-5])
    assert main(["replay", str(path)]) == 0
    assert "The last line was written in part only, and is left out." in capsys.readouterr().out
    for broken in (text[: header - 5], text[:-5] + "\n"):  # no header, and an end that says that nothing is missing
        path.write_text(broken)
        with pytest.raises(InvalidArgument, match=r"line [13] of the ledger: column"):
            replay(path)
    with pytest.raises(InvalidArgument, match=r"line 1 of the ledger: .* empty"):
        replay([])


def test_a_ledger_in_a_file_has_each_line_when_it_is_decided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("ledger.jsonl", tmp_path / "ledger.jsonl"):  # the second takes the place of the first
        balancer = Balancer(["a", "b"], ledger=path)
        for step in range(5):
            balancer.record([[(share, 0.01 * share)] for share in balancer.next_plan(64).shares])
            assert replay(path).records == step + 1
    monkeypatch.chdir("/")
    assert balancer.ledger() == (tmp_path / "ledger.jsonl").read_text()
    assert not balancer.ledger_failed
    (tmp_path / "ledger.jsonl").unlink()
    with pytest.raises(InvalidArgument, match="the ledger cannot be read from"):
        balancer.ledger()
    with pytest.raises(InvalidArgument, match=r"cannot be opened for writing \(No such file or directory\)"):
        Balancer(["a"], ledger=tmp_path / "none" / "ledger.jsonl")
    with pytest.raises(InvalidArgument, match="/dev/full cannot be written to; is the disk full"):
        Balancer(["a"], ledger="/dev/full")


# The command `paceline replay`, and parsing of ledgers.


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """A ledger of four devices: one is twice as slow for a while, and another one stops."""
    result = simulate(
        [1, 1, 1, 0.5], noise=0.03, throttles=[(0, 2.0, 100, 300)], failures=[(2, 350)], seed=1, ledger=True
    )
    path = tmp_path / "run.jsonl"
    path.write_text(result.ledger)
    return path


def changed(ledger: Path, number: int, **plan: Any) -> Path:
    """The same ledger with a changed plan on line `number`."""
    lines = ledger.read_text().splitlines()
    entry = json.loads(lines[number - 1])
    entry["plan"].update(plan)
    lines[number - 1] = json.dumps(entry)
    path = ledger.with_name("changed.jsonl")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_table_tells_every_split_and_why(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(ledger)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{ledger}: balance auto on sim:0, sim:1, sim:2, sim:3"
    assert lines[1] == "401 decisions, 400 recorded steps, 4 moves. All of them came out the same."
    assert lines[3].split() == ["step", "steps", "batch", "shares", "promised", "measured", "why"]
    rows = lines[4:]
    assert [int(row.split()[0]) for row in rows][-3:] == [101, 301, 350]
    assert sum(int(row.split()[1]) for row in rows) == 400
    assert sum("moved: promises" in row for row in rows) == 3
    assert "sim:2 left; " in rows[-1]


def test_json_tells_the_same(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(ledger), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["reproduced"] is True
    assert (summary["plans"], summary["records"], summary["moves"]) == (401, 400, 4)
    assert (summary["policy"], summary["devices"]) == ("auto", ["sim:0", "sim:1", "sim:2", "sim:3"])
    decisions = summary["decisions"]
    assert sum(entry["moved"] for entry in decisions) == 4
    assert all(sum(entry["shares"]) == entry["batch_size"] == 512 for entry in decisions)
    assert decisions[-1]["retired"] == ["sim:2"]
    assert decisions[-1]["shares"][2] == 0
    assert sum("calibration" in entry["reason"] for entry in decisions) == 2
    for entry in decisions[2:]:
        assert entry["measured_seconds"] == pytest.approx(entry["promised_seconds"], rel=0.1)


def test_a_decision_that_differs_is_shown_and_ends_with_1(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = changed(ledger, 40, shares=[512, 0, 0, 0])
    assert main(["replay", str(path)]) == 1
    output = capsys.readouterr().out
    assert "1 of them came out DIFFERENTLY" in output
    assert re.search(
        r"  line 40, step 19: shares: the ledger says \[512, 0, 0, 0\], replayed \[1\d\d, 1\d\d, 1\d\d, 5\d\]", output
    )
    assert main(["replay", str(path), "--json"]) == 1
    summary = json.loads(capsys.readouterr().out)
    assert summary["reproduced"] is False
    assert [(entry["line"], entry["step"]) for entry in summary["mismatches"]] == [(40, 19)]


def test_many_differences_are_cut_short(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = [json.loads(line) for line in ledger.read_text().splitlines()]
    for entry in entries:
        if "plan" in entry:
            entry["plan"]["predicted_seconds"] = 1.0
    ledger.write_text("\n".join(json.dumps(entry) for entry in entries))
    assert main(["replay", str(ledger)]) == 1
    output = capsys.readouterr().out
    assert "401 of them came out DIFFERENTLY" in output
    assert output.count("predicted_seconds") == 10
    assert "and 391 more" in output


def dealt_by_cost(path: Path, **options: Any) -> Path:
    """A ledger as that of a step with costs."""
    balancer = Balancer(["a", "b"], "even", **options or {"proportional": True}, ledger=True)
    plan = balancer.next_plan(1_000_000)
    balancer.record([[(share, 1e-8 * share)] for share in plan.shares])
    claims: dict[str, Any] = {"step": 0, "batch_size": 3, "ran": [[0, 0, 1, 0, 1], [1, 1, 3, 0, 1]], "order": [2, 0, 1]}
    path.write_text(balancer.ledger() + json.dumps({"claims": claims}) + "\n")
    return path


@pytest.mark.parametrize("options", [{"proportional": True}, {"unit": "units of work"}])
def test_work_is_not_taken_for_items(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any]
) -> None:
    path = dealt_by_cost(tmp_path / "run.jsonl", **options)
    assert main(["replay", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith(
        "Items are dealt by cost: batch and shares below are units of work, of which the first plan has 1000000"
    )
    assert lines[4].split() == ["step", "steps", "batch", "work", "promised", "measured", "why"]
    assert lines[5].split()[2:5] == ["1000000", "500000", "500000"]
    assert main(["replay", str(path), "--json"]) == 0
    assert [entry["unit"] for entry in json.loads(capsys.readouterr().out)["decisions"]] == ["work"]


def test_decisions_about_items_and_about_work_are_replayed_and_told_apart(
    ledger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_work = [json.loads(line) for line in dealt_by_cost(tmp_path / "work.jsonl").read_text().splitlines()]
    lines = ledger.read_text().splitlines()
    # The second balancer's calls lie among those of the first.
    for place, entry in zip((7, 9, 20, 30), of_work, strict=True):
        lines.insert(place, json.dumps({"balancer": 1, **entry}))
    both = tmp_path / "both.jsonl"
    both.write_text("\n".join(lines) + "\n")
    assert main(["replay", str(both)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[1] == "402 decisions, 401 recorded steps, 4 moves. All of them came out the same."
    heads = [number for number, line in enumerate(told) if line.split()[:1] == ["step"]]
    assert [told[number].split()[3] for number in heads] == ["shares", "work"]
    assert told[heads[1] + 1].split()[2:5] == ["1000000", "500000", "500000"]
    assert main(["replay", str(both), "--json"]) == 0
    units = [entry["unit"] for entry in json.loads(capsys.readouterr().out)["decisions"]]
    assert units[-1] == "work"
    assert set(units[:-1]) == {"items"}


@pytest.mark.parametrize("balancer", [-1, 1, 2])
def test_a_line_of_a_balancer_without_a_header_is_refused(
    ledger: Path, balancer: int, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger.write_text(ledger.read_text() + json.dumps({"balancer": balancer, "retire": {"device": 0}}) + "\n")
    with pytest.raises(SystemExit):
        main(["replay", str(ledger)])
    assert f"balancer {balancer} has written no header" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"\x89PNG\xff", "no text"),
        (b"", "line 1 of the ledger"),
        (b"[project]\n", "line 1 of the ledger"),
    ],
    ids=["absent", "binary", "empty", "something else"],
)
def test_other_files_are_refused(
    content: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    try:
        status: Any = main(["replay", str(path)])
    except SystemExit as exit:
        status = exit.code
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    assert message in captured.err


def test_stretches_follow_each_batch_size_by_itself() -> None:
    balancer = Balancer(["a", "b"], "even", ledger=True)
    for size in (8, 8, 4, 8, 8, 4):
        plan = balancer.next_plan(size)
        balancer.record([[(share, 0.01 * share)] for share in plan.shares])
    found = stretches(read(balancer.ledger().splitlines())[0])
    assert [(entry.first.step, entry.last_step, entry.steps, entry.first.batch_size) for entry in found] == [
        (0, 4, 4, 8),
        (2, 5, 2, 4),
    ]
    assert [entry.measured_seconds for entry in found] == pytest.approx([0.04, 0.02])
