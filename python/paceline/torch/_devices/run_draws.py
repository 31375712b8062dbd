"""What is drawn in one run: seeded where that can be, noticed where it cannot, refused where a gradient would be wrong."""

from __future__ import annotations

import contextlib

from paceline import InvalidArgument
from paceline.torch._devices.caller_state import RecomputeWatch
from paceline.torch._devices.noise import OtherGenerators
from paceline.torch._devices.places import Places, RandomStates
from paceline.torch._devices.worker_draws import WorkerDraws, of_each_thread


class UnseededDrawsWarning(UserWarning):
    """Something draws random numbers on several host devices that the seed does not determine."""


class Drawing:
    """What is known of a kind of work.

    A function mode costs 4 us for every PyTorch call: 9 to 19 % of a small transformer on one core, 0.3 % of a convolution. So it is on in
    the first run of a kind of work, and after that only if something was drawn. Runs without it look at the generator instead: one
    that moved it is not committed but runs again, with the mode.
    """

    def __init__(self) -> None:
        self.draws: bool | None = None  # None: it has not run yet


class RunDraws:
    """The draws of one run that begins with the generators as in `before`.

    In `compiled` work nothing is seeded: a compiler would compile the mode, too, once with and once without.
    """

    def __init__(self, places: Places, drawing: Drawing, compiled: bool, before: RandomStates) -> None:
        self._drawing = drawing
        self._compiled = compiled
        self._first = drawing.draws is None and not compiled
        self._on_host = [not gpu for gpu in places.on_gpu]
        seeds = places.hosts_share and not compiled
        self._own = WorkerDraws(places.own_generators) if seeds and drawing.draws is not False else None
        self._others = OtherGenerators() if seeds and self._first else None  # looked at once: that takes milliseconds
        self._expects_none = places.any_host and not compiled and drawing.draws is False
        devices = range(len(places))
        looks = places.any_host or places.share_generators
        self._generators = [places.generator(device) for device in devices] if looks else []
        # Looked at after every forward: recomputation sets the generator back for a while, so that before and after the whole step it
        # may be the same. The first device that comes to its backward has seen its own forward undisturbed.
        self._before = before
        self._moved = [False] * len(self._generators)
        # Where something draws from a generator that devices share, recomputation would draw other numbers. Compiled code keeps the seeds
        # of its draws instead, and makes no PyTorch calls from Python in its backward.
        watched = places.share_generators and (any(places.on_gpu) or not self._expects_none)
        self.watches = [RecomputeWatch() for _ in devices] if watched else []

    def run(self) -> contextlib.AbstractContextManager[None]:
        """Around all of it, on the caller's thread."""
        return contextlib.nullcontext() if self._own is None else of_each_thread()

    def micro_batch(self, device: int, first: int) -> contextlib.AbstractContextManager[None]:
        """Around forward and backward, on a worker."""
        return contextlib.nullcontext() if self._own is None else self._own.on(device, first)

    def look(self, device: int) -> None:
        """After a forward, on a worker, and before a backward that the caller runs: recomputation puts the generator back to where it was."""
        if self._generators and not self._moved[device]:
            self._moved[device] = self._before.moved_of(self._generators[device])

    def must_run_again(self) -> bool:
        """Whether something was drawn in a run that expected nothing: it was not seeded, or not split as its like. True once for a kind of work."""
        if not (self._expects_none and self._moved_on_host()):
            return False
        self._drawing.draws = True
        return True

    def check(self) -> None:
        """Raise if a gradient is silently wrong. A forward that runs again inside a backward is activation checkpointing."""
        if any(self._moved) and any(watch.seen for watch in self.watches):
            raise InvalidArgument(
                f"step: random draws ({self._told() or 'dropout?'}) together with activation checkpointing, on devices that share a random "
                "generator: parts of one GPU do, and host devices where these numbers cannot be seeded. So a recomputed forward would "
                "silently draw other numbers than the first. Set dropout to 0, train without checkpointing, or use one device. Nothing was "
                "committed."
            )

    def finish(self) -> str:
        """On the caller's thread, when the run has come to its end. What drew on the host without a seed, or an empty string."""
        own = self._own
        if self._first and self._drawing.draws is None:
            self._drawing.draws = self._moved_on_host() or (own is not None and own.drew)
        if own is not None:
            own.advance()
        return self._told() if any(self._moved) or own is not None else ""

    def _moved_on_host(self) -> bool:
        return any(moved and host for moved, host in zip(self._moved, self._on_host, strict=False))

    def _told(self) -> str:
        names = set() if self._own is None else set(self._own.unreached)
        names.update([] if self._others is None else self._others.moved)
        if names or not self._moved_on_host() or self._on_host.count(True) < 2:
            return ", ".join(sorted(names))
        return "compiled code" if self._compiled else "compiled code, an extension or another thread"
