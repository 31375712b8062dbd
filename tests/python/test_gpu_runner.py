"""The runner of tests/gpu/run: time-outs, failures, counts, goals, rehearsals, and a record that is complete at every moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner import first_minute, goals, plan, sanitizer
from runner.main import Run
from runner.record import Record
from runner.stage import Running, Stage
from runner.stage import test_counts as counts_in
from timeline import Kernel, hidden

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
    assert (record["status"], output.splitlines()[0]) == ("timed out", "started")
    assert "KeyboardInterrupt" in output, "it was given no time to say what it has found"
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


@pytest.mark.alone
def test_the_limits_of_later_stages_are_kept_for_them(tmp_path: Path) -> None:
    run = Run(Record(tmp_path), ENVIRONMENT, time.monotonic() + 30)
    run.stages(
        [python("late", "print(1)"), python("never", "print(1)", 500, why_not="no"), python("last", "print(1)", 27)]
    )
    assert [(entry["stage"], entry["status"]) for entry in run.record.stages] == [
        ("late", "skipped"),
        ("never", "skipped"),
        ("last", "passed"),
    ]
    assert run.record.stages[0]["why"] == "time is up"


@pytest.mark.alone
def test_a_stage_may_use_what_others_have_saved_but_no_more_than_its_limit_again(tmp_path: Path) -> None:
    run = Run(Record(tmp_path), ENVIRONMENT, time.monotonic() + 1000)
    run.stages([python("slow", "import time; time.sleep(3.3)", 3), python("hangs", "import time; time.sleep(60)", 0.5)])
    slow, hangs = run.record.stages
    assert (slow["status"], hangs["status"]) == ("passed", "timed out")


def test_the_limits_add_up_to_less_than_the_whole_time(tmp_path: Path) -> None:
    setting = plan.Setting(tmp_path, tmp_path)
    limits = {stage.name: stage.limit for stage in [plan.build(setting), *plan.after_build(setting)]}
    assert sum(limits.values()) <= 60 * plan.MINUTES - 10, limits  # what remains unpacks and describes the machine
    names = list(limits)
    for measured in ("measure", "race_gpu", "verify"):
        for destructive in ("python_children", "allocators", "sticky"):
            assert names.index(measured) < names.index(destructive)


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
    stages = {stage.name: stage for stage in plan.after_build(plan.Setting(tmp_path, tmp_path))}
    run.stage(stages["cpp_reduction"])  # a program that does not exist
    monkeypatch.setenv("PATH", str(tmp_path))
    run.stage(sanitizer.stages(tmp_path, gpu=True)[0])
    monkeypatch.setenv("PATH", str(fake_sanitizer(tmp_path, "", 0)))
    run.stage(sanitizer.stages(tmp_path, gpu=True)[0])
    assert [entry.get("why") for entry in run.record.stages[1:]] == [
        "not built: no GoogleTest, or as the stage programs says",
        "compute-sanitizer is not installed",
        "cpp_reduction did not pass (not built: no GoogleTest, or as the stage programs says)",
    ]
    assert run.record.failed == []


def test_tests_run_side_by_side_where_that_was_carried_along(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "xdist").mkdir(parents=True)
    (site / "xdist" / "__init__.py").touch()
    setting = plan.Setting(tmp_path, tmp_path, python_path=f"{site}{os.pathsep}/no/such/folder")
    stages = {stage.name: stage for stage in plan.after_build(setting)}
    for name in ("python_exactness", "python_children"):
        command = list(stages[name].command)
        assert int(command[command.index("-n") + 1]) == min(8, len(os.sched_getaffinity(0)))
        assert stages[name].environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] == "1"
        assert command[command.index("-n") - 2 : command.index("-n")] == ["-p", "xdist"], "plugins are off"
    assert "-n" not in stages["python_alone"].command


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ('note\n{"a": [1]}\n[W123] a warning at the end\n', {"a": [1]}),
        ('[{"first": 1}]\n{\n "b": [\n{}\n]}\n', {"b": [{}]}),
        ('{"broken": ', None),
        ("[1] is no result", None),
    ],
)
def test_the_result_is_the_last_json_on_lines_of_its_own(text: str, result: object) -> None:
    record, _ = Running(python("prints", f"print({text!r})", json_result=True), ENVIRONMENT).finish(20)
    assert record.get("result") == result


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


@pytest.mark.parametrize(
    ("program", "json_result", "status", "why"),
    [
        (r"print('no GPU: PyTorch sees none\n2 skipped in 0.10s')", False, "skipped", "no GPU: PyTorch sees none"),
        ('print(\'{"available": false, "why": "no driver"}\')', True, "skipped", "no driver"),
        (
            'print(\'{"available": true, "disjoint": false, "failed": "the same SMs"}\'); raise SystemExit(1)',
            True,
            "failed",
            "the same SMs",
        ),
    ],
    ids=["all tests are skipped", "it says that it cannot run", "it measures what must not be"],
)
def test_a_stage_says_why_it_is_skipped_or_fails(program: str, json_result: bool, status: str, why: str) -> None:
    record, _ = Running(python("probe", program, json_result=json_result), ENVIRONMENT).finish(20)
    assert (record["status"], record["why"]) == (status, why)
    assert record.get("result", {}).get("disjoint", False) is False


RESULTS: dict[str, dict[str, object]] = {
    "measure": {
        "overheads": {
            "long": {"plain_milliseconds": 20.0, "plain_over_paceline": 0.985},
            "short": {"plain_milliseconds": 2.0, "plain_over_paceline": 0.5},
        },
        "overlap": {"hidden": 0.9},
    },
    "race_gpu": {
        "races": [
            {"part": "a: one device", "network": "compute", "fraction_of_ideal": 0.995, "counts": True},
            {"part": "b: 2 parts", "network": "compute", "fraction_of_ideal": 0.9, "counts": True},
            {"part": "b: 2 parts", "network": "memory", "fraction_of_ideal": 0.1, "counts": False},
            {"part": "b: 3 parts", "network": "memory", "failed": "out of memory"},
        ]
    },
    "sum_bandwidth": {"sums": [{"inputs": 2, "dtype": "float32", "of_copy": 0.85}]},
}


def test_goals_are_met_or_missed_by_what_was_measured_and_counts() -> None:
    stages = [{"stage": name, "result": result} for name, result in RESULTS.items()]
    found = {(each["goal"].split(":")[0], each["of"]): each["met"] for each in goals.goals(stages)}
    assert found == {
        ("one GPU", "long"): False,
        ("one GPU", "short"): None,
        ("one GPU", "a: one device compute"): True,
        ("parts", "b: 2 parts compute"): False,
        ("parts", "b: 2 parts memory"): None,
        ("parts", "b: 3 parts memory"): None,
        ("sum in one memory", "2 x float32"): True,
        ("all-reduce in one memory", "not measured"): None,
        ("reduction hidden behind backward", "two parts"): True,
    }
    assert "MISSED" in goals.table(goals.goals(stages), rehearsal=False)
    assert {each["met"] for each in goals.goals(stages, rehearsal=True)} == {None}, "a rehearsal meets nothing"
    assert {each["of"] for each in goals.goals([])} == {"not measured"}


def test_what_is_hidden_is_the_time_of_sums_in_which_other_kernels_run() -> None:
    sums = [Kernel("paceline_reduce_float32", 10, 20), Kernel("paceline_reduce_float32", 95, 105)]
    backward = [Kernel("gemm", 0, 15), Kernel("gemm", 5, 12), Kernel("gemm", 18, 100)]
    assert hidden([*sums, *backward]) == (5 + 2 + 5) / 20
    assert hidden(sums) == 0.0
    assert hidden(backward) is None


def run_script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = Path(plan.GPU_TESTS / "run")
    return subprocess.run(
        [sys.executable, str(program), "--carried", "/nonexistent", *arguments],
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_rehearsal_is_recorded_as_one_and_runs_the_chosen_stages_alone(tmp_path: Path) -> None:
    (tmp_path / "build" / "python_package").mkdir(parents=True)
    build = ("--build", str(tmp_path / "build"))
    done = run_script("--rehearse", *build, "--only", "info,sticky", str(tmp_path / "out"))
    record = json.loads((tmp_path / "out" / "rehearsal.json").read_text())
    assert record["rehearsal"] is True
    assert record["state"] == "complete"
    assert [stage["stage"] for stage in record["stages"]] == ["build", "programs", "info", "sticky"], done.stdout
    assert "these numbers mean nothing" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--rehearse", str(plan.ROOT / "benchmarks" / "results")), "a rehearsal measures nothing"),
        (("--rehearse", "--build", "/nonexistent", "{tmp}"), "run tests/run first"),
        (("--build", "{tmp}", "--only", "rase", "{tmp}"), "no stage begins with 'rase'; there are build, programs,"),
    ],
)
def test_wrong_arguments_say_what_to_do(arguments: tuple[str, ...], why: str, tmp_path: Path) -> None:
    (tmp_path / "python_package").mkdir()
    done = run_script(*(each.replace("{tmp}", str(tmp_path)) for each in arguments))
    assert done.returncode == 2
    assert why in " ".join(done.stderr.split())


def test_the_page_of_the_first_minute_says_what_is_wrong_and_names_no_host() -> None:
    copies = [
        {"from": f"cuda:{one}", "to": f"cuda:{1 - one}", "link": "PCIe peer", "memory": "pool", "way": "pull"}
        | {"gigabytes_per_second": 20.0 + one, "right": one == 0}
        for one in (0, 1)
    ]
    stages = [
        {"stage": "build", "status": "passed", "seconds": 60.0},
        {"stage": "topology", "status": "passed", "seconds": 1.0, "result": {"available": True, "lines": ["two GPUs"]}},
        {"stage": "truth", "status": "failed", "seconds": 2.0, "result": {"available": True, "copies": copies}},
        {"stage": "cpp_exact", "status": "passed", "seconds": 2.0, "tests": {"passed": 2, "failed": 0, "skipped": 0}},
        {"stage": "nccl", "status": "timed out", "seconds": 14.0, "tail": "initialising\nstill waiting"},
    ]
    page = first_minute.page({"rehearsal": False, "machine": {"gpus": 2, "driver": None}, "stages": stages})
    assert page.splitlines() == [
        "# paceline's first minute on several GPUs",
        "gpus 2",
        "",
        "## topology: passed, 1.0 s",
        "two GPUs",
        "",
        "## truth: failed, 2.0 s",
        "pull, pool memory: 20.0 to 21.0 GB/s over 2 ordered pairs",
        "PCIe peer: cuda:0 and cuda:1",
        "WRONG BYTES from cuda:1 to cuda:0, pool memory, pull",
        "",
        "## cpp_exact: passed, 2.0 s",
        "2 passed, 0 failed, 0 skipped",
        "",
        "## nccl: timed out, 14.0 s",
        "    initialising",
        "    still waiting",
    ]


def test_the_first_minute_is_a_minute_and_looks_at_links_before_it_trains(tmp_path: Path) -> None:
    stages = first_minute.stages(plan.Setting(build=tmp_path, scratch=tmp_path))
    assert sum(stage.limit for stage in stages) <= first_minute.SECONDS
    names = [stage.name for stage in stages]
    assert names[:2] == ["topology", "truth"]
    assert names[-1] == "nccl", "what may hang for ever comes last"
    assert stages[names.index("cpp_through_host")].environment["PACELINE_PEER_ACCESS"] == "0"


def test_a_rehearsal_of_the_first_minute_prints_its_page(tmp_path: Path) -> None:
    (tmp_path / "build" / "python_package").mkdir(parents=True)
    build = ("--build", str(tmp_path / "build"))
    done = run_script("--first-minute", "--rehearse", *build, "--only", "truth", str(tmp_path / "out"))
    record = json.loads((tmp_path / "out" / "first-minute-rehearsal.json").read_text())
    assert [stage["stage"] for stage in record["stages"]] == ["build", "programs", "truth", "truth_torch"], done.stdout
    assert "# paceline's first minute on several GPUs (a rehearsal: it measured nothing)" in done.stdout
    assert "## truth: skipped" in done.stdout
