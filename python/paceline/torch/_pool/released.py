"""What becomes of models on a device that a pool releases, and before the device takes work again."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING

from paceline._words import warn
from paceline.torch._pool.job import clear_frames

if TYPE_CHECKING:
    from paceline.torch._pool.answerer import Answerer
    from paceline.torch._pool.jobs import Jobs

_SETTLED = 0.5  # seconds from a release on, in which a worker begins the batch that it had taken
_LOOK = 0.1  # seconds between looks at whether a load hangs
_RETRY, _LONGEST_RETRY = 10.0, 600.0  # seconds after a load that failed; twice as many after each more


class Released:
    """Frees what models keep on released devices, and loads it before these devices come back: beside the service, one device at a time. Threads: any.

    Attributes
    ----------
    coming
        The devices that are loaded, or wait for it. Whoever takes one out stops its load.
    arriving
        Those that have all that answered a moment ago. Whoever publishes a version loads it there, too.
    """

    def __init__(self) -> None:
        self.coming: set[str] = set()
        self.arriving: set[str] = set()
        self._full: dict[str, float] = {}  # devices that may keep something, and when that can be freed
        self._seconds: dict[str, float] = {}  # of the last load
        self._failed: dict[str, tuple[float, float]] = {}  # until when it is not tried again, and for how long
        self._thread: threading.Thread | None = None
        self._loads: threading.Thread | None = None  # the one that loads a device
        self._step = 0.0  # when its present load or batch has begun
        self._over = False
        self._lock = threading.RLock()  # for the thread

    def note(self, name: str) -> None:
        """The device was just released."""
        self._full[name] = time.monotonic() + _SETTLED

    def want(self, name: str) -> None:
        """Load what answers on a released device, and then take it back."""
        with self._lock:
            if not self._over:
                self.note(name)  # what is loaded is freed if it stays away
                self.coming.add(name)

    def back(self, name: str) -> None:
        """The device is about to take work."""
        self.coming.discard(name)
        self._full.pop(name, None)

    def leave(self, jobs: Jobs, name: str) -> None:
        """Let what goes on for the device end early, and wait for that: it is about to take work."""
        self.back(name)
        if name not in jobs.engine.active and (seat := jobs.seats.get(name)):
            with seat.loading():
                pass

    def go_on(self, jobs: Jobs) -> None:
        """Do what is due, on a thread, unless one is at it."""
        with self._lock:
            if not self._over and self._thread is None and (self.coming or self._full):
                thread = threading.Thread(target=self._run, args=(jobs,), name="paceline pool released", daemon=True)
                thread.start()
                self._thread = thread

    def end(self) -> None:
        """Stop, and wait until that is so: the pool's streams end. What is loaded or freed may close the pool, and waits for nothing."""
        with self._lock:
            self._over = True
            self.coming.clear()
            thread = self._thread
        if thread is not None and threading.current_thread() not in (thread, self._loads):
            thread.join()

    def failed(self) -> set[str]:
        """The devices on which a load has failed lately."""
        return {name for name, (until, _) in list(self._failed.items()) if time.monotonic() < until}

    def seconds_of(self, jobs: Jobs, name: str) -> float:
        """How long the device will load: as the last time, as the longest of others, or as first batches have taken together."""
        if not jobs.keeps_models:
            return 0.0
        known = [*self._seconds.values()]
        if not known:
            answers = [made.served for one in jobs.versions() for made in one.answering()]
            known = [sum(one.load_seconds for one in answers if jobs.loads_ahead(jobs.seats[name], one))]
        return self._seconds.get(name, max(known))

    def _run(self, jobs: Jobs) -> None:
        try:
            for name, when in list(self._full.items()):
                if name not in self.coming and when <= time.monotonic():
                    self._free(jobs, name)
            for name in sorted(self.coming):
                if not self._over:  # each on a thread of its own, which is prepared for the device for good
                    loads = threading.Thread(
                        target=self._bring, args=(jobs, name), name=f"paceline {name}", daemon=True
                    )
                    self._loads, self._step = loads, math.inf  # while it waits for other loads
                    loads.start()
                    self._wait(jobs, name, loads)
        finally:
            with self._lock:
                self._thread = None

    def _wait(self, jobs: Jobs, name: str, loads: threading.Thread) -> None:
        """Wait until it has ended, or hangs in a load or a batch. Then its `goes_on` says no."""
        watchdog = jobs.watchdog
        while loads.is_alive():
            loads.join(None if watchdog is None else _LOOK)
            if watchdog is None:
                continue
            with self._lock:
                if not loads.is_alive() or time.monotonic() <= self._step + watchdog.seconds:
                    continue
                self._loads = None
            self.arriving.discard(name)
            self._fail(name, "what answers", watchdog.give_up_load(jobs.seats[name], f"{name}, loading", loads))
            return

    def _free(self, jobs: Jobs, name: str) -> None:
        busy = {device for _, device, *_ in jobs.engine.runs_over(0.0)}
        # A version that is just published may have begun to load there before the release.
        if name in busy or name in jobs.engine.active or any(one.bringing for one in jobs.versions()):
            return
        seat = jobs.seats[name]
        with seat.loading():
            if name in self._full:  # otherwise it takes work again
                jobs.unload(seat)
                self._full.pop(name, None)

    def _bring(self, jobs: Jobs, name: str) -> None:
        seat, begun, made = jobs.seats[name], time.monotonic(), None
        done: set[Answerer] = set()
        here = threading.current_thread()

        def goes_on() -> bool:
            with self._lock:
                if self._over or self._loads is not here:
                    return False
                self._step = time.monotonic()
            return name in self.coming

        try:
            with seat.loading():
                while goes_on():
                    # Before the look at what there is, so that a version that comes later is loaded there as well.
                    self.arriving.add(name)
                    endpoints = jobs.versions()
                    if any(one.exchanging for one in endpoints):
                        return  # until a later look
                    left = [(one, version) for one in endpoints for version in one.answering() if version not in done]
                    if not left:
                        break
                    self.arriving.discard(name)
                    versions, made = left[0]
                    versions.warming("restore", made).ahead(seat, goes_on)
                    done.add(made)
            if goes_on():
                self._seconds[name] = time.monotonic() - begun
                self._failed.pop(name, None)
                jobs.scale.take_back(jobs, name)
        except BaseException as error:
            if self._loads is here:
                self._fail(name, "the device" if made is None else made.name, error)
        finally:
            if self._loads is here:
                self.arriving.discard(name)
            elif name not in jobs.engine.active:  # it was given up, and nobody keeps what it has made
                seat.release_memory()

    def _fail(self, name: str, what: str, error: BaseException) -> None:
        clear_frames(error)  # they refer to what was loaded
        before = self._failed.get(name)
        wait = _RETRY if before is None else min(2 * before[1], _LONGEST_RETRY)
        self._failed[name] = time.monotonic() + wait, wait
        self.coming.discard(name)
        if before is None:
            warn(
                f"paceline autoscale: {name} stays released, since loading {what} there has raised {error!r}. The pool tries it again from time to time. "
                f"restore({name!r}) takes the device back as it is."
            )
