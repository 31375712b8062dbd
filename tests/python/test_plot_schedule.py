"""The picture of a pipeline's schedule: its numbers, read from the SVG."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from paceline import InvalidArgument
from paceline._plot_schedule import _COLOURS, ScheduleRow, ScheduleSpan, bubbles, draw_schedule

SVG = "{http://www.w3.org/2000/svg}"
LINK = "{http://www.w3.org/1999/xlink}"
# Two stages, three micro-batches. The step goes from 5 s to 15 s.
ROWS = [
    ScheduleRow("host:1", 0, [
        ScheduleSpan("forward", 10, 5.0, 6.0), ScheduleSpan("send", 10, 6.0, 6.5), ScheduleSpan("forward", 11, 6.0, 7.0),
        ScheduleSpan("wait", 10, 9.0, 10.0), ScheduleSpan("backward", 10, 10.0, 12.0), ScheduleSpan("backward", 11, 13.0, 15.0),
    ]),
    ScheduleRow("host:0", 1, [
        ScheduleSpan("forward", 10, 6.5, 7.5), ScheduleSpan("backward", 10, 7.5, 10.0), ScheduleSpan("forward", 11, 10.0, 10.04),
        ScheduleSpan("backward", 11, 10.5, 12.5),
    ]),
]  # fmt: skip


class Bar(NamedTuple):
    kind: str
    left: float
    right: float
    top: float
    bottom: float


class Word(NamedTuple):
    text: str
    x: float
    y: float


def read(path: Path) -> tuple[list[Bar], list[Word]]:
    """The bars and the texts of a picture, in its own units."""
    kinds = {colour.lower(): kind for kind, colour in _COLOURS.items()}
    bars, words = [], []
    root = ElementTree.parse(path, ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True)))
    for group in root.iter(f"{SVG}g"):
        if group.get("id", "").startswith("PolyCollection"):
            shapes = {one.get("id"): one.get("d", "") for one in group.iter(f"{SVG}path")}
            for one in [*group.iter(f"{SVG}use"), *group.iter(f"{SVG}path")]:
                shape = one.get("d") or shapes[one.get(f"{LINK}href", "")[1:]]
                colour = re.search(r"fill: (#\w+)", one.get("style", "") + "; fill: #000000")  # black is left out
                if one.get("id") is None and colour is not None:  # a shape with a name is only drawn where it is used
                    corners = [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", shape)]
                    (left, *_, right), (top, *_, bottom) = (sorted(axis) for axis in zip(*corners, strict=True))
                    x, y = float(one.get("x", 0)), float(one.get("y", 0))
                    bars.append(Bar(kinds[colour[1]], left + x, right + x, top + y, bottom + y))
        if group.get("id", "").startswith("text"):
            moved = next(
                re.match(r"translate\((\S+) (\S+?)\)", one.get("transform", "")) for one in group.iter(f"{SVG}g")
                if one.get("transform")
            )  # fmt: skip
            comment = next(one for one in group if not isinstance(one.tag, str))
            assert moved is not None
            words.append(Word((comment.text or "").strip(), float(moved[1]), float(moved[2])))
    return bars, words


def in_row(bars: list[Bar], bubble: Bar) -> list[Bar]:
    return [
        bar
        for bar in bars
        if bar.kind != "bubble" and bubble.top - 0.01 <= bar.top and bar.bottom <= bubble.bottom + 0.01
    ]


@pytest.fixture(autouse=True)
def _matplotlib() -> None:
    pytest.importorskip("matplotlib")


def test_every_span_is_drawn_to_scale_on_the_row_of_its_device(tmp_path: Path) -> None:
    draw_schedule(tmp_path / "step.svg", ROWS, title="three micro-batches")
    bars, words = read(tmp_path / "step.svg")
    steps = sorted((bar for bar in bars if bar.kind == "bubble"), key=lambda bar: bar.top)
    assert len(steps) == len(ROWS)
    for row, step in zip(ROWS, steps, strict=True):
        found = [
            (bar.kind, round((bar.left - step.left) / (step.right - step.left), 4), round((bar.right - step.left) / (step.right - step.left), 4))
            for bar in in_row(bars, step)
        ]  # fmt: skip
        wanted = [
            (one.kind, round((one.start_seconds - 5) / 10, 4), round((one.finish_seconds - 5) / 10, 4))
            for one in row.spans
        ]
        assert sorted(found) == sorted(wanted)
        (label,) = (word for word in words if word.text == f"stage {row.stage}, {row.device}")
        assert step.top < label.y < step.bottom
        assert label.x < step.left
    texts = [word.text for word in words]
    assert set(_COLOURS) <= set(texts)  # the legend
    assert {"three micro-batches", "time (s)"} <= set(texts)


def test_numbers_of_micro_batches_stand_in_boxes_that_are_wide_enough(tmp_path: Path) -> None:
    draw_schedule(tmp_path / "step.svg", ROWS)
    bars, words = read(tmp_path / "step.svg")
    boxes = [bar for bar in bars if bar.kind in ("forward", "backward")]
    numbers = [word for word in words if word.text in ("10", "11")]
    inside = {
        word: [box for box in boxes if box.left < word.x < box.right and box.top < word.y < box.bottom]
        for word in numbers
        if any(box.top < word.y < box.bottom for box in boxes)  # "10" stands at the axis, too
    }
    assert all(len(found) == 1 for found in inside.values())
    numbered = [found[0] for found in inside.values()]
    assert sorted(set(boxes) - set(numbered)) == [min(boxes, key=lambda box: box.right - box.left)]
    assert [word.text for word in sorted(inside, key=lambda word: (word.y, word.x))] == [
        *["10", "11", "10", "11", "10", "10", "11"]
    ]


def test_the_bubble_of_each_device_stands_in_per_cent_at_the_end_of_its_row(tmp_path: Path) -> None:
    assert bubbles(ROWS) == [pytest.approx(0.4), pytest.approx(0.446)]
    draw_schedule(tmp_path / "step.svg", ROWS)
    bars, words = read(tmp_path / "step.svg")
    for text, step in zip(
        ("40.0 % bubble", "44.6 % bubble"), (bar for bar in bars if bar.kind == "bubble"), strict=True
    ):
        (word,) = (word for word in words if word.text == text)
        assert word.x > step.right
        assert step.top < word.y < step.bottom


def test_planned_rows_are_drawn_beside_the_real_ones_on_one_time_axis(tmp_path: Path) -> None:
    planned = [
        ScheduleRow("host:0", 1, [ScheduleSpan("forward", 0, 2.0, 6.0)]),
        ScheduleRow("host:1", 0, [ScheduleSpan("forward", 0, 3.0, 10.0)]),
    ]
    draw_schedule(tmp_path / "step.svg", ROWS, planned=planned)
    bars, words = read(tmp_path / "step.svg")
    steps = sorted((bar for bar in bars if bar.kind == "bubble"), key=lambda bar: bar.top)
    second = (steps[0].right - steps[0].left) / 10
    assert {bar.left for bar in steps} == {steps[0].left}
    assert [round((bar.right - bar.left) / second, 3) for bar in steps] == [10, 8, 10, 8]
    spans = [
        [(round((bar.left - steps[0].left) / second, 3), round((bar.right - steps[0].left) / second, 3)) for bar in in_row(bars, step)]
        for step in steps
    ]  # fmt: skip
    assert spans[1] == [(1, 8)]
    assert spans[3] == [(0, 4)]
    assert len(spans[0]) == len(ROWS[0].spans)
    labels = sorted((word.y, word.text) for word in words if word.text == "planned" or word.text.startswith("stage"))
    assert [text for _, text in labels] == ["stage 0, host:1", "planned", "stage 1, host:0", "planned"]
    assert sum(word.text in ("12.5 % bubble", "50.0 % bubble") for word in words) == 2


def test_short_steps_are_drawn_in_milliseconds_and_as_png(tmp_path: Path) -> None:
    rows = [ScheduleRow("host:0", 0, [ScheduleSpan("forward", None, 0.0, 0.02)])]
    (axes,) = draw_schedule(tmp_path / "step.png", rows).axes
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert (axes.get_xlabel(), axes.get_xlim()) == ("time (ms)", (0, 20))


@pytest.mark.parametrize(
    ("rows", "planned", "message"),
    [
        ([], None, "no step has run yet"),
        ([ScheduleRow("host:0", 0, [])], None, "no step has run yet"),
        ([ScheduleRow("host:0", 3, [ScheduleSpan("forward", 7, 2.0, 1.0)])], None, "forward of micro-batch 7 in stage 3 on host:0 goes from 2.0 s"),
        ([ScheduleRow("host:0", 0, [ScheduleSpan("forward", 0, 0.0, math.inf)])], None, "at finite times"),
        ([ScheduleRow("host:0", 0, [ScheduleSpan("bubble", 0, 0.0, 1.0)])], None, "it must be 'forward'"),  # type: ignore[arg-type]
        (ROWS, ROWS[:1], r"planned rows \(stage 0 on host:1\) are not those"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_drawn_are_refused(
    rows: list[ScheduleRow], planned: list[ScheduleRow] | None, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        draw_schedule(None, rows, planned=planned)
