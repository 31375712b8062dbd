"""Write the file of a page."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import Any

from paceline import __version__
from paceline._files import write_whole
from paceline._page.charts import Chart, charts_of, rows_of, shown, top
from paceline._page.run import MOST_MOVES, Row, Run, Table, amount, milliseconds, sentences, thinned
from paceline._words import plural

_TABLE_ROWS = 24  # of the steps as a table
_QUESTIONS = ("How good was the split?", "What cost most?", "What to change?")
# Nothing may be fetched, whatever a title or a reason contains.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


@dataclass
class Section:
    """A part of a page: its answers, charts and tables. Pieces are HTML."""

    title: str
    answers: Sequence[tuple[str, str]] = ()
    charts: Sequence[Chart] = ()
    pieces: list[str] = field(default_factory=list)


def page_of_runs(title: str, runs: Sequence[Run]) -> str:
    """The page of one or more runs. Those of several stand side by side, with the same axis of times."""
    drawn = [rows_of(run, len(runs)) for run in runs]
    longest = max((top(rows) for rows in drawn if rows), default=None)
    sections = []
    for run, rows in zip(runs, drawn, strict=True):
        section = Section(run.title, list(zip(_QUESTIONS, sentences(run), strict=True)))
        section.charts = charts_of(run, rows, longest=longest if len(runs) > 1 else None, moves=MOST_MOVES // len(runs))
        section.pieces = [*run.schedules, *_pieces(run, rows, MOST_MOVES // len(runs))]
        sections.append(section)
    return page(title, sections, _compared(runs) if len(runs) > 1 else "")


def page(title: str, sections: Sequence[Section], before: str = "") -> str:
    """A whole page. `before`: HTML above the sections."""
    charts: list[Chart] = []
    above = title if len(sections) == 1 else ""
    body = "".join(_section(section, number, charts, above) for number, section in enumerate(sections))
    when = time.strftime("%Y-%m-%d %H:%M %z")
    data = json.dumps(charts, separators=(",", ":")).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(title)}</title>
<style>{_data("uPlot.min.css")}
{_data("page.css")}</style>
</head>
<body>
<header><h1>{escape(title)}</h1>
<p class="soft">Written by paceline {__version__}, {when}. Point at a chart, or move along it by the arrow keys, for the figures there; drag to zoom, and
press Escape or click twice to see all. A name in a legend hides its line.</p>
<noscript><p>Charts need JavaScript. The tables have the same figures.</p></noscript></header>
<main>{before}<div class="runs">{body}</div></main>
<script type="application/json" id="charts">{data}</script>
<script>/*
{_data("uPlot.LICENSE")}*/
{_data("uPlot.min.js")}</script>
<script>{_data("page.js")}</script>
</body>
</html>
"""


def write(path: str | os.PathLike[str], text: str) -> None:
    """Write a page, as `write_whole` does."""
    write_whole(path, text, errors="xmlcharrefreplace")  # halves of surrogate pairs in names


def table(made: Table) -> str:
    """HTML of a table. Columns of words stand left, those of numbers right."""
    words = [any(len(row[column]) > 24 for row in made.rows) for column in range(len(made.head))]
    head = "".join(
        f'<th scope="col"{" class=text" if long else ""}>{escape(one)}</th>'
        for one, long in zip(made.head, words, strict=True)
    )
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(
            f"<td{' class=text' if long else ''}>{escape(one)}</td>"
            for one, long in zip(row[1:], words[1:], strict=True)
        )
        + "</tr>"
        for row in made.rows
    )
    note = f" <small>{escape(made.note)}</small>" if made.note else ""
    return (
        f'<div class="scroll" tabindex="0"><table class="figures"><caption>{escape(made.caption)}{note}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def folded(summary: str, inside: str, *, opened: bool = False) -> str:
    """What is shown on a click."""
    return f"<details{' open' if opened else ''}><summary>{escape(summary)}</summary>{inside}</details>"


def words(text: str) -> str:
    """Text as it is."""
    return f"<pre>{escape(text)}</pre>"


def _data(name: str) -> str:
    return files("paceline._page").joinpath(name).read_text(encoding="utf-8")


def _section(section: Section, number: int, charts: list[Chart], above: str) -> str:
    heading = "" if section.title == above else f"<h2>{escape(section.title)}</h2>"
    found = [f'<section class="run">{heading}']
    if section.answers:
        answers = "".join(f"<dt>{escape(asked)}</dt><dd>{escape(said)}</dd>" for asked, said in section.answers)
        found.append(f'<dl class="answers">{answers}</dl>')
    for chart in section.charts:
        title = escape(str(chart["title"]), quote=True)
        found.append(
            f'<figure><figcaption>{title}</figcaption><div data-chart="{len(charts)}" data-run="{number}" tabindex="0" role="group" '
            f'aria-label="{title}. Arrow keys move to other places."></div></figure>'
        )
        charts.append({name: value for name, value in chart.items() if name != "title"})
    return "".join([*found, *section.pieces, "</section>"])


def _pieces(run: Run, rows: Sequence[Row], most: int) -> Iterator[str]:
    """What stands below the charts of a run."""
    if rows and rows[0].steps > 1:
        text = f"Each place of the charts is {plural(rows[0].steps, 'step')}: the mean, and for the time of a step also the longest"
        yield f"<p class=soft>{text}{' and the shortest' if rows[0].shortest is not None else ''}.</p>"
    if len(shown(run)) < len(run.devices):
        yield f"<p class=soft>Of {len(run.devices)} devices the {len(shown(run))} fastest and slowest are drawn; the table has all.</p>"
    yield "".join(f"<p class=soft>{escape(one)}</p>" for one in run.lacks)
    if run.rows:
        yield table(_devices(run))
    if run.moves:
        left = len(run.moves) - most
        note = f"the last {most}, of {len(run.moves)}" if left > 0 else ""
        moves = [(str(move.step + 1), move.what, move.why) for move in run.moves[max(0, left) :]]
        yield folded(
            f"{plural(len(run.moves), 'move')} with {'its reason' if len(run.moves) == 1 else 'their reasons'}",
            table(Table("Moves", ("before step", "what", "why"), moves, note)),
        )
    yield from (table(one) for one in run.tables)
    if run.rows:
        yield folded("The steps as a table", table(_steps(run)))
    if run.words:
        yield folded("In words", words(run.words))


def _devices(run: Run) -> Table:
    last = run.rows[-1]
    total = run.total
    shares = run.usual or [n / last.steps for n in (last.amounts if last.shares is None else last.shares)]
    whole = sum(shares) or 1.0
    if run.share_of:
        share, said = "share at the end", [f"{amount(one, 5)} {run.share_of}" for one in shares]
    elif run.unit == "items":
        share, said = f"share of a batch of {amount(whole, 5)}", [amount(one, 5) for one in shares]
    else:
        share, said = "share of a batch", [f"{one / whole:.1%}" for one in shares]
    head = ("device", share, f"{run.unit} in all", f"{run.unit}/s while busy", "busy")
    rows = [
        (
            name,
            said[device],
            amount(sum(row.amounts[device] for row in run.rows)),
            amount(run.speeds[device], 5) if total.busy[device] > 0 else "–",
            f"{1 - run.idle[device]:.1%}",
        )
        for device, name in enumerate(run.devices)
    ]
    return Table("Devices", head, rows)


def _steps(run: Run) -> Table:
    rows = thinned(run.rows, _TABLE_ROWS)
    drawn = shown(run)
    parts = {"ideal": "ideal", "waiting": next(iter(run.parts))} | {
        name: name for name in ("launching", "reduction", "input")
    }
    known = [name for name in parts if all(getattr(row, name) is not None for row in rows)]
    head = [
        "steps",
        "a step",
        *(parts[name] for name in known),
        *(f"{run.unit} on {run.devices[device]}" for device in drawn),
    ]
    body = [
        [
            f"{row.first_step + 1}" + (f" to {row.first_step + row.steps}" if row.steps > 1 else ""),
            milliseconds(row.seconds / row.steps),
            *(milliseconds(getattr(row, name) / row.steps) for name in known),
            *(f"{row.amounts[device] / row.steps:.5g}" for device in drawn),
        ]
        for row in rows
    ]
    return Table("Steps", head, body, "means" if rows[0].steps > 1 else "")


def _compared(runs: Sequence[Run]) -> str:
    """A table with a row for each run."""
    head = ("run", "steps", "a step", "ideal", "lost", "most of it", "moves", "speed")
    body: list[Sequence[Any]] = []
    for run in runs:
        if not run.rows:
            body.append((run.title, "0", *["–"] * 6))
            continue
        total, parts = run.total, run.parts
        each = total.steps
        name = max(parts, key=lambda one: parts[one])
        rate = sum(total.amounts) / total.whole if total.whole > 0 else 0.0
        body.append(
            (
                run.title,
                str(sum(row.steps for row in run.rows)),
                milliseconds(total.whole / each),
                milliseconds(total.ideal / each),
                f"{sum(parts.values()):.1%}",
                f"{name} {parts[name]:.1%}",
                str(len(run.moves)),
                f"{amount(rate, 5)} {run.unit}/s",
            )
        )
    note = "means without the first step, or the first place of the charts; charts of times have the same axis"
    return table(Table("Side by side", head, body, note))
