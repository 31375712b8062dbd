"""Gives up jobs that hang, so that their device is free again."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from paceline import Error, InvalidArgument, Timeout
from paceline._words import warn
from paceline.torch._devices.compile_gate import CompileGate
from paceline.torch._pool.job import of_users
from paceline.torch._pool.seats import Seat
from paceline.torch._replicas.capture import forget_load

_LOOKS = 10  # during the time that a job may take
_LONGEST_PAUSE = 1.0  # seconds


class Watchdog:
    """Looks at what runs of `jobs`, a pool's, on a thread of its own, which ends with the pool.

    The thread needs Python's lock. If native code hangs and keeps that lock, nothing is given up.
    """

    def __init__(self, jobs: Any, seconds: float) -> None:
        if not (isinstance(seconds, (int, float)) and seconds > 0):
            raise InvalidArgument(f"Pool: hang_seconds={seconds!r} must be a positive number of seconds.")
        self.hangs: deque[dict[str, Any]] = deque(maxlen=100)
        self.hung: set[str] = set()  # devices
        self.seconds, self._over = seconds, threading.Event()
        looks = weakref.ref(jobs)
        threading.Thread(target=self._look, args=(looks,), name="paceline pool watchdog", daemon=True).start()

    def end(self) -> None:
        """Let the thread end."""
        self._over.set()

    def _look(self, known: weakref.ref[Any]) -> None:
        while not self._over.wait(min(self.seconds / _LOOKS, _LONGEST_PAUSE)):
            jobs = known()
            if jobs is None:
                return
            with contextlib.suppress(Exception):  # the thread has to go on
                for run, device, kind, works in jobs.engine.runs_over(self.seconds):
                    self._give_up(jobs, run, device, kind, works)
            del jobs

    def _give_up(self, jobs: Any, run: int, device: str, kind: str, works: list[Any]) -> None:
        lead = min(works, key=lambda one: one.own)  # as `Request.run_batch` takes them
        thread = lead.thread  # None: only a GPU is still at it
        where = _where(thread)
        message = f"watchdog: '{kind}' has run on {device} for more than hang_seconds={self.seconds:g} s{where and f', and is at {where}'}."
        for work in works:
            work.hang(device)
        if lead.enqueued:
            told = f"{message} The pool has given it up. The GPU goes on with it, beside later jobs. If it does not end, retire('{device}') lets others run these."
        else:
            told = f"{message} The pool has given it up. Its thread goes on, and another one runs the jobs of {device}."
        jobs_of_users = of_users(works)
        known = lead.run_until_now([device], jobs_of_users, "given up")
        hang = {"device": device, "kind": kind, "jobs": jobs_of_users, "where": where, "time": time.time()}

        def note() -> None:
            self.hung.add(device)
            self.hangs.append(hang)
            jobs.figures.end_run(lead, known)
            warn(f"paceline {told}")

        lead.on_timeout = note  # before anybody who waits for it goes on
        try:
            if jobs.engine.give_up(run, told, device) and thread is not None:
                CompileGate.forget(thread)
                forget_load(thread)
        except Error as error:
            warn(f"paceline {message} It goes on, and its jobs wait, since {device} gives no other stream: {error}")
            raise
        finally:
            lead.on_timeout = None

    def give_up_load(self, seat: Seat, kind: str, thread: threading.Thread) -> Timeout:
        """Give up what another thread than a worker loads. It goes on, and holds up no other load. Returns the error that says so."""
        seat.leave_load()
        CompileGate.forget(thread.ident or 0)
        forget_load(thread.ident or 0)
        where = _where(thread.ident)
        self.hung.add(seat.name)
        self.hangs.append({"device": seat.name, "kind": kind, "jobs": 0, "where": where, "time": time.time()})
        told = f"it has taken more than hang_seconds={self.seconds:g} s{where and f', and is at {where}'}."
        return Timeout(f"{told} The pool has given it up, and its thread goes on.")


def run_beside(watchdog: Watchdog | None, seat: Seat, kind: str, load: Callable[[], None]) -> None:
    """Run what loads something onto a device on a thread of its own, and wait for it, until it is given up. The wait for other loads does not count."""
    begun, ended = threading.Event(), threading.Event()
    raised: list[BaseException] = []
    longest = None if watchdog is None else watchdog.seconds

    def run() -> None:
        try:
            with seat.loading():
                begun.set()
                load()
        except BaseException as error:
            raised.append(error)
        finally:
            ended.set()
            begun.set()

    thread = threading.Thread(target=run, name="paceline publish", daemon=True)
    thread.start()
    try:
        begun.wait()
        ended.wait(longest)
    except BaseException:  # an interrupt, after which what is loaded is freed
        begun.wait()
        ended.wait(longest)
        raise
    finally:
        if watchdog is not None and begun.is_set() and not ended.is_set():  # after a second interrupt it may still wait
            raised.append(watchdog.give_up_load(seat, kind, thread))
    if raised:
        raise raised.pop()


def _where(thread: int | None) -> str:
    frame = sys._current_frames().get(thread or 0)
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
