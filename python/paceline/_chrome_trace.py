"""Write what happened when as a file for https://ui.perfetto.dev and chrome://tracing.

The format is Google's "Trace Event Format": JSON with complete events ("X"), instant events ("i") and metadata ("M").
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from paceline._files import write_whole


class ChromeTrace:
    """Spans and instants on named rows of one process. Seconds count from any moment that is the same for all of them.

    Spans of one row must not overlap, unless one lies inside of the other, which is then drawn below it. Give a row of its own to what runs
    beside something else, such as ``"host:0 sends"``. In the file time counts from the first event, in microseconds.
    """

    def __init__(self, process: str, rows: Sequence[str] = ()) -> None:
        self._process = process
        self._rows = {name: number for number, name in enumerate(rows)}
        # What an event has in the file, apart from its time, and its start and end in seconds.
        self._events: list[tuple[dict[str, Any], float, float | None]] = []

    def span(self, row: str, name: str, start_seconds: float, finish_seconds: float, *, kind: str, **args: Any) -> None:
        """Add what took from one moment to another. `kind` is a category to filter by; `args` is shown when the span is clicked.

        A row that `rows` did not name comes below the others.
        """
        self._add("X", row, name, start_seconds, finish_seconds, kind, args)

    def instant(self, row: str, name: str, seconds: float, *, kind: str, **args: Any) -> None:
        """Add what happened at one moment. Otherwise like `span`."""
        self._add("i", row, name, seconds, None, kind, args)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write all events to a file. An existing file is replaced. If writing fails (OSError), it stays as it was."""
        write_whole(path, json.dumps({"traceEvents": self._named() + self._timed(), "displayTimeUnit": "ms"}))

    def _add(
        self, phase: str, row: str, name: str, start: float, finish: float | None, kind: str, args: dict[str, Any]
    ) -> None:
        number = self._rows.setdefault(row, len(self._rows))
        event: dict[str, Any] = {
            "ph": phase,
            "name": name,
            "cat": kind,
            "pid": os.getpid(),
            "tid": number,
            "args": args,
        }
        self._events.append((event, start, finish))

    def _named(self) -> list[dict[str, Any]]:
        """The events that name the process and its rows, and give the rows their order."""
        named: list[tuple[str, int, dict[str, Any]]] = [("process_name", 0, {"name": self._process})]
        for name, number in self._rows.items():
            named += [("thread_name", number, {"name": name}), ("thread_sort_index", number, {"sort_index": number})]
        return [
            {"ph": "M", "name": name, "pid": os.getpid(), "tid": number, "args": args} for name, number, args in named
        ]

    def _timed(self) -> list[dict[str, Any]]:
        first = min((start for _, start, _ in self._events), default=0.0)

        def nanoseconds(seconds: float) -> int:  # whole ones: spans that touch in seconds also touch in the file
            return round(1e9 * (seconds - first))

        # Spans that begin together come with the outer one first, which is how readers tell which one holds the other.
        ordered = sorted(
            ((event, nanoseconds(start), None if finish is None else nanoseconds(finish)) for event, start, finish in self._events),
            key=lambda one: (one[1], -(one[1] if one[2] is None else one[2])),
        )  # fmt: skip
        return [
            event | {"ts": start / 1e3} | ({"s": "t"} if finish is None else {"dur": (finish - start) / 1e3})
            for event, start, finish in ordered
        ]
