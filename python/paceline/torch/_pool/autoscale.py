"""How many devices a pool needs: a hint, what-if, and devices that come and go by themselves."""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline import Error, InvalidArgument
from paceline._core.plan import Scaler
from paceline._words import plural
from paceline.torch._pool.jobs import Jobs

_TICK = 1.0  # seconds between two decisions
_LEAST_TICK = 0.2  # seconds that one is about


@dataclass(frozen=True)
class Autoscale:
    """When devices of a pool come and go.

    Parameters
    ----------
    wait
        Seconds that a job shall wait in the mean, from its submit to its start.
    keep
        Seconds for which a device is kept that is not needed. Until then it costs as much as to let it go and to take it back, so this is about what its
        return costs. Work is also forecast over so long.
    prices
        Of a second of a device, by its name. Those of the least price for what they do are kept. Others have the price 1.
    """

    wait: float = 0.1
    keep: float = 5.0
    prices: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
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
        self._jobs, self._scaler = weakref.ref(jobs), Scaler(self.options.wait)  # the jobs own it
        self._speeds: dict[str, float] = {}  # of the last look
        self._lock = threading.RLock()
        if self.acts:
            over = threading.Event()
            jobs.ends.append(over.set)
            known = weakref.ref(self)
            threading.Thread(target=_look, args=(known, over), name="paceline pool autoscale", daemon=True).start()

    def look(self) -> None:
        """Decide anew, if some time has passed."""
        jobs = self._jobs()
        with self._lock:
            tick = None if jobs is None else jobs.engine.scale_tick(_LEAST_TICK)
            if jobs is None or tick is None:
                return
            engine = jobs.engine
            seconds, arrived_work, arrived_jobs, waiting_work, known, speeds, awaited = tick
            names = [one.name for one in jobs.devices][: len(speeds)]
            active = set(engine.active)
            self._speeds = dict(zip(names, speeds, strict=True))
            self.released &= set(names) if self.acts else active
            rows = [
                (
                    max(self._speeds[name], 1e-9),
                    self.options.prices.get(name, 1.0),
                    self.options.keep,
                    name not in self.released,
                    name in active or name in self.released,
                )
                for name in names
            ]
            wanted = self._scaler.decide(
                rows, seconds=seconds, arrived_work=arrived_work, arrived_jobs=arrived_jobs, waiting_work=waiting_work
            )
            # What no device has run yet may take any time, and what only released devices can run waits for these.
            wanted = [want or wait or not known for want, wait in zip(wanted, awaited, strict=True)]
            for name, want in zip(names, wanted, strict=True):
                if want and name in self.released:
                    self.released.discard(name)
                    if self.acts:
                        engine.restore(name)
                elif not want and name in active and (not self.acts or engine.retire(name, True)):
                    self.released.add(name)

    def desired(self) -> int:
        """How many devices the wait takes."""
        if not self.acts:
            self.look()
        with self._lock:
            return max(1, self._scaler.desired)

    def owned(self, device: str) -> None:
        """The pool's owner retires or restores it, so it is no longer this that has released it."""
        with self._lock:
            self.released.discard(device)

    def wait_of(self, remove: Iterable[str], add: Iterable[str | float]) -> dict[str, Any]:
        self.look()
        jobs = self._jobs()
        assert jobs is not None
        with self._lock:
            active = set(jobs.engine.active) | self.released
            left = {name: speed for name, speed in self._speeds.items() if name in active}
            for name in remove:
                if left.pop(name, None) is None:
                    raise InvalidArgument(
                        f"what_if: remove has {name!r}, which is not among the devices that take jobs, {sorted(left)}."
                    )
            fastest = max(self._speeds.values(), default=1.0)
            speeds = list(left.values())
            for one in add:
                if isinstance(one, str) and one not in self._speeds:
                    raise InvalidArgument(f"what_if: add has {one!r}. Name a device of the pool to add one like it.")
                if not isinstance(one, str) and not 0 < one < math.inf:
                    raise InvalidArgument(f"what_if: add has {one!r}; a speed must be a positive number.")
                speeds.append(self._speeds[one] if isinstance(one, str) else one * fastest)
            busy = self._scaler.work_per_second / sum(speeds) if speeds else math.inf
            return {"devices": len(speeds), "wait_seconds": self._scaler.wait_of(speeds), "busy": busy}

    def explain(self) -> str:
        """A sentence, if there is something to say."""
        if not self.acts:
            return ""
        with self._lock:
            names = sorted(self.released)
            wait = self._scaler.wait_seconds
        told = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} released" if names else "no device is released"
        return f"\nautoscale: {told}; {plural(self.desired(), 'device')} for a mean wait of {self.options.wait:g} s, {wait:.3g} s predicted"


def _look(known: weakref.ref[Scale], over: threading.Event) -> None:
    while not over.wait(_TICK):
        scale = known()
        if scale is None:
            return
        with contextlib.suppress(
            Error
        ):  # such as a device that is lost meanwhile; a pool that closes may need devices back
            scale.look()
        del scale


class Scaled:
    """What a pool says of the number of its devices, and devices that its owner takes out."""

    _jobs: Jobs
    _scale: Scale

    def retire(self, device: str) -> None:
        """Let a device start nothing until `restore`. What runs there goes on."""
        self._jobs.engine.retire(device)
        self._scale.owned(device)

    def restore(self, device: str) -> None:
        """Let a device start jobs again."""
        self._jobs.engine.restore(device)
        self._scale.owned(device)

    def what_if(self, *, remove: Iterable[str] = (), add: Iterable[str | float] = ()) -> dict[str, Any]:
        """Predict the mean wait with other devices, for the work that has come lately.

        Parameters
        ----------
        remove
            Names of devices to do without.
        add
            More devices: the name of one of the pool's for one like it, or a speed, 1 for that of the fastest device.

        Returns
        -------
        dict
            ``devices``, how many; ``wait_seconds`` that a job waits in the mean, infinity if more comes than they do; ``busy``, the part of their time that
            the work takes.

        Raises
        ------
        InvalidArgument
            For a device that does not take jobs, and for a speed that is not positive.

        Notes
        -----
        The wait is that of queueing theory (Sakasegawa, 1977) for jobs that come at random, with what waits now. Released devices count as there. Kinds of work that no
        device has run yet count as nothing.
        """
        return self._scale.wait_of(remove, add)
