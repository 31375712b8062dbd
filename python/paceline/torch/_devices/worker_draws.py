"""Random numbers of host workers. Each worker has a generator of its own, which is seeded anew for every micro-batch.

All threads of a process share PyTorch's generator for the host. If devices drew from it, they would draw other numbers in every run, and
activation checkpointing, which sets the generator back for a moment, would get another device's numbers. So while a step runs, random
functions on its workers draw from the worker's generator. `torch.random` (``get_rng_state``, ``fork_rng``, ``manual_seed``, ...), by which
checkpointing saves and restores, then also means the worker's generator.
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
_random: Any = torch.random  # its functions look up `default_generator` in it


class WorkerGenerator(torch.Generator):
    """The generator of one worker. Its seed is mixed with the first item of the micro-batch, so that no two micro-batches draw the same."""

    _first = 0

    def begin(self, key: bytes, first: int) -> None:
        self._first = first
        super().manual_seed(mixed_seed(key, first))

    def manual_seed(self, seed: int) -> torch.Generator:
        return super().manual_seed(mixed_seed(repr(seed).encode(), self._first))


def mixed_seed(key: bytes, number: int) -> int:
    """A seed for this number of a series. The same key gives the same seeds."""
    return int.from_bytes(hashlib.blake2b(key + number.to_bytes(8, "little"), digest_size=8).digest(), "little")


class WorkerDraws:
    """The draws of one run.

    Their seeds are made of the present state of the caller's generator and of the first item of each micro-batch. So the same seed and
    the same split give the same numbers, whatever the devices' speeds.
    """

    def __init__(self, generators: list[WorkerGenerator | None]) -> None:
        self._generators = generators
        self._modes = [None if generator is None else DrawMode(_Stream(self, generator)) for generator in generators]
        self._key = hashlib.blake2b(bytes_of(torch.default_generator.get_state())).digest()
        self.drew = False
        self.unreached: set[str] = set()
        # Generators of the caller, each with the first worker that drew from it.
        self.given: dict[torch.Generator, Source] = {}

    @contextlib.contextmanager
    def on(self, device: int, first: int) -> Iterator[None]:
        """A context around a micro-batch, on its worker."""
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
        """Draw from the caller's generator, on its thread, so that the next run draws other numbers."""
        if self.drew:
            # The user's modes do not see this.
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
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
    """The default generator for `torch.random`: the worker's own inside of a micro-batch, the process's on all other threads."""

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(_worker, "generator", torch.default_generator), name)


class _Swap:
    """Whether `_OfThisThread` is the default generator of `torch.random`."""

    lock = threading.Lock()
    runs = 0  # under way
    before: Any = None


@contextlib.contextmanager
def of_each_thread() -> Iterator[None]:
    """While workers draw, let `torch.random` work on the generator of the thread that calls it."""
    with _Swap.lock:
        _Swap.runs += 1
        if _Swap.runs == 1:
            _Swap.before, _random.default_generator = _random.default_generator, _OfThisThread()
    try:
        yield
    finally:
        with _Swap.lock:
            _Swap.runs -= 1
            if _Swap.runs == 0:
                _random.default_generator = _Swap.before
