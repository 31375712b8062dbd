"""What a trainer keeps of its run, and the picture of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import Unavailable
from paceline.torch import DataParallel, Pipeline
from torch_support import TWO, classifier, classify


def trained(steps: int, **options: Any) -> DataParallel:
    module, batch = classifier(12)
    with DataParallel(module, TWO, **options) as trainer:
        for _ in range(steps):
            trainer.step(classify, batch)
    return trainer


def test_the_history_adds_up_to_the_report() -> None:
    trainer = trained(20, balance=[2, 1])
    history, report = trainer.history(), trainer.report()
    assert [row["first_step"] for row in history] == list(range(20))
    for name, share in zip(TWO, (8, 4), strict=True):
        assert all(row["items"][name] == row["planned"][name] == share for row in history)
        assert sum(row["busy_seconds"][name] for row in history) == pytest.approx(
            report["devices"][name]["busy_seconds"]
        )
    assert sum(row["step_seconds"] for row in history) == pytest.approx(report["step_seconds"])
    assert all(row["longest_step_seconds"] == row["step_seconds"] for row in history)
    lost = [row["launching_seconds"] + row["reduction_seconds"] for row in history]
    assert all(0 < part < row["step_seconds"] for part, row in zip(lost, history, strict=True))


def test_a_long_run_is_thinned_out() -> None:
    steps = 1030
    trainer = trained(steps, balance="even")
    history = trainer.history()
    assert len(history) <= 1024
    assert {row["steps"] for row in history} == {2}
    assert sum(sum(row["items"].values()) for row in history) == 12 * steps
    pytest.importorskip("matplotlib")
    labels = legend(trainer.plot().axes[2])
    assert "longest of 2 steps" in labels


def legend(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def lines(axes: Any, *, faint: bool = False) -> list[list[float]]:
    """The shares that are drawn: those that were planned, or, `faint`, those that ran."""
    return [list(patch.get_data().values) for patch in axes.patches if (patch.get_alpha() is not None) == faint]


def test_planned_shares_are_lines_what_ran_is_faint_and_moves_are_marked() -> None:
    pytest.importorskip("matplotlib")
    from paceline._plot import draw_run

    row: dict[str, Any] = {"steps": 2, "step_seconds": 0.1, "longest_step_seconds": 0.1}
    row |= {"busy_seconds": {"a": 0.1, "b": 0.0}, "items": {"a": 11, "b": 5}, "planned": {"a": 8, "b": 8}}
    axes = draw_run([{**row, "first_step": 2 * k, "moves": int(k in (3, 7))} for k in range(10)], title="").axes[0]
    assert lines(axes) == [[4] * 10] * 2
    assert lines(axes, faint=True) == [[5.5] * 10, [2.5] * 10]
    assert legend(axes) == ["a", "b", "2 moves"]
    (marks,) = axes.lines
    assert list(marks.get_xdata()) == [7.5, 15.5]  # type: ignore[arg-type]


def test_a_pipeline_shows_blocks() -> None:
    pytest.importorskip("matplotlib")
    module = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(5)))
    with Pipeline(module, TWO, cuts=[0, 2], micro_batches=2) as trainer:
        for _ in range(3):
            trainer.step(lambda m, part: m(part).square().mean(), torch.ones(8, 8))
        assert sorted(trainer.history()[0]["blocks"].values()) == [2, 3]
        assert trainer.history()[0]["planned"] is None
        assert trainer.history()[0]["reduction_seconds"] is trainer.history()[0]["launching_seconds"] is None
        shares = trainer.plot().axes[0]
    assert shares.get_ylabel() == "blocks of a device"
    assert sorted(heights[0] for heights in lines(shares)) == [2, 3]


def test_the_picture_shows_shares_speeds_and_step_times(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.png"
    trainer = trained(30, balance=[2, 1])
    before = "matplotlib.pyplot" in sys.modules
    figure = trainer.plot(path)
    assert ("matplotlib.pyplot" in sys.modules) == before
    assert path.read_bytes().startswith(b"\x89PNG")
    shares, speeds, times = figure.axes
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "share (items of a step)",
        "speed while busy (items/s)",
        "time of a step (ms)",
    ]
    assert legend(shares)[:2] == TWO
    assert legend(speeds) == TWO
    assert lines(shares) == [[8] * 30, [4] * 30]
    assert times.get_xlim() == (0.5, 30.5)
    assert "2 devices" not in shares.get_title()
    assert "host:0, host:1" in shares.get_title()


def test_batches_of_changing_size_are_drawn_in_percent() -> None:
    pytest.importorskip("matplotlib")
    module, _ = classifier()
    with DataParallel(module, TWO, balance=[3, 1]) as trainer:
        for size in (16, 32, 8):
            trainer.step(classify, classifier(size)[1])
        shares = trainer.plot().axes[0]
    assert shares.get_ylabel() == "share (% of a step's items)"
    assert lines(shares) == [[75] * 3, [25] * 3]


def test_steps_with_costs_are_drawn_by_cost() -> None:
    pytest.importorskip("matplotlib")
    module, batch = classifier(12)
    costs = torch.tensor([100.0, *[1.0] * 11])
    with DataParallel(module, TWO, balance="even") as trainer:
        for _ in range(3):
            trainer.step(classify, batch, cost=costs)
        shares, speeds, _ = trainer.plot().axes
        (first, *_), report = trainer.history(), trainer.report()
        trainer.step(classify, batch)
        mixed = trainer.plot().axes
        last = trainer.history()[-1]
    assert [axes.get_ylabel() for axes in (shares, speeds)] == [
        "share (% of a step's cost)",
        "speed while busy (cost/s)",
    ]
    assert sorted(first["costs"].values()) == [11, 100]
    heights = [patch.get_data().values[0] for patch in shares.patches]  # type: ignore[attr-defined]
    assert sorted(heights) == [pytest.approx(1100 / 111), pytest.approx(10000 / 111)]
    assert [axes.get_ylabel() for axes in mixed[:2]] == ["share (items of a step)", "speed while busy (items/s)"]
    assert last["costs"] is None
    assert first["planned"] is None
    assert sum(last["planned"].values()) == 12
    assert {entry["cost"] for entry in report["devices"].values()} == {33, 300}
    rates = [entry["cost_per_second"] for entry in report["devices"].values()]
    assert [entry["speed"] for entry in report["devices"].values()] == [rate / max(rates) for rate in rates]


def test_without_a_step_or_matplotlib_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(Unavailable, match="no step has run"):
        trained(0).plot()
    trainer = trained(1)
    for name in [*(name for name in sys.modules if name.startswith("matplotlib.")), "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'paceline\[plot\]'"):
        trainer.plot()
