"""The page of a run: what it says, from ledgers, as text and as data."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from paceline._cli import main
from paceline._page.charts import charts_of, rows_of
from paceline._page.document import page_of_runs, write
from paceline._page.ledger import runs_of
from paceline._page.run import Row, Run, ideal_seconds, milliseconds, sentences, thinned
from paceline.balance import Balancer
from paceline.sim import simulate
from page_support import MOST_BYTES, Reader, charts_in, ledger, lines_of


@pytest.fixture(scope="module")
def throttled() -> Run:
    (run,) = runs_of("throttled.jsonl", ledger())
    return run


# What is computed.


def test_the_ideal_is_the_work_over_the_sum_of_the_speeds() -> None:
    # 40 items in 4 s and 20 items in 1 s: 10 and 20 items a second, so 60 items take 2 s together.
    assert ideal_seconds([40, 20], [4.0, 1.0]) == pytest.approx(2.0)
    assert ideal_seconds([40, 0], [4.0, 0.0]) == pytest.approx(4.0)  # a device without work does not count
    assert ideal_seconds([0, 0], [0.0, 0.0]) == 0.0


def test_a_step_is_its_ideal_and_what_was_lost_to_the_last_part(throttled: Run) -> None:
    assert len(throttled.rows) == 120
    for row in throttled.rows:
        assert row.reduction is None or row.reduction >= 0
        parts = row.ideal + row.waiting + (row.launching or 0.0) + (row.reduction or 0.0)
        assert row.seconds == pytest.approx(parts)
        assert 0 < row.ideal <= row.seconds * (1 + 1e-9)


def test_what_a_ledger_says_of_a_step_is_split_into_waiting_launching_and_reduction() -> None:
    balancer = Balancer(["a", "b"], "even", ledger=True)
    balancer.next_plan(60)
    # a: 30 items in 3 s from 0 s on; b: 30 items in 1 s from 0.5 s on. Speeds 10 and 30, so the ideal is 60 / 40 = 1.5 s of 3 s.
    balancer.record([[(30, 3.0)], [(20, 0.7), (10, 0.3)]], 3.0, reduction_seconds=0.25, startup_seconds=[0.0, 0.5])
    (run,) = runs_of("two", lines_of(balancer.ledger()))
    (row,) = run.rows
    assert (row.seconds, row.reduction) == (3.25, 0.25)
    assert row.ideal == pytest.approx(1.5)
    assert row.launching == pytest.approx(0.5 * 30 / 40)  # b has three quarters of the speed
    assert row.waiting == pytest.approx(1.5 * 30 / 40)  # and waits for 1.5 s at its end
    good, cost, change = sentences(run)
    assert good.startswith("The split was poor: a step took 3.25 s in the mean, and 1.50 s would do")
    assert "so 53.8% was lost" in good
    assert cost == "Most of the loss was waiting, 34.6% of the steps' time: b stood idle longest, for 69% of it."
    assert 'balance="auto"' in change


def test_steps_by_cost_count_what_ran_and_not_what_was_planned() -> None:
    balancer = Balancer(["a", "b"], "even", proportional=True, ledger=True)
    for _ in range(9):
        balancer.next_plan(1_000_000)
        # Less ran than was planned, in 3 s. The record has the time of the planned work at this speed.
        balancer.record([[(600_000, 3.0)], [(200_000, 1.0)]], 3.0 * 1_000_000 / 800_000)
    (run,) = runs_of("cost", lines_of(balancer.ledger()))
    assert [row.seconds for row in run.rows] == pytest.approx([3.0] * 9)
    assert run.idle == pytest.approx([0.0, 2 / 3])
    shares = charts_of(run, rows_of(run))[0]["series"]
    assert [one["data"][0] for one in shares] == [50.0, 75.0, 50.0, 25.0]


def test_a_device_without_work_did_not_wait() -> None:
    rows = [Row(step, 1, [10, 10, 10 * (step == 8)], [1.0, 0.5, 0.1 * (step == 8)], 1.0, 0.7, 1.0) for step in range(9)]
    _, cost, _ = sentences(Run("three", ["a", "b", "c"], rows))
    assert cost.endswith(": b stood idle longest, for 50% of it.")


@pytest.mark.parametrize(
    ("options", "busy", "says"),
    [
        ({"even": True}, [1.0, 0.5], 'Take balance="auto"'),
        ({"even": True}, [0.51, 0.5], "in the mean they were equally fast"),
        ({}, [1.0, 0.5], "Look at the slowest device"),
        ({"even": True}, [0.5, 0.0], "One device had all work"),
        ({}, [0.5, 0.0], "One device had all work"),
        ({"pipeline": True}, [1.0, 0.5], "or one device less"),
        ({"pipeline": True}, [0.5, 0.0], "One device has all stages"),
    ],
)
def test_the_split_is_blamed_only_where_devices_with_work_are_unequal(
    options: dict[str, Any], busy: list[float], says: str
) -> None:
    rows = [Row(step, 1, [10 * (s > 0) for s in busy], busy, 2.0, 1.0, 2.0) for step in range(9)]
    assert says in sentences(Run("two", ["a", "b"], rows, **options))[2]


@pytest.mark.parametrize(
    ("seconds", "says"), [(0.9994, "999 ms"), (0.9997, "1.00 s"), (0.02, "20 ms"), (12, "12.00 s")]
)
def test_times_for_people(seconds: float, says: str) -> None:
    assert milliseconds(seconds) == says


def test_a_pipeline_that_ended_on_one_device_cannot_do_with_less() -> None:
    rows = [Row(step, 1, [10, 10], [1.0, 0.5 * (step < 8)], 2.0, 1.0, 2.0) for step in range(9)]
    assert sentences(Run("two", ["a", "b"], rows, pipeline=True))[2].startswith("One device has all stages")


def test_a_device_that_slowed_down_is_what_to_look_at() -> None:
    (run,) = runs_of("slow", ledger(throttles=[(0, 3.0, 40, 120)], noise=0.0))
    change = sentences(run)[2]
    found = re.match(r"Look for what slows sim:0: since step (\d+) it takes (\d\.\d\d) times as long as before", change)
    assert found is not None, change
    assert int(found[1]) == pytest.approx(40, abs=2)
    assert float(found[2]) == pytest.approx(3.0, abs=0.1)


def test_nothing_is_to_change_where_nothing_is_lost() -> None:
    rows = [Row(step, 1, [10, 10], [1.0, 1.0], 1.01, 1.0, 1.01, 1.01, [10, 10], 0.005, 0.0) for step in range(9)]
    good, _, change = sentences(Run("even", ["a", "b"], rows))
    assert good.startswith("The split was close to ideal")
    assert change.startswith("Nothing needs a change")


@pytest.mark.parametrize("devices", [3, 20])
def test_a_run_without_steps_has_a_page_that_says_so(devices: int) -> None:
    lines = ledger(speeds=[1.0] * devices, throttles=[])[:1]
    page = page_of_runs("none", runs_of("none", lines))
    assert "No step has run" in Reader(page).words
    assert charts_in(page) == []


def test_thinned_rows_keep_sums_and_the_shortest_and_longest_steps(throttled: Run) -> None:
    thin = thinned(throttled.rows, 50)
    assert len(thin) == 40
    assert [row.first_step for row in thin] == list(range(0, 120, 3))
    for name in ("steps", "seconds", "ideal"):
        assert sum(getattr(row, name) for row in thin) == pytest.approx(
            sum(getattr(row, name) for row in throttled.rows)
        )
    for at, row in enumerate(thin):
        times = [one.seconds for one in throttled.rows[3 * at : 3 * at + 3]]
        assert (row.shortest, row.longest) == (min(times), max(times))


# What the page has.


def test_the_page_answers_three_questions_and_has_the_figures_as_tables(throttled: Run) -> None:
    page = page_of_runs("throttled", [throttled])
    read = Reader(page)
    for asked, said in zip(
        ("How good was the split?", "What cost most?", "What to change?"), sentences(throttled), strict=True
    ):
        assert asked in read.words
        assert said in read.words
    devices = read.tables["Devices"]
    assert [row[0] for row in devices[1:]] == ["sim:0", "sim:1", "sim:2"]
    assert sum(float(row[2]) for row in devices[1:]) == 120 * 512
    assert sum(float(row[1]) for row in devices[1:]) == 512
    assert len(read.tables["Steps"]) == 1 + 24
    assert "does not tell whether the loop waits for its input" in read.words


def test_each_move_is_marked_and_has_its_reason(throttled: Run) -> None:
    page = page_of_runs("throttled", [throttled])
    moved = [plan for plan in (json.loads(line).get("plan") for line in ledger()) if plan and plan["moved"]]
    assert len(moved) >= 2
    rows = Reader(page).tables["Moves"][1:]
    assert [(int(row[0]) - 1, row[2]) for row in rows] == [(plan["step"], plan["reason"]) for plan in moved]
    assert [row[1].rpartition(" to ")[2] for row in rows] == [str(plan["shares"]) for plan in moved]
    marks = charts_in(page)[0]["marks"]
    assert [at for at, _ in marks] == [plan["step"] for plan in moved]
    assert all(plan["reason"] in text for plan, (_, text) in zip(moved, marks, strict=True))


def test_charts_draw_what_the_ledger_has(throttled: Run) -> None:
    shares, speeds, times = charts_in(page_of_runs("throttled", [throttled]))
    plans = [json.loads(line)["plan"] for line in ledger() if '"plan"' in line]
    drawn = {one["label"]: one["data"] for one in shares["series"]}
    for device in range(3):
        assert drawn[f"sim:{device}"] == [plan["shares"][device] for plan in plans]
    assert shares["x"] == list(range(1, 121))
    before, during = (speeds["series"][0]["data"][at] for at in (20, 60))
    assert before == pytest.approx(2 * during, rel=0.25)  # sim:0 was half as fast, but for its fixed time
    (whole,) = (one for one in times["series"] if one["label"] == "a step")
    areas = [one for one in times["series"] if one.get("area")]
    assert areas[0]["data"] == pytest.approx(whole["data"], rel=1e-3)
    assert areas[-1]["label"] == "ideal"
    assert all(
        sum(says) == pytest.approx(top, rel=1e-3)
        for top, says in zip(whole["data"], zip(*(one["says"] for one in areas), strict=True), strict=True)
    )


def test_the_page_fetches_nothing_and_forbids_to(throttled: Run) -> None:
    page = page_of_runs("throttled", [throttled])
    assert Reader(page).fetched == []
    assert re.findall(r"@import|url\(|import\(|fetch\(|XMLHttpRequest", page) == []
    assert "default-src 'none'" in page
    assert "The MIT License" in page
    assert "uPlot 1.6.16" in page


def test_the_page_of_10000_steps_is_small_and_says_that_it_is_thinned() -> None:
    lines = ledger(speeds=[1, 1, 1, 0.5, 1, 1, 1, 0.9], steps=10_000, spike_probability=0.001, spike_factor=4.0)
    runs = runs_of("long", lines)
    page = page_of_runs("long", runs)
    assert len(page.encode()) < MOST_BYTES
    times = charts_in(page)[2]
    drawn = {one["label"]: one["data"] for one in times["series"]}
    assert len(times["x"]) <= 512
    assert max(drawn["longest"]) == pytest.approx(1e3 * max(row.seconds for row in runs[0].rows), rel=1e-3)
    assert min(drawn["shortest"]) == pytest.approx(1e3 * min(row.seconds for row in runs[0].rows), rel=1e-3)
    assert "Each place of the charts is 20 steps: the mean" in Reader(page).words
    two = page_of_runs("two", runs * 4)
    assert len(two.encode()) < MOST_BYTES


def test_of_many_devices_the_fastest_and_the_slowest_are_drawn() -> None:
    speeds = [1 + 0.02 * number for number in range(32)]
    (run,) = runs_of("many", ledger(speeds=speeds, batch_size=4096, throttles=[], noise=0.0))
    page = page_of_runs("many", [run])
    assert len(page.encode()) < MOST_BYTES
    labels = [one["label"] for one in charts_in(page)[1]["series"]]
    assert labels == [f"sim:{number}" for number in (*range(6), *range(26, 32))]
    looks = [(one["colour"], tuple(one["dash"])) for one in charts_in(page)[1]["series"]]
    assert len(set(looks)) == 12
    assert "Of 32 devices the 12 fastest and slowest are drawn" in Reader(page).words
    assert len(Reader(page).tables["Devices"]) == 33


def test_names_and_reasons_are_words_and_no_html() -> None:
    name = '</script><script>alert("x")</script> & <b>bold</b> '
    balancer = Balancer([name, "b"], "even", ledger=True)
    for _ in range(4):
        balancer.next_plan(60)
        balancer.record([[(30, 3.0)], [(30, 1.0)]], 3.0)
    page = page_of_runs(name, runs_of(name, lines_of(balancer.ledger())))
    read = Reader(page)
    assert read.scripts == 3
    assert read.tables["Devices"][1][0] == name
    assert charts_in(page)[0]["series"][0]["label"] == name


def test_work_by_cost_and_two_balancers_in_a_ledger_are_told_apart() -> None:
    plain = lines_of(simulate([1, 0.5], steps=9, ledger=True).ledger)
    balancer = Balancer(["sim:0", "sim:1"], "even", proportional=True, ledger=True)
    for _ in range(9):
        balancer.next_plan(1_000_000)
        balancer.record([[(500_000, 3.0)], [(500_000, 1.0)]], 3.0)
    costed = [json.dumps({"balancer": 1, **json.loads(line)}) + "\n" for line in lines_of(balancer.ledger())]
    runs = runs_of("both", plain + costed)
    assert [run.unit for run in runs] == ["items", "work"]
    assert [run.title for run in runs] == [
        "both (steps without costs): balance auto",
        "both (steps with costs): balance even",
    ]
    assert [len(run.rows) for run in runs] == [9, 9]
    assert "% of a step's work" in charts_of(runs[1], rows_of(runs[1]))[0]["title"]


def test_devices_that_left_and_came_back_are_moves_with_these_reasons() -> None:
    balancer = Balancer(["a", "b"], "auto", ledger=True)
    for step in range(12):
        if step == 4:
            balancer.retire(1)
        if step == 8:
            balancer.restore(1)
        shares = balancer.next_plan(60).shares
        balancer.record([[(n, 0.1 * n)] if n else [] for n in shares], 0.1 * max(shares))
    (run,) = runs_of("left", lines_of(balancer.ledger()))
    whys = {move.step: move.why for move in run.moves}
    assert whys[4].startswith("b left; ")
    assert whys[8].startswith("b came back; ")


def test_a_page_that_cannot_be_completed_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.html"
    write(path, "before \ud800")
    assert path.read_text(encoding="utf-8") == "before &#55296;"

    def full(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="full"):
        write(path, "after")
    assert path.read_text(encoding="utf-8").startswith("before")
    assert list(tmp_path.iterdir()) == [path]


def test_a_page_follows_a_link_and_is_written_to_what_is_no_regular_file(tmp_path: Path) -> None:
    link, path, pipe = tmp_path / "link.html", tmp_path / "run.html", tmp_path / "pipe"
    path.write_text("before")
    link.symlink_to(path)
    write(link, "after")
    assert link.is_symlink()
    assert path.read_text() == "after"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write(pipe, "page")
        assert os.read(reader, 9) == b"page"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


# The command.


def written(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(lines), encoding="utf-8")
    return path


def test_the_command_writes_the_page_of_a_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "run.html"
    assert main(["page", str(written(tmp_path / "run.jsonl", ledger())), "-o", str(made)]) == 0
    assert re.fullmatch(rf"{re.escape(str(made))}: \d+ kB\n", capsys.readouterr().out)
    assert "The split was" in Reader(made.read_text(encoding="utf-8")).words


def test_several_ledgers_are_compared_on_one_scale(tmp_path: Path) -> None:
    paths = [written(tmp_path / f"{policy}.jsonl", ledger(policy=policy)) for policy in ("auto", "even")]
    made = tmp_path / "both.html"
    assert main(["page", *map(str, paths), "-o", str(made)]) == 0
    page = made.read_text(encoding="utf-8")
    rows = Reader(page).tables["Side by side"]
    assert [row[0] for row in rows[1:]] == ["auto.jsonl: balance auto", "even.jsonl: balance even"]
    lost = [float(row[rows[0].index("lost")].rstrip("%")) for row in rows[1:]]
    assert lost[0] < lost[1]
    charts = charts_in(page)
    assert charts[2]["high"] == charts[5]["high"]


def test_a_ledger_is_not_replaced_by_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "run.jsonl", ledger())
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(SystemExit):
        main(["page", "-o", str(tmp_path / "link"), str(path)])
    assert "is one of the ledgers, which the page would replace" in capsys.readouterr().err
    assert path.read_text(encoding="utf-8") == "".join(ledger())


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    lines = ledger()
    made = tmp_path / "run.html"
    cut = written(tmp_path / "cut.jsonl", [*lines[:-1], lines[-1][:9]])
    assert main(["page", str(cut), "-o", str(made)]) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["page", "missing.jsonl", "-o", "x.html"], "missing.jsonl cannot be read: No such file"),
        (["page", "wrong.jsonl", "-o", "x.html"], "wrong.jsonl is no ledger that can be replayed: line 1"),
        (["page", "good.jsonl", "-o", "nowhere/x.html"], "nowhere/x.html cannot be written: No such file"),
        (["page", "good.jsonl"], "-o"),
    ],
)
def test_what_cannot_be_read_or_written_is_named(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "good.jsonl", ledger())
    written(tmp_path / "wrong.jsonl", ["{}\n"])
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"good.jsonl", "wrong.jsonl"}
