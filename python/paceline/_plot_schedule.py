"""Draw when the stages of a pipeline did what, with matplotlib, if it is installed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline._plot import figure_class, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SpanKind = Literal["forward", "backward", "wait", "send"]

# Five colours that differ most to people with any colour blindness, of those in the palette of Okabe and Ito ("Color Universal Design",
# 2008) and a grey. The differences were computed with the matrices of Machado et al. ("A Physiologically-based Model for Simulation of
# Color Vision Deficiency", 2009).
_COLOURS = {"forward": "#0072B2", "backward": "#E69F00", "wait": "#56B4E9", "send": "#000000", "bubble": "#E6E6E6"}
_TEXT_COLOURS = {"forward": "white", "backward": "black"}
_HEIGHT = 0.9  # of a bar, where rows are 1 apart
_HEIGHT_OF_PLANNED = 0.55
_SEND_HEIGHT = 0.2  # of the bar's; sends run beside computing, so they are a strip at the bottom
_LABEL_POINTS = 7
_DIGIT_WIDTH = 0.7  # of the font size, with room at the sides


@dataclass(frozen=True)
class ScheduleSpan:
    """One thing that a device did. Seconds count from any moment that is the same for all rows.

    ``"forward"`` and ``"backward"`` compute. ``"wait"``: the device is free and waits for its input or its turn. ``"send"``: its output is on
    the way to another device, and the device may compute meanwhile. `micro_batch` is a number from 0, or None for a wait for none.
    """

    kind: SpanKind
    micro_batch: int | None
    start_seconds: float
    finish_seconds: float


@dataclass(frozen=True)
class ScheduleRow:
    """What the device of one stage did in a step. Its forwards and backwards do not overlap."""

    device: str
    stage: int
    spans: Sequence[ScheduleSpan]


def bubbles(rows: Sequence[ScheduleRow]) -> list[float]:
    """For each row the part of the step, from the first span of all rows to the last, in which its device computes nothing."""
    start, finish = _extent(rows)
    return [
        max(0.0, 1.0 - sum(one.finish_seconds - one.start_seconds for one in row.spans if one.kind in _TEXT_COLOURS) / (finish - start))
        for row in rows
    ]  # fmt: skip


def draw_schedule(
    path: str | os.PathLike[str] | None,
    rows: Sequence[ScheduleRow],
    *,
    title: str = "",
    planned: Sequence[ScheduleRow] | None = None,
) -> Figure:
    """Draw one bar per device: forward, backward, wait, send, and the bubble, which is what remains. Its per cent stand at the end.

    Time counts from the first start. The number of a micro-batch stands in its boxes where they are wide enough. `path`: a file to write, as .svg,
    .png or another format of matplotlib, or None. `rows`: one for each stage. `planned`: the same stages as they were planned, drawn below.
    """
    whole = _extent(rows)
    groups = [(rows, whole, "")]
    if planned is not None:
        groups.append((planned, _extent(planned), "planned"))
    seconds = max(finish - start for _, (start, finish), _ in groups)
    unit, scale = ("s", 1.0) if seconds >= 1.0 else ("ms", 1e3)

    pitch = 1.0 if planned is None else 1.2 + _HEIGHT_OF_PLANNED
    figure = figure_class()(figsize=(9, 1.4 + 0.36 * pitch * len(rows)), layout="constrained")
    axes = figure.subplots()
    bottom = pitch * len(rows) - 0.5
    axes.set(title=title, xlabel=f"time ({unit})", xlim=(0, seconds * scale), ylim=(bottom, -0.5))
    for kind, colour in _COLOURS.items():
        axes.bar(0, 0, color=colour, label=kind)
    tops = {(row.stage, row.device): pitch * number - _HEIGHT / 2 for number, row in enumerate(rows)}
    drawn: list[tuple[ScheduleRow, float, float]] = []
    labels: dict[float, str] = {}
    for group, (start, finish), name in groups:
        below, height = (_HEIGHT + 0.05, _HEIGHT_OF_PLANNED) if name else (0.0, _HEIGHT)
        for row, bubble in zip(group, bubbles(group), strict=True):
            top = tops[row.stage, row.device] + below
            middle = top + height / 2
            labels[middle] = name or f"stage {row.stage}, {row.device}"
            _draw_row(axes, row, top, height, start, finish, scale)
            at_the_end = axes.get_yaxis_transform()  # x goes from 0 to 1, y is the row
            axes.text(1.01, middle, f"{100 * bubble:.1f} % bubble", transform=at_the_end, va="center", size=8)
            drawn.append((row, middle, start))
    axes.set_yticks(list(labels), list(labels.values()))
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "left", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(_COLOURS), frameon=False)
    figure.draw_without_rendering()  # sets the width of the axes, which says what is wide enough
    points = axes.get_window_extent().width / figure.dpi * 72 / seconds
    for row, middle, start in drawn:
        _number_boxes(axes, row, middle, start, scale, points)
    return save(figure, path)


def _draw_row(
    axes: Axes, row: ScheduleRow, top: float, height: float, start: float, finish: float, scale: float
) -> None:
    axes.broken_barh([(0, (finish - start) * scale)], (top, height), color=_COLOURS["bubble"], linewidth=0)
    for kind in ("wait", "forward", "backward", "send"):
        part, line = (_SEND_HEIGHT * height, 0.0) if kind == "send" else (height, 0.4)
        bars = [
            ((one.start_seconds - start) * scale, (one.finish_seconds - one.start_seconds) * scale)
            for one in row.spans
            if one.kind == kind
        ]
        axes.broken_barh(
            bars, (top + height - part, part), facecolors=_COLOURS[kind], edgecolors="white", linewidth=line
        )


def _number_boxes(axes: Axes, row: ScheduleRow, y: float, start: float, scale: float, points: float) -> None:
    """Write the numbers of micro-batches. A second is `points` wide."""
    for one in row.spans:
        if one.kind not in _TEXT_COLOURS or one.micro_batch is None:
            continue
        label = str(one.micro_batch)
        if (one.finish_seconds - one.start_seconds) * points < _DIGIT_WIDTH * _LABEL_POINTS * len(label):
            continue
        middle = ((one.start_seconds + one.finish_seconds) / 2 - start) * scale
        colour = _TEXT_COLOURS[one.kind]
        axes.text(middle, y, label, color=colour, ha="center", va="center", size=_LABEL_POINTS)


def _extent(rows: Sequence[ScheduleRow]) -> tuple[float, float]:
    """When the first span starts, and when the last one ends."""
    spans = [one for row in rows for one in row.spans]
    start, finish = min(one.start_seconds for one in spans), max(one.finish_seconds for one in spans)
    return start, finish
