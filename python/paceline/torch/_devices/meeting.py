"""Where the devices of one run wait for each other in the middle of their micro-batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from paceline import InvalidArgument

# Puts together what several have brought, in their order. The result has the shape of what each of them has brought.
Merge = Callable[[list[torch.Tensor]], torch.Tensor]
# (topic, brought, merge): puts together what all devices of this process have brought with what others have, elsewhere.
Beyond = Callable[[str, torch.Tensor, Merge], torch.Tensor]

# Seconds between two looks of a waiting thread. Nothing depends on them but the exception that is raised in a worker when the program ends,
# which a waiting thread does not see.
_LOOK_SECONDS = 0.2


class MeetingOffError(BaseException):
    """Another device has failed, or the run was cancelled before each device had begun. So there is nobody to wait for.

    No `Exception`, so that a forward that catches those does not go on.
    """


class MeetingPoint:
    """Where the devices of one trainer meet. Graphs keep this one, since their backward may be in a later run than their forward."""

    def __init__(self) -> None:
        self.now: Meeting | None = None  # of the present run

    def meet(self, topic: str, brought: torch.Tensor, merge: Merge) -> torch.Tensor:
        """Meet in the present run, of which the calling thread must be a device."""
        if self.now is None or not self.now.is_here:
            raise RuntimeError(
                f"batch_norm='synchronised': {topic} outside of the devices' run, where there is nobody to meet. Call backward on what the trainer "
                "returns, or on the thread that runs loss_fn."
            )
        return self.now.meet(topic, brought, merge)

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is a device of the present run."""
        return self.now is not None and self.now.is_here


class Meeting:
    """Puts together what each device of a run brings, in rounds. A device that waits is woken when another one fails, ends, or never begins.

    Every device has to come to the same rounds in the same order.

    Parameters
    ----------
    devices
        Those that have items in this run.
    beyond
        Called by the device that comes last in a round, with what `merge` has made of what all have brought. Its result is that of the round.
        It may wait for other processes. The other devices can be woken meanwhile.
    """

    def __init__(self, names: Sequence[str], devices: Iterable[int], beyond: Beyond | None = None) -> None:
        self._names = names
        self._devices = sorted(devices)
        self._beyond = beyond
        self._condition = threading.Condition()
        self._threads: dict[int, int] = {}  # the device of each worker that has begun
        self._brought: dict[int, torch.Tensor] = {}  # by device, in the present round
        self._topic = ""
        self._result: torch.Tensor | None = None  # of the last round; the next one cannot end before everybody has it
        self._round = 0
        self._ended: set[int] = set()
        self._off = False
        self.waited = [0.0] * len(names)  # seconds of each device

    def begin(self, device: int) -> None:
        """Note that the calling thread runs the micro-batch of this device."""
        self._threads[threading.get_ident()] = device

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is one that has begun."""
        return threading.get_ident() in self._threads

    def meet(self, topic: str, brought: torch.Tensor, merge: Merge) -> torch.Tensor:
        """Wait until every device has come, and return what `merge` makes of all that they brought, in the order of the devices.

        Raises `MeetingOffError` if another device has failed, or the run was cancelled before all had begun, and `InvalidArgument` if another device
        has come for another `topic`, or has ended its micro-batch. Also raises what `beyond` raises, for the device that came last.
        """
        device = self._threads[threading.get_ident()]
        with self._condition:
            if self._brought and self._topic != topic:
                raise self._apart(device, topic, next(iter(self._brought)), f"runs {self._topic}")
            self._topic = topic
            self._brought[device] = brought
            if len(self._brought) < len(self._devices):
                return self._waited_for(device, topic)
            everything = [self._brought[one] for one in self._devices]
        try:  # the others wait in `_waited_for`, and nothing is locked, so that they can be woken
            result = self._merged(device, topic, everything, merge)
        except BaseException:
            self.call_off()
            raise
        with self._condition:
            self._brought, self._result = {}, result
            self._round += 1
            self._condition.notify_all()
        return result

    def _waited_for(self, device: int, topic: str) -> torch.Tensor:
        """The result of the present round, for a device that has come before others. Requires the lock."""
        this, since = self._round, time.perf_counter()
        while self._round == this:
            if self._off:
                raise MeetingOffError
            if self._ended:
                raise self._apart(device, topic, min(self._ended), "has ended its slice")
            self._condition.wait(_LOOK_SECONDS)
        self.waited[device] += time.perf_counter() - since
        if self._result is None:  # this device was left behind
            raise MeetingOffError
        return self._result

    def _merged(self, device: int, topic: str, everything: list[torch.Tensor], merge: Merge) -> torch.Tensor:
        result = merge(everything)
        if self._beyond is None:
            return result
        since = time.perf_counter()
        result = self._beyond(topic, result, merge)
        self.waited[device] += time.perf_counter() - since
        return result

    def end(self, device: int) -> None:
        """Note that the device runs nothing more. If it has not begun, the run was cancelled."""
        with self._condition:
            if device in self._threads.values():
                self._ended.add(device)
            else:
                self._off = True
            self._condition.notify_all()

    def over(self) -> None:
        """The run has ended: let go of what devices have brought."""
        with self._condition:
            self._brought, self._result = {}, None

    def call_off(self) -> None:
        """Wake everybody, since a device has failed."""
        with self._condition:
            self._off = True
            self._condition.notify_all()

    def _apart(self, device: int, topic: str, other: int, does: str) -> InvalidArgument:
        return InvalidArgument(
            f"batch_norm='synchronised': {self._names[device]} runs {topic}, and {self._names[other]} {does}. All slices of a batch have to run the "
            "same normalisations in the same order, forward and backward. Let loss_fn take no branch that depends on its slice, or use "
            "batch_norm='apart'."
        )
