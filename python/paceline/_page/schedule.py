"""The schedule of a pipeline's step as rows of boxes, without a script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from paceline._page.document import folded
from paceline._page.run import milliseconds
from paceline._plot_schedule import ScheduleRow, bubbles
from paceline._words import plural

_KEY = "".join(f'<span><i class="{kind}"></i>{kind}</span> ' for kind in ("forward", "backward", "wait", "bubble"))
_NUMBERED = 3.0  # per cent of the width that a number of two digits needs

MOST_BOXES = 5000  # of all schedules of a page, of about 120 bytes each


def schedules(
    title: str,
    rows: Sequence[ScheduleRow],
    planned: Sequence[ScheduleRow] | None,
    before: Iterable[tuple[str, Sequence[ScheduleRow]]],
) -> tuple[list[str], str]:
    """HTML of the last step beside its plan, and of the steps `before` it, the latest first, folded together; as many as a page has room for. And what it has no room for."""
    room = MOST_BOXES - _boxes(rows)
    if room < 0:
        return (
            [],
            f"The schedule of a step has {_boxes(rows)} boxes, more than a page has room for. plot_schedule() draws it.",
        )
    lacks = "A page has no room for the plan of the last step. plot_schedule() draws it." if planned else ""
    if planned and _boxes(planned) <= room:
        room, lacks = room - _boxes(planned), ""
        found = [schedule(f"{title}, and below each bar the plan", rows, planned)]
    else:
        found = [schedule(title, rows)]
    figures = []
    for name, earlier in before:
        room -= _boxes(earlier)
        if room < 0:
            lacks = lacks or "A page has no room for the schedules of earlier steps."
            break
        figures.append(schedule(name, earlier))
    if figures:
        found.append(folded(f"{plural(len(figures), 'step')} before it", "".join(figures)))
    return found, lacks


def _boxes(rows: Sequence[ScheduleRow]) -> int:
    return sum(1 + len(row.spans) for row in rows)


def schedule(title: str, rows: Sequence[ScheduleRow], planned: Sequence[ScheduleRow] | None = None) -> str:
    """HTML: a bar for each stage, its boxes with what they are on hover, and the bubble at its end. The plan stands below each as a thinner bar, on the same scale."""
    groups = [(rows, _start(rows))] + ([] if planned is None else [(planned, _start(planned))])
    whole = max(_finish(group) - start for group, start in groups) or 1.0
    ends = [100 * (_finish(group) - start) / whole for group, start in groups]
    lines = [
        _line(row, bubble, groups[0][1], whole, ends[0], "") for row, bubble in zip(rows, bubbles(rows), strict=True)
    ]
    if planned is not None:
        plans = {
            (row.stage, row.device): _line(row, bubble, groups[1][1], whole, ends[1], " planned")
            for row, bubble in zip(planned, bubbles(planned), strict=True)
        }
        lines = [line + plans.get((row.stage, row.device), "") for line, row in zip(lines, rows, strict=True)]
    return f'<figure><figcaption>{escape(title)}</figcaption><div class="key soft">0 to {milliseconds(whole)}{_KEY}at the right: how long a device did not compute</div>{"".join(lines)}</figure>'


def _start(rows: Sequence[ScheduleRow]) -> float:
    return min(one.start_seconds for row in rows for one in row.spans)


def _finish(rows: Sequence[ScheduleRow]) -> float:
    return max(one.finish_seconds for row in rows for one in row.spans)


def _line(row: ScheduleRow, bubble: float, start: float, whole: float, end: float, planned: str) -> str:
    """`end`: of all rows, in per cent of the width. Up to there, what is not computing or waiting is a bubble."""
    boxes, order = [f'<i class="bubble" style="left:0;width:{end:.2f}%" title="bubble"></i>'], []
    for one in row.spans:
        left = 100 * (one.start_seconds - start) / whole
        width = 100 * (one.finish_seconds - one.start_seconds) / whole
        number = "" if one.micro_batch is None else str(one.micro_batch)
        what = f"{one.kind} for micro-batch {number}" if one.kind == "wait" else f"{one.kind} of micro-batch {number}"
        says = f"{what if number else one.kind}: {milliseconds(one.start_seconds - start)} to {milliseconds(one.finish_seconds - start)}"
        computes = one.kind in ("forward", "backward")
        order += [f"{one.kind[0].upper()}{number}"] if computes else []
        label = number if computes and width * 2 > _NUMBERED * len(number) else ""
        boxes.append(
            f'<i class="{one.kind}" style="left:{left:.2f}%;width:{width:.2f}%" title="{escape(says)}">{label}</i>'
        )
    name = "planned" if planned else f"stage {row.stage}, {row.device}"
    label = escape(f"{name}: {' '.join(order)}; bubble {bubble:.1%}")
    return (
        f'<div class="stage{planned}"><span>{escape(name)}</span><div class="bar{planned}" tabindex="0" role="img" aria-label="{label}">{"".join(boxes)}</div>'
        f"<span>{bubble:.1%}</span></div>"
    )
