"""The pages of trainers, pipelines and pools, and what notebooks show."""

from __future__ import annotations

import bisect
import copy
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Unavailable
from paceline._page.pool import Never, page_of
from paceline._page.pool import Run as Ran
from paceline._page.run import Move, sentences
from paceline.torch import DataParallel, Pipeline, Pool
from paceline.torch._trainer.pages import _all_moves
from page_support import MOST_BYTES, Reader, charts_in
from pool_support import Held, pool_of
from rank_processes import Run
from test_torch_layout import inputs, replicas, squares
from test_torch_rank_ledgers import OfATrainer
from torch_support import TWO, classifier, classify


def read(path: Path) -> tuple[Reader, list[dict[str, Any]]]:
    page = path.read_text(encoding="utf-8")
    return Reader(page), charts_in(page)


@pytest.fixture
def trainer() -> Any:
    module, batch = classifier(12)
    with DataParallel(module, TWO, balance=[2, 1], memory={"host:0": 2**30}) as made:
        for _ in range(12):
            made.step(classify, batch)
        made.predict(batch[0])
    return made


def test_the_page_of_a_trainer_has_the_figures_of_its_report(trainer: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    trainer.page(path)  # though it is closed
    page, charts = read(path)
    assert "Sequential on host:0, host:1, balance weighted" in page.words
    assert "How good was the split?" in page.words
    report = trainer.report()
    table = {row[0]: row for row in page.tables["Devices"][1:]}
    for name, share in zip(TWO, (8, 4), strict=True):
        assert float(table[name][1]) == share
        assert float(table[name][2]) == report["devices"][name]["items"]
    assert [one["data"] for one in charts[0]["series"]] == [[8] * 12, [4] * 12]
    times = {one["label"]: one["data"] for one in charts[2]["series"]}
    assert sum(times["a step"]) == pytest.approx(1e3 * report["step_seconds"], rel=1e-3)
    shown = {one["label"]: one["says"] for one in charts[2]["series"] if "says" in one}
    assert set(shown) == {"ideal", "waiting", "launching", "reduction"}
    rows = trainer.history()
    for name in ("launching", "reduction"):
        assert shown[name] == pytest.approx([1e3 * row[f"{name}_seconds"] for row in rows], rel=1e-4)
    assert [sum(one) for one in zip(*shown.values(), strict=True)] == pytest.approx(times["a step"], rel=1e-3)
    limit = report["memory"]["host:0"]["limit_bytes"]
    assert page.tables["Memory"][1][:2] == ["host:0", f"{limit / 2**20:.4g} MiB"]
    assert page.tables["Beside the steps"][1][:3] == ["predictions", "1", "12"]
    assert page.tables["Input and the rest of the loop"][1][0] == "between two steps"
    assert trainer.explain().splitlines()[0] in page.words


def test_a_device_is_called_slower_only_where_explain_says_so(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = trainer._reports
    monkeypatch.setattr(type(reports._gaps), "explain", lambda _: "")
    monkeypatch.setattr(type(reports._works.steps.launches), "explain", lambda *_: "")
    report = copy.deepcopy(dict(trainer.report()))
    report["devices"]["host:1"]["speed"] = 0.7
    line = "  host:1: share 4, speed {} of the fastest host (+-1.0 %), noise 1.0 %\n    what may slow it: a program\n"
    assert reports._advice(report, line.format("1.00")) == ""
    assert reports._advice(report, line.format("0.70")) == "Free host:1, the slower device: a program."


def test_before_the_first_step_and_where_nothing_can_be_written_the_reason_is_named(
    trainer: Any, tmp_path: Path
) -> None:
    path = tmp_path / "run.html"
    with DataParallel(nn.Linear(2, 2), TWO) as unused, pytest.raises(Unavailable, match="no step has run yet"):
        unused.page(path)
    path.write_text("before")
    with pytest.raises(OSError, match=r"nowhere/run\.html'$"):
        trainer.page(tmp_path / "nowhere" / "run.html")
    assert [one.name for one in tmp_path.iterdir()] == ["run.html"]
    assert path.read_text() == "before"


def test_work_by_cost_is_drawn_by_cost(tmp_path: Path) -> None:
    module, batch = classifier(12)
    with DataParallel(module, TWO, balance="even") as made:
        for _ in range(5):
            made.step(classify, batch, cost=torch.arange(1.0, 13.0))
        made.page(tmp_path / "run.html")
    page, charts = read(tmp_path / "run.html")
    assert "% of a step's cost" in charts_title(page)
    assert [sum(column) for column in zip(*(one["data"] for one in charts[0]["series"]), strict=True)] == pytest.approx(
        [100] * 5
    )


def charts_title(page: Reader) -> str:
    return page.words.partition("Shares: ")[2].partition("Speeds")[0]


def test_a_long_run_has_a_small_page(tmp_path: Path) -> None:
    module, batch = classifier(12)
    with DataParallel(module, TWO, balance="even") as made:
        for _ in range(1030):  # more than a history has rows
            made.step(classify, batch)
        made.page(tmp_path / "run.html")
    page, charts = read(tmp_path / "run.html")
    assert (tmp_path / "run.html").stat().st_size < MOST_BYTES
    assert len(charts[2]["x"]) <= 512
    assert "longest" in [one["label"] for one in charts[2]["series"]]
    assert re.search(r"Each place of the charts is \d+ steps", page.words)
    assert re.search(r"The ideal is known of \d+ steps together", page.words)


def test_the_page_of_a_pipeline_has_the_schedule_beside_the_plan(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)), nn.Linear(32, 3))
    batch = torch.randn(32, 32), torch.randint(0, 3, (32,))
    path = tmp_path / "run.html"
    with Pipeline(module, TWO) as made:
        for _ in range(10):
            made.step(classify, batch)
        made.page(path)
        report = made.report()
        reports: Any = made._reports
        planned = reports._loop.last.plan.actions()
    text = path.read_text(encoding="utf-8")
    page, charts = read(path)
    bars = re.findall(r'<div class="bar( planned)?" tabindex="0" role="img" aria-label="([^"]*)">(.*?)</div>', text)
    stages = len(report["pipeline"]["stages"])
    micro_batches = len(report["micro_batches"])
    last = bars[: stages * (1 if planned is None else 2)]
    assert [bool(kind) for kind, _, _ in last] == ([False] if planned is None else [False, True]) * stages
    for _, label, boxes in last:
        assert boxes.count('class="forward"') == boxes.count('class="backward"') == micro_batches
        assert "bubble" in label
    order = [label.partition(": ")[2].partition(";")[0] for kind, label, _ in last if not kind]
    assert order == report["pipeline"]["schedule"].splitlines()
    ends = [float(left) + float(width) for left, width in re.findall(r"left:([\d.]+)%;width:([\d.]+)%", text)]
    assert max(ends) == pytest.approx(100, abs=0.1)
    assert "<summary>7 steps before it</summary>" in text  # the steps before the last, of eight that are kept
    assert [row[1] for row in page.tables["Stages"][1:]] == [stage["device"] for stage in report["pipeline"]["stages"]]
    for row in zip(*(one["data"] for one in charts[0]["series"]), strict=True):
        assert sum(row) == sum(stage["blocks"] for stage in report["pipeline"]["stages"])
    assert "The schedule was" in page.words


def test_the_page_of_a_pipeline_marks_its_first_plan_and_advises_what_explain_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Pipeline(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), TWO) as made:
        for _ in range(2):
            made.step(lambda model, x: model(x).square().mean(), torch.randn(8, 8))
        reports: Any = made._reports
        report = made.report()
    monkeypatch.setattr(type(reports._gaps), "explain", lambda _: "")
    says = "One more device like host:0 would make steps 25.6 % shorter; one more micro-batch would make steps 1.9 % longer."
    rows = [reports.history()[0] | {"first_step": k, "input": None, "memory": None} for k in range(6)]
    for row, first in zip(rows, (2, 2, 2, 3, 3, 1), strict=True):
        row["blocks"] = {"host:0": first, "host:1": 4 - first}
    report["moves"], report["recent_moves"] = 1, [{"kind": "depth", "step": 5, "seconds_before": 0, "seconds_after": 0}]
    report["recent_moves"][0]["reason"] = "host:0 got slower"
    run = reports._run(rows, report, f"Stage 0 on host:0 sets the pace.\n{says}\n")
    assert sentences(run)[2] == says
    worse = says.replace("would make steps 25.6 % shorter", "would make no difference")
    change = sentences(reports._run(rows, report, worse))[2]
    assert change == f"No change is known that would shorten steps: o{worse[1:]}"
    assert [(move.step, move.what) for move in run.moves] == [
        (3, "blocks [2, 2] to [3, 1]"),
        (5, "micro-batches or depth"),
    ]
    report["moves"] = 2  # one is forgotten, and nobody knows which
    assert all("blocks" not in move.what for move in reports._run(rows, report, "").moves)


def test_the_page_of_replicas_of_pipelines_has_the_stages_of_each(tmp_path: Path) -> None:
    _, trainer = replicas()
    with trainer:
        for _ in range(3):
            trainer.step(squares, inputs())
            trainer.predict(inputs())
        trainer.page(tmp_path / "run.html")
        stages = trainer.report()["pipeline"]["stages"]
    page, _ = read(tmp_path / "run.html")
    assert [row[1] for row in page.tables["Stages"][1:]] == [stage["device"] for stage in stages]
    assert page.words.count("as it ran") == 1 + 2  # of the last step, and those before


def page_of_ranks(rank: int, path: Path, ledger: bool) -> Any:
    training = OfATrainer(ledger=ledger)
    for _ in range(12):
        training.step()
    trainer = training._trainer
    trainer.page(path.with_name(f"{rank}.html"))
    report: Any = trainer.report()
    training.close()
    return report.get("rank_shares"), report["ranks"]


@pytest.mark.parametrize("ledger", [True, False])
def test_the_page_of_rank_0_has_the_ranks(on_ranks: Run, tmp_path: Path, ledger: bool) -> None:
    path = tmp_path / "run.html"
    (dealt, last), (no_dealt, _) = on_ranks(2, page_of_ranks, path, ledger)
    page, charts = read(tmp_path / "0.html")
    rows = page.tables["Ranks"][1:]
    assert [row[0] for row in rows] == ["rank 0", "rank 1"]
    assert [row[7] for row in rows] == [str(device["share"]) for device in dealt["devices"]]
    assert [row[8] for row in rows] == [f"{rank['items']:.0f}" for rank in last]
    assert len(charts) == (7 if ledger else 4), "a ledger has no memory"
    assert ("The ranks: balance auto" in page.words) == ledger
    assert ("no ledger is kept" in page.words) != ledger
    if ledger:
        assert [one["label"] for one in charts[5]["series"]] == ["rank 0", "rank 1"]
    assert no_dealt is None
    assert "Ranks" not in read(tmp_path / "1.html")[0].tables


def test_the_page_of_a_pool_has_its_queue_waits_batches_and_who_declined(tmp_path: Path) -> None:
    path = tmp_path / "pool.html"
    with pool_of() as pool:
        with pytest.raises(Unavailable, match="no job has run yet"):
            pool.page(path)
        served = pool.serve(lambda x: x + 1, max_batch=4)
        with Held(pool, 2):  # so that requests come together
            answers = [served(torch.tensor(k)) for k in range(40)]
        assert [int(one.result()) for one in answers] == list(range(1, 41))
        failed = pool.submit(lambda _: 1 / 0, kind="bad")
        assert isinstance(failed.exception(), ZeroDivisionError)
        pool.submit(lambda _: None, gang=2).result()
        names = [one.name for one in pool.devices]
    pool.page(path)
    page, charts = read(path)
    report = pool.report()
    assert [row[:3] for row in page.tables["Devices"][1:]] == [
        [name, str(report["devices"][name]["jobs"]), str(report["devices"][name]["runs"])] for name in names
    ]
    assert ["completed", "43"] in page.tables["How jobs ended"]
    assert ["failed", "1"] in page.tables["How jobs ended"]
    assert "43 of 44 jobs completed" in page.words
    assert "Look at the job that failed: result() raises its error." in page.words
    assert pool.explain().splitlines()[0] in page.words
    queue, waits, sizes, busy = charts
    assert min(queue["series"][0]["data"]) >= 0
    assert max(queue["series"][0]["data"]) >= 1
    longest = [one for one in waits["series"][1]["data"] if one is not None]
    assert max(longest) > 0
    assert {one["label"] for one in sizes["series"]} == set(names)
    kinds = {row[0]: row[1:4] for row in page.tables["Kinds of jobs"][1:]}
    assert kinds["bad"] == ["1", "1", "1"]
    assert sum(int(jobs) for jobs, _, _ in kinds.values()) == 44
    assert all(1 <= value <= 4 for one in sizes["series"] for value in one["data"] if value is not None)
    assert all(0 <= value <= 100 for one in busy["series"] for value in one["data"])


def test_the_page_of_a_pool_that_refused_all_jobs(tmp_path: Path) -> None:
    with Pool("host") as pool:
        future = pool.submit(lambda _: None, not_before=60)
        assert future.cancel()
        pool.page(tmp_path / "pool.html")
    page, charts = read(tmp_path / "pool.html")
    assert "0 of 1 job completed" in page.words
    waiting, ended = charts[0]["series"]
    assert max(waiting["data"]) == 1, "until it was cancelled"
    assert [one for one in ended["data"] if one is not None] == [1]


def pool_page(**options: Any) -> tuple[list[dict[str, Any]], dict[str, str], str]:
    """The charts and the answers of a page whose only device was busy from the 100th second on, for two runs of 4 s each."""
    runs = [
        Ran(["host:0"], "job", 100.0 + 5 * k, 104.0 + 5 * k, 1, options.get("waited", 0.5), "completed")
        for k in range(2)
    ]
    outcomes = {"completed": 2, "failed": 0, "rejected": 0, "expired": 0} | options.get("outcomes", {})
    report = {
        "outcomes": outcomes,
        "wait_seconds_sum": 2 * runs[0].waited,
        "wait_counts": [(float("inf"), 2)],
        "hangs": [],
        "versions": {},
        "devices": {"host:0": {"jobs": 2, "runs": 2, "busy_seconds": 8.0, "retired": False}},
        "waiting": options.get("waiting", 0),
        "running": 0,
        "backlog_seconds": 0.0,
    }
    text = page_of(["host:0"], runs, options.get("never", []), report, "words")
    answers = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text))
    return charts_in(text), answers, Reader(text).words


def test_jobs_that_never_ran_before_the_first_run_do_not_stretch_the_page_of_a_pool() -> None:
    came = [Never(1.0, 1.0, "job", "rejected"), Never(104.0, 104.5, "job", "cancelled")]
    charts, answers, _ = pool_page(never=came)
    assert charts[0]["x"][-1] == pytest.approx(9.5, rel=0.01)
    assert "busy for 84 %" in answers["How did the jobs end?"]


def test_the_queue_of_a_pool_has_the_jobs_that_never_ran() -> None:
    came = [Never(101.0, 103.0, "job", "expired")] * 3 + [Never(102.0, 102.0, "job", "rejected")]
    charts, _, words = pool_page(never=came, outcomes={"expired": 3, "rejected": 1})
    x, (waiting, ended) = charts[0]["x"], charts[0]["series"]
    at = [bisect.bisect(x, seconds - 99.5) - 1 for seconds in (101.5, 103.5)]
    assert [waiting["data"][place] for place in at] == [3, 0]
    assert ended["label"] == "ended without a run"
    assert {place: count for place, count in enumerate(ended["data"]) if count is not None} == {
        bisect.bisect(x, 102.0 - 99.5) - 1: 1,
        bisect.bisect(x, 103.0 - 99.5) - 1: 3,
    }
    assert "were refused, expired or were cancelled" in words


def test_a_full_pool_that_loses_jobs_needs_devices() -> None:
    _, answers, _ = pool_page(outcomes={"expired": 3}, waited=0.1)
    assert answers["What to change?"].startswith("Add devices")
    _, answers, _ = pool_page(outcomes={"expired": 3}, waited=3.0)
    assert answers["What to change?"].startswith("Send fewer requests")


def test_jobs_that_wait_beside_idle_devices_wait_for_something_else_than_devices() -> None:
    for waited, advice in ((6.0, "Nothing, if all jobs were submitted at once"), (60.0, "Take a shorter max_delay")):
        assert pool_page(waited=waited)[1]["What to change?"].startswith(advice)


def test_jobs_that_wait_are_in_the_queue_and_in_the_advice() -> None:
    charts, answers, words = pool_page(waiting=7)
    assert charts[0]["series"][0]["data"][-1] == 7
    assert "7 jobs did not start yet" in answers["What to change?"]
    assert len(charts[0]["series"]) == 1
    assert "were refused, expired or were cancelled" not in words
    charts, answers, _ = pool_page()
    assert charts[0]["series"][0]["data"][-1] == 0
    assert "start soon" in answers["What to change?"]


def test_rows_in_which_shares_changed_are_marked_where_no_move_is_known() -> None:
    history = [
        {"first_step": 4 * at, "steps": 4 - 3 * (at == 3), "moves": moves, "reason": f"planted {at}"}
        for at, moves in enumerate((2, 1, 0, 1))
    ]
    history[2]["steps"] = 1
    for row, shares in zip(history[2:], ([2, 2], [1, 3]), strict=True):
        row["planned"] = dict(zip(TWO, shares, strict=True))
    known = [Move(5, "[1, 1] to [2, 0]", "promised")]
    assert _all_moves(known, history) == [
        Move(0, "shares changed 2 times up to step 4", "planted 0"),
        *known,
        Move(12, "[2, 2] to [1, 3]", "planted 3"),
    ]


def test_a_device_that_left_is_marked_and_named(tmp_path: Path) -> None:
    module, batch = classifier(12)
    with DataParallel(module, TWO, balance="even") as made:
        for step in range(6):
            if step == 4:
                made.retire("host:1")
            made.step(classify, batch)
        made.page(tmp_path / "run.html")
    page, charts = read(tmp_path / "run.html")
    assert "Retired, and without work in the end: host:1." in page.words
    assert [(at, what) for at, what in charts[0]["marks"]] == [
        (4, "step 5: [6, 6] to [12, 0]; host:1 has no more work")
    ]


# Notebooks.


def test_a_trainer_and_its_report_are_small_tables_in_a_notebook(trainer: Any) -> None:
    report = trainer.report()
    for html in (trainer._repr_html_(), report._repr_html_()):
        rows = next(rows for caption, rows in Reader(html).tables.items() if caption.startswith("12 steps, "))
        assert [row[0] for row in rows] == ["device", "host:0", "host:1"]
        assert [row[1] for row in rows[1:]] == ["8", "4"]
        assert [row[2] for row in rows[1:]] == ["96", "48"]
    assert "DataParallel Sequential on host:0, host:1" in trainer._repr_html_()
    assert json.loads(json.dumps(report))["steps"] == 12  # it is a dictionary like any other
    assert dict(report) == report
    torch.save({"report": report}, file := io.BytesIO())
    file.seek(0)
    assert torch.load(file)["report"] == report
    assert copy.deepcopy(report) == report


def test_showing_an_unused_trainer_does_not_count_as_using_it() -> None:
    with DataParallel(nn.Linear(2, 2), TWO) as unused:
        assert "0 steps" in unused._repr_html_()
        assert not unused._touched
