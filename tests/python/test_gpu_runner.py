"""The runner of tests/gpu/run: time-outs, failures, counts, and a record that is complete at every moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner import plan, sanitizer
from runner.main import Run
from runner.record import Record
from runner.stage import Running, Stage
from runner.stage import test_counts as counts_in

ENVIRONMENT = dict(os.environ)


def python(name: str, program: str, limit: float = 20, **more: object) -> Stage:
    return Stage(name, [sys.executable, "-c", program], limit, **more)  # type: ignore[arg-type]


def test_a_stage_that_hangs_ends_with_all_its_children(tmp_path: Path) -> None:
    mark = tmp_path / "child"
    program = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(mark)!r}, "w").write(str(child.pid))
print("started", flush=True)
time.sleep(600)
"""
    running = Running(python("hangs", program), ENVIRONMENT)
    while not mark.exists() or not mark.read_text():
        time.sleep(0.01)
    record, output = running.finish(0.1)
    assert (record["status"], output) == ("timed out", "started\n")
    child = int(mark.read_text())
    deadline = time.monotonic() + 10
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(child)


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(") ", 1)[1][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_one_stage_that_fails_stops_no_other_but_those_that_need_it(tmp_path: Path) -> None:
    run = Run(Record(tmp_path), ENVIRONMENT, time.monotonic() + 1000)
    run.stage(python("breaks", "raise SystemExit(3)"))
    run.stage(python("needs it", "print(1)", needs=("breaks",)))
    run.stage(python("other", 'print("first"); print(\'{"a": [1]}\')', json_result=True))
    run.stage(Stage("absent", ["/no/such/program"], 5))
    stages = {entry["stage"]: entry for entry in json.loads((tmp_path / "gpu.json").read_text())["stages"]}
    assert [entry["status"] for entry in stages.values()] == ["failed", "skipped", "passed", "failed"]
    assert stages["needs it"]["why"] == "breaks did not pass"
    assert stages["other"]["result"] == {"a": [1]}
    assert "No such file" in stages["absent"]["tail"]
    assert run.record.failed == ["breaks", "absent"]


def test_when_time_is_up_the_rest_is_skipped_and_the_last_stage_still_runs(tmp_path: Path) -> None:
    run = Run(Record(tmp_path), ENVIRONMENT, time.monotonic() + 30)
    run.stage(python("late", "print(1)"))
    run.stage(python("last", "print(1)"), last=True)
    assert [(entry["stage"], entry["status"]) for entry in run.record.stages] == [
        ("late", "skipped"),
        ("last", "passed"),
    ]
    assert run.record.stages[0]["why"] == "time is up"


def test_a_run_that_is_killed_has_told_what_it_was_at(tmp_path: Path) -> None:
    program = f"""
import os, time
from pathlib import Path
from runner import plan, sanitizer
from runner.main import Run
from runner.record import Record
from runner.stage import Stage
run = Run(Record(Path({str(tmp_path)!r})), dict(os.environ), time.monotonic() + 1000)
run.stage(Stage("done", ["true"], 5))
run.stage(Stage("endless", ["sleep", "20"], 100))
"""
    folder = Path(__file__).resolve().parents[1] / "gpu"
    process = subprocess.Popen([sys.executable, "-c", program], env=ENVIRONMENT | {"PYTHONPATH": str(folder)})
    deadline = time.monotonic() + 20
    record: dict[str, object] = {}
    while record.get("state") != "running endless" and time.monotonic() < deadline:
        time.sleep(0.01)
        if (tmp_path / "gpu.json").exists():
            record = json.loads((tmp_path / "gpu.json").read_text())  # complete at every moment
    process.kill()
    process.wait()
    assert record["state"] == "running endless"


def fake_sanitizer(folder: Path, text: str, exit_status: int) -> Path:
    tool = folder / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(f"#!{sys.executable}\nprint({text!r})\nraise SystemExit({exit_status})\n")
    tool.chmod(0o755)
    return tool.parent


SUMMARY = "========= ERROR SUMMARY: {} errors"


@pytest.mark.parametrize(
    ("text", "exit_status", "status", "why"),
    [
        (f"[  PASSED  ] 1 test.\n{SUMMARY.format(0)}", 0, "passed", ""),
        (f"========= Invalid __global__ write of size 4 bytes\n{SUMMARY.format(1)}", 9, "failed", ""),
        ("========= Internal Sanitizer Error: no memory\n========= Invalid __global__ read", 9, "failed", ""),
        # The program itself fails.
        (f"========= Error: process didn't terminate successfully\n{SUMMARY.format(0)}", 1, "failed", ""),
        (
            "========= Error: Target application terminated before first instrumented API call",
            255,
            "skipped",
            "cannot run here: Error: Target application terminated",
        ),
        (
            f"[  PASSED  ] 1 test.\n========= Internal Sanitizer Error: didn't track the launch\n{SUMMARY.format(0)}",
            0,
            "skipped",
            "cannot run here: Internal Sanitizer Error: didn't track the launch",
        ),
        ("ptrace: Operation not permitted", 1, "skipped", "status 1 and no summary: ptrace: Operation not permitted"),
        ("", 0, "skipped", "status 0 and no summary: it said nothing"),
    ],
)
def test_a_sanitizer_that_cannot_run_is_skipped_and_one_that_finds_something_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, exit_status: int, status: str, why: str
) -> None:
    monkeypatch.setenv("PATH", str(fake_sanitizer(tmp_path, text, exit_status)))
    record, _ = Running(sanitizer.stages(tmp_path, gpu=True)[0], ENVIRONMENT).finish(20)
    assert record["status"] == status
    assert why in record["why"] if why else "why" not in record


def test_without_the_sanitizer_or_its_programs_its_stages_say_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(Record(tmp_path), ENVIRONMENT, time.monotonic() + 1000)
    run.done({"stage": "build", "status": "passed", "seconds": 0.0})
    stages = {stage.name: stage for stage in plan.after_build(tmp_path, "", gpu=True)}
    run.stage(stages["cpp_reduction"])  # a program that does not exist
    monkeypatch.setenv("PATH", str(tmp_path))
    run.stage(sanitizer.stages(tmp_path, gpu=True)[0])
    monkeypatch.setenv("PATH", str(fake_sanitizer(tmp_path, "", 0)))
    run.stage(sanitizer.stages(tmp_path, gpu=True)[0])
    assert [entry.get("why") for entry in run.record.stages[1:]] == [
        "not built: no GoogleTest",
        "compute-sanitizer is not installed",
        "cpp_reduction did not pass (not built: no GoogleTest)",
    ]
    assert run.record.failed == []


def test_tests_run_side_by_side_where_that_was_carried_along(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "xdist").mkdir(parents=True)
    (site / "xdist" / "__init__.py").touch()
    stages = {stage.name: stage for stage in plan.after_build(tmp_path, f"{site}{os.pathsep}/no/such/folder", gpu=True)}
    for name in ("python_exactness", "python_children"):
        command = list(stages[name].command)
        assert command[command.index("-n") + 1] == "8"
    assert "-n" not in stages["python_alone"].command


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("[  PASSED  ] 3 tests.\n[  SKIPPED ] 2 tests, listed below:", (3, 0, 2)),
        ("[  PASSED  ] 0 tests.\n[  FAILED  ] 1 test, listed below:", (0, 1, 0)),
        ("x\n==== 1 failed, 40 passed, 2 skipped in 46.37s ====", (40, 1, 2)),
        ("343 skipped in 2.65s", (0, 0, 343)),
        ("1 passed, 2 errors in 1.00s (0:01:00)", (1, 2, 0)),
        ("no tests here, it took 3 s", None),
    ],
)
def test_tests_are_counted_by_what_the_runner_closes_with(text: str, counts: tuple[int, int, int] | None) -> None:
    assert counts_in(text) == (
        {} if counts is None else dict(zip(("passed", "failed", "skipped"), counts, strict=True))
    )


def test_a_stage_whose_tests_were_all_skipped_is_skipped_with_the_reason() -> None:
    program = "print('no GPU: PyTorch sees none\\n2 skipped in 0.10s')"
    record, _ = Running(python("tests", program), ENVIRONMENT).finish(20)
    assert (record["status"], record["why"]) == ("skipped", "no GPU: PyTorch sees none")


def test_a_program_that_says_it_cannot_run_is_skipped_with_its_reason() -> None:
    program = 'print(\'{"available": false, "why": "no driver"}\')'
    record, _ = Running(python("probe", program, json_result=True), ENVIRONMENT).finish(20)
    assert (record["status"], record["why"]) == ("skipped", "no driver")


def test_a_program_that_measures_what_must_not_be_fails_and_says_so() -> None:
    program = 'print(\'{"available": true, "disjoint": false, "failed": "the same SMs"}\'); raise SystemExit(1)'
    record, _ = Running(python("probe", program, json_result=True), ENVIRONMENT).finish(20)
    assert (record["status"], record["why"]) == ("failed", "the same SMs")
    assert record["result"]["disjoint"] is False
