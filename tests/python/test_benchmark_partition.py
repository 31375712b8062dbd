"""The comparison with Karmarkar and Karp: it counts right, and it says so if numberpartitioning is missing."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import partition


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


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """Run the script and return its JSON."""
    monkeypatch.setattr(sys, "argv", ["partition.py", *options, "--json"])
    assert partition.main() == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def test_without_the_other_it_says_so_and_ends_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "numberpartitioning", None)  # makes its import fail
    result = run(monkeypatch, capsys)
    assert result["available"] is False
    assert "pip install numberpartitioning" in result["why"]


def test_a_table_has_a_row_for_each_size(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def in_turns(numbers: list[int], *, num_parts: int, return_indices: bool) -> SimpleNamespace:
        assert return_indices
        return SimpleNamespace(partition=[list(range(part, len(numbers), num_parts)) for part in range(num_parts)])

    stand_in = SimpleNamespace(karmarkar_karp=in_turns)
    monkeypatch.setitem(sys.modules, "numberpartitioning", stand_in)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0")
    result = run(monkeypatch, capsys, "--seeds", "2")
    ((head, *rows),) = result["tables"].values()
    assert [row[0] for row in rows] == [f"{items} × {devices}" for items, devices in partition.SIZES]
    assert all(len(row) == len(head) for row in rows)
    assert all(goal["met"] for goal in result["goals"])  # dealing items out in turn, whatever their length, is worse
    assert {goal["of_batches"] for goal in result["goals"]} == {2 * len(partition.SIZES)}


def test_the_real_one_is_understood(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numberpartitioning")
    result = run(monkeypatch, capsys, "--short", "--seeds", "3")
    (size,) = result["batches"].values()
    assert 1.0 <= size["over_bound"]["Karmarkar-Karp"]["worst"] < 1.1  # it differs by much less than a tenth of a load
