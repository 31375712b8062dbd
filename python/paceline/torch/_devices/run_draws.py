"""The random draws of one run, and where generators were before it. Draws are seeded where possible, else noticed, and refused where a gradient would be wrong."""

from __future__ import annotations

import contextlib
import ctypes
import operator

import torch

from paceline import InvalidArgument
from paceline.torch._devices.caller_state import NOTHING, RecomputeWatch
from paceline.torch._devices.noise import OTHER_THREAD, OtherGenerators
from paceline.torch._devices.places import Places
from paceline.torch._devices.worker_draws import WorkerDraws, of_each_thread

_state = torch.Generator.get_state
# The lock of Python stays held: a comparison of 5 kB takes less than to get it back.
_differ = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ("memcmp", ctypes.PyDLL(None))
)


class RandomStates:
    """The present state of the random generators of a trainer's devices, to go back to."""

    def __init__(self, places: Places) -> None:
        generators = places.generators
        self._kept = dict(zip(generators, map(_state, generators), strict=True))

    @property
    def moved(self) -> bool:
        """Whether somebody has drawn since then."""
        return any(not torch.equal(generator.get_state(), state) for generator, state in self._kept.items())

    def moved_of(self, generator: torch.Generator) -> bool:
        """Whether somebody has drawn from this generator. No operator runs."""
        then, now = self._kept[generator], generator.get_state()
        return bool(_differ(then.data_ptr(), now.data_ptr(), now.numel()))

    def restore(self) -> None:
        """Go back to that state: the same draws follow again."""
        for generator, state in self._kept.items():
            generator.set_state(state)


class UnseededDrawsWarning(UserWarning):
    """Several host devices draw random numbers that the seed does not determine."""


class Drawing:
    """Whether a kind of work draws.

    A function mode costs 4 us for every PyTorch call: 9 to 19 % of a small transformer on one core, 0.3 % of a convolution. So it is on in
    the first run of a kind of work, and after that only if something was drawn. Runs without the mode look at the generator instead. If a
    run has moved the generator, it is not committed but runs again with the mode.
    """

    def __init__(self) -> None:
        self.draws: bool | None = None  # None: this kind of work has not run yet


class RunDraws:
    """The draws of one run. `before` is the state of the generators when it begins.

    Nothing is seeded in `compiled` work: a compiler would compile the code twice, with the mode and without.
    """

    def __init__(self, places: Places, drawing: Drawing, compiled: bool, before: RandomStates) -> None:
        self._drawing = drawing
        self._compiled = compiled
        self._first = drawing.draws is None and not compiled
        self._on_host = places.on_host
        seeds = places.hosts_share and not compiled
        self._own = WorkerDraws(places.own_generators) if seeds and drawing.draws is not False else None
        self.seeds = self._own is not None  # whether each host device draws from a generator of its own
        # Only in a first run: it takes milliseconds.
        self._others = OtherGenerators() if seeds and self._first else None
        self._expects_none = places.any_host and not compiled and drawing.draws is False
        looks = places.any_host or places.share_generators
        self._generators = places.device_generators if looks else []
        # `look` compares the generator after every forward. Recomputation sets the generator back for a while, so its state may be the
        # same before and after the whole step. No recomputation has disturbed the first device that reaches its backward.
        self._before = before
        self._moved = [False] * len(self._generators)
        # If devices share a generator and something draws from it, recomputation would draw other numbers. Compiled code keeps the seeds
        # of its draws, and its backward makes no PyTorch calls from Python.
        watched = places.share_generators and (any(places.on_gpu) or not self._expects_none)
        self.watches = [RecomputeWatch() for _ in places.devices] if watched else []

    def run(self) -> contextlib.AbstractContextManager[None]:
        """A context around the whole run, on the caller's thread."""
        return contextlib.nullcontext() if self._own is None else of_each_thread()

    def micro_batch(self, device: int, first: int) -> contextlib.AbstractContextManager[None]:
        """A context around forward and backward of a micro-batch, on a worker."""
        return NOTHING if self._own is None else self._own.on(device, first)

    def look(self, device: int) -> None:
        """Note whether the generator has moved: on a worker, after a forward and before a backward that the caller's function runs."""
        if self._generators and not self._moved[device]:
            self._moved[device] = self._before.moved_of(self._generators[device])

    @property
    def drew(self) -> bool:
        """Whether a forward of this run has drawn."""
        return any(self._moved) or (self._own is not None and self._own.drew)

    def repeated_others(self) -> None:
        """Note that this run drew again what an earlier one drew. So the caller's generator stays where it is."""
        if self._own is not None:
            self._own.drew = False

    def must_run_again(self) -> bool:
        """Whether this run drew although it was not expected to, so that its draws were not seeded. True at most once per kind of work."""
        if not (self._expects_none and self._moved_on_host()):
            return False
        self._drawing.draws = True
        return True

    def check(self) -> None:
        """Raise if a gradient would be silently wrong, because activation checkpointing drew other numbers in its second forward."""
        if any(self._moved) and any(watch.seen for watch in self.watches):
            raise InvalidArgument(
                f"step: random draws ({self._unseeded() or 'dropout?'}) together with activation checkpointing, on devices that share a random "
                "generator: parts of one GPU do, and host devices where these numbers cannot be seeded. So a recomputed forward would "
                "silently draw other numbers than the first. Set dropout to 0, train without checkpointing, or use one device. Nothing was "
                "committed."
            )

    def finish(self) -> str:
        """End the run, on the caller's thread. Returns what drew on the host without a seed, or an empty string."""
        own = self._own
        if self._first and self._drawing.draws is None:
            self._drawing.draws = self._moved_on_host() or (own is not None and (own.drew or bool(own.given)))
        if own is not None:
            own.advance()
        return self._unseeded() if any(self._moved) or own is not None else ""

    def _moved_on_host(self) -> bool:
        return True in self._moved and any(map(operator.and_, self._moved, self._on_host))

    def _unseeded(self) -> str:
        names = set() if self._own is None else set(self._own.unreached)
        names.update([] if self._others is None else self._others.moved)
        if names or not self._moved_on_host() or self._on_host.count(True) < 2:
            return ", ".join(sorted(names))
        return "compiled code" if self._compiled else f"compiled code, an extension or {OTHER_THREAD}"


def replayed_draws(places: Places, before: RandomStates) -> RunDraws:
    """Draws that need no seeds, since each item draws what it drew before. Recomputation draws the same, so nothing watches it."""
    draws = RunDraws(places, Drawing(), compiled=True, before=before)
    draws.watches, draws._generators = [], []
    return draws
