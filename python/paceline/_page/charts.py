"""What the charts of a page draw, as data for `page.js`, which hands it to uPlot."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from paceline._page.run import MOST_MOVES, Row, Run, thinned
from paceline._plot import running_median

MOST_ROWS = 512  # more than a screen has room for
MOST_NUMBERS = (
    60_000  # of all charts of a page, of up to ten bytes each: with what is written around them less than 1 MB
)
MOST_DEVICES = 12  # more lines than that cannot be told apart
_DIGITS = 5

Chart = dict[str, Any]


def numbers(values: Iterable[float | None]) -> list[float | None]:
    """Round for the page. What is not known is None."""
    return [None if value is None or value != value else float(f"{value:.{_DIGITS}g}") for value in values]


def shown(run: Run) -> list[int]:
    """The devices that are drawn: all, or the fastest and the slowest."""
    if len(run.devices) <= MOST_DEVICES or not run.rows:
        return list(range(len(run.devices)))
    order = sorted(range(len(run.devices)), key=lambda device: run.speeds[device])
    return sorted([*order[: MOST_DEVICES // 2], *order[-MOST_DEVICES // 2 :]])


def rows_of(run: Run, runs: int = 1) -> list[Row]:
    """The rows that are drawn, if a page has so many runs."""
    return thinned(run.rows, min(MOST_ROWS, MOST_NUMBERS // runs // (3 * len(shown(run)) + 10 + len(run.memory_of))))


def charts_of(run: Run, rows: Sequence[Row], *, longest: float | None = None, moves: int = MOST_MOVES) -> list[Chart]:
    """Draw shares with moves, speeds, the time of a step, and memory if it is known. `longest`: where the axis of times ends, for runs that are compared. `moves`: how many have a reason."""
    if not rows:
        return []
    x = [row.first_step + 1 for row in rows]
    drawn = shown(run)
    return [
        {"x": x, "of": "step", **_shares(run, rows, drawn, moves)},
        {"x": x, "of": "step", **_speeds(run, rows, drawn)},
        {"x": x, "of": "step", **_times(run, rows, longest)},
        *([{"x": x, "of": "step", **_memory(run, rows)}] if any(row.memory for row in rows) else []),
    ]


def top(rows: Sequence[Row]) -> float:
    """Where an axis of times ends, in ms: above all but the longest means. The first step starts threads and allocates, and would flatten the rest."""
    means = sorted(1e3 * row.whole / row.steps for row in rows)
    return 1.15 * means[int(0.99 * (len(means) - 1))]


def _looks(drawn: Sequence[int]) -> dict[int, dict[str, Any]]:
    """A colour for each device, and a dash from the eighth on."""
    dashes = itertools.cycle([[], [8, 4], [2, 3]])
    found: dict[int, dict[str, Any]] = {}
    for start, dash in zip(range(0, len(drawn), 7), dashes, strict=False):
        for colour, device in enumerate(drawn[start : start + 7]):
            found[device] = {"colour": f"d{colour}", "dash": dash}
    return found


def _shares(run: Run, rows: Sequence[Row], drawn: Sequence[int], moves: int) -> Chart:
    sizes = [sum(row.amounts) / row.steps for row in rows]
    fixed = run.unit == "items" and min(sizes) == max(sizes)
    series = []

    def each(device: int, columns: Sequence[Sequence[float]]) -> list[float | None]:
        each_step = fixed or run.share_of
        return numbers(
            column[device] / (row.steps if each_step else sum(column) / 100 or 1.0)
            for row, column in zip(rows, columns, strict=True)
        )

    shares = [row.shares for row in rows if row.shares is not None]
    planned = len(shares) == len(rows)
    for device, look in _looks(drawn).items():
        name = run.devices[device]
        if planned:
            series.append({"label": name, "data": each(device, shares), "step": True, **look})
        if not run.share_of:
            ran = each(device, [row.amounts for row in rows])
            faint = {"faint": True, "label": f"{name} ran"} if planned else {"label": name}
            if not planned or ran != series[-1]["data"]:
                series.append({"data": ran, "step": True, **look, **faint})
    marks = _marks(run, rows, moves)
    what = run.share_of or ("items of a step" if fixed else f"% of a step's {run.unit}")
    title = f"Shares: {what}" if not run.share_of else f"Shares: {what} of each device"
    if any(one.get("faint") for one in series):
        title += "; strong as planned, faint as run (a device that ends early takes over from others)"
    return {"title": title, "series": series, "marks": marks, "low": 0}


def _marks(run: Run, rows: Sequence[Row], most: int) -> list[tuple[int, str]]:
    """The index of the row that a move was before, and what to say of it. Of several moves before a row the last one is told."""
    firsts = [row.first_step for row in rows]
    texts: dict[int, str] = {}
    for number, move in enumerate(run.moves):
        at = max(0, bisect.bisect_right(firsts, move.step) - 1)
        told = number >= len(run.moves) - most
        texts[at] = (
            f"step {move.step + 1}: {move.what}; {move.why}"
            if told
            else f"step {move.step + 1}; a page has no reasons of so early moves"
        )
    return sorted(texts.items())


def _speeds(run: Run, rows: Sequence[Row], drawn: Sequence[int]) -> Chart:
    series = []
    for device, look in _looks(drawn).items():
        rate = [
            row.amounts[device] / row.busy[device] if row.amounts[device] and row.busy[device] > 0 else float("nan")
            for row in rows
        ]
        series.append({"label": run.devices[device], "data": numbers(running_median(rate)), **look})
    return {"title": f"Speeds: {run.unit} a second while busy (running median)", "series": series, "low": 0}


def _times(run: Run, rows: Sequence[Row], longest: float | None) -> Chart:
    names = ("launching", "reduction", "input")
    split = {name: [getattr(row, name) for row in rows] for name in names}
    known = {name: seconds for name, seconds in split.items() if all(one is not None for one in seconds)}
    waiting = next(iter(run.parts))
    parts: dict[str, Sequence[Any]] = {
        "ideal": [row.ideal for row in rows],
        waiting: [
            row.waiting + sum(0.0 if name in known else getattr(row, name) or 0.0 for name in names[:2]) for row in rows
        ],
        **known,
    }
    areas, sums = [], [0.0] * len(rows)
    for name, seconds in parts.items():
        each = [1e3 * s / row.steps for s, row in zip(seconds, rows, strict=True)]
        sums = [before + one for before, one in zip(sums, each, strict=True)]
        areas.append(
            {
                "label": name,
                "data": numbers(sums),
                "says": numbers(each),
                "colour": name if name in ("ideal", *split) else "waiting",
                "area": True,
                "step": True,
            }
        )
    series = areas[::-1]  # each covers the lower part of those before it
    mean = numbers(1e3 * row.seconds / row.steps for row in rows)
    together = max(row.steps for row in rows)
    series.append(
        {
            "label": "a step" if together == 1 else f"mean of {together} steps",
            "data": mean,
            "colour": "ink",
            "step": True,
        }
    )
    if together > 1:
        for name in ("shortest", "longest"):
            values = [getattr(row, name) for row in rows]
            if None not in values:
                series.append(
                    {
                        "label": name,
                        "data": numbers(1e3 * s for s in values),
                        "colour": "ink",
                        "faint": True,
                        "step": True,
                    }
                )
    return {
        "title": "Time of a step in ms, and what it consists of",
        "series": series,
        "low": 0,
        "high": longest or top(rows),
    }


def _memory(run: Run, rows: Sequence[Row]) -> Chart:
    """MiB, of the most that was seen in the steps of a row."""
    series = [
        {
            "label": name,
            "data": numbers(None if row.memory is None else row.memory[at] / 2**20 for row in rows),
            "step": True,
            **_looks(range(len(run.memory_of)))[at],
        }
        for at, name in enumerate(run.memory_of[:MOST_DEVICES])
    ]
    return {"title": "Memory in MiB", "series": series, "low": 0}
