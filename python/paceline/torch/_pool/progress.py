"""The progress of `Batcher.map`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, TextIO, TypeVar

from paceline._progress import REDRAW_SECONDS, DeviceFigures, Figures, live_display, print_line

_T = TypeVar("_T")
_Devices = Mapping[str, Mapping[str, Any]]  # "jobs" and "busy_seconds" by the name of the device

_JOINED = {"jobs": 0, "busy_seconds": 0.0}  # a device, after the start


def watched(
    answers: Iterator[_T],
    total: int | None,
    devices: Callable[[], _Devices],
    *,
    every: float = 10.0,
    file: TextIO | None = None,
) -> Iterator[_T]:
    """Yield `answers` and show how many came, how many a second, and what each device does. In the caller's thread; starts no thread."""
    file = sys.stderr if file is None else file
    display = live_display(file)
    pause = every if display is None else REDRAW_SECONDS
    begin, before = time.monotonic(), devices()
    with nullcontext(partial(print_line, file)) if display is None else display as show:
        done, last_done, last = 0, 0, float("-inf")
        for answer in answers:
            yield answer
            done += 1
            now = time.monotonic()
            if now - last >= pause:
                show(_figures(done, total, now - begin, before, devices()))
                last_done, last = done, now
        if done > last_done:
            show(_figures(done, total, time.monotonic() - begin, before, devices()))


def _figures(done: int, total: int | None, seconds: float, before: _Devices, now: _Devices) -> Figures:
    seconds = max(seconds, 1e-9)
    since = {name: before.get(name, _JOINED) for name in now}
    rates = {name: (one["jobs"] - since[name]["jobs"]) / seconds for name, one in now.items()}
    busy = {name: (one["busy_seconds"] - since[name]["busy_seconds"]) / seconds for name, one in now.items()}
    head = [str(done) if total is None else f"{done}/{total}", f"{done / seconds:.4g} items/s"]
    return Figures(
        done,
        total,
        "  ".join(head),
        [DeviceFigures(name, rate, min(1.0, busy[name])) for name, rate in rates.items()],
        by_cost=False,
        of="items",
        per="second",
    )
