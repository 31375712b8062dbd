"""What the devices of a pool are worth: the requests in its ledger, served again by each useful subset of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline import InvalidArgument
from paceline._replay import lines_of
from paceline._replay_pool import PoolTimes, arrivals, replay_pool
from paceline._words import plural
from paceline._worth import BUSY, aligned, alike, asked, prices_of, shown

_MOST = 5  # devices of which each subset is asked about: each replays the whole ledger


@dataclass(frozen=True)
class PoolChoice:
    """Some of the devices, and how they would have served the same requests.

    Attributes
    ----------
    devices
        Their names.
    seconds
        Of 1,000 requests: 99 of 100 had ended so long after their submit (`times` has more), for comparing subsets.
    cost
        Of 1,000 requests that completed. None without prices.
    lost
        How many requests fewer completed than did in the ledger.
    """

    devices: list[str]
    seconds: float
    cost: float | None
    lost: int
    times: PoolTimes

    @property
    def error(self) -> float | None:
        """Relative standard error of `seconds`, see `PoolTimes`. The cost has none: devices and the time of arrivals are given."""
        return self.times.p99_error


@dataclass
class PoolWorth:
    """What the devices of a pool are worth. ``print`` shows a table.

    Attributes
    ----------
    choices
        The subsets, those that lose fewest requests first, of these the one with the shortest requests.
    latency
        In seconds, or None: how soon 99 of 100 requests are to end.
    measured
        What really was.
    notes
        What else is to be known: a device that stands idle, with the cure, and what the replay assumes.
    """

    choices: list[PoolChoice]
    latency: float | None
    measured: PoolTimes
    notes: list[str] = field(default_factory=list)

    @property
    def good(self) -> list[PoolChoice]:
        """Those that are soon enough, and with which no more requests are lost."""
        limit = float("inf") if self.latency is None else self.latency
        return [one for one in self.choices if one.lost <= 0 and one.seconds <= limit]

    @property
    def fastest(self) -> PoolChoice:
        """The one whose requests are the shortest, of those that lose fewest."""
        return self.choices[0]

    @property
    def cheapest(self) -> PoolChoice | None:
        """The cheapest of `good`. None without prices, and if none is good enough."""
        return min((one for one in self.good if one.cost is not None), key=lambda one: one.cost or 0.0, default=None)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("devices", "p50 ms", "p99 ms", "+-", "completed", "cost of 1,000")]
        chosen, others = shown(self.choices)
        for name, times, cost in (
            ("as it was", self.measured, None),
            *((" ".join(one.devices), one.times, one.cost) for one in chosen),
        ):
            error = "" if times.p99_error is None else f"{times.p99_error:.1%}"
            figures = (f"{1e3 * times.p50_seconds:.2f}", f"{1e3 * times.p99_seconds:.2f}", error, str(completed(times)))
            rows.append((name, *figures, "" if cost is None else f"{cost:.4g}"))
        if chosen[0].cost is None:
            rows = [row[:5] for row in rows]
        lines = ["The same requests, from submit to end, with each subset of the devices:", "", *aligned(rows)]
        limit = "" if self.latency is None else f" of those with a p99 of at most {1e3 * self.latency:g} ms"
        best, cheapest = self.fastest, self.cheapest
        close = alike(best, self.choices, lambda one: one.seconds)
        lines += [*others, "", f"fastest:  {' '.join(best.devices)}, p99 {1e3 * best.seconds:.4g} ms{close}"]
        if cheapest is not None:
            lines.append(f"cheapest{limit}: {' '.join(cheapest.devices)}, {cheapest.cost:.4g} for 1,000 requests")
        elif not self.good:
            lines.append(
                f"No subset serves all requests{limit.replace(' of those', '')}: take more or faster devices, or a shorter max_delay."
            )
        return "\n".join([*lines, *self.notes])


def completed(times: PoolTimes) -> int:
    """How many requests completed."""
    return times.outcomes.get("completed", 0)


def worth_pool(
    ledger: str | os.PathLike[str] | Iterable[str],
    prices: Mapping[str, float] | None = None,
    *,
    latency: float | None = None,
) -> PoolWorth:
    """Say what the devices of a pool are worth: the requests in its ledger, served again by each useful subset of them, on a virtual clock.

    Parameters
    ----------
    ledger
        The path of a file that ``Pool.write_ledger`` wrote, or its lines.
    prices
        As for `paceline.balance.worth`. A subset costs from the first event to the last one, also while it waits for requests.
    latency
        In seconds: 99 of 100 requests are to end so soon after their submit. `cheapest` keeps to it.

    Returns
    -------
    PoolWorth

    Raises
    ------
    InvalidArgument
        As `what_if_pool`, without a request that completed, for a placement that was a function, and for wrong prices.
    OSError
        If the file cannot be read.
    """
    lines = list(lines_of(ledger))
    found = replay_pool(lines)
    if found.placement == "custom":
        raise InvalidArgument(
            "worth: the pool's placement was a function, and the ledger does not have what it would answer with fewer devices. Write a ledger with a placement that has a name."
        )
    names = list(dict.fromkeys(found.devices))
    hourly = None if prices is None else prices_of(prices, names)
    if latency is not None and not latency > 0:
        raise InvalidArgument(f"worth: latency is {latency!r}; give seconds above 0.")
    if found.times is None or not completed(found.times):
        raise InvalidArgument("worth: no request has completed, so nothing is known of the devices.")
    measured = found.times

    entries, ask = arrivals(lines, found)

    def of(kept: Sequence[int]) -> tuple[bool, PoolChoice]:
        times = ask(None, [name for number, name in enumerate(names) if number not in kept], True)
        done = completed(times)
        cost = None if hourly is None or not done else hourly(kept) * times.elapsed_seconds / 3600 / done * 1000
        devices = [names[number] for number in kept]
        return done > 0, PoolChoice(devices, times.p99_seconds, cost, completed(measured) - done, times)

    choices = [one for one in asked(len(names), of, _MOST) if completed(one.times)]
    if not choices:
        raise InvalidArgument("worth: with no subset of the devices any request completes in the replay.")
    choices.sort(key=lambda one: (max(0, one.lost), one.seconds))
    last = max(number for number, entry in enumerate(entries) if "submit" in entry)
    released = {
        entry["retire"]["device"] for entry in entries[:last] if "retire" in entry
    }  # a pool that is closed retires all
    worth = PoolWorth(choices, latency, measured)
    best = worth.cheapest or (None if worth.good else worth.fastest)
    needed = [] if best is None else best.devices
    notes = worth.notes = _idle_notes(found.devices, entries, measured.elapsed_seconds, released, needed)
    if released:
        notes.append("Devices were released meanwhile. In the replay each subset has its devices all the time.")
    fewest = max(choices, key=lambda one: one.lost)
    if fewest.lost > 0:
        ends = [f"{count} {name}" for name, count in fewest.times.outcomes.items() if count and name != "completed"]
        if (never := found.jobs - sum(fewest.times.outcomes.values())) > 0:
            ends.append(f"{never} never start")
        notes.append(f"Fewer complete with {' '.join(fewest.devices)}: {', '.join(ends)}.")
    notes.append(
        f"{plural(found.jobs, 'request')}; runs take what they took in the mean of the ledger, by device and size."
    )
    return worth


def _idle_notes(
    names: Sequence[str],
    entries: Iterable[Mapping[str, Any]],
    elapsed: float,
    released: Collection[int],
    needed: Collection[str],
) -> list[str]:
    """The device that stood idle most, if it did so by the rule of thumb for trainers, and the cure. One that was released meanwhile is none.

    `needed`: the devices of the best subset, which is not to be taken without one of them.
    """
    seconds, runs = Counter(dict.fromkeys(names, 0.0)), dict[int, list[int]]()
    for entry in entries:
        runs.update((start["run"], start["devices"]) for start in entry.get("decided", {}).get("starts", ()))
        if "finish" in entry:
            for device in runs.pop(entry["finish"]["run"], ()):
                seconds[names[device]] += entry["finish"].get("seconds", 0.0)
    notes = [f"{name} has run nothing." for name, busy in seconds.items() if busy <= 0]
    kept = (name for number, name in enumerate(names) if number not in released and seconds[name] > 0)
    least = min(kept, key=lambda name: seconds[name], default=None)
    if least is not None and (busy := seconds[least]) < BUSY * elapsed:
        said = f"{least} ran requests in {busy / elapsed:.0%} of the time, less than {BUSY:.0%}: some of its price buys nothing."
        less = "Let" if least in needed else "Take a subset without it, let"
        notes.append(f"{said} {less} Pool(autoscale=) release it while it idles, or give it other work.")
    return notes
