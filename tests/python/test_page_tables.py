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
from page_support import Reader, lines_of


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


def test_the_ledger_of_a_pool_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pool.jsonl"
    path.write_text('{"paceline_pool_ledger": 1}\n', encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["page", str(path), "-o", str(tmp_path / "pool.html")])
    assert "is the ledger of a pool" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]
