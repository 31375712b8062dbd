"""benchmarks/run: it runs everything, reports failures, and writes the results down. Speeds are not tested."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import partition

pytest.importorskip("torch", reason="the benchmarks need torch")

import paceline
from runner.stage import Stage
from suite.__main__ import run
from suite.report import figures, google_rows, tables
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


def suite(programs: Path, results: Path, only: str) -> subprocess.CompletedProcess[str]:
    programs.mkdir(exist_ok=True)
    path = os.pathsep.join([str(PYTHON), str(ROOT / "tests" / "gpu"), *sys.path])
    command = [sys.executable, "-m", "suite", "--programs", str(programs), str(results), "--quick", "--only", only]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def test_every_program_is_a_stage_and_a_failure_is_said(tmp_path: Path) -> None:
    programs, results = tmp_path / "programs", tmp_path / "results"
    (programs / "CMakeFiles").mkdir(parents=True)
    program(programs, "benchmark_good", OK)
    program(programs, "benchmark_crashes", "#!/bin/sh\necho 'no such device'; exit 3\n")
    program(programs, "benchmark_mute", "#!/bin/sh\n")
    done = suite(programs, results, "benchmark_")
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

    def measured() -> dict[str, str]:
        return {entry["stage"]: entry["status"] for entry in record()["stages"] if entry["status"] != "skipped"}

    def record() -> dict[str, Any]:
        (written,) = results.glob("*.json")
        found: dict[str, Any] = json.loads(written.read_text())
        return found

    program(programs, "benchmark_one", OK)
    program(programs, "benchmark_two", OK)
    assert suite(programs, results, "benchmark_one").returncode == 0
    assert measured() == {"benchmark_one": "passed"}
    program(programs, "benchmark_one", "#!/bin/sh\nexit 1\n")
    assert suite(programs, results, "benchmark_two").returncode == 0
    assert measured() == {"benchmark_one": "passed", "benchmark_two": "passed"}
    (written,) = results.glob("*.md")
    assert written.read_text().count("| BM_a\\|b/8 | 891 ns |") == 2
    other = record()
    other["machine"]["processor"] = "another"
    written.with_suffix(".json").write_text(json.dumps(other))
    done = suite(programs, results, "benchmark_two")
    assert done.returncode == 1
    assert "is of another machine" in done.stderr
    assert record() == other


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


@pytest.mark.slow
@pytest.mark.skipif(
    len(paceline.devices()) < 2 or not all(device.cores for device in paceline.devices()),
    reason="needs two cores that processes can be pinned to",
)
def test_the_straggler_is_measured_and_drawn(tmp_path: Path) -> None:
    for package in ("sklearn", "matplotlib"):
        pytest.importorskip(package)
    picture = tmp_path / "straggler.svg"
    options = ["--steps", "12", "--batch", "64", "--onsets", "2", "--json", "--plot", str(picture)]
    command = [sys.executable, str(PYTHON / "straggler.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
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


# The comparison with Karmarkar and Karp: it counts right, and it says so if numberpartitioning is missing.


def test_the_bound_is_the_mean_load_or_the_longest_item() -> None:
    assert partition.lower_bound([1, 2, 3, 4], 2) == 5.0
    assert partition.lower_bound([9, 1, 1], 2) == 9.0


def test_a_split_with_a_lost_or_doubled_item_is_no_split() -> None:
    assert partition.makespan([5, 4, 3], [[0], [1, 2]]) == 7
    for parts in ([[0], [1]], [[0, 1], [1, 2]]):
        with pytest.raises(RuntimeError, match="exactly once"):
            partition.makespan([5, 4, 3], parts)


def test_both_are_held_against_the_bound_and_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = {1: [4, 3, 2, 1], 2: [6, 2, 2, 2]}
    monkeypatch.setattr(partition, "lengths_of", lambda items, seed: batches[seed])
    methods: dict[str, partition.Method] = {
        "halves": lambda lengths, devices: [[0, 1], [2, 3]],  # loads of 7 and 8; the lower bounds are 5 and 6
        "best": lambda lengths, devices: [[0, 3], [1, 2]] if lengths[0] == 4 else [[0], [1, 2, 3]],
    }
    size = partition.compared(methods, 4, 2, (1, 2))
    assert size["over_bound"]["best"] == {"median": 1.0, "worst": 1.0}
    assert size["over_bound"]["halves"]["worst"] == pytest.approx(7 / 5)
    assert size["over_karmarkar_karp"] == {"halves": {"median": pytest.approx((7 / 5 + 8 / 6) / 2), "worst": 7 / 5}}
    (goal,) = partition.goals([size], seeds=2)
    assert (goal["batches_above"], goal["of_batches"], goal["met"]) == (2, 2, False)
    monkeypatch.setitem(methods, "halves", methods["best"])
    (goal,) = partition.goals([partition.compared(methods, 4, 2, (1, 2))], seeds=2)
    assert (goal["worst"], goal["batches_above"], goal["met"]) == (1.0, 0, True)


def comparison(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """Run the script and return its JSON."""
    monkeypatch.setattr(sys, "argv", ["partition.py", *options, "--json"])
    assert partition.main() == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def test_without_the_other_it_says_so_and_ends_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "numberpartitioning", None)  # makes its import fail
    result = comparison(monkeypatch, capsys)
    assert result["available"] is False
    assert "pip install numberpartitioning" in result["why"]


def test_a_table_has_a_row_for_each_size(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def in_turns(numbers: list[int], *, num_parts: int, return_indices: bool) -> SimpleNamespace:
        assert return_indices
        return SimpleNamespace(partition=[list(range(part, len(numbers), num_parts)) for part in range(num_parts)])

    stand_in = SimpleNamespace(karmarkar_karp=in_turns)
    monkeypatch.setitem(sys.modules, "numberpartitioning", stand_in)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0")
    result = comparison(monkeypatch, capsys, "--seeds", "2")
    ((head, *rows),) = result["tables"].values()
    assert [row[0] for row in rows] == [f"{items} × {devices}" for items, devices in partition.SIZES]
    assert all(len(row) == len(head) for row in rows)
    assert all(goal["met"] for goal in result["goals"])  # dealing items out in turn, whatever their length, is worse
    assert {goal["of_batches"] for goal in result["goals"]} == {2 * len(partition.SIZES)}


def test_the_real_one_is_understood(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numberpartitioning")
    result = comparison(monkeypatch, capsys, "--short", "--seeds", "3")
    (size,) = result["batches"].values()
    assert 1.0 <= size["over_bound"]["Karmarkar-Karp"]["worst"] < 1.1  # it differs by much less than a tenth of a load
