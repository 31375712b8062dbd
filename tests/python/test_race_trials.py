"""The race of searches: that its rivals do the same work, and what it compares. Speeds are not tested."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

for package in ("torch", "optuna", "sklearn"):
    pytest.importorskip(package)

import paceline  # noqa: E402
import race_trials  # noqa: E402
from program_server import SERVER  # noqa: E402
from race.processes import FOLDER  # noqa: E402
from race.worker import MARK  # noqa: E402

RIVALS = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
from race import trial_rivals
trial_rivals.WIDTHS = 1, 2
for name in ("paceline", "threads", "ids"):
    sys.argv = ["", name, "CORES", "0", "2"]
    trial_rivals.main()
"""


def cores() -> list[int]:
    devices = paceline.devices()[:2]
    if len(devices) < 2 or not all(one.cores for one in devices):
        pytest.skip("needs two cores that processes can be pinned to")
    return [one.cores[0] for one in devices]


def test_all_rivals_train_the_same_trials() -> None:
    program = RIVALS.replace("CORES", json.dumps(cores()))
    done = SERVER.run(program, timeout=120, imports=["sklearn.datasets", "optuna"])
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    found = [json.loads(line) for line in lines]
    assert len(found) == 3
    assert all(one["seconds"] > 0 and len(one["values"]) == 2 for one in found)
    assert found[0]["values"] == found[1]["values"] == found[2]["values"]
    assert len(set(found[0]["values"])) > 1


def test_a_rival_that_ends_early_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said = SimpleNamespace(stdout=f'a library says something\n{MARK} {{"seconds": 2}}\n', returncode=0)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: said)
    assert race_trials.answer("ids", [0], 0, 1) == {"seconds": 2}
    said.stdout, said.returncode = "", 3
    with pytest.raises(RuntimeError, match="ids: its process ended with status 3"):
        race_trials.answer("ids", [0], 0, 1)


def given(answers: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rivals answer with seconds and values, by round."""

    def answer(name: str, cores: list[int], seed: int, trials: int) -> Any:
        del cores, trials
        return {"seconds": answers[name][seed][0], "values": answers[name][seed][1], "optuna": "5"}

    monkeypatch.setattr(race_trials, "answer", answer)


def test_the_race_compares_what_is_of_one_round(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cores()
    values = [0.5, 0.6]
    answers: dict[str, list[Any]] = {
        "alone": [(3.0, None), (6.0, None), (30.0, None)],
        "paceline": [(2.0, values), (4.0, values), (15.0, values)],
        "default": [(8.0, []), (12.0, []), (45.0, [])],
        "threads": [(4.0, values), (4.0, values), (45.0, values)],
        "ids": [(3.0, values), (6.0, values), (30.0, values)],
    }
    given(answers, monkeypatch)
    monkeypatch.setattr("sys.argv", ["race_trials.py", "--busy", "--rounds", "3", "--json"])
    assert race_trials.main() == 0
    *table, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert found["over_ours"] == {"default": 3.0, "threads": 2.0, "ids": 1.5}
    assert found["makespan"]["ideal"] == 3.0
    assert found["of_ideal"]["paceline"] == pytest.approx(1.333)
    assert {"hardware", "versions", "rounds"} <= set(found)
    assert "goal, each rival at least 1.25 times ours: met" in table
    assert "missed" in race_trials.text(found, 1.6)


def test_a_rival_that_computes_something_else_ends_the_race(monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = (1.0, [0.5]), (1.0, [0.25])
    given({"threads": [wrong], **{name: [right] for name in ("alone", "paceline", "default", "ids")}}, monkeypatch)
    run: Any = SimpleNamespace(devices=[SimpleNamespace(cores=[0])] * 2, args=SimpleNamespace(trials=1))
    with pytest.raises(RuntimeError, match="have not computed the same"):
        race_trials.Race(run).round(0)
