"""What tables, moves and errors of the page of a run say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline._cli import main
from paceline._ledger import read
from paceline._page.document import page_of_runs
from paceline._page.ledger import runs_of
from paceline._page.pool_ledger import _Jobs
from paceline._page.run import Move, Row, Run
from paceline.balance import Balancer
from paceline.torch import DataParallel
from page_support import Reader, charts_in, ledger, lines_of
from pool_support import Held, pool_of
from torch_support import TWO, classifier, classify


def rows(amount: float = 10, steps: int = 1) -> list[Row]:
    return [Row(steps * at, steps, [amount, amount], [1.0, 0.9], 1.5, 1.0, 1.5) for at in range(5)]


def test_runs_that_are_compared_have_units_of_their_own() -> None:
    runs = [Run("plain", ["a", "b"], rows()), Run("costed", ["a", "b"], rows(30), unit="work")]
    table = Reader(page_of_runs("both", runs)).tables["Side by side"]
    assert [row[-1] for row in table] == ["speed", "13.333 items/s", "40 work/s"]


def test_a_page_without_room_for_moves_has_none() -> None:
    moves = [Move(step, "[1, 1] to [2, 0]", "planted") for step in (1, 3)]
    page = page_of_runs("many", [Run("one", ["a", "b"], rows()[:1], moves)] * 401)
    assert "a page has no reasons of so early moves" in page
    assert "planted" not in page


def test_amounts_are_written_out_and_the_time_has_its_zone() -> None:
    read = Reader(page_of_runs("large", [Run("large", ["a", "b"], rows(1_024_000))]))
    assert [row[1:4] for row in read.tables["Devices"][1:]] == [
        ["1024000", "5120000", "1024000"],
        ["1024000", "5120000", "1137778"],
    ]
    assert re.search(r", \d{4}-\d\d-\d\d \d\d:\d\d [+-]\d{4}\.", read.words)


def test_a_step_that_is_planned_again_keeps_why_a_device_had_left() -> None:
    balancer = Balancer(["a", "b", "c"], "auto", ledger=True)
    for step in range(6):
        if step == 2:
            balancer.retire(1)
            balancer.next_plan(60)  # and then c is lost
            balancer.retire(2)
        shares = balancer.next_plan(60).shares
        balancer.record([[(n, 0.1 * n)] if n else [] for n in shares], 0.1 * max(shares))
        if step == 3:
            balancer.restore(1)
    (run,) = runs_of("again", lines_of(balancer.ledger()))
    assert [(move.step, move.why.split("; ")[:-1]) for move in run.moves] == [
        (2, ["b left", "c left"]),
        (4, ["b came back"]),
    ]


def test_the_ledger_of_a_pool_has_the_page_of_the_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, own, made = (tmp_path / name for name in ("pool.jsonl", "own.html", "ledger.html"))
    with pool_of(2) as pool:
        pool.write_ledger(path)
        for name, jobs in (("host:0", 4), ("host:1", 2)):
            for _ in range(jobs):
                pool.submit(int, kind="k", needs=name).exception()  # int(device) raises
                pool.submit(str, kind="s", needs=name).result()
        with Held(pool, 2) as held:
            pool.submit(str, kind="s").cancel()
            waits = pool.submit(str, kind="s")
        waits.result()
        for job in held.jobs:
            job.result()
        pool.page(own)
    assert main(["page", str(path), "-o", str(made)]) == 0
    pages = [Reader(one.read_text(encoding="utf-8")) for one in (own, made)]
    assert [len(charts_in(one.read_text(encoding="utf-8"))) for one in (own, made)] == [3, 3]  # each job ran alone
    for table in ("How jobs ended", "Devices"):
        rows = [[row[:3] for row in page.tables[table][1:]] for page in pages]
        assert rows[0] == rows[1], table
    counts = {row[0]: row[1] for row in pages[1].tables["How jobs ended"][1:]}
    assert (counts["failed"], counts["cancelled"], counts["completed"]) == ("6", "1", "9")
    assert "pool.jsonl: pool on host:0, host:1, placement auto, 16 jobs" in pages[1].words
    assert "not its words" in pages[1].words
    ledger_of_trainer = tmp_path / "run.jsonl"
    ledger_of_trainer.write_text("".join(ledger()), encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["page", str(path), str(ledger_of_trainer), "-o", str(tmp_path / "both.html")])
    assert "these have pages of their own" in capsys.readouterr().err


def test_the_page_of_a_pools_ledger_ends_where_it_was_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, made = tmp_path / "pool.jsonl", tmp_path / "pool.html"
    with pool_of(1) as pool:
        pool.write_ledger(path)
        for _ in range(3):
            pool.submit(str).result()
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    third = [number for number, line in enumerate(lines) if '"submit"' in line][2]
    lines[third] = lines[third].replace('"devices": [0]', '"devices": [7]')
    path.write_text("".join(lines), encoding="utf-8")
    assert main(["page", str(path), "-o", str(made)]) == 0
    page = Reader(made.read_text(encoding="utf-8"))
    assert f"The page ends at line {third + 1}, where a replay decides differently" in page.words
    path.write_text("".join(lines[:2]), encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["page", str(path), "-o", str(made)])
    assert "no job that ran or ended" in capsys.readouterr().err


def entries_of(*entries: dict[str, Any]) -> _Jobs:
    """What has become of the jobs of a pool with two devices, each of which is one's own kind."""
    found = _Jobs()
    for name in ("d:0", "d:1"):
        found.add({"add_device": {"name": name}})
        found.add({"add_kind": {"name": f"kind of {name}"}})
    for entry in entries:
        found.add(entry)
    return found


def starts(run: int, *jobs: int, declines: Any = (), devices: Any = (0,)) -> dict[str, Any]:
    return {"starts": [{"run": run, "devices": list(devices), "kind": 0, "jobs": list(jobs)}], "declines": declines}


def test_a_run_that_is_withdrawn_counts_its_wait_when_it_begins() -> None:
    submits = [{"at": 0.0, "submit": {}, "job": job} for job in range(2)]
    found = entries_of(
        *submits,
        {"at": 1.0, "tick": {}, "decided": starts(1, 0, 1)},
        {"at": 2.0, "withdraw": {"run": 1}, "decided": starts(2, 0)},
        {"at": 3.0, "finish": {"run": 2, "result": "failed", "seconds": 1.0}, "decided": starts(3, 0, 1)},
        {"at": 4.0, "withdraw": {"run": 3}},
    ).report()
    assert (found["wait_counts"][-1][1], found["wait_seconds_sum"]) == (1, 2.0)  # the other job has not begun
    assert (found["waiting"], found["running"]) == (2, 0)


def test_a_ledger_says_who_declined_and_counts_what_failed_as_busy() -> None:
    faster, memory = [1, 0, "faster_devices", 1, 2.0], [1, 1, "memory", 1, 0.0]
    found = entries_of(
        *({"at": 0.0, "submit": {}, "job": job} for job in range(2)),
        {"at": 1.0, "tick": {}, "decided": {"declines": [faster]}},
        {"at": 1.0, "tick": {}, "decided": starts(1, 0, declines=[faster, memory], devices=(0, 1))},
        {"at": 4.0, "finish": {"run": 1, "result": "failed", "seconds": 3.0}},
    )
    assert [(row[0], row[1], row[3]) for row in found.declined().rows] == [
        ("d:1", "kind of d:0", "2"),
        ("d:1", "kind of d:1", "1"),
    ]
    assert "faster devices" in found.declined().rows[0][2]
    devices = found.report()["devices"].values()
    assert [(one["runs"], one["busy_seconds"]) for one in devices] == [(0, 3.0), (0, 3.0)]


def test_jobs_that_must_not_begin_at_once_wait_since_they_were_submitted() -> None:
    found = entries_of(
        *({"at": 1.0, "submit": {"not_before_seconds": 2.0}, "job": job} for job in range(2)),
        {"at": 5.0, "tick": {}, "decided": starts(1, 0) | {"ends": [[1, "cancelled"]]}},
        {"at": 6.0, "finish": {"run": 1, "result": "completed", "seconds": 1.0}},
    )
    assert [one.waited for one in found.runs] == [4.0]
    assert [one.came for one in found.never] == [1.0]
    assert found.report()["wait_seconds_sum"] == 4.0


def test_the_page_of_a_ledger_shows_declines_and_no_backlog(tmp_path: Path) -> None:
    path, made = tmp_path / "pool.jsonl", tmp_path / "pool.html"
    with pool_of(2) as pool:
        pool.write_ledger(path)
        with Held(pool, 1):
            batcher = pool.serve(lambda x: x, max_batch=4, max_delay=60.0)
            answer = batcher(torch.tensor(1))  # waits for others, while a device is idle
        assert answer.cancel()
    assert main(["page", str(path), "-o", str(made)]) == 0
    page = Reader(made.read_text(encoding="utf-8"))
    (row,) = {tuple(row[2:3]) for row in page.tables["Who left jobs waiting"][1:]}
    assert row == ("the batch may still become larger within max_delay",)
    assert "would be served" not in page.words


def test_a_step_that_is_planned_again_keeps_its_move() -> None:
    balancer = Balancer(["a", "b"], "even", ledger=True)
    header, *_ = balancer.ledger().splitlines()
    plan = {"step": 0, "batch_size": 8, "shares": [6, 2], "moved": True, "predicted_seconds": 0, "reason": "planted"}
    again = plan | {"moved": False, "reason": "kept"}  # the step failed before it was recorded
    lines = [header, *(json.dumps({"plan": one}) for one in (plan, again))]
    (decision,) = read(lines)[0].decisions
    assert (decision.line, decision.moved, decision.reason) == (3, True, "planted")


def test_each_of_several_runs_has_its_title() -> None:
    page = page_of_runs("one", [Run("one", ["a", "b"], rows()), Run("two", ["a", "b"], rows())])
    assert re.findall("<h2>(.*?)</h2>", page) == ["one", "two"]
    assert "<h2>" not in page_of_runs("one", [Run("one", ["a", "b"], rows())])


def test_shares_that_return_after_calibration_are_no_riddle() -> None:
    balancer = Balancer(["a", "b"], "auto", ledger=True)
    for _ in range(6):
        shares = balancer.next_plan(60).shares
        balancer.record([[(n, 0.1 * n)] if n else [] for n in shares], 0.1 * max(shares))
    (run,) = runs_of("calibrated", lines_of(balancer.ledger()))
    assert [move.why.split(": ")[0] for move in run.moves] == ["back from sizes that were tried to measure; kept"]


def test_shares_are_those_of_the_usual_batch_and_not_of_the_last_one_of_an_epoch(tmp_path: Path) -> None:
    module, batch = classifier(12)
    lines, path = tmp_path / "run.jsonl", tmp_path / "run.html"
    with DataParallel(module, TWO, balance=[2, 1], prove=False) as trainer:
        trainer.write_ledger(lines)
        for items in (12, 12, 12, 3):
            trainer.step(classify, tuple(one[:items] for one in batch))
        trainer.page(path)
        assert "shares of a batch of 12, as planned" in trainer.explain()
        assert "<td>8</td>" in trainer._repr_html_()
    for page in (path.read_text(), page_of_runs("", runs_of("", lines_of(lines.read_text())))):
        head, *rows = Reader(page).tables["Devices"]
        assert head[1] == "share of a batch of 12"
        assert [row[1] for row in rows] == ["8", "4"]
