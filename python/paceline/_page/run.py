"""What a page shows of a run, wherever it was read from, and the three sentences at its top."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from paceline._words import plural

MOST_MOVES = 400  # of all runs of a page, with their reasons
_CLOSE, _GOOD, _FAIR = 0.03, 0.10, 0.25  # lost parts of the steps' time, by which a split is called so
_SEEN = 0.005  # of the steps' time; less waiting for batches is not worth a word
_UNEQUAL = 1.1  # times as fast: by less the speed of devices is no reason to move shares


@dataclass(frozen=True)
class Row:
    """Consecutive steps, of which all figures are sums. Lists have an entry for each device."""

    first_step: int  # from 0
    steps: int
    amounts: Sequence[float]  # items or work that ran
    busy: Sequence[float]  # seconds
    seconds: float  # of the steps, with the reduction if it is known
    ideal: float  # seconds
    longest: float  # of one step
    shortest: float | None = None
    shares: Sequence[float] | None = None  # as planned; None: not known
    reduction: float | None = None  # seconds; None: not known
    launching: float | None = None  # seconds
    input: float | None = None  # seconds, beside those of the steps, in which the loop waited for batches
    memory: Sequence[float] | None = None  # bytes at most, of what `Run.memory_of` names

    @property
    def waiting(self) -> float:
        """What is lost beside reduction and launching, and with these where they are not known."""
        return max(0.0, self.seconds - self.ideal - (self.reduction or 0.0) - (self.launching or 0.0))

    @property
    def whole(self) -> float:
        """Seconds of the steps and of the waits for their batches."""
        return self.seconds + (self.input or 0.0)


def ideal_seconds(amounts: Sequence[float], busy: Sequence[float]) -> float:
    """Seconds that the same work takes if every device that had some works until the end, at the speed that it had.

    That is the work over the sum of the speeds. It is never more than the busiest device took. What is lost beyond it is the mean of the devices' idle times,
    weighted by their speeds: sum of v * (c - b) = c * sum of v - work, for a step of c seconds in which a device of speed v was busy for b.
    """
    known = [(n, s) for n, s in zip(amounts, busy, strict=True) if s > 0]
    speed = sum(n / s for n, s in known)
    return sum(n for n, _ in known) / speed if speed > 0 else 0.0


def joined(rows: Sequence[Row]) -> Row:
    """The sum of consecutive rows."""

    def total(values: Iterable[Any]) -> Any:
        found = list(values)
        return None if any(one is None for one in found) else sum(found)

    def by_device(name: str) -> Any:
        found = [getattr(row, name) for row in rows]
        return None if any(one is None for one in found) else [sum(column) for column in zip(*found, strict=True)]

    memory = [row.memory for row in rows if row.memory is not None]
    shortest = [row.shortest for row in rows if row.shortest is not None]
    return Row(
        rows[0].first_step,
        total(row.steps for row in rows),
        by_device("amounts"),
        by_device("busy"),
        total(row.seconds for row in rows),
        total(row.ideal for row in rows),
        max(row.longest for row in rows),
        min(shortest) if len(shortest) == len(rows) else None,
        by_device("shares"),
        total(row.reduction for row in rows),
        total(row.launching for row in rows),
        total(row.input for row in rows),
        [max(column) for column in zip(*memory, strict=True)] if memory else None,
    )


def thinned(rows: Sequence[Row], most: int) -> list[Row]:
    """At most `most` rows, each the sum of equally many, but for the last."""
    together = max(1, -(-len(rows) // max(1, most)))
    return [joined(rows[at : at + together]) for at in range(0, len(rows), together)]


@dataclass(frozen=True)
class Move:
    """A change of shares before a step."""

    step: int  # from 0
    what: str
    why: str


def because(notes: Sequence[str], reason: str) -> str:
    """Why shares moved, in words. A plan that keeps its shares is a move if other sizes were tried before it."""
    back = ["back from sizes that were tried to measure"] if reason.startswith("kept: ") and not notes else []
    return "; ".join(filter(None, [*notes, *back, reason]))


@dataclass
class Table:
    """A table of a page. The first column names the rows."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass
class Run:
    """What a page shows of one run. Figures are computed once, from the rows."""

    title: str
    devices: Sequence[str]
    rows: list[Row]
    moves: list[Move] = field(default_factory=list)
    unit: str = "items"
    share_of: str = ""  # what shares count, if that is not the unit
    usual: Sequence[float] = ()  # shares of a batch of the usual size (`Balancer.report`); none: of the last row
    pipeline: bool = False
    skipped: int = 1  # steps at the start that do not count in figures
    even: bool = False  # whether shares were even by wish
    advice: str = ""  # what to change, if reports say so
    tables: list[Table] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)  # what the source does not know
    words: str = ""  # of explain()
    schedules: list[Any] = field(default_factory=list)  # of `schedule`
    memory_of: Sequence[str] = ()  # whose memory is known over time

    @cached_property
    def counted(self) -> list[Row]:
        """The rows that figures are about: without the first one, in which threads start and memory is allocated, and others that are `skipped`."""
        later = [row for row in self.rows if row.first_step >= self.skipped]
        return later if len(self.rows) > 3 and later else self.rows

    @cached_property
    def total(self) -> Row:
        """All steps that figures are about."""
        return joined(self.counted)

    @cached_property
    def parts(self) -> dict[str, float]:
        """Parts of the steps' time, by name, that were lost. What is not known apart is in the name of the first one."""
        total = self.total
        known = {"launching": total.launching, "reduction": total.reduction}
        unknown = [name for name, seconds in known.items() if seconds is None and not self.pipeline]
        name = "waiting" + "".join(f"{' and' if one == unknown[-1] else ','} {one}" for one in unknown)
        known["input"] = total.input
        seconds = {name: total.waiting} | {one: s for one, s in known.items() if s is not None}
        return {name: s / total.whole if total.whole > 0 else 0.0 for name, s in seconds.items()}

    @cached_property
    def waited(self) -> list[float]:
        """For each device the part of the steps' time in which it had work and did not compute."""
        seconds = [
            sum(max(0.0, row.seconds - row.busy[device]) for row in self.counted if row.busy[device] > 0)
            for device in range(len(self.devices))
        ]
        return [one / self.total.whole if self.total.whole > 0 else 0.0 for one in seconds]

    @cached_property
    def idle(self) -> list[float]:
        """For each device the part of the steps' time in which it did not compute."""
        total = self.total
        return [max(0.0, 1 - busy / total.seconds) if total.seconds > 0 else 0.0 for busy in total.busy]

    @cached_property
    def speeds(self) -> list[float]:
        """For each device the amount in a second of computing; 0 if it had no work."""
        total = self.total
        return [n / s if s > 0 else 0.0 for n, s in zip(total.amounts, total.busy, strict=True)]


def _speeds(run: Run, device: int) -> tuple[float, float, str]:
    """Between which speeds a device was in eight of ten rows, and its name."""
    speeds = sorted(
        row.amounts[device] / row.busy[device] for row in run.counted if row.amounts[device] and row.busy[device] > 0
    )
    tenth = len(speeds) // 10
    return (speeds[tenth], speeds[-1 - tenth], run.devices[device]) if speeds else (1.0, 1.0, run.devices[device])


def milliseconds(seconds: float) -> str:
    """Format a time for people."""
    return f"{seconds:.2f} s" if seconds >= 0.9995 else f"{1e3 * seconds:.3g} ms"


def amount(value: float, digits: int = 6) -> str:
    """Format a number for people, without an exponent."""
    return f"{value:.0f}" if value > 10.0 ** min(5, digits) - 1 else f"{value:.{digits}g}"


def sentences(run: Run) -> list[str]:
    """How good the split was, what cost most, and what to change."""
    if not run.rows:
        return ["No step has run, or none was recorded.", "So nothing has cost time.", "So there is nothing to change."]
    total, parts = run.total, run.parts
    lost, fed = sum(parts.values()), parts.get("input", 0.0)
    split = (lost - fed) / (1 - fed) if fed < 1 else 0.0  # of the time in which there was a batch
    word = "close to ideal" if split < _CLOSE else "good" if split < _GOOD else "fair" if split < _FAIR else "poor"
    each, waits, of_that = total.steps or 1, "", ""
    if fed > _SEEN:
        waits = f" with {milliseconds((total.input or 0.0) / each)} of waiting for its batch"
        of_that = (
            f": {lost - fed:.1%} by the {'schedule' if run.pipeline else 'split'}, {fed:.1%} by the wait for batches"
        )
    good = (
        f"The {'schedule' if run.pipeline else 'split'} was {word}: a step took {milliseconds(total.whole / each)} in the mean{waits}, and "
        f"{milliseconds(total.ideal / each)} would do if all devices with work had computed to its end, so {lost:.1%} was lost{of_that}."
    )
    name = max(parts, key=lambda one: parts[one])
    worst = max(range(len(run.devices)), key=lambda device: run.waited[device])
    cost = f"Most of the loss was {name}, {parts[name]:.1%} of the steps' time"
    if name.startswith("waiting"):
        cost += f": {run.devices[worst]} stood idle longest, for {run.waited[worst]:.0%} of it"
    advice = "" if name == "input" else run.advice.strip()
    return [good, f"{cost}.", advice or _advice(run, name, lost)]


def _advice(run: Run, name: str, lost: float) -> str:
    if lost < _CLOSE:
        return "Nothing needs a change: shorter steps need more or faster devices."
    if name == "reduction":
        return "Take larger batches or accumulate gradients, so that there are fewer reductions for as many items."
    if name == "input":
        return "Give the loader more workers, or less work for each item: the devices wait for batches."
    if name == "launching":
        return "Take larger batches, so that starting a step counts less; on GPUs graphs=True shortens it, too."
    worked = [speed for speed in run.speeds if speed > 0]
    unequal = len(worked) > 1 and max(worked) > _UNEQUAL * min(worked)
    if run.even and unequal:
        return 'Take balance="auto": shares were fixed, so fast devices waited for slow ones.'
    if run.pipeline:
        if sum(seconds > 0 for seconds in run.rows[-1].busy) == 1:
            return "One device has all stages: explain() says what another split would gain."
        return "Try more micro-batches, or one device less: explain() says what either would gain."
    if len(worked) == 1:
        return "One device had all work, so no other split of it can shorten steps: see in explain() what delays that device."
    low, high, name = max((_speeds(run, device) for device in range(len(run.devices))), key=lambda one: one[1] / one[0])
    if len(run.moves) > max(2, sum(row.steps for row in run.rows) // 50) and high > _UNEQUAL * low:
        return f"Look for what disturbs {name}: its speed was between {amount(low, 4)} and {amount(high, 4)} {run.unit}/s, and shares moved {plural(len(run.moves), 'time')}."
    if not unequal:
        return "Look in explain() for what delays the devices: in the mean they were equally fast."
    return "Look at the slowest device in the chart of speeds: explain() names what may slow it."
