"""What devices are worth: seconds and cost of the same work with each useful subset of them."""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline import InvalidArgument
from paceline._page.ledger import read
from paceline._page.run import Run, sentences
from paceline._replay import lines_of
from paceline._words import plural

_MOST = 10  # devices of which each subset is asked about; with more there are too many
_MOST_ROWS = 24  # in a text
BUSY = 0.7  # of the time of the steps; `on_alarm` has the same limit
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
        From one step to the next: what `what_if` with the other devices in ``remove=`` says, to the digit.
    seconds, cost
        Of 1,000 items, or of a batch with costs, in such steps. The cost is None without prices.
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
        rows: list[tuple[str, ...]] = [("devices", "ms a step", "+-", f"s for {what}", f"cost of {what}", "shares")]
        chosen, others = shown(self.choices)
        for one in chosen:
            cost = "" if one.cost is None else f"{one.cost:.4g}"
            figures = (f"{1e3 * one.step_seconds:.2f}", f"{one.error:.1%}", f"{one.seconds:.4g}", cost)
            rows.append((" ".join(one.devices), *figures, " ".join(map(str, one.shares.values()))))
        if chosen[0].cost is None:
            rows = [(*row[:4], row[5]) for row in rows]
        lines = [f"A step of {self.batch_size} {self.unit}, with each subset of the devices:", ""]
        lines += aligned(rows, left=(0, len(rows[0]) - 1))
        cheapest = self.cheapest
        lines += [*others, "", f"fastest:  {self._said(self.fastest, lambda one: one.seconds, f's for {what}')}"]
        if cheapest is not None:
            lines.append(f"cheapest: {self._said(cheapest, lambda one: one.cost or 0.0, f'for {what}')}")
        return "\n".join([*lines, *self.notes])

    def _said(self, best: Choice, figure: Callable[[Choice], float], of: str) -> str:
        text = f"{' '.join(best.devices)}, {figure(best):.4g} {of} (+-{best.error:.1%})"
        return text + alike(best, self.choices, figure)


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """The lines of a table. These columns are flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def flush(column: int, cell: str) -> str:
        return cell.ljust(widths[column]) if column in left else cell.rjust(widths[column])

    return ["  ".join(itertools.starmap(flush, enumerate(row))).rstrip() for row in rows]


def alike(best: Any, choices: Sequence[Any], figure: Callable[[Any], float]) -> str:
    """Words on the choices that the error does not tell apart from the best one."""

    def near(one: Any) -> bool:
        noise = max(_CLOSE, 2.0 * math.hypot(one.error or 0.0, best.error or 0.0))
        return abs(figure(one) - figure(best)) <= noise * max(abs(figure(one)), abs(figure(best)))

    close = [" ".join(one.devices) for one in choices if one is not best and _lost(one) == _lost(best) and near(one)]
    named = ", ".join(close[:3])
    return f"; within the error of this: {named}{', ...' if len(close) > 3 else ''}" if close else ""


def shown(choices: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """Of choices that take and cost the same the first one, of very many only the best ones; and a line on the others, if there are some."""
    found: dict[Any, Any] = {}
    for one in choices:
        steps = [round(math.log(max(value, 1e-30)) / _CLOSE) for value in (one.seconds, one.cost or 1.0)]
        found.setdefault((len(one.devices), _lost(one), *steps), one)
    rows, priced = list(found.values()), choices[0].cost is not None
    if priced and len(rows) > _MOST_ROWS:  # only those that no other one beats
        least = [math.inf, *itertools.accumulate((one.cost for one in rows), min)]
        rows = [one for one, before in zip(rows, least, strict=False) if one.cost < before]
    worse = "slower" + (" or with fewer completed" if any(map(_lost, choices)) else "")
    worse += " and no cheaper" if priced and len(rows) <= _MOST_ROWS else ""
    rows = rows[:_MOST_ROWS]
    if len(rows) == len(choices):
        return rows, []
    others = plural(len(choices) - len(rows), "other subset")
    return rows, [f"and {others}: as fast{' and as dear' if priced else ''} as one of these, or {worse}"]


def _lost(one: Any) -> int:
    """How many requests fewer than in the ledger complete with a pool's choice. A trainer's choice loses none."""
    return max(0, getattr(one, "lost", 0))


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
        What an hour of each device costs, in any currency, by name (``"cuda:0"``) or for each one of a kind (``"host"``, ``"cuda"``). Parts of a
        GPU that have no price of their own cost together what the GPU does. A device that no subset has needs none. None: only seconds.
    add
        ``(like, speed)`` for each: one more device like the named one, so many times as fast, at the same price, or at that of ``"another <like>"``.
    remove
        Devices that no subset has.
    batch_size
        Of steps without costs. Default: the size that most of the last 50 had.

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
    Steps take what `Balancer.what_if` says. A ledger does not have the time between steps, nor the trainer's own part of a step, which ``trainer.what_if(prices=)``
    counts. Devices are taken to be as fast alone as beside each other.
    """
    runs, balancers = read("", list(lines_of(ledger)))
    found = []
    for run, balancer in zip(runs, balancers, strict=True):
        if run.rows:
            items = _WORK if run.unit == "work" else batch_size or sum(balancer.what_if().shares)

            def ask(_balancer: Any = balancer, **asked: Any) -> Any:
                return _balancer.what_if(**{name: value or None for name, value in asked.items()})

            found.append(worth_of(ask, run, prices, add, remove, items))
            found[-1].notes.append("A ledger has no time between steps: only steps are counted.")
            if batch_size and run.unit == "work":
                found[-1].notes.append(
                    "The batch size that was asked for counts items, so it does not apply to steps with costs."
                )
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
) -> Worth:
    """Ask ``what_if`` about each subset. `run`: what has run, by which devices are known and how busy they were."""
    add = list(add)
    present = [name for name in run.devices if name not in remove]
    names = list(ask(add=add, remove=remove, batch_size=batch_size).names)  # which also checks the arguments
    hourly = None if prices is None else prices_of(prices, names)
    more = [unique(names, at) for at in range(len(run.devices), len(names))]
    labels = [*run.devices, *more]
    unit, per = ("items", 1000 / batch_size) if run.unit == "items" else ("units of work", _WORK / batch_size)

    def of(kept: Sequence[int]) -> tuple[bool, Choice]:
        """What one subset takes, and whether each of its devices has work."""
        out = [name for number, name in enumerate(present) if number not in kept]
        new = [number for number in range(len(more)) if number + len(present) in kept]
        try:
            answer = ask(add=[add[number] for number in new], remove=[*remove, *out], batch_size=batch_size)
        except InvalidArgument:  # these are retired, or have no memory for the batch
            return False, IMPOSSIBLE
        asked_of = [*range(len(run.devices)), *(len(run.devices) + number for number in new)]
        working = {number: share for number, share in zip(asked_of, answer.shares, strict=True) if share > 0}
        shares = {labels[number]: share for number, share in working.items()}
        seconds, cost = answer.seconds * per, None
        if hourly is not None:
            cost = seconds / 3600 * hourly(working)
        return len(shares) == len(kept), Choice(shares, answer.seconds, seconds, cost, answer.error)

    choices = asked(len(present) + len(more), of)
    return Worth(sorted(choices, key=lambda one: one.seconds), batch_size, unit, idle_notes(run))


def unique(names: Sequence[str], at: int) -> str:
    """The name of a device; several that are added like the same one are numbered."""
    before = names[:at].count(names[at])
    return f"{names[at]} ({before + 1})" if before else names[at]


def asked(count: int, ask: Callable[[Sequence[int]], tuple[bool, Any]], most: int = _MOST) -> list[Any]:
    """The answers for all useful subsets of so many devices.

    With many devices only for those subsets that remain if the device is left out, one after the other, without which the others are fastest, or cheapest.
    """
    everything = tuple(range(count))
    if count <= most:
        subsets = (kept for size in range(1, count + 1) for kept in itertools.combinations(everything, size))
        return [answer for useful, answer in map(ask, subsets) if useful]
    ask = functools.cache(ask)
    found = {everything: ask(everything)}

    def rank(one: Any, name: str) -> tuple[int, float]:  # what completes nothing has short requests, and no cost
        value = getattr(one, name)
        return _lost(one), math.inf if value is None else value

    for name in ("seconds", "cost") if found[everything][1].cost is not None else ("seconds",):
        kept = everything
        while len(kept) > 1:
            smaller = {tuple(one for one in kept if one != out): None for out in kept}
            answers = {subset: ask(subset) for subset in smaller}
            kept = min(answers, key=lambda subset: rank(answers[subset][1], name))
            found[kept] = answers[kept]
    return [answer for useful, answer in found.values() if useful] or [found[everything][1]]


def prices_of(prices: Mapping[str, float], names: Sequence[str]) -> Callable[[Iterable[int]], float]:
    """What an hour of some of these devices costs, by their numbers. Parts without a price of their own cost what their GPU does, once.

    Only devices that are asked about need a price.
    """
    for key, value in prices.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise InvalidArgument(f"prices: that of {key} is {value!r}; give what an hour of it costs, such as 2.1.")
    keys = []
    for name in names:
        plain = name.removeprefix("another ")
        keys.append((name, plain, plain.partition("/")[0], plain.replace(" ", ":").partition(":")[0]))
    if unknown := sorted(set(prices).difference({"host", "cuda"}, *keys)):
        raise InvalidArgument(f"prices: there is no device {unknown[0]}; the devices are {', '.join(names)}.")

    def hourly(devices: Iterable[int]) -> float:
        paid: dict[str | int, float] = {}
        for number in devices:
            name, plain, whole, kind = keys[number]
            given = next((key for key in keys[number] if key in prices), None)
            if given is None:
                raise InvalidArgument(
                    f"prices: there is none for {name}. Give {plain} one, or all of its kind ({kind})."
                )
            shared = name == plain != whole and given != name  # what is added is a part of a GPU of its own
            paid[whole if shared else number] = float(prices[given])
        return sum(paid.values())

    return hourly


def idle_notes(run: Run) -> list[str]:
    """The device that stands idle most, if it does so by the rule of thumb, and the cure."""
    busy = {name: 1 - idle for name, idle in zip(run.devices, run.idle, strict=True) if idle < 1}
    notes = [f"{name} has run nothing." for name in run.devices if name not in busy]
    least = min(busy, key=lambda name: busy[name], default=None)
    if least is None or busy[least] >= BUSY:
        return notes
    said = f"{least} computed in {busy[least]:.0%} of the time of the steps, less than {BUSY:.0%}: some of its price buys nothing."
    cure = sentences(run)[2].replace(" in the chart of speeds", "")  # which is on a page
    return [*notes, f"{said} What to change: {cure} trainer.on_alarm() calls back when a device idles."]
