"""The last runs of a pool, as a timeline and as numbers by name."""

from __future__ import annotations

import itertools
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline import Unavailable
from paceline._chrome_trace import ChromeTrace
from paceline._page.pool import Never, Run
from paceline._words import plural

_KEPT = 10_000
FEW = 1000  # what is read quickly
_QUEUE = "queue"


class Runs:
    """The last runs, and the last jobs that never ran. Threads: any."""

    def __init__(self) -> None:
        self._runs: deque[Run] = deque(maxlen=_KEPT)
        self._never: deque[Never] = deque(maxlen=_KEPT)

    def add(self, run: Run) -> None:
        """Note a run."""
        self._runs.append(run)

    def never_ran(self, kind: str, outcome: str, came: float) -> None:
        """Note a job that has ended now, and came then."""
        self._never.append(Never(came, time.monotonic(), kind, outcome))

    def noted(self) -> tuple[list[Run], list[Never]]:
        """The runs by when they begun, and the jobs that ended without a run."""
        return sorted(self._runs.copy(), key=lambda run: run.begun), list(self._never.copy())

    def since(self, seconds: float) -> list[Run]:
        """The runs that have ended since then, by the clock of `time.monotonic`: the last one first, and at most 1,000."""
        last = itertools.islice(reversed(self._runs.copy()), FEW)
        return list(itertools.takewhile(lambda run: run.ended >= seconds, last))

    def write(self, path: str | os.PathLike[str], devices: Sequence[str]) -> None:
        """Write them all as a trace."""
        runs, never = self.noted()
        if not runs and not never:
            raise Unavailable("trace: no job has run yet, so there is nothing to write.")
        trace = ChromeTrace(f"Pool on {', '.join(devices)}", [*devices, _QUEUE])
        free_at = defaultdict[str, float](float)  # clocks differ a little, and rows of a trace may not overlap
        for run in runs:
            name = f"{run.kind}: {plural(run.jobs, 'request')}" if run.jobs > 1 else run.kind
            if run.outcome != "completed":
                name += f" ({run.outcome})"
            for device in run.devices:
                begun = max(run.begun, free_at[device])
                ended = max(run.ended, begun)
                free_at[device] = ended
                kind = "batch" if run.jobs > 1 else "job" if run.jobs else "own"
                trace.span(
                    device, name, begun, ended, kind=kind, jobs=run.jobs, waited_seconds=run.waited, outcome=run.outcome
                )
        for job in never:
            trace.instant(_QUEUE, f"{job.outcome}: {job.kind}", job.ended, kind=job.outcome)
        trace.write(path)


class Traced:
    """What a pool says of its last runs."""

    _jobs: Any
    _scalars: Scalars
    devices: Any
    report: Callable[[], dict[str, Any]]

    def scalars(self, prefix: str = "paceline/pool/") -> dict[str, float]:
        """Figures by flat names, for what logs numbers, such as TensorBoard.

        Returns
        -------
        dict
            ``waiting``, ``running`` and ``backlog_seconds`` are of now. What counts, is of the time since the call before, or since the pool was made: how
            many jobs ended how, such as ``completed``; ``wait_seconds``, the mean wait; and by device, with ``_`` in place of ``:``,
            ``jobs_per_second/host_0``, ``busy_ratio/host_0`` and ``retired/host_0``.
        """
        return self._scalars.of(self.report(), prefix)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the last 10,000 runs as a trace for https://ui.perfetto.dev or chrome://tracing.

        Each device has a row with its jobs and batches. A click shows how many requests a batch has, how long its first one has waited, and how it ended.
        Jobs that never ran are instants in a row of their own. Works after `close`, too.

        Parameters
        ----------
        path
            The JSON file. An existing one is replaced when the new one is complete.

        Raises
        ------
        Unavailable
            Before the first job.
        OSError
            If the file cannot be written.
        """
        self._jobs.figures.runs.write(path, [one.name for one in self.devices])


class Scalars:
    """The figures of reports by flat names. Names of devices have ``_`` in place of ``:`` and ``/``."""

    def __init__(self) -> None:
        self._before: Mapping[str, Any] = {}
        self._then = time.monotonic()

    def of(self, report: Mapping[str, Any], prefix: str) -> dict[str, float]:
        """What is now, and what has come since the call before, or since the beginning."""
        now, before = time.monotonic(), self._before
        seconds = max(now - self._then, 1e-9)
        self._before, self._then = report, now
        waits = report["wait_counts"][-1][1] - (before["wait_counts"][-1][1] if before else 0)
        found: dict[str, float] = {name: report[name] for name in ("waiting", "running", "backlog_seconds")}
        found["wait_seconds"] = (report["wait_seconds_sum"] - before.get("wait_seconds_sum", 0.0)) / max(1, waits)
        for outcome, count in report["outcomes"].items():
            found[outcome] = count - before.get("outcomes", {}).get(outcome, 0)
        for name, device in report["devices"].items():
            plain = name.replace(":", "_").replace("/", "_")
            old = before.get("devices", {}).get(name, {})
            found[f"jobs_per_second/{plain}"] = (device["jobs"] - old.get("jobs", 0)) / seconds
            found[f"busy_ratio/{plain}"] = min(1.0, (device["busy_seconds"] - old.get("busy_seconds", 0.0)) / seconds)
            found[f"retired/{plain}"] = device["retired"]
        return {f"{prefix}{name}": float(value) for name, value in found.items()}
