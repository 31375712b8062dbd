"""benchmarks/run: it runs everything, reports failures, and writes the results down. Speeds are not tested."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmarks need torch")

import paceline
from runner.stage import Stage
from suite.__main__ import run
from suite.report import figures, google_rows, markdown, tables
from suite.stages import PYTHON, stages

ROOT = PYTHON.parents[1]
OK = """#!/bin/sh
echo "***WARNING*** not quiet" >&2
echo '{"benchmarks": [
 {"run_name": "BM_a|b/8", "run_type": "aggregate", "aggregate_name": "median", "real_time": 891.2, "cpu_time": 890, "time_unit": "ns"},
 {"run_name": "BM_a|b/8", "run_type": "aggregate", "aggregate_name": "mean", "real_time": 999, "cpu_time": 890, "time_unit": "ns"},
 {"run_name": "BM_a|b/8", "run_type": "aggregate", "aggregate_name": "cv", "real_time": 0.021, "cpu_time": 0.02, "time_unit": "ns"}
]}'
"""


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)


def test_every_script_is_a_stage(tmp_path: Path) -> None:
    scripts = {path.stem for path in PYTHON.glob("*.py")} - {"ablation", "ablation_rules"}  # edits sources, for hours
    planned = stages(tmp_path, tmp_path / "picture.svg", quick=True, gpu=True)
    assert {stage.name.split()[0] for stage in planned} == scripts
    assert all(stage.limit > 0 and stage.json_result for stage in planned)
    assert len({stage.name for stage in planned}) == len(planned)


def test_a_comparison_without_its_rival_is_skipped_and_says_why() -> None:
    said = "import json; print(json.dumps({'available': False, 'why': 'it is not installed'}))"
    entry, _ = run(Stage("partition", [sys.executable, "-c", said], 60, json_result=True), chosen=True)
    assert (entry["status"], entry["why"]) == ("skipped", "it is not installed")


def test_every_program_is_a_stage_and_a_failure_is_said(tmp_path: Path) -> None:
    programs, results = tmp_path / "programs", tmp_path / "results"
    programs.mkdir()
    program(programs, "benchmark_good", OK)
    program(programs, "benchmark_crashes", "#!/bin/sh\necho 'no such device'; exit 3\n")
    program(programs, "benchmark_mute", "#!/bin/sh\n")
    (programs / "CMakeFiles").mkdir()
    path = os.pathsep.join([str(PYTHON), str(ROOT / "tests" / "gpu"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "suite", "--programs", str(programs), str(results), "--quick", "--only", "benchmark_"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    assert "failed: benchmark_crashes, benchmark_mute" in done.stdout
    (written,) = results.glob("*.json")
    record = json.loads(written.read_text())
    status = {entry["stage"]: entry["status"] for entry in record["stages"]}
    assert status.pop("benchmark_good") == "passed"
    assert status.pop("benchmark_crashes") == status.pop("benchmark_mute") == "failed"
    assert set(status.values()) == {"skipped"}
    assert record["versions"]["paceline"] == paceline.__version__
    assert record["machine"]["processor"]
    text = written.with_suffix(".md").read_text()
    assert "The figures mean nothing" in text
    assert "| BM_a\\|b/8 | 891 ns | 890 ns | 2.1% |" in text
    assert "no such device" in text
    assert re.search(r"\| benchmark_mute \| \*\*failed\*\* \| 0 \| [\w.-]* \| it ended without its JSON \|", text)
    assert str(tmp_path) not in text.replace(record["command"], "")
    assert "no such device" in written.with_suffix(".log").read_text()


def test_what_others_measured_that_day_stays(tmp_path: Path) -> None:
    programs, results = tmp_path / "programs", tmp_path / "results"
    programs.mkdir()
    path = os.pathsep.join([str(PYTHON), str(ROOT / "tests" / "gpu"), *sys.path])

    def suite(only: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "suite", "--programs", str(programs), str(results), "--quick", "--only", only]
        environment = {**os.environ, "PYTHONPATH": path}
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)

    def measured() -> dict[str, str]:
        return {entry["stage"]: entry["status"] for entry in record()["stages"] if entry["status"] != "skipped"}

    def record() -> dict[str, Any]:
        (written,) = results.glob("*.json")
        found: dict[str, Any] = json.loads(written.read_text())
        return found

    program(programs, "benchmark_one", OK)
    program(programs, "benchmark_two", OK)
    assert suite("benchmark_one").returncode == 0
    assert measured() == {"benchmark_one": "passed"}
    program(programs, "benchmark_one", "#!/bin/sh\nexit 1\n")
    assert suite("benchmark_two").returncode == 0
    assert measured() == {"benchmark_one": "passed", "benchmark_two": "passed"}
    (written,) = results.glob("*.md")
    assert written.read_text().count("| BM_a\\|b/8 | 891 ns |") == 2
    other = record()
    other["machine"]["processor"] = "another"
    written.with_suffix(".json").write_text(json.dumps(other))
    done = suite("benchmark_two")
    assert done.returncode == 1
    assert "is of another machine" in done.stderr
    assert record() == other


def test_a_stage_that_hangs_is_ended() -> None:
    begin = time.monotonic()
    entry, _ = run(Stage("hangs", ["sleep", "60"], 0.2, json_result=True), chosen=True)
    assert time.monotonic() - begin < 30
    assert (entry["status"], entry["why"]) == ("timed out", "after 0 s")


def test_results_become_rows() -> None:
    result: dict[str, Any] = {
        "auto_over_ddp": 1.23456789,
        "alone": {"host:0": {"whole": 5.0}},
        "auto": {"steps_to_recover": [2, None]},
        "races": [{"a": 1}, {"b": {"c": 2}}],
        "rows": [{"size_mib": 1, "us": 2.0, "over": None}, {"size_mib": 256, "us": 1234.5678, "over": 3}],
        "tables": {"batch 8": [["", "of ideal"], ["auto", "0.98"]]},
        "gpu": None,
        "hardware": {"processor": "x"},
    }
    assert tables(result) == {
        "batch 8": [["", "of ideal"], ["auto", "0.98"]],
        "rows": [["size mib", "us", "over"], ["1", "2", ""], ["256", "1234.57", "3"]],
    }
    assert dict(figures(result)) == {
        "auto over ddp": "1.23457",
        "alone: host:0: whole": "5",
        "auto: steps to recover": "2, None",
        "races 1: a": "1",
        "races 2: b: c": "2",
    }
    single = {"run_name": "BM_x", "run_type": "iteration", "real_time": 2.5, "cpu_time": 2.4, "time_unit": "us"}
    assert [row[1] for row in google_rows([{**single, "real_time": time} for time in (0.5, 1500.0, 2e6)])] == [
        "500 ns",
        "1.5 ms",
        "2 s",
    ]
    counted = {**single, "label": "told", "of_roofline": 0.9512, "threads": 1}
    assert [row[0] for row in google_rows([counted])] == ["BM_x (told, of_roofline 0.951)"]
    failed = {"run_name": "BM_y", "run_type": "iteration", "error_occurred": True, "error_message": "no"}
    assert list(google_rows([single, failed])) == [("BM_x", "2.5 µs", "2.4 µs", ""), ("BM_y", "failed: no", "", "")]


def test_tables_are_whole_figures_are_cut_short_and_the_picture_is_shown() -> None:
    given = {"batch 8": [["", "of ideal"], ["a|b", "0.98"], *([f"row {i}", "0.5"] for i in range(100))]}
    records = {"sizes": [{"bytes": 4**i, "us": i} for i in range(100)]}
    record = {
        "date": "2026-01-01",
        "quick": False,
        "command": "benchmarks/run",
        "picture": "straggler-2026-01-01.svg",
        "machine": {"processor": "p", "cores": 2, "system": "s", "gpu": None, "load_before": 0.0},
        "versions": {"paceline": "1"},
        "stages": [
            {
                "stage": "straggler",
                "status": "passed",
                "seconds": 1.0,
                "command": [sys.executable, "/a/straggler.py", "--json"],
                "result": {"tables": given} | records | {f"figure_{i}": i for i in range(100)},
            },
            {
                "stage": "benchmark_plan",
                "status": "passed",
                "seconds": 1.0,
                "command": ["/a/benchmark_plan"],
                "result": {
                    "context": {"host_name": "h"},
                    "benchmarks": [
                        {
                            "run_name": f"BM_{i}",
                            "run_type": "iteration",
                            "real_time": 1,
                            "cpu_time": 1,
                            "time_unit": "us",
                        }
                        for i in range(100)
                    ],
                },
            },
        ],
    }
    text = markdown(record)
    assert "(straggler-2026-01-01.svg)" in text
    assert "batch 8:\n\n|  | of ideal |\n| --- | --- |\n| a\\|b | 0.98 |\n| row 0 | 0.5 |\n" in text
    assert "| row 99 | 0.5 |\n\n" in text
    assert "sizes:\n\n| bytes | us |\n| --- | --- |\n| 1 | 0 |\n" in text
    assert f"| {4**99} | 99 |\n\n" in text
    assert "| BM_99 | 1 µs | 1 µs |  |\n\n" in text
    assert "| figure 59 | 59 |" in text
    assert "figure 60" not in text
    assert "40 more figures of this stage are in [benchmarks-2026-01-01.json](benchmarks-2026-01-01.json)." in text
    assert f"`{Path(sys.executable).name} straggler.py --json`" in text


@pytest.mark.slow
@pytest.mark.skipif(
    len(paceline.devices()) < 2 or not all(device.cores for device in paceline.devices()),
    reason="needs two cores that processes can be pinned to",
)
def test_the_straggler_is_measured_and_drawn(tmp_path: Path) -> None:
    for package in ("sklearn", "matplotlib"):
        pytest.importorskip(package)
    picture = tmp_path / "straggler.svg"
    done = subprocess.run(
        [
            sys.executable,
            str(PYTHON / "straggler.py"),
            "--steps",
            "12",
            "--batch",
            "64",
            "--onsets",
            "2",
            "--json",
            "--plot",
            str(picture),
        ],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["slow_steps"] == [4, 8]
    for policy in ("auto", "even"):
        assert all(result[policy][f"{third}_ms"] > 0 for third in ("before", "during", "after"))
        assert len(result[policy]["steps_to_recover"]) == 2
    assert len(result["recovery"]["steps"]["each"]) == 2
    assert all(late > -1e-3 for late in result["recovery"]["step_that_is_hit"]["each"])
    drawn = picture.read_text()
    assert "host:1, auto" in drawn
    assert len(drawn) < 60_000
