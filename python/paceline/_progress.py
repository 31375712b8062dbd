"""Show the progress of a training loop: redrawn in place on a terminal if rich is installed, otherwise as plain lines."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Generic, TextIO, TypeAlias, TypeVar

from paceline import InvalidArgument

_T = TypeVar("_T")

# Reading the figures waits for GPUs. This pause is long enough to cost nothing, and short enough to look alive.
REDRAW_SECONDS = 0.25
_WINDOW_SECONDS = 2.0  # a redrawn figure is a mean over at least this time, because single steps would flicker
_MOST_DEVICES_IN_A_LINE = 8


@dataclass(frozen=True)
class DeviceFigures:
    """What one device did in the steps since the previous figures."""

    name: str
    amount: float  # mean per step, in items or cost
    busy: float  # busy fraction of the steps' time


@dataclass(frozen=True)
class Figures:
    """The state of a loop."""

    done: int  # batches
    total: int | None
    head: str  # what belongs to no single device, in words
    devices: list[DeviceFigures]
    by_cost: bool  # whether the devices' amounts are costs
    of: str = "batches"  # what is counted
    per: str = "step"  # what the devices' amounts are for: a step, or a second


Show: TypeAlias = Callable[[Figures], None]


@dataclass(eq=False)
class Progress(Generic[_T]):
    """Yield `batches` and show progress. Draws between two batches in the caller's thread; starts no thread.

    `report` returns what `paceline.torch.DataParallel.report` returns, and `loss` the last loss, or None before the first one. `total`: the number of
    batches; None: ``len(batches)``, if it has a length. `every`: seconds between two plain lines. `file`: the output; None: ``sys.stderr`` at the
    time when the loop begins. `watched` turns the batches into the iterable to loop over.
    """

    batches: Iterable[_T]
    report: Callable[[], Mapping[str, Any]]
    loss: Callable[[], float | None]
    _: KW_ONLY
    total: int | None = None
    every: float = 10.0
    file: TextIO | None = None
    watched: Callable[[Iterable[_T]], Iterable[_T]] = iter
    display: Callable[[TextIO], AbstractContextManager[Show] | None] | None = None  # in place of `live_display`

    def __post_init__(self) -> None:
        if not self.every >= 0:
            raise InvalidArgument(f"progress: every is {self.every}; it is the seconds between two lines, at least 0.")
        if self.total is None:
            with suppress(TypeError):  # a generator, or a loader over an iterable data set
                self.total = len(self.batches)  # type: ignore[arg-type]

    def __len__(self) -> int:
        if self.total is None:
            raise TypeError("the length of these batches is not known; pass total=")
        return self.total

    def __iter__(self) -> Iterator[_T]:
        # A generator, so that leaving the loop in any way ends it at once and restores the terminal before a traceback is printed.
        file = sys.stderr if self.file is None else self.file
        display = (self.display or live_display)(file)
        pause, window = (self.every, 0.0) if display is None else (REDRAW_SECONDS, _WINDOW_SECONDS)
        figures = _FiguresSince(self, window)
        with nullcontext(partial(print_line, file)) if display is None else display as show:
            done, last_done, last = 0, 0, float("-inf")
            for batch in self.watched(self.batches):
                yield batch
                done += 1
                now = time.monotonic()
                if now - last >= pause:
                    show(figures(done))
                    last_done, last = done, now
            if done > last_done:
                show(figures(done))


class _FiguresSince:
    """Compute figures over the steps since the previous figures, or over the last `window` seconds if that is longer."""

    def __init__(self, progress: Progress[Any], window: float) -> None:
        self._of = progress
        self._window = window
        self._first = self._since = self._next = progress.report()
        self._next_time = time.monotonic()

    def __call__(self, done: int) -> Figures:
        now = self._of.report()
        if now.get("of") != self._first.get("of"):  # about another kind of work from now on
            self._first = self._since = self._next = now
        since = self._since
        steps = now["steps"] - since["steps"] - (now.get("proved", 0) - since.get("proved", 0))  # that have times
        seconds = now["step_seconds"] - since["step_seconds"]
        # If only some of the steps had costs, amounts are in items.
        by_cost = steps > 0 and _steps_with_costs(now) - _steps_with_costs(since) == steps
        kind = "cost" if by_cost else "items"
        devices = []
        for name, entry in now["devices"].items():
            before = since["devices"][name]
            busy = (entry["busy_seconds"] - before["busy_seconds"]) / seconds if seconds > 0 else 0.0
            devices.append(DeviceFigures(name, (entry[kind] - before.get(kind, 0)) / max(steps, 1), busy))
        if time.monotonic() - self._next_time >= self._window:
            # Keep one window back, so that the next figures cover one to two windows. Without a window, the next figures start here.
            self._since = self._next if self._window > 0 else now
            self._next, self._next_time = now, time.monotonic()
        total, loss = self._of.total, self._of.loss()
        head = [f"{done}" if total is None else f"{done}/{total}", f"step {now['steps'] - self._first['steps']}"]
        head += [] if loss is None else [f"loss {loss:.4g}"]
        head += [f"{1e3 * seconds / steps:.1f} ms/step"] if steps else []
        head += [f"imbalance {now['imbalance']:.1%}", f"moves {now['moves'] - self._first['moves']}"]
        return Figures(done, total, "  ".join(head), devices, by_cost)


def print_line(file: TextIO, figures: Figures) -> None:
    """Print a line, for files, pipes, notebooks, and terminals without rich."""
    cost = "cost " if figures.by_cost else ""
    rate = "/s" if figures.per == "second" else ""
    devices = [f"{entry.name} {cost}{entry.amount:.4g}{rate} ({entry.busy:.0%} busy)" for entry in figures.devices]
    if len(devices) > _MOST_DEVICES_IN_A_LINE:
        amount, busy = ([getattr(entry, key) for entry in figures.devices] for key in ("amount", "busy"))
        range_of = f"{min(amount):.4g} to {max(amount):.4g} ({min(busy):.0%} to {max(busy):.0%} busy)"
        devices = [f"{len(devices)} devices {cost}{range_of}"]
    print("  ".join([figures.head, *devices]), file=file, flush=True)


def live_display(file: TextIO) -> AbstractContextManager[Show] | None:
    """The display that redraws itself, or None if it cannot be used here."""
    if not _is_terminal(file) or _logs_to_a_terminal():
        return None
    try:
        from paceline._progress_live import live
    except ImportError:  # rich is an extra
        return None
    return live(file)


def _logs_to_a_terminal() -> bool:
    """Whether a log handler writes to a terminal, into the redrawn lines. Handlers keep the stream that they were created with."""
    return any(_is_terminal(getattr(handler, "stream", None)) for handler in logging.getLogger().handlers)


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # None, another object, or a closed file, which the next write reports
        return False


def _steps_with_costs(report: Mapping[str, Any]) -> int:
    return int(report["items"]["steps"]) if "items" in report else 0
