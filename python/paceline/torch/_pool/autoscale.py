"""How many devices a pool needs: a hint, what-if, and devices that come and go by themselves."""

from __future__ import annotations

import math
import operator
import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline import Error, InvalidArgument
from paceline._core.plan import Scaler, with_covers
from paceline._words import plural, warn
from paceline.torch._pool.jobs import Jobs
from paceline.torch._pool.released import Released
from paceline.torch._pool.tenants import by_name

_TICK = 1.0  # seconds between two decisions
_LEAST_TICK = 0.2  # seconds that one is about
_PAUSE = 0.02  # seconds between two looks that deadlines or bursts want


@dataclass(frozen=True)
class Autoscale:
    """When devices of a pool come and go.

    Parameters
    ----------
    wait
        Seconds that a job shall wait in the mean, from its submit until its run begins. So many devices are taken that four fifths of it are predicted, and most minutes keep it. The
        ``max_delay`` of batches is no reason for more devices.
    keep
        Seconds for which a device is kept that is not needed.
    prices
        Of a second of a device, by its name. Those of the least price for what they do are kept. Others have the price 1.
    """

    wait: float = 0.1
    keep: float = 5.0
    prices: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prices", dict(by_name("prices", self.prices)))  # None: no prices, as in `Pool`
        for name, value in (("wait", self.wait), *((f"prices[{name!r}]", one) for name, one in self.prices.items())):
            if not (isinstance(value, (int, float)) and 0 < value < math.inf):
                raise InvalidArgument(f"Autoscale: {name}={value!r} must be a positive number.")
        if not (isinstance(self.keep, (int, float)) and 0 <= self.keep < math.inf):
            raise InvalidArgument(f"Autoscale: keep={self.keep!r} must be a number of seconds that is not negative.")


class Scale:
    """Decides which devices of `jobs`, a pool's, are needed. With `acts` it retires and restores them, on a thread that ends with the pool. Threads: any."""

    def __init__(self, jobs: Jobs, asked: bool | Autoscale) -> None:
        if not isinstance(asked, (bool, Autoscale)):
            raise InvalidArgument(f"Pool: autoscale={asked!r} must be True, False or an Autoscale.")
        self.options = Autoscale() if isinstance(asked, bool) else asked
        names = [one.name for one in jobs.devices]
        if unknown := sorted(set(self.options.prices) - set(names)):
            raise InvalidArgument(f"Pool: autoscale has prices of {unknown}, which are not among its devices {names}.")
        self.acts = bool(asked)
        self.released: set[str] = set()  # by this; without `acts` only in thought
        self._models = Released()  # on those
        self._out: set[str] = set()  # that the pool's owner has retired
        self._jobs, self._scaler = weakref.ref(jobs), Scaler(self.options.wait)  # the jobs own it
        self._speeds: dict[str, float] = {}  # of the last look
        self._waiting = 0.0  # work, at the last look
        self._filling = 0.0  # seconds in which batches fill, which pass while jobs wait for a device
        self._knows = False  # whether work has come of a kind that was timed
        self._wanted = 0  # devices, by then
        self._holding = 0  # calls during which nothing is released
        self._lock = (
            threading.RLock()
        )  # No device is retired or restored while it is held: callbacks of jobs that end then may want other locks.
        if self.acts:
            over, wake = threading.Event(), threading.Event()
            jobs.ends += [over.set, wake.set, self._models.end]
            jobs.engine.on_wants_devices(wake.set, self.options.wait)
            known = weakref.ref(self)
            threading.Thread(
                target=_look, args=(known, over, wake), name="paceline pool autoscale", daemon=True
            ).start()

    @property
    def away(self) -> set[str]:
        """The devices that it has released."""
        return set(self.released) if self.acts else set()

    @property
    def arriving(self) -> set[str]:
        """See `Released`."""
        return self._models.arriving

    def look(self, least_seconds: float = _LEAST_TICK) -> None:
        """Decide anew, if so much time has passed."""
        jobs = self._jobs()
        if jobs is None:
            return
        with self._lock:
            changes = self._decide(jobs, least_seconds)
        for name, want in changes:
            if want and self.acts and jobs.keeps_models and name not in self._models.failed():
                with self._lock:
                    if name in self.released:
                        self._models.want(name)
            elif want:
                self._models.leave(jobs, name)
                self.take_back(jobs, name)
            elif not self.acts or (
                not self._holding and jobs.engine.retire(name, True, True, self._models.seconds_of(jobs, name))
            ):
                with self._lock:
                    if name not in self._out:
                        self.released.add(name)
                        self._models.note(name)
        if self.acts:
            self._models.go_on(jobs)

    def retire_useless(self, device: str) -> bool:
        """Retire a device that is of no use, but not the last one. Returns whether it did. Released devices come back before, since they may be all others."""
        jobs = self._jobs()
        if jobs is None:
            return False
        with self._lock:
            self._holding += 1
        try:
            for name in list(self.released) if self.acts else ():
                self._models.leave(jobs, name)
                self.take_back(jobs, name)  # each loads with its first batch
            return jobs.engine.retire(device, unless_last=True)
        finally:
            with self._lock:
                self._holding -= 1

    def take_back(self, jobs: Any, name: str) -> None:
        """Let a device that was released take work again."""
        with self._lock:
            self._models.back(name)
            if name not in self.released:
                return
            self.released.discard(name)
        if self.acts:
            jobs.engine.restore(name)
            if name in self._out:  # meanwhile
                jobs.engine.retire(name)

    def _decide(self, jobs: Jobs, least_seconds: float) -> list[tuple[str, bool]]:
        """Which devices shall be released, and which shall come back."""
        tick = jobs.engine.scale_tick(least_seconds, self.options.keep)
        if tick is None:
            return []
        seconds, arrived_work, arrived_jobs, self._waiting, runs, filling, known, speeds, lost, covers = tick
        self._filling = filling if arrived_jobs else self._filling
        self._knows |= arrived_jobs > 0 or self._waiting > 0
        active = set(jobs.engine.active)
        names = [one.name for one in jobs.devices]
        self._speeds = dict(zip(names, speeds, strict=False))  # one may just be added
        gone = {name for name, is_lost in zip(names, lost, strict=False) if is_lost}
        self.released = self.released - active - gone if self.acts else self.released & active
        coming, failed = self._models.coming, self._models.failed()
        coming &= self.released
        away = self.released - coming
        there = {name: name in active or (name in self.released and name not in failed) for name in self._speeds}
        rows = [
            (
                max(speed, 1e-9),
                self.options.prices.get(name, 1.0),
                self._models.seconds_of(jobs, name) if self.acts else 0.0,
                self.options.keep,
                name not in away,
                speed > 0 and there[name],
            )
            for name, speed in self._speeds.items()
        ]
        found = self._scaler.decide(
            rows,
            seconds=seconds,
            arrived_work=arrived_work,
            arrived_jobs=arrived_jobs,
            waiting_work=self._waiting,
            runs=runs,
        )
        wanted = dict(zip(self._speeds, found, strict=True))
        if not known:  # nobody knows what it takes
            wanted = {name: wanted[name] or there[name] for name in wanted}
        able = [there[name] or name in self.released for name in self._speeds]
        covering = with_covers(
            list(wanted.values()),
            [(*row[:-1], there[name] and name not in failed) for row, name in zip(rows, self._speeds, strict=True)],
            [([*map(operator.and_, accepted, able)], count) for accepted, count in covers],
        )
        wanted = dict(zip(self._speeds, covering, strict=True))
        self._wanted = sum(wanted.values())
        coming -= {name for name in coming.copy() if not wanted[name]}  # other threads may take one out
        back = [(name, True) for name in away if wanted.get(name, False)]
        return back + [(name, False) for name in wanted if not wanted[name] and name in active - self.released]

    def desired(self) -> int:
        """How many devices the wait takes."""
        if not self.acts:
            self.look()
        with self._lock:
            return max(1, self._scaler.desired, self._wanted)

    def owned(self, device: str, *, out: bool) -> bool:
        """The pool's owner is about to retire (`out`) or to restore it, so it is no longer this that has released it. Returns whether its owner had retired it."""
        with self._lock:
            was = device in self._out
            self.released.discard(device)
            (self._out.add if out else self._out.discard)(device)
        if not out and (jobs := self._jobs()) is not None:
            self._models.leave(jobs, device)
        return was

    def wait_of(self, remove: Iterable[str], add: Iterable[str | float]) -> dict[str, Any]:
        """See `Scaled.what_if`."""
        jobs = self._jobs()
        active = set() if jobs is None else set(jobs.engine.active)  # first: it raises in a forked process
        self.look(_LEAST_TICK if self._knows else 0.0)
        with self._lock:
            names = [] if jobs is None else [one.name for one in jobs.devices]
            speeds = self._speeds or dict.fromkeys(names, 1 / max(1, len(names)))
            left = {name: speed for name, speed in speeds.items() if name in active | self.released}
            for name in remove:
                if left.pop(name, None) is None:
                    raise InvalidArgument(
                        f"what_if: remove has {name!r}, which is not among the devices that take jobs, {sorted(left)}."
                    )
            fastest = max(speeds.values(), default=1.0)
            asked = list(left.values())
            for one in add:
                if isinstance(one, str) and one not in speeds:
                    raise InvalidArgument(f"what_if: add has {one!r}. Name a device of the pool to add one like it.")
                if not isinstance(one, str) and not 0 < one < math.inf:
                    raise InvalidArgument(f"what_if: add has {one!r}; a speed must be a positive number.")
                asked.append(speeds[one] if isinstance(one, str) else one * fastest)
            if not self._knows:
                raise InvalidArgument(
                    "what_if: nothing is known of the work yet, since none has come of a kind that a device has timed. Let some jobs run first."
                )
            busy = self._scaler.work_per_second / sum(asked) if sum(asked) > 0 else math.inf
            wait = max(self._scaler.wait_of(asked, self._waiting), self._filling)
            return {"devices": len(asked), "wait_seconds": wait, "busy": busy}

    def explain(self) -> str:
        """A sentence, if there is something to say."""
        if not self.acts:
            return ""
        with self._lock:
            names, loads = sorted(self.released), sorted(self._models.coming)
            wait = max(self._scaler.wait_seconds, self._filling)
        told = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} released" if names else "no device is released"
        if loads:
            told += f", of which {', '.join(loads)} {'loads' if len(loads) == 1 else 'load'} what answers"
        return f"\nautoscale: {told}; {plural(self.desired(), 'device')} for a mean wait of {self.options.wait:g} s, {wait:.3g} s predicted"


def _look(known: weakref.ref[Scale], over: threading.Event, wake: threading.Event) -> None:
    warned = False
    while not over.wait(_PAUSE):
        wake.wait(_TICK - _PAUSE)
        wake.clear()
        scale = known()
        if scale is None or over.is_set():  # a look would want devices that a pool which closes has just given up
            return
        try:
            scale.look()
        except Exception as error:  # it has to go on: a pool that closes may need devices back
            if not (warned or isinstance(error, Error)):  # an error of ours is such as a device that is just lost
                warned = True
                warn(f"paceline autoscale: a look has failed: {error!r}")
        del scale


class Scaled:
    """What a pool says of the number of its devices, and devices that its owner takes out."""

    _jobs: Jobs
    _scale: Scale

    def retire(self, device: str) -> None:
        """Let a device start nothing until `restore`. What runs there goes on.

        Raises
        ------
        Unavailable
            While versions of a model are exchanged there.
        """
        was = self._scale.owned(device, out=True)
        try:
            self._jobs.engine.retire(device)
        except BaseException:
            self._scale.owned(device, out=was)
            raise

    def restore(self, device: str) -> None:
        """Let a device start jobs again, at once. If `Autoscale` had released it, it loads what answers with its first batches."""
        self._scale.owned(device, out=False)
        self._jobs.engine.restore(device)

    def what_if(
        self, *, remove: str | Iterable[str] = (), add: str | float | Iterable[str | float] = ()
    ) -> dict[str, Any]:
        """Predict the mean wait with other devices, for the work that has come lately.

        Parameters
        ----------
        remove
            The name of a device to do without, or several.
        add
            One more device, or several: the name of one of the pool's for one like it, or a speed, 1 for that of the fastest device.

        Returns
        -------
        dict
            ``devices``, how many; ``wait_seconds`` that a job waits in the mean, infinity if more comes than they do; ``busy``, the part of their time that
            the work takes.

        Raises
        ------
        InvalidArgument
            For a device that does not take jobs, and for a speed that is not positive. As long as no work has come of a kind that a device has timed: then nothing is
            known of it.

        Notes
        -----
        The wait is from a job's submit until its run begins, as in ``report()["wait_seconds_sum"]``, which is of all jobs together. It is that of queueing theory (Sakasegawa, 1977; Allen and Cunneen) for
        jobs that come at random, with the mean and the variation of the runs that were measured, batches included, after what waits now; or the mean time
        that a request waits for its batch to fill, at most ``max_delay``, if this is longer. Released devices count as there. Kinds of work that no device has run yet count as nothing.
        """
        return self._scale.wait_of(_listed("remove", remove), _listed("add", add))


def _listed(name: str, given: Any) -> Iterable[Any]:
    if isinstance(given, (str, int, float)):
        return [given]
    if not isinstance(given, Iterable):
        raise InvalidArgument(f"what_if: {name} is a {type(given).__name__}; give a device, or a list of them.")
    return given
