"""The page of a pool: its queue, waits, batch sizes and devices over time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paceline._page.charts import MOST_DEVICES, Chart, numbers
from paceline._page.document import Section, folded, page, table, words
from paceline._page.run import Table, milliseconds
from paceline._pool_figures import COLUMNS, RECENT, role_of, row_of
from paceline._words import plural

_BINS = 240  # of the time; more would be narrower than a pixel of a small screen
_BUSY = 0.85  # of the devices' time: more devices would shorten waits
_IDLE = 0.5  # of the devices' time: waits have another reason than too few devices
_MOST_KINDS = 24
_NEVER = ("rejected", "expired")
_ENDED = "Jobs that ended without a run were refused, expired or were cancelled, and count as waiting until then. "


class Run(NamedTuple):
    """A job or a batch that has run, by the clock of `time.monotonic`."""

    devices: Sequence[str]
    kind: str
    begun: float
    ended: float
    jobs: int  # 0: only those of the pool itself, copies of requests in the shadow or what warms a version
    waited: float  # its first job, in seconds
    outcome: str


class Never(NamedTuple):
    """A job that ended without a run, by the same clock."""

    came: float
    ended: float
    kind: str
    outcome: str


def page_of(
    names: Sequence[str], runs: Sequence[Run], never: Sequence[Never], report: Mapping[str, Any], explained: str
) -> str:
    """The page. `never`: the jobs that did not run."""
    section = section_of(names, runs, never, report, explained)
    return page(section.title, [section])


def section_of(
    names: Sequence[str], runs: Sequence[Run], never: Sequence[Never], report: Mapping[str, Any], explained: str
) -> Section:
    """What a page has of one pool."""
    shown = ", ".join(names) if len(names) <= 4 else f"{len(names)} devices"
    begin = min([run.begun - run.waited for run in runs] or [job.came for job in never])
    never = [job for job in never if job.ended >= begin]
    end = max([run.ended for run in runs] + [job.ended for job in never])
    width = max((end - begin) / _BINS, 1e-6)
    section = Section(f"Pool on {shown}")
    busy = _busy(names, runs, begin, width)
    section.answers = _answers(names, runs, report, {name: sum(busy[name]) / len(busy[name]) for name in names})
    section.charts = _charts(names, runs, never, begin, width, busy, report["waiting"])
    section.pieces = [
        f"<p class=soft>Each place of the charts is {milliseconds(width)}. Jobs of a batch count as waiting since its first one was submitted. "
        f"Jobs that wait now are in the last place of their chart. {_ENDED if never else ''}"
        f"The charts, and the time of a run, are of the last {plural(len(runs), 'run')}, all else is of all.</p>",
        table(_devices(names, runs, report)),
        table(_kinds(runs)),
        f"<h3>What each device has run, and why it leaves jobs waiting</h3>{words(explained)}",
        *([table(_versions(report["versions"]))] if report["versions"] else []),
        table(_outcomes(report)),
        folded("How long jobs waited", table(_waits(report))),
    ]
    if report["hangs"]:
        hangs = [(str(one["device"]), str(one["kind"]), str(one["jobs"]), str(one["where"])) for one in report["hangs"]]
        section.pieces.append(table(Table("Runs that were given up", ("device", "kind", "jobs", "where"), hangs)))
    return section


def _busy(names: Sequence[str], runs: Sequence[Run], begin: float, width: float) -> dict[str, list[float]]:
    """For each device the busy part of each bin, in per cent."""
    found = {name: [0.0] * _BINS for name in names}
    for run in runs:
        first, last = (_bin(seconds, begin, width) for seconds in (run.begun, run.ended))
        for at in range(first, last + 1):
            left = max(run.begun, begin + at * width)
            part = min(run.ended, begin + (at + 1) * width) - left
            for name in run.devices:
                found[name][at] = min(100.0, found[name][at] + 100 * max(0.0, part) / width)
    return found


def _bin(seconds: float, begin: float, width: float) -> int:
    return min(_BINS - 1, max(0, int((seconds - begin) / width)))


def _charts(
    names: Sequence[str],
    runs: Sequence[Run],
    never: Sequence[Never],
    begin: float,
    width: float,
    busy: Mapping[str, list[float]],
    waiting: int,
) -> list[Chart]:
    x = [float(f"{at * width:.6g}") for at in range(_BINS)]
    change = [0] * (_BINS + 1)
    waits: list[list[float]] = [[] for _ in x]
    for run in (one for one in runs if one.jobs):
        started = _bin(run.begun, begin, width)
        change[_bin(run.begun - run.waited, begin, width)] += run.jobs
        change[started] -= run.jobs
        waits[started].append(1e3 * run.waited)
    lost = [0] * _BINS
    for job in never:
        change[_bin(job.came, begin, width)] += 1
        change[_bin(job.ended, begin, width)] -= 1
        lost[_bin(job.ended, begin, width)] += 1
    queue = list(itertools.accumulate(change[:_BINS]))
    queue[-1] += waiting
    ended = [count or None for count in lost]
    mean = numbers(sum(one) / len(one) if one else None for one in waits)
    longest = numbers(max(one) if one else None for one in waits)
    drawn = list(names[:MOST_DEVICES])
    looks = [{"colour": f"d{number % 7}", "dash": [[], [8, 4]][number // 7 % 2]} for number in range(len(drawn))]
    sizes: dict[str, list[list[int]]] = {name: [[] for _ in x] for name in drawn}
    for run in (one for one in runs if one.jobs):
        for name in run.devices:
            if name in sizes:
                sizes[name][_bin(run.begun, begin, width)].append(run.jobs)
    of: dict[str, Any] = {"x": x, "of": "seconds", "low": 0}
    batches = of | {
        "title": "Jobs of a run: the sizes of batches (means)",
        "series": [
            {
                "label": name,
                "data": numbers(sum(one) / len(one) if one else None for one in sizes[name]),
                "points": True,
                **look,
            }
            for name, look in zip(drawn, looks, strict=True)
        ],
    }
    return [
        of
        | {
            "title": "Queue: jobs that wait" + (", and those that ended without a run" if never else ""),
            "series": [
                {"label": "jobs that wait", "data": queue, "colour": "d0", "step": True},
                *([{"label": "ended without a run", "data": ended, "colour": "d1", "points": True}] if never else []),
            ],
        },
        of
        | {
            "title": "Waits of runs that start, in ms",
            "series": [
                {"label": "mean", "data": mean, "colour": "d0", "points": True},
                {"label": "longest", "data": longest, "colour": "d1", "points": True},
            ],
        },
        *([batches] if any(run.jobs > 1 for run in runs) else []),
        of
        | {
            "title": "Busy: % of the time",
            "series": [
                {"label": name, "data": numbers(busy[name]), "step": True, **look}
                for name, look in zip(drawn, looks, strict=True)
            ],
            "high": 102,
        },
    ]


def _answers(
    names: Sequence[str], runs: Sequence[Run], report: Mapping[str, Any], busy: Mapping[str, float]
) -> list[tuple[str, str]]:
    outcomes = report["outcomes"]
    whole = sum(outcomes.values())
    least, most = min(busy, key=lambda name: busy[name]), max(busy, key=lambda name: busy[name])
    good = f"{outcomes['completed']} of {plural(whole, 'job')} completed; devices were busy for {busy[least]:.0f} % ({least}) to {busy[most]:.0f} % ({most}) of the time."
    waited = report["wait_seconds_sum"] / max(1, report["wait_counts"][-1][1])
    worked = sum(run.ended - run.begun for run in runs) / max(1, len(runs))
    cost = f"A job waited {milliseconds(waited)} in the mean, and a run took {milliseconds(worked)}: " + (
        "waiting cost most." if waited > worked else "computing cost most."
    )
    lost = sum(outcomes[name] for name in _NEVER)
    full = sum(busy.values()) > 100 * _BUSY * len(names)
    idle = sum(busy.values()) < 100 * _IDLE * len(names)
    if report["hangs"]:
        change = "Look at the runs that were given up, which the table at the end names."
    elif outcomes["failed"]:
        one = outcomes["failed"] == 1
        change = f"Look at {'the job' if one else plural(outcomes['failed'], 'job')} that failed: result() raises {'its error' if one else 'their errors'}."
    elif full and (waited > worked or lost):
        change = "Add devices, or take larger batches (max_batch): all devices were busy while jobs waited."
    elif lost:
        change = f"Send fewer requests at once, or give them more time: {lost} were rejected or expired though devices had time left."
    elif waited > worked and idle:
        change = "Take a shorter max_delay, if batches wait to become larger; the lines below name devices that leave jobs to faster ones. Devices were idle for more than half of the time."
    elif waited > worked:
        change = "Nothing, if all jobs were submitted at once: they wait for each other. The lines below name devices that leave jobs to faster ones."
    elif report["waiting"]:
        change = (
            f"Look below for devices that leave jobs waiting: {plural(report['waiting'], 'job')} did not start yet."
        )
    else:
        change = "Nothing needs a change: jobs start soon after they come."
    return [("How did the jobs end?", good), ("What cost most?", cost), ("What to change?", change)]


def _devices(names: Sequence[str], runs: Sequence[Run], report: Mapping[str, Any]) -> Table:
    took: dict[str, list[float]] = {name: [] for name in names}
    for run in runs:
        if run.outcome == "completed":
            took[run.devices[0]].append(run.ended - run.begun)
    rows = [
        (
            name,
            f"{one['jobs']:.0f}",
            f"{one['runs']:.0f}",
            f"{one['jobs'] / one['runs']:.3g}" if one["runs"] else "–",
            milliseconds(one["busy_seconds"]),
            milliseconds(sum(took[name]) / len(took[name])) if took[name] else "–",
            "released" if one.get("released") else "retired or lost" if one["retired"] else "works",
        )
        for name, one in ((name, report["devices"][name]) for name in names)
    ]
    return Table("Devices", ("device", "jobs", "runs", "jobs of a run", "busy", "a run", "state"), rows)


def _kinds(runs: Sequence[Run]) -> Table:
    """What was run: functions, and requests by model, version and shape."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        if run.jobs:
            found.setdefault(run.kind, []).append(run)
    jobs = {kind: sum(run.jobs for run in some) for kind, some in found.items()}
    most = sorted(found, key=lambda kind: -jobs[kind])[:_MOST_KINDS]
    rows = [
        (
            kind,
            str(jobs[kind]),
            str(len(some)),
            f"{jobs[kind] / len(some):.3g}",
            milliseconds(sum(run.waited for run in some) / len(some)),
            milliseconds(sum(run.ended - run.begun for run in some) / len(some)),
        )
        for kind, some in ((kind, found[kind]) for kind in most)
    ]
    note = (
        f"of the charts' runs{f'; the {_MOST_KINDS} of {len(found)} with most jobs' if len(found) > len(most) else ''}"
    )
    return Table("Kinds of jobs", ("kind", "jobs", "runs", "jobs of a run", "wait of its first", "a run"), rows, note)


def _versions(endpoints: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    rows = [
        (f"{name}, version {one['number']}", role_of(one), *row_of(one))
        for name, versions in endpoints.items()
        for one in versions
    ]
    note = f"times are of the last {RECENT:,} requests and batches of each"
    return Table("Versions", ("version", "role", *COLUMNS), rows, note)


def _outcomes(report: Mapping[str, Any]) -> Table:
    note = f"{report['waiting']} wait and {report['running']} run now"
    if report["backlog_seconds"] is not None:
        note += f"; what waits would be served in {milliseconds(report['backlog_seconds'])}"
    return Table(
        "How jobs ended", ("outcome", "jobs"), [(name, str(count)) for name, count in report["outcomes"].items()], note
    )


def _waits(report: Mapping[str, Any]) -> Table:
    rows = [
        ("any time" if bound == math.inf else f"at most {milliseconds(bound)}", str(count))
        for bound, count in report["wait_counts"]
    ]
    return Table("Waits", ("waited", "jobs"), rows)
