"""Writes down what every device and thread is doing when a call takes longer than a deadline."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from paceline._words import plural
from paceline.torch._devices.failures import noted
from paceline.torch._devices.places import Places
from paceline.torch._run.call import Call
from paceline.torch._run.executor import Executor
from paceline.torch._run.feature import Bound, Context, Feature

_numbers = itertools.count()  # of the files of this process


class Work:
    """What one device has done in one call."""

    def __init__(self) -> None:
        self.last: tuple[int, int] | None = None  # the items of its last micro-batch
        self.since = 0.0  # when that began, or ended
        self.ended = 0  # how many micro-batches have ended


class WatchedCall:
    """One call under watch: `number` counts the trainer's calls from 1, and `running` returns its run, once there is one."""

    def __init__(self, number: int, running: Callable[[], Executor | None], devices: int) -> None:
        self.number = number
        self.running = running
        self.began = time.monotonic()
        self.works = [Work() for _ in range(devices)]
        self.report: str | None = None  # where everything was written, in words

    @contextlib.contextmanager
    def micro_batch(self, device: int, begin: int, end: int) -> Iterator[None]:
        """Note what a worker runs, around one micro-batch."""
        work = self.works[device]
        work.last, work.since = (begin, end), time.monotonic()
        try:
            yield
        finally:
            work.since = time.monotonic()
            work.ended += 1


class _Notes(Bound):
    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog

    def begin(self, run: Executor) -> None:
        self._watched = self._watchdog.watched

    def micro_batch(self, run: Executor, device: int, begin: int, end: int) -> Context:
        return self._watched.micro_batch(device, begin, end)


class Watchdog(Feature):
    """Watches the calls of one trainer, one at a time.

    A timer for each call would cost a thread for each. Here one thread sleeps until the deadline of the call that ran when it fell asleep.
    If no call runs then, it ends, and the next call starts another.

    The thread needs Python's lock. If native code hangs and keeps that lock, nothing is written.
    """

    def __init__(self, seconds: float, folder: Path, places: Places) -> None:
        self._call: WatchedCall | None = None  # the one that runs now
        self._seconds = seconds
        self._folder = folder
        self._places = places
        self._condition = threading.Condition()
        self._is_watching = False
        self._closed = False

    def bind(self, call: Call) -> Bound | None:
        return _Notes(self)

    @property
    def watched(self) -> WatchedCall:
        """The call that runs now."""
        assert self._call is not None
        return self._call

    @contextlib.contextmanager
    def call(self, number: int, running: Callable[[], Executor | None]) -> Iterator[None]:
        """Watch a call for the length of a ``with`` block. An error that ends it late says where its state was written."""
        call = WatchedCall(number, running, len(self._places))
        with self._condition:
            self._call = call
            if not self._is_watching:
                threading.Thread(target=self._sleep_and_look, name="paceline watchdog", daemon=True).start()
                self._is_watching = True
        try:
            yield
        except BaseException as error:
            if call.report is not None:
                noted(error, call.report)
            raise
        finally:
            with self._condition:
                self._call = None

    def close(self) -> None:
        """Let the thread end now."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _sleep_and_look(self) -> None:
        while True:
            with self._condition:
                call = self._call
                if call is None or self._closed:
                    self._is_watching = False
                    return
                left = self._seconds if call.report is not None else call.began + self._seconds - time.monotonic()
                if left > 0:
                    del call  # it refers to the trainer, which may be dropped meanwhile
                    self._condition.wait(left)
                    continue
            self._report(call)

    def _report(self, call: WatchedCall) -> None:
        """Write the file, then warn. GPUs are asked last, since their driver may hang as well."""
        begun = f"watchdog: call {call.number} of this trainer has run for more than {self._seconds:g} s"
        native = f"Stacks of native code: py-spy dump --native --pid {os.getpid()}"
        try:
            with self._new_file() as file:
                file.write(
                    f"paceline {begun}; process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}.\n{native}\n\n"
                )
                file.write(f"{self._described(call)}\nStacks of Python, of all threads:\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                call.report = f"{begun}. What its devices do, and all stacks of Python, are in {file.name}. {native}"
                self._warn(call.report)
                for line in self._queues():
                    file.write(line)
                    file.flush()
        except Exception as error:  # the thread has to go on
            call.report = f"{begun}. Its state could not be written: {error}. {native}"
            self._warn(call.report)

    def _new_file(self) -> TextIO:
        """A file of a name that is free. In a container that starts anew the process often has the same number."""
        while True:
            with contextlib.suppress(FileExistsError):
                path = self._folder / f"paceline-watchdog-{os.getpid()}-{next(_numbers)}.txt"
                return path.open("x", encoding="utf-8")

    def _described(self, call: WatchedCall) -> str:
        now, run = time.monotonic(), call.running()
        if run is None:
            return "The call has not reached the devices yet: the caller's thread prepares it.\n"
        lines = [f"Plan: {self._plan(run)}"]
        inside = run.inside
        for device, (name, work) in enumerate(zip(self._places.names, call.works, strict=True)):
            thread = f" (thread 0x{inside[device]:016x})" if device in inside else ""
            ago = f"{now - work.since:.1f} s"
            if work.last is None:
                state = "inside of a micro-batch that has not begun yet" if thread else "has run nothing in this call"
            elif thread:
                state = f"inside of user code for {ago}: {run.batch.described(*work.last)}"
            else:
                state = f"outside of user code for {ago}; its last work: {run.batch.described(*work.last)}"
            lines.append(f"{name}: {state}{thread}; {plural(work.ended, 'micro-batch', 'micro-batches')} ended")
        return "\n".join(lines) + "\n"

    def _plan(self, run: Executor) -> str:
        names = self._places.names
        if run.claims is not None:
            claims = zip(names, run.claims, strict=True)
            return "; ".join(f"{name} runs {_spans(spans)}" for name, spans in claims)
        if run.plan is None:
            return "not made yet"
        shares = zip(names, run.plan.shares, strict=True)
        return f"of {plural(run.batch.size, 'item')} " + ", ".join(f"{share} on {name}" for name, share in shares)

    def _queues(self) -> Iterator[str]:
        """For each GPU whether it has done what was enqueued. A queue whose line is missing did not answer."""
        for device, name in enumerate(self._places.names):
            if self._places.on_gpu[device]:
                yield f"{name}: its queue "
                yield "has reached its end\n" if self._places.has_finished(device) else "still has work\n"

    @staticmethod
    def _warn(message: str) -> None:
        with contextlib.suppress(Exception):  # such as the warning itself, where warnings are errors
            warnings.warn(f"paceline {message}", UserWarning, stacklevel=1)


def _spans(spans: list[tuple[int, int]]) -> str:
    shown = ", ".join(f"{begin} to {end - 1}" for begin, end in spans[:16])
    return f"items {shown}{', ...' if len(spans) > 16 else ''}" if spans else "nothing"
