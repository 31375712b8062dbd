"""Random numbers of host workers: each has a generator of its own, which is seeded anew for every micro-batch.

All threads of a process share PyTorch's generator for the host. Devices that drew from it would draw other numbers in every run, and
activation checkpointing, which sets it back for a moment, would be given another device's numbers. So while a step runs, on its workers
random functions draw from the worker's generator, and `torch.random` (``get_rng_state``, ``fork_rng``, ``manual_seed``, ...), through
which checkpointing saves and restores, speaks of it, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from paceline.torch._devices.caller_state import bytes_of
from paceline.torch._devices.draws import Draw, DrawMode, Source

_worker = threading.local()
_random: Any = torch.random  # its functions look their generator up in it


class WorkerGenerator(torch.Generator):
    """The generator of one worker. What seeds it is mixed with the first item of the micro-batch: no two draw the same."""

    _first = 0

    def begin(self, key: bytes, first: int) -> None:
        self._first = first
        super().manual_seed(_mixed(key, first))

    def manual_seed(self, seed: int) -> torch.Generator:
        return super().manual_seed(_mixed(repr(seed).encode(), self._first))


def _mixed(key: bytes, first: int) -> int:
    return int.from_bytes(hashlib.blake2b(key + first.to_bytes(8, "little"), digest_size=8).digest(), "little")


class WorkerDraws:
    """The draws of one run.

    Their seeds are made of the state that the caller's generator has now and of the first item of each micro-batch. So the same seed
    and the same split give the same numbers, whatever the devices' speeds.
    """

    def __init__(self, generators: list[WorkerGenerator | None]) -> None:
        self._generators = generators
        self._modes = [None if generator is None else DrawMode(_Stream(self, generator)) for generator in generators]
        self._key = hashlib.blake2b(bytes_of(torch.default_generator.get_state())).digest()
        self.drew = False
        self.unreached: set[str] = set()
        self.given: dict[
            torch.Generator, Source
        ] = {}  # of the caller's generators: which worker was the first to draw from it

    @contextlib.contextmanager
    def on(self, device: int, first: int) -> Iterator[None]:
        """Around a micro-batch, on its worker."""
        generator, mode = self._generators[device], self._modes[device]
        if generator is None or mode is None:
            yield
            return
        generator.begin(self._key, first)
        _worker.generator = generator
        try:
            with mode:
                yield
        finally:
            del _worker.generator

    def advance(self) -> None:
        """On the caller's thread: its generator has been drawn from, too, so that the next run draws other numbers."""
        if self.drew:
            with (
                torch._C.DisableTorchFunction(),
                torch._C._DisableTorchDispatch(),
            ):  # the user's modes see nothing of it
                torch.empty((), dtype=torch.int64).random_()


class _Stream:
    """A `Source` of one worker."""

    def __init__(self, draws: WorkerDraws, generator: torch.Generator) -> None:
        self._draws = draws
        self._generator = generator

    def draw(self, draw: Draw) -> Any:
        self._draws.drew = True
        return draw(self._generator)

    def unreached(self, name: str) -> None:
        self._draws.unreached.add(name)

    def given(self, generator: torch.Generator) -> None:
        if generator.device.type == "cpu" and self._draws.given.setdefault(generator, self) is not self:
            self.unreached("calls with generator=")


class _OfThisThread:
    """The default generator for `torch.random`: on a worker inside a micro-batch its own, on all other threads the process's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(_worker, "generator", torch.default_generator), name)


class _Swap:
    """While any run draws on workers, `torch.random` has `_OfThisThread` in the place of the default generator."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs = 0
        self._before: Any = None

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        with self._lock:
            self._runs += 1
            if self._runs == 1:
                self._before = _random.default_generator
                _random.default_generator = _OfThisThread()
        try:
            yield
        finally:
            with self._lock:
                self._runs -= 1
                if self._runs == 0:
                    _random.default_generator = self._before


_swap = _Swap()


def of_each_thread() -> contextlib.AbstractContextManager[None]:
    """While workers draw: what `torch.random` does is done to the generator of the thread that calls it."""
    return _swap.made()
