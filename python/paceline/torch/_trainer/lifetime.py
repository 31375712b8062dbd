"""The life of a trainer: one call at a time, and an end that leaves nothing behind, however it comes."""

from __future__ import annotations

import abc
import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import TypeVar

from paceline import DeviceGroup, Error, InvalidArgument, Timeout, Unavailable
from paceline.torch._devices.caller_state import CallerThreads
from paceline.torch._run.execution import Execution, Workload
from paceline.torch._run.run import Run
from paceline.torch._trainer.exit import abandoned_runs, finalize, open_trainers

_L = TypeVar("_L", bound="Lifetime")


class Lifetime(abc.ABC):
    """What a trainer is beside its work: open, inside one call, abandoned by one, closed."""

    def __init__(self, group: DeviceGroup, owned: bool, execution: Execution) -> None:
        self.group = group
        self._retired: set[int] = set()  # devices that get no work
        self._execution = execution
        self._places = execution.places
        self._replicas = execution.replicas
        self._lock = threading.Lock()
        self._caller: threading.Thread | None = None  # the one that is in a call, or was last
        self._abandoned = False
        if self._places.any_host:
            CallerThreads.limit()
        # Runs when the trainer is dropped without close(); `exit` handles the end of the program.
        self._finalizer = weakref.finalize(self, finalize, group if owned else None, self._places.any_host)
        self._finalizer.atexit = False
        open_trainers.add(self)

    @abc.abstractmethod
    def _workloads(self) -> list[Workload]:
        """All that may run or be pending."""

    def close(self) -> None:
        """End the workers and give the caller its PyTorch threads back; idempotent. A `DeviceGroup` that was passed in stays open.

        A step that runs in another thread is cancelled: it ends once every worker has left its micro-batch.
        """
        running = self._running
        if running is not None and running.on_a_worker:
            raise InvalidArgument(
                "close: called by loss_fn on a worker, which cannot wait for its own end. Leave the step first, by an exception if need be."
            )
        self._cancel()
        self._finalizer()
        self._give_back_once()

    def _is_closed(self) -> bool:
        return not self._finalizer.alive

    def _give_back_once(self) -> None:
        """Unless a call is still inside, which does it when it leaves, or workers are."""
        if self._places.queues is not None and not self.group.busy and self._lock.acquire(blocking=False):
            try:
                self._give_back()
            finally:
                self._lock.release()

    def _give_back(self) -> None:
        """Everything that the devices hold of this trainer; its figures stay."""
        with contextlib.suppress(Error):  # of a device that was lost: it has said so before
            for work in self._workloads():
                work.stepper.settle()
        self._places.drain()  # a device that was too late may still write to what is let go of
        self._execution.release()
        self._replicas.release()
        self._places.close()

    def _cancel(self) -> None:
        for work in self._workloads():
            work.stepper.cancel()

    def __enter__(self: _L) -> _L:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is None or not self.group.busy:
            return self.close()
        # Left by a second Ctrl-C: its workers are inside user code, and whoever pressed it does not want to wait for them.
        self._cancel()
        ended = self._finalizer.detach()
        if ended is not None:
            group = ended[2][0]
            with contextlib.suppress(Timeout):
                finalize(group, self._places.any_host, timeout=0.0)
        return None

    @contextlib.contextmanager
    def _alone(self, call: str) -> Iterator[None]:
        """One call at a time: the replicas and their gradients are the trainer's, not the call's."""
        if not self._finalizer.alive:
            raise Unavailable(f"{call}: the trainer is closed. Make a new one.")
        if not self._lock.acquire(blocking=False):
            raise InvalidArgument(
                f"{call}: this trainer is in the middle of another call, in another thread or around this one (loss_fn must "
                "not call the trainer). One call at a time."
            )
        self._caller = threading.current_thread()
        if self._places.any_host:
            CallerThreads.enter()
        try:
            if self.group.busy:
                raise InvalidArgument(
                    f"{call}: an earlier step of this group has not ended: its workers are still inside user code. Wait for it, or close "
                    "the trainer."
                )
            if self._abandoned:  # its workers have gone on to write gradients meanwhile
                self._execution.drop_gradients()
            yield
        finally:
            if self.group.busy and self._running is not None:
                abandoned_runs.add(self._running)
            self._execution.running = None
            self._abandoned = self.group.busy
            self._lock.release()
            if self._is_closed():  # meanwhile, by another thread
                self._give_back_once()

    @contextlib.contextmanager
    def _if_idle(self) -> Iterator[bool]:
        """Whether the workers are free; then they are the caller's alone for the length of the ``with`` block."""
        if not self._finalizer.alive or not self._lock.acquire(blocking=False):
            yield False
            return
        try:
            yield not self.group.busy
        finally:
            self._lock.release()
            if self._is_closed():  # meanwhile, by another thread
                self._give_back_once()

    @property
    def _running(self) -> Run | None:
        return self._execution.running
