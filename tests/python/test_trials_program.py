"""`examples/run trials` as a program."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from program_server import SERVER

pytest.importorskip("torch")
pytest.importorskip("optuna")
pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "python"


def test_the_example_searches_two_data_sets_at_once(tmp_path: Path) -> None:
    trace = tmp_path / "trials.json"
    arguments = ["--devices", "host:0,host:1", "--slow", "host:1", "--trials", "4", "--width", "6"]
    done = SERVER.run_file(
        EXAMPLES / "trials.py", *arguments, "--trace", str(trace), imports=["sklearn.datasets", "optuna"]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(
        r"^(digits|cancer) +(\d+) +(?:mlp|cnn) +\d+ +(complete|pruned) +\d\.\d+ +(\d) +\d+\.\d\d  ((?:host:\d(?:, )?)+)$",
        done.stdout,
        re.MULTILINE,
    )
    assert sorted(row[:2] for row in rows) == [
        *(("cancer", str(n)) for n in range(2)),
        *(("digits", str(n)) for n in range(4)),
    ]
    for *_, outcome, epochs, devices in rows:
        assert {"1": 1, "3": 2, "9": 3}[epochs] == len(devices.split(", "))
        assert (outcome == "complete") == (epochs == "9")
    whole, ratio, ideal = map(
        float, re.findall(r"^makespan (\S+) s, (\S+) times the ideal (\S+) s", done.stdout, re.MULTILINE)[0]
    )
    assert ratio == pytest.approx(whole / ideal, abs=0.2)  # of rounded seconds
    moved = sum(len(set(row[-1].split(", "))) > 1 for row in rows)
    assert f"\n{moved} of 6 trials moved" in done.stdout
    assert len(re.findall(r"^best of (?:digits|cancer): \d\.\d+, trial \d+, ", done.stdout, re.MULTILINE)) == 2
    assert json.loads(trace.read_text())


def test_a_search_of_which_no_rung_ends_says_that_nothing_is_complete() -> None:
    arguments = ["--devices", "host:0", "--trials", "2", "--width", "4", "--hang-seconds", "1e-6"]
    done = SERVER.run_file(EXAMPLES / "trials.py", *arguments, imports=["sklearn.datasets", "optuna"])
    assert done.returncode == 1, done.stderr
    assert "ZeroDivisionError" not in done.stderr
    assert "no trial of digits is complete" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--slow", "host:7"), "--slow host:7: not a device of this run"),
        (("--trials", "1"), "--trials must be at least 2"),
    ],
)
def test_arguments_that_cannot_be_used_are_told(arguments: tuple[str, ...], told: str) -> None:
    done = SERVER.run_file(EXAMPLES / "trials.py", *arguments, imports=["sklearn.datasets", "optuna"])
    assert done.returncode == 2
    assert told in done.stderr
