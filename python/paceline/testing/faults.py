"""Makes devices of a trainer slow, hang, run out of memory, raise, or be lost, to test what a program does then.

Faults are injected on the workers, around the micro-batches of `step`, `loss` and the runs of `batch`. For the trainer they are real: its
plans, its rollback and its errors are those of such a device. Without `inject` there is nothing around a micro-batch.

Examples
--------
>>> from paceline.testing import faults
>>> plan = faults.Slow("host:1", factor=3, steps=range(10, 20)), faults.Error("host:0", rate=0.01)
>>> with faults.inject(trainer, *plan, seed=7) as injection:                         # doctest: +SKIP
...     train(trainer)
>>> print(injection.log)                                                             # doctest: +SKIP
[Injected(step=10, device='host:1', kind='slow'), ...]
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import random
import threading
import time
from collections.abc import Container, Iterator, Sequence
from typing import ClassVar, NamedTuple

import torch

from paceline import DeviceLost, InvalidArgument
from paceline.torch._features.faults import Faults
from paceline.torch._run.executor import Around
from paceline.torch._trainer.base import Trainer

__all__ = ["Error", "Fault", "Hang", "Injected", "InjectedError", "Injection", "Lost", "OutOfMemory", "Slow", "inject"]

_SECONDS_BETWEEN_LOOKS = 0.05  # of a hanging worker: an exception for its thread only arrives when it runs Python


class InjectedError(RuntimeError):
    """What `Error` raises by default."""


class Injected(NamedTuple):
    """A fault that has happened: in this step (from 0, since `inject`), on this device."""

    step: int
    device: str
    kind: str


@dataclasses.dataclass(frozen=True)
class Fault(abc.ABC):
    """Where and when something goes wrong.

    Parameters
    ----------
    devices
        The names of the devices, or of one: ``"host:1"``.
    steps
        The numbers of the steps, from 0 at `inject`: one, or a range, set or list of them. Default: all. A step that runs again, because memory ran
        out for example, keeps its number.
    rate
        The probability, in each of these steps and on each of the devices. The draws depend on the seed, the step, the device and the
        place of the fault among the arguments of `inject`, and on nothing else.

    Notes
    -----
    A fault comes after the first micro-batch that the device runs in the step, when a part of its gradients is there. A device that runs nothing
    in the step has no fault.
    """

    devices: str | Sequence[str]
    _: dataclasses.KW_ONLY
    steps: int | Container[int] | None = None
    rate: float = 1.0

    kind: ClassVar[str]  # "slow", "hang", "out_of_memory", "error" or "lost"

    @property
    def names(self) -> Sequence[str]:
        """The names of the devices."""
        return [self.devices] if isinstance(self.devices, str) else self.devices

    def covers(self, step: int) -> bool:
        """Whether the fault may happen in this step."""
        return self.steps is None or (step == self.steps if isinstance(self.steps, int) else step in self.steps)

    @abc.abstractmethod
    def happen(self, injection: Injection, device: str, seconds: float) -> None:
        """Act on the device's worker, after a micro-batch that took so many seconds."""

    def check(self) -> None:
        """Raise if a number cannot be used."""
        if not 0 <= self.rate <= 1:
            raise InvalidArgument(f"inject: {self}: rate is a probability, from 0 to 1.")


@dataclasses.dataclass(frozen=True)
class Slow(Fault):
    """Every micro-batch of the step takes `factor` times as long."""

    _: dataclasses.KW_ONLY
    factor: float = 2.0

    kind = "slow"

    def happen(self, injection: Injection, device: str, seconds: float) -> None:
        """Sleep, so that other devices on the same cores are not slowed down, too."""
        time.sleep((self.factor - 1) * seconds)

    def check(self) -> None:
        """Raise if it would be faster."""
        super().check()
        if not self.factor >= 1:
            raise InvalidArgument(f"inject: {self}: factor is at least 1.")


@dataclasses.dataclass(frozen=True)
class Hang(Fault):
    """The worker does not return until `Injection.release`, the end of `inject`, or after `seconds`. Then it goes on as if nothing had been.

    The first Ctrl-C waits for it, as for every worker that is inside user code. The second does not.
    """

    _: dataclasses.KW_ONLY
    seconds: float | None = None

    kind = "hang"

    def happen(self, injection: Injection, device: str, seconds: float) -> None:
        """Wait on the worker."""
        injection.hang(device, self.seconds)


@dataclasses.dataclass(frozen=True)
class OutOfMemory(Fault):
    """PyTorch's ``torch.OutOfMemoryError``. When the step runs again there is enough memory."""

    kind = "out_of_memory"

    def happen(self, injection: Injection, device: str, seconds: float) -> None:
        """Raise what PyTorch's allocator raises."""
        raise torch.OutOfMemoryError(f"{device}: out of memory, injected by paceline.testing.faults")


@dataclasses.dataclass(frozen=True)
class Error(Fault):
    """An exception: an instance, or a class, which is then made with a text."""

    _: dataclasses.KW_ONLY
    raises: Exception | type[Exception] = InjectedError

    kind = "error"

    def happen(self, injection: Injection, device: str, seconds: float) -> None:
        """Raise it."""
        if isinstance(self.raises, type):
            raise self.raises(f"injected by paceline.testing.faults on {device}")
        raise self.raises


@dataclasses.dataclass(frozen=True)
class Lost(Fault):
    """`paceline.DeviceLost`. From then on the device raises it whenever it gets work, until the end of `inject`."""

    kind = "lost"

    def happen(self, injection: Injection, device: str, seconds: float) -> None:
        """Raise it, now and later."""
        injection.lose(device)


class Injection:
    """The faults of one trainer, in a ``with`` block. `inject` makes it.

    Attributes
    ----------
    log
        The faults that have happened, an `Injected` each. Devices of one step come in the order in which they met them.
    hanging
        The devices that hang now.
    """

    def __init__(self, names: Sequence[str], faults: Sequence[Fault], seed: int) -> None:
        self.log: list[Injected] = []
        self.hanging: list[str] = []
        self._names = names
        self._faults = faults
        self._seed = seed
        self._call = self._step = -1
        self._lost: set[str] = set()
        self._happened: set[tuple[int, str, int]] = set()  # in this step, on this device, this fault
        self._over = False
        self._released = threading.Event()

    def release(self) -> None:
        """Let all devices that hang now go on."""
        before, self._released = self._released, threading.Event()
        before.set()

    def end(self) -> None:
        """Let everything go on, and inject nothing more."""
        self._over = True
        self.release()

    def hang(self, device: str, seconds: float | None) -> None:
        """Wait on a worker until somebody releases it."""
        released, begun = self._released, time.monotonic()
        self.hanging.append(device)
        try:
            while not self._over and not released.wait(_SECONDS_BETWEEN_LOOKS):
                if seconds is not None and time.monotonic() - begun >= seconds:
                    return
        finally:
            self.hanging.remove(device)

    def lose(self, device: str) -> None:
        """Raise what a lost device raises, and remember that it is lost."""
        self._lost.add(device)
        error = DeviceLost(
            f"{device}: lost, injected by paceline.testing.faults. Nothing runs on it any more: start a new process from the last checkpoint."
        )
        error.device = device
        raise error

    def of(self, call: int) -> Around:
        """What surrounds the micro-batches of the trainer's call with this number, which may run several times."""
        if call != self._call:
            self._call = call
            self._step += 1
        step = self._step
        drawn = {name: self._drawn(step, name) for name in self._names}
        return lambda device, begin, end: self._around(step, self._names[device], drawn[self._names[device]])

    def _drawn(self, step: int, device: str) -> list[tuple[int, Fault]]:
        """The faults of a device in a step, with their place among all faults."""
        return [
            (index, fault)
            for index, fault in enumerate(self._faults)
            if device in fault.names
            and fault.covers(step)
            and random.Random(f"{self._seed} {index} {step} {device}").random() < fault.rate
        ]

    @contextlib.contextmanager
    def _around(self, step: int, device: str, faults: list[tuple[int, Fault]]) -> Iterator[None]:
        if device in self._lost and not self._over:
            self.lose(device)
        begun = time.perf_counter()
        yield
        seconds = time.perf_counter() - begun
        for index, fault in faults:
            once = (step, device, index)
            if self._over or (once in self._happened and not isinstance(fault, Slow)):
                continue
            if once not in self._happened:
                self._happened.add(once)
                self.log.append(Injected(step, device, fault.kind))
            fault.happen(self, device, seconds)

    def __repr__(self) -> str:
        return f"<paceline.testing.faults.Injection seed {self._seed}, step {self._step}, {len(self.log)} injected>"


@contextlib.contextmanager
def inject(trainer: Trainer, *faults: Fault, seed: int = 0) -> Iterator[Injection]:
    """Inject faults into the steps of a trainer within a ``with`` block.

    Parameters
    ----------
    trainer
        A `DataParallel` or `Pipeline`. The backward of a call of a `DataParallel` is a step, too. The devices of a `Pipeline` run
        forwards and backwards of their stages in the place of micro-batches.
    faults
        `Slow`, `Hang`, `OutOfMemory`, `Error` and `Lost`. One that raises keeps those after it from happening in that micro-batch.
    seed
        Decides, with `Fault.rate`, which steps have faults.

    Raises
    ------
    InvalidArgument
        For something that is no trainer or no fault, for a device that the trainer does not have, for numbers that cannot be used, or
        if faults are injected into this trainer already.
    """
    if not isinstance(trainer, Trainer):
        raise InvalidArgument(
            f"inject: trainer is a {type(trainer).__name__}; a paceline.torch.DataParallel or Pipeline is needed."
        )
    names = [device.name for device in trainer.group.devices]
    for fault in faults:
        if not isinstance(fault, Fault):
            raise InvalidArgument(f"inject: {fault!r} is no fault; use Slow, Hang, OutOfMemory, Error or Lost.")
        unknown = [name for name in fault.names if name not in names]
        if unknown or not fault.names:
            raise InvalidArgument(
                f"inject: {fault} names {unknown[0] if unknown else 'no device'}; the trainer has {', '.join(names)}."
            )
        fault.check()
    execution = trainer._execution
    if Faults in execution.features.kinds:
        raise InvalidArgument(
            "inject: faults are injected into this trainer already. Give all of them to one inject()."
        )
    injection = Injection(names, faults, seed)
    injected = Faults(injection.of, names)
    try:
        execution.features.add(injected)
        yield injection
    finally:
        execution.features.remove(injected)
        injection.end()
