"""`Pool.trace` and `Pool.scalars`."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import InvalidArgument, Rejected, Unavailable
from paceline._page.pool import Run
from paceline._words import plural
from paceline.torch._pool.figures import Figures
from pool_support import Held, give_up_after, pool_of, soon
from versions_support import adds, ask


def events_of(path: Path) -> tuple[dict[int, str], list[dict[str, Any]]]:
    """The rows' names, and what is on them."""
    events = json.loads(path.read_text())["traceEvents"]
    rows = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    return rows, [one for one in events if one["ph"] != "M"]


def test_a_trace_has_each_run_on_its_device_and_jobs_that_never_ran(tmp_path: Path) -> None:
    path = tmp_path / "pool.json"
    with pool_of() as pool:
        with pytest.raises(Unavailable, match="no job has run yet"):
            pool.trace(path)
        batcher = pool.serve(lambda x: x + 1, max_batch=4)
        with Held(pool, 2):
            answers = [batcher(torch.tensor(k)) for k in range(12)]
            waits = pool.submit(lambda _: None, kind="cancelled one")
            assert waits.cancel()
        for answer in answers:
            answer.result()
        failed = pool.submit(lambda _: 1 / 0, kind="bad")
        assert isinstance(failed.exception(), ZeroDivisionError)
        both = pool.submit(lambda _: time.sleep(0.01), kind="both", gang=2)
        both.result()
    pool.trace(path)
    rows, events = events_of(path)
    spans = [one for one in events if one["ph"] == "X"]
    assert [one["name"] for one in events if one["ph"] == "i"] == ["cancelled: cancelled one"]
    assert sum(one["args"]["jobs"] for one in spans if "lambda" in one["name"]) == 12
    assert sum(one["name"] == "hold" for one in spans) == 2
    (bad,) = [one for one in spans if one["name"] == "bad (failed)"]
    assert rows[bad["tid"]] == failed.device
    gang = [one for one in spans if one["name"] == "both"]
    assert {rows[one["tid"]] for one in gang} == {"host:0", "host:1"}
    assert all(one["dur"] >= 10_000 for one in gang)
    assert all(one["args"]["waited_seconds"] >= 0 for one in spans)
    for row in rows:
        edges = sorted((one["ts"], one["ts"] + one["dur"]) for one in spans if one["tid"] == row)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(edges))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_trace_shows_what_was_given_up(tmp_path: Path) -> None:
    over = threading.Event()
    with pool_of(1, hang_seconds=0.05) as pool:
        job = pool.submit(lambda _: over.wait(60), kind="slow")
        assert job.exception() is not None
        give_up_after(pool, 60)
        for _ in range(3):
            pool.submit(lambda _: None, kind="quick").result()
        over.set()
        time.sleep(0.2)  # until the thread of the first one is back: its end is not noted again
        pool.trace(tmp_path / "pool.json")
    spans = events_of(tmp_path / "pool.json")[1]
    assert [one["name"] for one in spans] == ["slow (given up)", "quick", "quick", "quick"]
    assert spans[0]["ts"] + spans[0]["dur"] <= spans[1]["ts"]


def test_scalars_are_of_the_time_since_the_call_before() -> None:
    with pool_of() as pool:
        assert pool.scalars()["paceline/pool/completed"] == 0
        with Held(pool, 2) as held:
            waits = pool.submit(lambda _: time.sleep(0.02), kind="work")
            now = pool.scalars("")
            assert (now["waiting"], now["running"]) == (1, 2)
        waits.result()
        for job in held.jobs:
            job.result()
        pool.retire("host:1")
        pool.submit(lambda _: None, gang=1).result()
        found = pool.scalars("")
        assert (found["completed"], found["failed"]) == (4, 0)
        assert found["wait_seconds"] > 0
        assert 0 < found["busy_ratio/host_0"] <= 1
        assert found["jobs_per_second/host_0"] > 0
        assert (found["retired/host_0"], found["retired/host_1"]) == (0, 1)
        again = pool.scalars("")
        assert again["completed"] == again["wait_seconds"] == again["busy_ratio/host_0"] == 0
        assert all(type(value) is float for value in again.values())


def test_waits_are_told_by_priority() -> None:
    with pool_of(1) as pool:
        with Held(pool) as held:
            jobs: list[Any] = [pool.submit(lambda _: None, priority=one) for one in ("interactive", "batch", "batch")]
            assert pool.submit(lambda _: None, priority="background").cancel()
        for job in (*held.jobs, *jobs):
            job.result()
        report = pool.report()
        (family,) = [one for one in pool.prometheus().collect() if one.name == "paceline_pool_wait_seconds"]
        with pytest.raises(InvalidArgument, match="labels priority already"):
            pool.prometheus(priority="x")
    wanted = {"interactive": 1, "normal": 1, "batch": 2, "background": 0}
    assert {name: one["wait_counts"][-1][1] for name, one in report["waits"].items()} == wanted
    assert report["wait_counts"][-1][1] == 4
    assert report["wait_seconds_sum"] == sum(one["wait_seconds_sum"] for one in report["waits"].values())
    counts = {one.labels["priority"]: one.value for one in family.samples if one.labels.get("le") == "+Inf"}
    assert counts == wanted


def test_a_job_that_runs_is_known_to_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, running = Figures.begin_run, list[bool]()

    def begin_run(self: Figures, work: Any, *of: Any) -> None:
        running.append(work.future.running())
        begin(self, work, *of)

    monkeypatch.setattr(Figures, "begin_run", begin_run)
    with pool_of(1) as pool:
        assert pool.submit(lambda _: 1).result() == 1
    assert running == [False]


def test_a_run_that_has_not_ended_counts_as_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pool_of() as pool:
        with Held(pool, 1) as held:
            now = time.monotonic()
            since = pool._jobs.figures.busy_since()
            monkeypatch.setattr(time, "monotonic", lambda: now + 600)
            pool._jobs.look._begun = now
            first, again, shown = pool.report()["devices"], pool.report()["devices"], pool._jobs.look()["devices"]
        busy = {name: one["busy_seconds"] for name, one in first.items()}
        assert busy == {name: one["busy_seconds"] for name, one in again.items()}
        assert busy == {name: now + 600 - since.get(name, now + 600) for name in first}
        assert sorted(one["busy"] for one in shown.values()) == [0, 1]
        held.jobs[0].result()
        then = pool.report()["devices"]
        assert {name: one["busy_seconds"] for name, one in then.items()} == pytest.approx(busy, abs=0.001)  # once
        monkeypatch.setattr(time, "monotonic", lambda: now + 700)
        assert pool.report()["devices"] == then
        monkeypatch.undo()
    assert pool._jobs.figures._open == {}


def test_the_busy_seconds_of_a_device_never_become_less() -> None:
    figures, work = Figures(["cuda:0"]), object()
    begun = time.monotonic() - 60
    figures.begin_run(work, ["cuda:0"], begun)
    told = figures.devices()["cuda:0"]["busy_seconds"]
    figures.end_run(work, Run(["cuda:0"], "job", begun, begun + 40, 1, 0.0, "completed"))  # by the GPU's clock
    assert figures.devices()["cuda:0"]["busy_seconds"] == told >= 60
    figures.begin_run(work, ["cuda:0"], begun)
    figures.end_run(work)
    assert figures.devices()["cuda:0"]["busy_seconds"] == told
    figures.end_run(work, Run(["cuda:0"], "job", begun, begun + 40, 1, 0.0, "failed"))
    assert figures.devices()["cuda:0"]["busy_seconds"] == pytest.approx(80)


def test_runs_that_fail_and_each_device_of_a_gang_count_as_busy() -> None:
    def fail(_: Any) -> None:
        time.sleep(0.01)
        raise ValueError

    def unprepared(_: Any) -> Any:
        time.sleep(0.01)
        raise OSError

    with pool_of() as pool:
        assert pool.submit(fail, gang=2).exception() is not None
        busy = [one["busy_seconds"] for one in pool.report()["devices"].values()]
        assert min(busy) >= 0.01
        with pytest.warns(RuntimeWarning, match="is lost to the pool"):
            assert pool.serve(lambda x: x, initializer=unprepared)(torch.tensor(1)).exception() is not None
        assert sum(one["busy_seconds"] for one in pool.report()["devices"].values()) >= sum(busy) + 0.02
        assert [one["runs"] for one in pool.report()["devices"].values()] == [0, 0]
        assert pool._jobs.figures._open == {}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_run_that_was_given_up_is_busy_no_more() -> None:
    over = threading.Event()
    with pool_of(1, hang_seconds=0.05) as pool:
        job = pool.submit(lambda _: over.wait(20))
        assert job.exception() is not None
        assert pool._jobs.figures._open == {}
        assert pool.report()["devices"]["host:0"]["busy_seconds"] > 0
        over.set()


def counted(pool: Any) -> tuple[Any, ...]:
    """Outcomes, how many waited, for how long, and what devices ran."""
    report = pool.report()
    ran = {name: (one["jobs"], one["runs"]) for name, one in report["devices"].items()}
    return report["outcomes"], report["wait_counts"], report["wait_seconds_sum"], ran


def test_copies_in_the_shadow_and_what_warms_a_version_are_no_requests(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError(len(x))

    with pool_of() as pool:
        batcher = pool.serve(adds(10), max_batch=4)
        for answer in ask(batcher, 4):
            answer.result()
        before, busy = counted(pool), pool.report()["devices"]["host:0"]["busy_seconds"]
        pool.scalars()
        batcher.publish(adds(20), shadow=True)
        with pytest.raises(Rejected, match="has raised ValueError"):
            batcher.publish(fails)
        assert counted(pool) == before
        assert pool.report()["devices"]["host:0"]["busy_seconds"] > busy
        shown = pool.scalars("")
        assert (shown["completed"], shown["failed"], shown["cancelled"], shown["wait_seconds"]) == (0, 0, 0, 0)
        assert shown["busy_ratio/host_0"] > 0
        for answer in ask(batcher, 6):
            answer.result()
        assert soon(lambda: not pool._jobs.copies)
        assert soon(lambda: pool.running == 0)
        outcomes, waits, _, ran = counted(pool)
        assert outcomes == {"completed": 10, "failed": 0, "rejected": 0, "expired": 0, "cancelled": 0}
        assert waits[-1][1] == sum(jobs for jobs, _ in ran.values()) == 10
        now = time.monotonic() + 1
        monkeypatch.setattr(time, "monotonic", lambda: now)
        rates = [one["jobs_per_second"] for one in pool._jobs.look()["devices"].values()]
        assert sum(rates) * (now - pool._jobs.look._begun) == pytest.approx(10)
        monkeypatch.undo()
        pool.page(tmp_path / "pool.html")
    assert "10 of 10 jobs completed" in (tmp_path / "pool.html").read_text()


def test_a_request_beside_a_copy_of_the_pools_own_counts(tmp_path: Path) -> None:
    with pool_of(1) as pool:
        batcher = pool.serve(adds(10), max_batch=4)
        ask(batcher, 1)[0].result()
        item = torch.tensor(0.0)
        with Held(pool):
            # A copy that comes just as its version is promoted: those that wait then are cancelled.
            copy = batcher._present.way.put(None, item, [item], None, None, "background", True, own=True)
            beside = batcher(torch.tensor(1.0), priority="background")
        assert (float(copy.result()), float(beside.result())) == (10.0, 11.0)
        assert soon(lambda: pool.running == 0)
        noted, _ = pool._jobs.figures.runs.noted()
        assert noted[-1].jobs == 1
        assert pool.report()["devices"]["host:0"]["runs"] == 3
        pool.trace(tmp_path / "trace.json")
    _, events = events_of(tmp_path / "trace.json")
    print(events)
    assert ("job", 1) in {(one["cat"], one["args"]["jobs"]) for one in events}


def explained(pool: Any) -> list[str]:
    """What `explain` says that each device ran."""
    return [line.partition(" s")[0] for line in pool.explain().splitlines() if line.startswith("host:")]


def told(pool: Any) -> list[str]:
    """The same by `report`."""
    return [
        f"{name}: {plural(one['jobs'], 'job')} in {plural(one['runs'], 'run')}, {one['busy_seconds']:.3f}"
        for name, one in pool.report()["devices"].items()
    ]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_explain_has_the_figures_of_the_report() -> None:
    over = threading.Event()
    with pool_of(hang_seconds=0.05) as pool:
        hangs = pool.submit(lambda _: over.wait(60))
        assert hangs.exception() is not None
        give_up_after(pool, 60)
        for _ in range(5):
            assert pool.submit(lambda _: 1 / 0).exception() is not None
        for _ in range(3):
            pool.submit(lambda _: None).result()
        pool.submit(lambda _: None, gang=2).result()
        batcher = pool.serve(lambda x: x + 1, max_batch=4)
        assert sum(int(one.result()) for one in [batcher(torch.tensor(k)) for k in range(8)]) == 36
        over.set()
        assert soon(lambda: pool.running == 0)
        assert explained(pool) == told(pool)
    assert explained(pool) == told(pool)


def test_explain_says_for_which_devices_jobs_wait() -> None:
    with pool_of() as pool:
        pool.retire("host:1")
        waits = pool.submit(lambda _: 1, kind="a", needs="host:1")
        gang = pool.submit(lambda _: 2, kind="b", gang=2)
        text = pool.explain()
        assert "'a': 1 job waits for host:1, which takes no work now\n" in text
        assert "'b': 1 job waits for 2 devices at once, and 1 takes work now: host:1 takes none\n" in text
        assert text.endswith("2 jobs wait, 0 runs go on\n")
        pool.restore("host:1")
        assert (waits.result(), gang.result()) == (1, 2)
        assert "takes no work" not in pool.explain()
    assert "retired" not in pool.explain()


def test_an_objective_of_optuna_runs_as_the_guide_says_and_what_it_prunes_did_not_complete() -> None:
    optuna = pytest.importorskip("optuna")
    guide = (Path(__file__).resolve().parents[2] / "python" / "guide" / "trials.md").read_text()
    program = re.findall(r"^```python\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)[1]

    def objective(device: torch.device, trial: Any) -> float:
        assert device == torch.device("cpu")
        if trial.number == 3:
            raise optuna.TrialPruned
        return float(trial.suggest_float("x", -1.0, 1.0)) ** 2

    names = {"Pool": pool_of, "study": (study := optuna.create_study()), "objective": objective}
    exec(compile(program.replace("100", "6"), "<guide>", "exec"), names)
    assert sorted(one.state.name for one in study.trials) == [*["COMPLETE"] * 5, "PRUNED"]
    assert "Jobs that did not complete: 1 failed.\n" in names["pool"].explain()
