"""The scripts of the checkout: called with wrong arguments, they say so and print their usage before they fetch or build anything."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [
    *("tests/run", "tests/stubs", "examples/run", "benchmarks/run"),
    *(".ci/run", ".ci/static", ".ci/cuda12", ".ci/nccl_headers", ".ci/wheel"),
]


def call(script: str, *arguments: str, build: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PACELINE_BUILD_DIR": str(build), "PACELINE_CUDA": "OFF", "TMPDIR": str(build.parent)}
    done = subprocess.run(
        [str(ROOT / script), *arguments], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert not build.exists() or not list(build.iterdir()), "something was fetched or built"
    return done


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("tests/run --hepl", "there is no option --hepl"),
        ("tests/run -k batch", "there is no option -k; what is meant for ctest or pytest comes after --cpp"),
        ("tests/run BatchSplit", "there is no option BatchSplit"),
        ("tests/run --cpp --python -k batch", "give one suite only, not cpp python"),
        ("tests/run --install -k batch", "--install takes no arguments"),
        ("tests/run --sanitize=memory", "it is --sanitize=thread or --sanitize=address"),
        ("tests/stubs --chekc", "there is no option --chekc"),
        ("tests/stubs --check twice", "there is no option --check twice"),
        ("examples/run digit", "no example called digit: there are batch_inference digits "),
        ("benchmarks/run --quik", "there is no option --quik"),
        (".ci/static --fxi", "there is no option --fxi"),
        (".ci/cuda12 --toolkits", "there is no option --toolkits"),
        (".ci/nccl_headers --headers", "there is no option --headers"),
        (".ci/wheel 3.11 3.9", "'3.9' is no Python from 3.10 to 3.14"),
        (".ci/run static whel", "there is no step whel; there are tests integrations static stubs"),
    ],
)
def test_a_wrong_call_is_told_with_the_usage(command: str, message: str, tmp_path: Path) -> None:
    script, *arguments = command.split()
    done = call(script, *arguments, build=tmp_path / "build")
    assert done.returncode == 2, done.stderr
    assert "error: " in done.stderr
    assert message in done.stderr
    assert f"\n  {script}" in done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_the_comment_at_the_top(script: str, tmp_path: Path) -> None:
    done = call(script, "-h" if script == "tests/run" else "--help", build=tmp_path / "build")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"\n  {script}" in done.stdout
    assert "#" not in done.stdout
    assert "pipefail" not in done.stdout


def test_the_usage_is_found_from_any_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        ["./run", "--hepl"],
        capture_output=True,
        text=True,
        cwd=ROOT / "tests",
        check=False,
        timeout=60,
        env={**os.environ, "PACELINE_BUILD_DIR": str(tmp_path)},
    )
    assert done.returncode == 2
    assert "\n  tests/run --cpp" in done.stderr
