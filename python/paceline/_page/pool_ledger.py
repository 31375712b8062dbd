"""Read what the page of a pool shows from the pool's ledger."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from paceline import InvalidArgument
from paceline._page.document import Section, table
from paceline._page.pool import Never, Run, section_of
from paceline._page.run import Table
from paceline._pool_figures import OUTCOMES, Seconds, VersionFigures, outcome_of, up_to
from paceline._replay import is_cut_off
from paceline._replay_pool import replay_pool
from paceline._words import plural

_MOST = 10_000  # runs, as on the page of a pool
_LACKS = "A ledger has the decisions of a pool, but not its words. The table at the end says how often devices left jobs waiting, and why; explain() of the pool says so of now."
_REQUESTS = re.compile(r"(?P<endpoint>.+?)(, version (?P<number>\d+))?, shape \d+")  # as `Answerer` names their kinds
# Why an idle device declines, by the names in a ledger.
_REASONS = {
    "faster_devices": "faster devices that are busy will end them sooner",
    "deadline": "it cannot end any of them before its deadline",
    "filling": "the batch may still become larger within max_delay",
    "reserved": "it is reserved for a gang",
    "memory": "the model does not fit into its memory beside what runs",
    "foreground": "background work waits while other work waits for the device",
    "quota": "their tenants use as much as their quotas allow",
    "chosen_otherwise": "the placement chose another device, or to wait",
}


def section(name: str, lines: Sequence[str]) -> Section:
    """The page of a pool, by the lines of its ledger.

    Raises
    ------
    InvalidArgument
        As `paceline.sim.replay_pool`, and if no job has run or ended.
    """
    replayed = replay_pool(lines)  # which names a malformed line
    found = _Jobs()
    cut = replayed.mismatch.line if replayed.mismatch is not None else -1 if is_cut_off(lines[-1]) else None
    entries = [json.loads(line) for line in lines[:cut]]
    last = max((number for number, entry in enumerate(entries) if "submit" in entry), default=0)
    for number, entry in enumerate(entries):
        if not ("retire" in entry and number > last):  # a pool that is closed retires all
            found.add(entry)
    if not found.runs and not found.never:
        raise InvalidArgument("the ledger has no job that ran or ended, so there is nothing to show")
    said = _LACKS
    if replayed.mismatch is not None:
        said += f"\nThe page ends at line {cut}, where a replay decides differently: another version wrote the ledger, or it was changed."
    made = section_of(found.names, found.runs[-_MOST:], found.never, found.report(), said)
    placement = "by a function" if replayed.placement == "custom" else replayed.placement
    made.title = (
        f"{name}: {made.title[0].lower()}{made.title[1:]}, placement {placement}, {plural(replayed.jobs, 'job')}"
    )
    if (declined := found.declined()).rows:
        made.pieces.append(table(declined))
    return made


class _Jobs:
    """What has become of the jobs so far."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.runs: list[Run] = []
        self.never: list[Never] = []
        self._kinds: list[str] = []
        self._came: dict[
            int, float
        ] = {}  # when jobs that have not ended were submitted, also those that must not begin before some time
        self._own: set[int] = set()  # jobs of the pool itself, which count as none
        self._declined = Counter[tuple[int, int, str]]()  # device, kind and reason
        self._open: dict[int, tuple[float, dict[str, Any]]] = {}  # runs
        self._retired: set[int] = set()
        self._waits: dict[int, tuple[int, float]] = {}  # by job: the run in which it began, and how long it had waited
        self._outcomes = Counter(dict.fromkeys(OUTCOMES, 0))
        self._kind_of: dict[int, int] = {}  # by job, until it has ended
        self._versions: dict[str, dict[int, VersionFigures]] = {}  # by batcher and number
        self._devices: list[dict[str, Any]] = []

    def add(self, entry: dict[str, Any]) -> None:
        """An event, and what was decided."""
        at, decided = entry.get("at", 0.0), entry.get("decided", {})
        match entry:
            case {"add_device": {"name": name}}:
                self.names.append(name)
                self._devices.append({"jobs": 0, "runs": 0, "busy_seconds": 0.0})
            case {"add_kind": {"name": name}}:
                self._kinds.append(name)
            case {"submit": call, "job": job}:
                self._came[job], self._kind_of[job] = at, call.get("kind", -1)
                if call.get("own"):
                    self._own.add(job)
            case {"finish": call} if call["run"] in self._open:
                self._finish(at, call)
            case {"withdraw": {"run": run}}:  # it had not begun
                for job in self._open.pop(run, (0.0, {"jobs": ()}))[1]["jobs"]:
                    if self._waits[job][0] == run:
                        del self._waits[job]
            case {"retire": {"device": device}} | {"lose": {"device": device}}:
                self._retired.add(device)
            case {"restore": {"device": device}}:
                self._retired.discard(device)
        for job, outcome, *_ in decided.get("ends", ()):
            came, kind = self._came.pop(job, at), self._kind_of.pop(job, -1)
            if job in self._own:
                continue
            self._outcomes[outcome_of(outcome)] += 1
            if (version := self._version_of(kind)) is not None:
                version.count(outcome, self._waits[job][1] if job in self._waits else None)
            if job not in self._waits:
                self.never.append(Never(came, at, "", outcome))
        for start in decided.get("starts", ()):
            self._open[start["run"]] = at, start
            for job in start["jobs"]:
                self._waits.setdefault(job, (start["run"], at - self._came[job]))
        self._declined.update((device, kind, reason) for device, kind, reason, *_ in decided.get("declines", ()))

    def _finish(self, at: float, call: dict[str, Any]) -> None:
        begun, start = self._open.pop(call["run"])
        devices = [self.names[device] for device in start["devices"]]
        waited = begun - min(self._came.get(job, begun) for job in start["jobs"])
        count = sum(job not in self._own for job in start["jobs"])
        self.runs.append(Run(devices, self._kinds[start["kind"]], begun, at, count, waited, call["result"]))
        for device in start["devices"]:
            self._devices[device]["busy_seconds"] += at - begun
        if call["result"] == "completed":
            figures = self._devices[start["devices"][0]]
            figures["jobs"] += count
            figures["runs"] += count > 0
            if count > 0 and (version := self._version_of(start["kind"])) is not None:
                version.count_run(at - begun)

    def _version_of(self, kind: int) -> VersionFigures | None:
        """The version of a model that answers requests of a kind."""
        found = _REQUESTS.fullmatch(self._kinds[kind]) if kind >= 0 else None
        if found is None:
            return None
        versions = self._versions.setdefault(found["endpoint"], {})
        return versions.setdefault(int(found["number"] or 1), VersionFigures())

    def declined(self) -> Table:
        """How often idle devices left jobs waiting, by kind and reason."""
        rows = [
            (self.names[device], self._kinds[kind], _REASONS.get(reason, reason), str(count))
            for (device, kind, reason), count in sorted(self._declined.items())
        ]
        note = "each event after which the device was idle while jobs waited"
        return Table("Who left jobs waiting", ("device", "kind of jobs", "why", "times"), rows, note)

    def report(self) -> dict[str, Any]:
        """What ``Pool.report`` would have said."""
        waits = Seconds()
        for job, (_, seconds) in self._waits.items():
            if job not in self._own:
                waits.add(seconds)
        devices = zip(self.names, self._devices, strict=True)
        running = {job for _, start in self._open.values() for job in start["jobs"]}
        return {
            "devices": {name: {**one, "retired": at in self._retired} for at, (name, one) in enumerate(devices)},
            "waiting": len(self._came.keys() - running),
            "running": len(self._open),
            "backlog_seconds": None,  # the models of the pool know it
            "hangs": [],
            "outcomes": dict(self._outcomes),
            "wait_counts": up_to(waits.counts),
            "wait_seconds_sum": waits.sum,
            "versions": {
                name: [{"number": number, **one.report()} for number, one in sorted(versions.items())]
                for name, versions in self._versions.items()
                if len(versions) > 1
            },
        }
