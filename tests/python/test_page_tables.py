"""What tables, moves and errors of the page of a run say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline._cli import main
from paceline._page.document import page_of_runs
from paceline._page.ledger import runs_of
from paceline._page.run import Move, Row, Run
from paceline.balance import Balancer
from page_support import Reader, charts_in, ledger, lines_of
from pool_support import Held, pool_of


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
    assert [row[2] for row in read.tables["Devices"][1:]] == ["5120000"] * 2
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
        with Held(pool, 2):
            pool.submit(str, kind="s").cancel()
            waits = pool.submit(str, kind="s")
        waits.result()
        pool.page(own)
    assert main(["page", str(path), "-o", str(made)]) == 0
    pages = [Reader(one.read_text(encoding="utf-8")) for one in (own, made)]
    assert [len(charts_in(one.read_text(encoding="utf-8"))) for one in (own, made)] == [4, 4]
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
