"""The examples and the race: they run and print what they promise. Speeds are not tested."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import paceline
from program_server import SERVER

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "examples" / "python" / "digits.py"
TWO_OPTIMIZERS = ROOT / "examples" / "python" / "two_optimizers.py"
TEXT = ROOT / "examples" / "python" / "text.py"
BATCH_INFERENCE = ROOT / "examples" / "python" / "batch_inference.py"
PIPELINE = ROOT / "examples" / "python" / "pipeline.py"
PIPELINE_RACE = ROOT / "benchmarks" / "python" / "race_pipeline.py"
TEXT_RACE = ROOT / "benchmarks" / "python" / "race_text.py"
RACE = ROOT / "benchmarks" / "python" / "race_ddp.py"
IMPORTS = ["sklearn.datasets"]  # takes two seconds in each of these programs

for package in ("torch", "sklearn"):
    if importlib.util.find_spec(package) is None:  # importing it takes seconds
        pytest.skip(f"the examples need {package}", allow_module_level=True)
needs_two_cores = pytest.mark.skipif(
    len(paceline.devices()) < 2 or not all(device.cores for device in paceline.devices()),
    reason="needs two cores that processes can be pinned to",
)


def run(script: Path, *arguments: str, timeout: float = 240) -> str:
    done = SERVER.run_file(script, *arguments, timeout=timeout, imports=IMPORTS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def shares(output: str) -> list[dict[str, int]]:
    """The rows of the table: the items of each device."""
    rows: list[dict[str, int]] = []
    for line in output.splitlines():
        found = re.match(r"(.{26})   (host:\d+) +(\d+)  #* +(\d+|-)  +\d+%", line)
        if found:
            if found[1].strip():
                rows.append({})
            rows[-1][found[2]] = int(found[3])
    return rows


def test_digits_prints_a_table_whose_shares_add_up_to_the_batch() -> None:
    output = run(DIGITS, "--steps", "12", "--batch", "64", "--devices", "host:0,host:1")
    rows = shares(output)
    assert len(rows) == 12
    assert all(set(row) == {"host:0", "host:1"} and sum(row.values()) == 64 for row in rows), output
    assert "auto balance, 12 steps measured" in output
    assert re.search(r"test accuracy: \d+\.\d% of 450 images", output)


def test_digits_keeps_even_shares_when_told_to() -> None:
    rows = shares(run(DIGITS, "--epochs", "1", "--batch", "128", "--balance", "even", "--devices", "host:0,host:1"))
    assert rows
    assert all(row == {"host:0": 64, "host:1": 64} for row in rows)


@needs_two_cores
def test_digits_holds_the_busy_loop_in_the_middle_third_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "shares.png"
    page = tmp_path / "run.html"
    made = ["--plot", str(picture), "--page", str(page)]
    output = run(DIGITS, "--steps", "12", "--batch", "64", "--slow", "host:1", *made)
    assert "How good was the split?" in page.read_text(encoding="utf-8")
    marked = [line.split()[0] for line in output.splitlines() if "busy loop" in line]
    assert marked == ["host:1"] * 4
    rows = [line for line in output.splitlines() if re.match(r" +\d+-\d+ ", line)]
    before = [number for number, line in enumerate(output.splitlines()) if "busy loop" in line]
    assert output.splitlines().index(rows[4]) < before[0]
    assert before[-1] < output.splitlines().index(rows[8])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


def test_two_optimizers_computes_the_gradients_of_one_device_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "drawn.png"
    output = run(TWO_OPTIMIZERS, "--steps", "8", "--devices", "host:0,host:1", "--verify", "--plot", str(picture))
    found = re.search(r"from the gradients of one device: (\S+)", output)
    assert found
    assert 0 < float(found[1]) < 1e-4
    assert len(re.findall(r"step +\d+  critic \d\.\d+  generator \d\.\d+  shares", output)) == 8
    assert "run criticise: auto balance, 9 steps measured" in output
    assert "run draw: auto balance, 8 steps measured" in output
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_two_optimizers_learns_to_draw() -> None:
    before, after = re.findall(r"(\d\.\d+) away .* (\d\.\d+) after", run(TWO_OPTIMIZERS))[0]
    assert float(after) < 0.2 * float(before)


def test_the_race_trains_the_network_of_the_example() -> None:
    example = load("digits_example", DIGITS)
    racing = load("race_model", RACE.parent / "race" / "model.py")
    assert str(racing.network()) == str(example.network())


@pytest.mark.slow
@needs_two_cores
def test_the_race_ends_with_a_line_of_json() -> None:
    sizes = "8,16"
    options = ["--network", "transformer", "--busy", "--ratio-seconds", "2"]
    output = run(RACE, "--steps", "2", "--rounds", "1", "--batch", sizes, "--json", *options)
    result = json.loads(output.splitlines()[-1])
    assert result["busy"] is True
    assert list(result["batches"]) == sizes.split(",")
    assert ("jax" in result["skipped"]) is (importlib.util.find_spec("jax") is None)
    assert ("JAX is not installed" in output) is ("jax" in result["skipped"])
    rivals = [name for name in ("ddp", "threads", "jax", "even", "auto") if name not in result["skipped"]]
    for summary in result["batches"].values():
        assert list(summary["of_ideal"]) == rivals
        for name in (*rivals, "ideal", "cores_at_the_same_time", "ideal_in_micro_batches"):
            assert summary[name] > 0, name
        assert summary["auto_over_ddp"] == pytest.approx(summary["auto"] / summary["ddp"], rel=1e-3)
        assert summary["auto_over_ideal"] == pytest.approx(summary["auto"] / summary["ideal"], rel=1e-3)
        assert summary["ideal"] == pytest.approx(sum(ways["whole"] for ways in summary["alone"].values()), abs=0.3)
        assert {"auto_over_even", "auto_over_even_interval", "spread"} <= set(summary)
    assert list(result["splitting"]["auto_over_best_alone"]) == [f"batch {size}" for size in sizes.split(",")]
    assert {"goals", "tables", "hardware", "versions"} <= set(result)
    assert "paceline, auto" in output
    assert "DDP" in output


def test_text_learns_and_tells_what_padding_it_saved() -> None:
    output = run(TEXT, "--steps", "24", "--batch", "32", "--devices", "host:0,host:1")
    assert "of the padding saved" in output
    assert re.search(r"loss per byte: \d\.\d\d at first, \d\.\d\d in the end", output)


def test_batch_inference_compares_all_devices_with_each_alone() -> None:
    output = run(BATCH_INFERENCE, "--devices", "host:0,host:1", "--passages", "150", "--seconds", "0.2")
    alone = [float(speed) for speed in re.findall(r"^host:\d alone: (\d+) passages/s$", output, re.MULTILINE)]
    found = re.search(
        r"all devices: (\d+) passages/s, (\S+) of the sum of the devices' speeds, (\S+) times host:0", output
    )
    assert len(alone) == 2
    assert found
    (whole,) = re.findall(r"^sum of the devices alone: (\d+) passages/s \(.* counted for 0\.2 s", output, re.MULTILINE)
    assert float(whole) == pytest.approx(sum(alone), abs=1.1)
    assert float(found[2]) == pytest.approx(float(found[1]) / sum(alone), abs=0.02)
    assert float(found[3]) == pytest.approx(float(found[1]) / alone[0], rel=0.05)
    assert re.search(r"host:0: \d+ jobs? in \d+ runs?", output)
    assert "largest difference from the model itself" in output
    assert "'CHAPTER I. Down the Rabbit-Hole" in output.splitlines()[-2]


@needs_two_cores
def test_the_race_on_text_ends_with_figures_of_every_rival() -> None:
    output = run(TEXT_RACE, "--steps", "3", "--rounds", "1", "--batch", "16", "--json", timeout=400)
    summary = json.loads(output.splitlines()[-1])
    assert set(summary["over"]) == {"text-ddp-random", "text-ddp-grouped", "text-ddp-padded"}
    assert 0 < summary["split_of_ideal"] <= 1
    assert 1 <= summary["padded"] <= summary["contiguous"]
    assert all(value > 0 for value in summary["milliseconds"].values())


@needs_two_cores
def test_pipeline_trains_what_no_device_holds_alone_and_draws_its_schedule(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "step.png"
    output = run(PIPELINE, "--steps", "6", "--batch", "4", "--slow", "host:1", "--plot", str(picture))
    assert re.search(r"^host:0 alone: no plan fits: .*bytes on host:0", output), output
    rows = re.findall(r"^step +\d+  loss \d\.\d+ +\d+\.\d ms  (.*)$", output, flags=re.MULTILINE)
    assert len(rows) == 6, output
    assert set(rows[:3]) == {"measuring the blocks"}
    for row in rows[3:]:  # every block is on one device, and neither device has all
        found = re.fullmatch(r"host:[01] blocks\.0 to blocks\.(\d), host:[01] blocks\.(\d) to blocks\.5.*", row)
        assert found, output
        assert int(found[2]) == int(found[1]) + 1, output
    assert output.count("a busy loop begins on host:1") == 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    first, end = re.findall(r"loss per byte: (\d\.\d\d) at first, (\d\.\d\d) in the end", output)[0]
    assert float(end) < float(first)


@pytest.mark.parametrize(
    ("script", "arguments", "status", "message"),
    [
        (DIGITS, ("--devices", "host:0", "--slow", "host:7"), 1, "host:7.*there are host:0"),
        (PIPELINE, ("--slow", "host:7"), 2, "--slow host:7.*there are host:0, host:1"),
        (PIPELINE, ("--devices", "host:0"), 2, "--devices host:0: name two devices or more.*$"),
    ],
)
def test_arguments_that_cannot_be_used_are_told(
    script: Path, arguments: tuple[str, ...], status: int, message: str
) -> None:
    done = SERVER.run_file(script, *arguments, imports=IMPORTS)
    assert done.returncode == status
    assert re.search(message, done.stderr.strip())


@pytest.mark.slow
@needs_two_cores
def test_the_race_of_pipelines_ends_with_a_line_of_json() -> None:
    size = ("--width", "32", "--items", "1", "--micro-batches", "4")
    output = run(PIPELINE_RACE, "--busy", "--steps", "1", "--rounds", "1", "--warm-up", "3", *size, "--json")
    result = json.loads(output.splitlines()[-1])
    assert result["busy"] is True
    for name in ("torch_gpipe", "torch_1f1b", "even", "auto", "single", "data_parallel", "predicted", "ideal"):
        assert result[name] > 0, name
    better = result[result["better_of_torch"]]
    assert result["auto_over_torch"] == pytest.approx(result["auto"] / better, rel=1e-2)
    assert {"hardware", "versions", "setting", "tables", "goals"} <= set(result)
