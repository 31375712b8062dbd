"""Replay ledgers of pools: the C++ decisions are made again, as they were or with another placement."""

from __future__ import annotations

import heapq
import itertools
import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from paceline import InvalidArgument
from paceline._core.plan import POOL_LEDGER_VERSION, PoolState
from paceline._replay import at_line, lines_of, numbered
from paceline._replay_pool_kinds import with_kinds_kept, without_own_of
from paceline._replay_pool_room import Waiting
from paceline._replay_pool_seconds import Seconds

Ledger = str | os.PathLike[str] | Iterable[str]  # a path, or the lines
_TIMELESS = ("add_kind", "add_need", "add_tenant", "forget", "unload")
_TIMED = ("submit", "finish", "measure", "tick", "withdraw", "cancel", "retire", "restore", "lose", "loaded")
_EVENTS = (*_TIMED, "add_device", *_TIMELESS)
_ARRIVE = ("submit", "cancel", "retire", "restore", "lose", "add_device", *_TIMELESS[:3])  # with any placement
_DECIDED = ("ends", "starts", "declines", "wake_seconds")
_RELEASES = ("retire", "restore")  # by a user, `Autoscale`, or a trainer beside the pool
_SAMPLES = 1000  # what a model of the whole ledger counts for
_PARTS = 10  # of the jobs that completed, whose figures have a spread


@dataclass(frozen=True)
class PoolLedgerMismatch:
    """The first decision that came out differently in a replay.

    Attributes
    ----------
    line
        The line in the ledger, from 1.
    event
        What had happened, such as ``"submit"``.
    what
        The decision in the ledger and the replayed one.
    """

    line: int
    event: str
    what: str


@dataclass
class PoolTimes:
    """How long the jobs of a pool waited and took, and how they ended. What warms a version, and copies for one in the shadow, are none of them.

    Attributes
    ----------
    mean_wait_seconds, p50_wait_seconds, p99_wait_seconds
        From the submit, or from ``not_before``, to the start, of the jobs that started.
    mean_seconds, p50_seconds, p99_seconds
        From the same time to the end, of the jobs that completed.
    outcomes
        How many jobs ended how, such as ``completed`` and ``expired``.
    elapsed_seconds
        From the first event to the last.
    p99_error
        Relative standard error of the 99th percentile to the end: from its spread over ten parts of the jobs that completed, in the order of their ends (the method of
        batch means). None with fewer than 20 such jobs.
    """

    mean_wait_seconds: float
    p50_wait_seconds: float
    p99_wait_seconds: float
    mean_seconds: float
    p50_seconds: float
    p99_seconds: float
    outcomes: dict[str, int]
    elapsed_seconds: float
    p99_error: float | None = None


@dataclass
class PoolReplayResult:
    """The result of a replay.

    Attributes
    ----------
    placement
        Of the pool. ``"custom"``: a function, whose answers are in the ledger.
    devices
        Their names.
    events, jobs, runs
        The numbers of replayed events, of jobs that were submitted by users, and of runs that were started.
    mismatch
        The first decision that came out differently, at which the replay ends. None if all were reproduced.
    times
        Those of the ledger.
    cut_off
        Whether the last line was written in part only, as by a process that was killed or on a full disk. It is left out.
    """

    placement: str
    devices: list[str] = field(default_factory=list)
    events: int = 0
    jobs: int = 0
    runs: int = 0
    mismatch: PoolLedgerMismatch | None = None
    times: PoolTimes | None = None
    cut_off: bool = False


def replay_pool(ledger: Ledger) -> PoolReplayResult:
    """Make every decision of a pool again, from the events in its ledger, and compare it with the one written.

    A last line that was written in part only is left out.

    Parameters
    ----------
    ledger
        The path of a file that ``Pool.write_ledger`` wrote, or its lines.

    Returns
    -------
    PoolReplayResult
        `mismatch` is None if every decision was reproduced.

    Raises
    ------
    InvalidArgument
        If a line is malformed, or holds an event that the pool refuses. The message names the line.
    OSError
        If the file cannot be read.
    """
    result = PoolReplayResult("")
    course, pool = _Course(), None
    for number, line in numbered(lines_of(ledger), result):
        with at_line(number):
            entry = json.loads(line)
            if not isinstance(entry, dict):
                raise InvalidArgument("it is no JSON object")
            if pool is None:
                pool, result.placement = _pool_of(entry), entry["options"]["placement"]
                continue
            name = _event_of(entry)
            made, decided = _call(pool, name, entry)
            written = entry.get("decided", {})
            result.events += 1
            result.jobs += name == "submit" and "own" not in entry[name]
            result.runs += len(written.get("starts", ()))
            if name == "add_device":
                result.devices.append(entry[name]["name"])
            result.mismatch = _difference(number, name, entry, made, decided)
            if result.mismatch is not None:
                break
            course.follow(name, entry, written)
    if pool is None:
        raise InvalidArgument("line 1 of the ledger: there is no header, the ledger is empty")
    result.times = course.times()
    return result


def what_if_pool(ledger: Ledger, placement: str | None = None, *, remove: Collection[str] = ()) -> PoolTimes:
    """How long the jobs in a pool's ledger would have waited and taken with another placement or fewer devices.

    On a virtual clock jobs arrive, are cancelled and lose devices as they did. A run takes what its kind took on that device by the last models in the ledger, scaled to what its runs took in the mean, times how much longer
    than by these models the first of its jobs took when it ran. The models are known from the start. No run fails. A job whose submit waited, or would have waited, for room in a full queue comes when it was
    submitted, and waits for room from then on. After the last submit no device is retired, since a pool that is closed retires all.

    Parameters
    ----------
    ledger
        As in `replay_pool`.
    placement
        ``"auto"``, ``"any"``, ``"round_robin"``, ``"least_outstanding"``, ``"weighted"`` or ``"earliest_finish"``. None: that of the ledger.
    remove
        Devices that take no jobs from the beginning. The others then take jobs all the time: devices that were released in the ledger, by `retire`,
        by ``Autoscale`` or for a trainer beside the pool, stay.

    Returns
    -------
    PoolTimes
        With the placement of the ledger, too, it differs from what was: decisions there knew only what had been measured.

    Raises
    ------
    InvalidArgument
        As `replay_pool`, for another placement, and without one for a ledger whose placement was a function.
    OSError
        If the file cannot be read.
    """
    lines = list(lines_of(ledger))
    return arrivals(lines, replay_pool(lines))[1](placement, remove, bool(remove))


def arrivals(
    lines: list[str], found: PoolReplayResult
) -> tuple[list[dict[str, Any]], Callable[[str | None, Collection[str], bool], PoolTimes]]:
    """The events of a replayed ledger, and what answers many times with a placement, what to remove, and whether no device is released."""
    if found.mismatch is not None:
        raise InvalidArgument(
            f"line {found.mismatch.line} of the ledger: its decision is not reproduced, so what follows is not known"
        )
    header, *entries = with_kinds_kept([json.loads(line) for line in lines[: -1 if found.cut_off else None]])
    seconds = Seconds(entries)

    def ask(placement: str | None, remove: Collection[str], stay: bool) -> PoolTimes:
        if (placement or found.placement) == "custom":
            raise InvalidArgument(
                "the pool's placement was a function, and the ledger has its answers, but not what it would answer otherwise: name a placement for what_if_pool"
            )
        return _WhatIf(_pool_of(header, placement), seconds, remove).run(without_own_of(entries, remove), stay)

    return entries, ask


def _pool_of(header: Any, placement: str | None = None) -> PoolState:
    version, options = header["paceline_pool_ledger"], header["options"]
    if version != POOL_LEDGER_VERSION:
        raise InvalidArgument(f"the ledger has version {version}, this library reads version {POOL_LEDGER_VERSION}")
    return PoolState(**{**options, "placement": placement or options["placement"]})


def _event_of(entry: dict[str, Any]) -> str:
    for name in _EVENTS:
        if name in entry:
            return name
    raise InvalidArgument(f"none of {', '.join(_EVENTS)} is there")


def _call(pool: PoolState, name: str, entry: dict[str, Any]) -> tuple[int | None, dict[str, Any]]:
    """Let an event happen. Returns the number of a job that was submitted, and what was decided."""
    made: int | None = None
    text: Any = ""
    if "chosen" in entry:
        pool.chose(entry["chosen"])
    if name in _TIMELESS:
        getattr(pool, name)(**entry[name])
    elif name == "submit":
        made, text = pool.submit(entry["at"], **entry[name])
    else:
        text = getattr(pool, name)(entry["at"], **entry[name])
    return made, json.loads(text) if text else {}


def _difference(line: int, name: str, entry: dict[str, Any], made: int | None, decided: dict[str, Any]) -> Any:
    found = {"job": made, **decided}
    said = {"job": entry.get("job"), **entry.get("decided", {})}
    for key in ("job", *_DECIDED):
        if said.get(key) != found.get(key):
            what = f"{key}: the ledger says {json.dumps(said.get(key))}, replayed {json.dumps(found.get(key))}"
            return PoolLedgerMismatch(line, name, what)
    return None


class _Course:
    """What happens to the jobs of a pool."""

    def __init__(self) -> None:
        self._due: dict[int, float] = {}
        self._waited: dict[int, float] = {}
        self._took: list[float] = []
        self._runs: dict[int, list[int]] = {}
        self._outcomes: Counter[str] = Counter()
        self._begin, self._end = math.inf, -math.inf

    def follow(self, name: str, entry: dict[str, Any], decided: dict[str, Any]) -> None:
        """An event, and what was decided."""
        if "at" not in entry:
            return
        at, call = entry["at"], entry[name]
        self._begin, self._end = min(self._begin, at), at
        if name == "submit" and not call.get("own"):  # nobody waits for what is the pool's own
            self._due[entry["job"]] = entry.get("came", at) + call.get("not_before_seconds", 0.0)
        elif name == "withdraw":  # it had not begun
            for job in self._runs[call["run"]]:
                self._waited.pop(job, None)
        for job, outcome, *_ in decided.get("ends", ()):
            if job in self._due:
                self._outcomes[outcome] += 1
                if outcome == "completed":
                    self._took.append(at - self._due[job])
        for start in decided.get("starts", ()):
            self._runs[start["run"]] = start["jobs"]
            for job in filter(self._due.__contains__, start["jobs"]):
                self._waited.setdefault(job, at - self._due[job])

    def times(self) -> PoolTimes:
        return PoolTimes(
            *_figures(self._waited.values()),
            *_figures(self._took),
            outcomes=dict(self._outcomes),
            elapsed_seconds=max(self._end - self._begin, 0.0),
            p99_error=_error(self._took),
        )


def _figures(values: Iterable[float]) -> tuple[float, float, float]:
    """Mean, median and 99th percentile."""
    ordered = sorted(values) or [0.0]
    return statistics.fmean(ordered), ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]


def _error(values: list[float]) -> float | None:
    if len(values) < 2 * _PARTS:
        return None
    cuts = [len(values) * part // _PARTS for part in range(_PARTS + 1)]
    parts = [_figures(values[begin:end])[2] for begin, end in itertools.pairwise(cuts)]
    return statistics.stdev(parts) / math.sqrt(_PARTS) / (statistics.fmean(parts) or 1.0)


class _WhatIf:
    """Runs what arrives in a ledger with other decisions."""

    def __init__(self, pool: PoolState, seconds: Seconds, remove: Collection[str]) -> None:
        self._pool, self._seconds, self._course, self._remove = pool, seconds, _Course(), remove
        self._ids: dict[int, int] = {}  # of jobs in the ledger
        self._waiting = Waiting(pool, self._ids, self._happens)
        self._jobs: dict[int, int] = {}  # and back
        self._removed: set[int] = set()
        self._ends: list[tuple[float, int, float]] = []
        self._kinds, self._devices, self._now, self._wake = 0, 0, 0.0, math.inf

    def run(self, entries: list[dict[str, Any]], stay: bool) -> PoolTimes:
        last = max((number for number, entry in enumerate(entries) if "submit" in entry), default=0)
        lost: set[int] = set()
        for number, entry in enumerate(entries):
            name = _event_of(entry)
            back = name == "restore" and entry[name]["device"] in lost  # no release ends with it
            ignored = name in _RELEASES and not back and (stay or (name == "retire" and number > last))
            if name in ("lose", "restore"):
                (lost.add if name == "lose" else lost.discard)(entry[name]["device"])
            if name in _ARRIVE and not ignored:
                with at_line(number + 2):
                    self._arrive(name, entry)
        self._until(math.inf)
        return self._course.times()

    def _arrive(self, name: str, entry: dict[str, Any]) -> None:
        if (arguments := dict(entry[name])).get("device") in self._removed:
            return
        if "at" in entry:
            self._until(entry["at"])
            self._now = max(self._now, entry["at"])
        if name == "submit":
            return self._waiting.comes(entry)
        if name == "cancel":
            self._waiting.cancel(arguments["job"])
        else:
            self._happens(name, arguments)
        if name == "add_kind":
            self._kinds += 1
            self._measure((self._kinds - 1, device) for device in range(self._devices))
        elif name == "add_device":
            self._devices += 1
            self._measure((kind, self._devices - 1) for kind in range(self._kinds))
            if arguments["name"] in self._remove:
                self._removed.add(self._devices - 1)
                self._happens("retire", {"device": self._devices - 1})
        self._waiting.go_on()

    def _measure(self, pairs: Iterable[tuple[int, int]]) -> None:
        for kind, device in pairs:
            model = self._seconds.models.get((kind, device))
            if model is not None:
                self._happens("measure", {"device": device, "kind": kind, "model": model, "samples": _SAMPLES})

    def _until(self, at: float) -> None:
        """Let happen what comes before, or at that time."""
        while True:
            end = self._ends[0][0] if self._ends else math.inf
            due = min(end, self._wake)
            if due > at or due == math.inf:
                return
            self._now = max(self._now, due)
            if end <= self._wake:
                _, run, seconds = heapq.heappop(self._ends)
                self._happens("finish", {"run": run, "result": "completed", "seconds": seconds})
            else:
                self._happens("tick", {})
            self._waiting.go_on()

    def _happens(self, name: str, arguments: dict[str, Any], submit: dict[str, Any] | None = None) -> None:
        entry: dict[str, Any] = {name: arguments}
        if name not in _TIMELESS:
            entry["at"] = self._now
        made, decided = _call(self._pool, name, entry)
        if made is not None and submit is not None:
            self._ids[submit["job"]], self._jobs[made] = made, submit["job"]
            entry |= {"job": made, "came": submit["at"]}
        self._course.follow(name, entry, decided)
        if "at" in entry:
            self._wake = decided.get("wake_seconds", math.inf)
        for start in decided.get("starts", ()):
            seconds = self._seconds.of(start, self._jobs.get(start["jobs"][0]))
            heapq.heappush(self._ends, (self._now + start.get("load_seconds", 0.0) + seconds, start["run"], seconds))
