"""What devices are worth: seconds and cost of the same work with each useful subset of them."""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline import InvalidArgument
from paceline._page.ledger import read
from paceline._page.run import Run, sentences
from paceline._words import plural

_MOST = 10  # devices of which each subset is asked about; with more there are too many
_MOST_ROWS = 24  # in a text
_RECENT = 50  # rows of a run, which are steps in a short one
_BUSY = 0.7  # of the time of the steps; `on_alarm` has the same limit
_CLOSE = 0.005  # relative; where less is measured than this, figures count as equal
_WORK = 1_000_000  # units of work of the first batch with costs


@dataclass(frozen=True)
class Choice:
    """Some of the devices, and what the work takes and costs with them.

    Attributes
    ----------
    shares
        By name, the items that each device would run in a step; of a pipeline the blocks that it would have.
    step_seconds
        Of a step.
    seconds, cost
        Of 1,000 items, or of a batch with costs. The cost is None without prices.
    error
        Relative standard error of all three, as the measured noise leaves it.
    """

    shares: Mapping[str, int]
    step_seconds: float
    seconds: float
    cost: float | None
    error: float

    @property
    def devices(self) -> list[str]:
        """Their names."""
        return list(self.shares)


IMPOSSIBLE = Choice({}, math.inf, math.inf, math.inf, 0.0)


@dataclass
class Worth:
    """What devices are worth. ``print`` shows a table.

    Attributes
    ----------
    choices
        The subsets in which each device has work, the fastest first.
    batch_size, unit
        Of a step, and what it counts: ``"items"`` or ``"units of work"``, of which the first batch with costs had 1,000,000.
    notes
        What else is to be known: devices that stand idle, with the cure, and what was not measured.
    """

    choices: list[Choice]
    batch_size: int
    unit: str = "items"
    notes: list[str] = field(default_factory=list)

    @property
    def fastest(self) -> Choice:
        """The one that takes the least time."""
        return self.choices[0]

    @property
    def cheapest(self) -> Choice | None:
        """The one that costs least, of equals the fastest. None without prices."""
        return min((one for one in self.choices if one.cost is not None), key=lambda one: one.cost or 0.0, default=None)

    def __str__(self) -> str:
        what = f"1,000 {self.unit}" if self.unit == "items" else "a batch"
        rows = [("devices", "ms a step", "+-", f"s for {what}", f"cost of {what}", "shares")]
        shown = self._shown()
        for one in shown:
            cost = "" if one.cost is None else f"{one.cost:.4g}"
            figures = (f"{1e3 * one.step_seconds:.2f}", f"{one.error:.1%}", f"{one.seconds:.4g}", cost)
            rows.append((" ".join(one.devices), *figures, " ".join(map(str, one.shares.values()))))
        columns = [0, 1, 2, 3, 5] if shown[0].cost is None else range(6)
        widths = [max(len(row[column]) for row in rows) for column in range(6)]
        lines = [f"A step of {self.batch_size} {self.unit}, with each subset of the devices:", ""]
        for row in rows:
            cells = [row[c].ljust(widths[c]) if c in (0, 5) else row[c].rjust(widths[c]) for c in columns]
            lines.append("  ".join(cells).rstrip())
        if len(shown) < len(self.choices):
            others = plural(len(self.choices) - len(shown), "other subset")
            lines.append(f"and {others}: as fast and as dear as one of these, or slower and no cheaper")
        cheapest = self.cheapest
        lines += ["", f"fastest:  {self._said(self.fastest, lambda one: one.seconds, f's for {what}')}"]
        if cheapest is not None:
            lines.append(f"cheapest: {self._said(cheapest, lambda one: one.cost or 0.0, f'for {what}')}")
        return "\n".join([*lines, *self.notes])

    def _said(self, best: Choice, figure: Callable[[Choice], float], of: str) -> str:
        """A choice, and which others the error does not tell apart from it."""
        text = f"{' '.join(best.devices)}, {figure(best):.4g} {of} (+-{best.error:.1%})"
        close = [one for one in self.choices if one is not best and _alike(figure(one), figure(best), one, best)]
        if not close:
            return text
        named = ", ".join(" ".join(one.devices) for one in close[:3])
        return f"{text}; within the error of this: {named}{', ...' if len(close) > 3 else ''}"

    def _shown(self) -> list[Choice]:
        """Of subsets that take and cost the same the first one, and of very many only those that no other one beats."""
        found: dict[Any, Choice] = {}
        for one in self.choices:
            steps = [round(math.log(max(value, 1e-30)) / _CLOSE) for value in (one.seconds, one.cost or 1.0)]
            found.setdefault((len(one.shares), *steps), one)
        shown = list(found.values())
        if len(shown) <= _MOST_ROWS:
            return shown
        best, least = [], math.inf
        for one in shown:  # from fast to slow
            if (one.cost or 0.0) < least:
                least = one.cost or 0.0
                best.append(one)
        return best[:_MOST_ROWS]


def _alike(one: float, other: float, first: Choice, second: Choice) -> bool:
    noise = max(_CLOSE, 2.0 * math.hypot(first.error, second.error))
    return abs(one - other) <= noise * max(abs(one), abs(other))


def worth(
    ledger: str | os.PathLike[str] | Iterable[str],
    prices: Mapping[str, float] | None = None,
    *,
    add: Sequence[tuple[str, float]] = (),
    remove: Sequence[str] = (),
    batch_size: int | None = None,
) -> list[Worth]:
    """Say what the devices of a run are worth: seconds and cost of the same work with each useful subset of them.

    Parameters
    ----------
    ledger
        The path of a file that ``trainer.write_ledger`` wrote, or its lines.
    prices
        What an hour of each device costs, in any currency, by name (``"cuda:0"``) or for each one of a kind (``"host"``, ``"cuda"``). None: only seconds.
    add
        ``(like, speed)`` for each: one more device like the named one, so many times as fast, at the same price, or at that of ``"another <like>"``.
    remove
        Devices that no subset has.
    batch_size
        Default: the size that most steps had.

    Returns
    -------
    list of Worth
        One for steps without costs and one for steps with costs, if both ran.

    Raises
    ------
    InvalidArgument
        If the ledger cannot be replayed or has no step, and for other arguments that cannot be used.
    OSError
        If the file cannot be read.

    Notes
    -----
    A ledger does not have the time between steps. Devices are taken to be as fast alone as beside each other.
    """
    if isinstance(ledger, (str, os.PathLike)):
        with Path(ledger).open(encoding="utf-8") as file:
            return worth(list(file), prices, add=add, remove=remove, batch_size=batch_size)
    lines = list(ledger)
    runs, balancers = read("", lines)
    sizes = [Counter[int]() for _ in runs]
    for line in lines[: len(lines) if lines[-1].endswith("\n") else -1]:
        entry = json.loads(line)
        if "plan" in entry:
            sizes[entry.get("balancer", 0)][entry["plan"]["batch_size"]] += 1
    found = []
    for run, balancer, counted in zip(runs, balancers, sizes, strict=True):
        if run.rows:
            items = batch_size or (_WORK if run.unit == "work" else counted.most_common(1)[0][0])

            def ask(_balancer: Any = balancer, **asked: Any) -> Any:
                return _balancer.what_if(**{name: value or None for name, value in asked.items()})

            together = waiting(run, balancer.what_if(batch_size=items).present_seconds, items)
            found.append(worth_of(ask, run, prices, add, remove, items, together=together))
            found[-1].notes.append("A ledger has no time between steps: only steps are counted.")
    if not found:
        raise InvalidArgument("worth: the ledger has no step that was recorded, so nothing is known of the devices.")
    return found


def worth_of(
    ask: Callable[..., Any],
    run: Run,
    prices: Mapping[str, float] | None,
    add: Sequence[tuple[str, float]],
    remove: Sequence[str],
    batch_size: int,
    between: float = 0.0,
    together: float = 1.0,
) -> Worth:
    """Ask ``what_if`` about each subset.

    `run`: what has run, by which devices are known and how busy they were. `between`: seconds between two steps.
    `together`: what steps of several devices take, over what is predicted if none waits.
    """
    add = list(add)
    present = [name for name in run.devices if name not in remove]
    names = list(ask(add=add, remove=remove, batch_size=batch_size).names)  # which also checks the arguments
    hourly = None if prices is None else prices_of(prices, names)
    more = [_unique(names, at) for at in range(len(run.devices), len(names))]
    unit, per = ("items", 1000 / batch_size) if run.unit == "items" else ("units of work", _WORK / batch_size)

    def of(kept: Sequence[int]) -> tuple[bool, Choice]:
        """What one subset takes, and whether each of its devices has work."""
        out = [name for number, name in enumerate(present) if number not in kept]
        new = [number for number in range(len(more)) if number + len(present) in kept]
        try:
            answer = ask(add=[add[number] for number in new], remove=[*remove, *out], batch_size=batch_size)
        except InvalidArgument:  # these are retired, or have no memory for the batch
            return False, IMPOSSIBLE
        labels = [*run.devices, *(more[number] for number in new)]
        shares = {label: share for label, share in zip(labels, answer.shares, strict=True) if share > 0}
        step = answer.seconds * (together if len(shares) > 1 else 1.0)
        seconds, cost = (step + between) * per, None
        if hourly is not None:
            cost = seconds / 3600 * sum(hourly[label.partition(" (")[0]] for label in shares)
        return len(shares) == len(kept), Choice(shares, step, seconds, cost, answer.error)

    choices = asked(len(present) + len(more), of)
    return Worth(sorted(choices, key=lambda one: one.seconds), batch_size, unit, idle_notes(run))


def waiting(run: Run, predicted: float, items: int) -> float:
    """What recent steps took over what is predicted for their shares, at least 1: devices do not end at the same moment. One device alone waits for none."""
    rows = [row for row in run.rows[-_RECENT:] if abs(sum(row.amounts) / row.steps - items) < 0.01 * items]
    if not rows or predicted <= 0:
        return 1.0
    return max(1.0, statistics.median(row.seconds / row.steps for row in rows) / predicted)


def _unique(names: Sequence[str], at: int) -> str:
    """The name of a device; several that are added like the same one are numbered."""
    before = names[:at].count(names[at])
    return f"{names[at]} ({before + 1})" if before else names[at]


def asked(count: int, ask: Callable[[Sequence[int]], tuple[bool, Any]]) -> list[Any]:
    """The answers for all useful subsets of so many devices.

    With many devices only for those subsets that remain if the device is left out, one after the other, without which the others are fastest, or cheapest.
    """
    everything = tuple(range(count))
    if count <= _MOST:
        subsets = (kept for size in range(1, count + 1) for kept in itertools.combinations(everything, size))
        return [answer for useful, answer in map(ask, subsets) if useful]
    found = {everything: ask(everything)}
    for name in ("seconds", "cost"):
        kept = everything
        while len(kept) > 1:
            smaller = {tuple(one for one in kept if one != out): None for out in kept}
            answers = {subset: found.get(subset) or ask(subset) for subset in smaller}
            kept = min(answers, key=lambda subset: getattr(answers[subset][1], name) or 0.0)
            found[kept] = answers[kept]
    return [answer for useful, answer in found.values() if useful] or [found[everything][1]]


def prices_of(prices: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """What an hour of each of these devices costs."""
    for key, value in prices.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise InvalidArgument(f"prices: that of {key} is {value!r}; give what an hour of it costs, such as 2.1.")
    found, used = {}, {"host", "cuda"}
    for name in names:
        plain = name.removeprefix("another ")
        keys = (name, plain, plain.partition("/")[0], plain.replace(" ", ":").partition(":")[0])
        given = next((one for one in keys if one in prices), None)
        if given is None:
            raise InvalidArgument(
                f"prices: there is none for {name}. Give {keys[1]} one, or all of its kind ({keys[3]})."
            )
        found[name] = float(prices[given])
        used |= set(keys)
    if unknown := sorted(set(prices) - used):
        raise InvalidArgument(f"prices: there is no device {unknown[0]}; the devices are {', '.join(names)}.")
    return found


def idle_notes(run: Run) -> list[str]:
    """The device that stands idle most, if it does so by the rule of thumb, and the cure."""
    busy = {name: 1 - idle for name, idle in zip(run.devices, run.idle, strict=True) if idle < 1}
    notes = [f"{name} has run nothing." for name in run.devices if name not in busy]
    least = min(busy, key=lambda name: busy[name], default=None)
    if least is None or busy[least] >= _BUSY:
        return notes
    said = f"{least} computed in {busy[least]:.0%} of the time of the steps, less than {_BUSY:.0%}: some of its price buys nothing."
    cure = sentences(run)[2].replace(" in the chart of speeds", "")  # which is on a page
    return [*notes, f"{said} {cure} trainer.on_alarm() calls back when a device idles."]
