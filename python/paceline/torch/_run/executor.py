"""What the workers run in any call, and in one prediction."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from paceline import Cancelled
from paceline._core.engine import BatchPlan, collect_garbage_if_due
from paceline.torch._devices.caller_state import NOTHING
from paceline.torch._devices.compiling import seed_graph_trees
from paceline.torch._devices.meeting import MeetingOffError
from paceline.torch._devices.run_draws import RunDraws
from paceline.torch._run.call import Call
from paceline.torch._run.gradients import View
from paceline.torch._run.memory import metered
from paceline.torch._run.seen import CompileGate

# Sizes per device. A compiler that meets so many has long switched to dynamic shapes, or given up (its own limit is 8).
MOST_SIZES = 64

# What a body returns to the engine (python_program.hpp).
DONE = 0
DONE_BUT_NO_EVIDENCE = 1
FAILED = -1
# The bits of the flags that a body gets from the engine.
CONTINUES = 1
MEASURE = 2
LAST = 4


# (device, begin, end): a context around one micro-batch, which its worker enters.
Around = Callable[[int, int, int], contextlib.AbstractContextManager[object]]


class Executor:
    """Runs the micro-batches of one attempt: the caller's state around every slice, and failures with their traceback."""

    repeatable = True  # whether it may run a second time, if memory runs out
    kept = "gradients and buffers are as before the step"  # what a failure does not change, in words

    def __init__(self, call: Call) -> None:
        self.call, self.recipe, self.places = call, call.recipe, call.places
        self.batch, self.items, self.replicas, self.seen = call.batch, call.items, call.replicas, call.seen
        self.state, self.limits, self.passage = call.state, call.limits, call.passage
        self.searches, self.divides, self.constraints = call.searches, call.divides, call.recipe.constraints
        self.gate = CompileGate.of_call() if self.seen.compiled or self.seen.captures else None
        count = len(self.replicas)
        self._fresh = [True] * count  # per device: whether it runs the first piece of a claim
        self._begun = [False] * count  # per device: whether it has run something
        self._last = [False] * count  # per device: whether it runs its last micro-batch
        self._brought = [0.0] * count  # per device: when its items had arrived, and Python began to enqueue
        self.ran = [0] * count  # per device: how many micro-batches
        self.queues_empty = True  # whether the devices' queues were empty when this run began
        self.claims: list[list[tuple[int, int]]] | None = None  # per device, in place of planned claims
        self.pieces: list[list[tuple[int, int]]] | None = None  # the pieces of these claims
        self.alone = False  # whether one device runs everything, as a trial
        self.plan: BatchPlan | None = None  # who runs what, once that is planned
        # Device (None: the reduction), begin, end, error.
        self.failures: list[tuple[int | None, int, int, BaseException]] = []
        self.failed_device: int | None = None  # where the first of these came; None also for the reduction
        self._inside: dict[int, int] = {}
        self._interrupted = False
        self.waited: list[float] | None = None  # seconds of each device in which others held it up
        self.draws = RunDraws(self.places, self.seen.drawing, self.seen.compiled, call.random)

    def body(self, device: int, begin: int, end: int, flags: int) -> int | tuple[int, int] | tuple[int, int, float]:
        try:
            self._inside[device] = threading.get_ident()
            if self._interrupted:  # before this worker could be seen inside
                raise Cancelled
            self.places.prepare_worker(device)
            return self.state.contexts[device].run(self._micro_batch, device, begin, end, flags)
        except MeetingOffError:  # another device's failure says why
            return FAILED
        except BaseException as error:
            self.failures.append((device, begin, end, error))
            for failed in self.recipe.failed:
                failed(device)
            return FAILED
        finally:
            self._inside.pop(device, None)

    def surrounded(self) -> contextlib.AbstractContextManager[Any]:
        """A context around all devices, on the caller's thread."""
        for begin in self.recipe.begin:
            begin(self)
        contexts = self.recipe.run
        if len(contexts) < 2:
            return contexts[0](self) if contexts else NOTHING
        return self._surrounded()

    @contextlib.contextmanager
    def _surrounded(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for context in self.recipe.run:
                stack.enter_context(context(self))
            yield

    def run_alone(self, device: int) -> None:
        """Let one device run the whole batch. Its time alone is no evidence of its speed beside the others."""
        self.claims = [[(0, self.batch.size)] if index == device else [] for index in range(len(self.places))]
        self.alone, self.searches = True, False

    def interrupt(self) -> None:
        """Raise `Cancelled` in every worker that is inside user code, at its next Python instruction, or comes there later."""
        self._interrupted = True
        for thread in list(self._inside.values()):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Cancelled))

    @property
    def inside(self) -> dict[int, int]:
        """The devices whose workers are inside of a micro-batch now, with the workers' thread identifiers."""
        return dict(self._inside)

    @property
    def on_a_worker(self) -> bool:
        """Whether the calling thread is one of the workers that run this."""
        return threading.get_ident() in self._inside.values()

    def first(self, device: int) -> None:
        """Called on a device's worker before its first micro-batch."""

    def end(self, device: int) -> list[View | None] | None:
        """Called on each device's worker when nothing is left to run, also for a device that a cancelled run has given nothing."""
        for ended in self.recipe.ended:
            ended(device)
        return self.finish(device)

    def finish(self, device: int) -> list[View | None] | None:
        """Where the gradients are. None if they cannot be used."""
        return []

    def sums(self) -> list[View | None]:
        """Where to put the sums of what `finish` returns. Called before the devices begin."""
        return []

    def _micro_batch(
        self, device: int, begin: int, end: int, flags: int
    ) -> int | tuple[int, int] | tuple[int, int, float]:
        self._fresh[device] = not flags & CONTINUES
        self._last[device] = bool(flags & LAST)
        if parametrize._cache:
            self.replicas[device].forget_cached()
        with self.places.enter(device):
            if not self._begun[device]:
                self._begin(device)
            if not flags & MEASURE:
                _, code = self._timed(device, begin, end)
                return code if self.waited is None else (code, 0, self.waited[device])
            name, limit = self.places.names[device], self.limits[device]
            with metered(self.places.devices[device], limit, name) as meter:
                ran, code = self._timed(device, begin, end)
            return code, meter.used if ran else -1

    def _begin(self, device: int) -> None:
        arrivals, queues = self.replicas[device].arrivals, self.places.queues
        if arrivals is not None and queues is not None:
            at_once = self.seen.waits_at_once or not self.repeatable  # a backward alone reads what its forward has kept
            arrivals.begin(functools.partial(queues.need, device), compiled=at_once)
        self.first(device)

    def _timed(self, device: int, begin: int, end: int) -> tuple[bool, int]:
        if self.recipe.micro_batch:
            with contextlib.ExitStack() as stack:
                for bound in self.recipe.micro_batch:
                    stack.enter_context(bound(self, device, begin, end))
                ran, code = self._compute(device, begin, end)
        else:
            ran, code = self._compute(device, begin, end)
        if ran and self.places.on_gpu[device]:
            self.launched(device, time.perf_counter() - self._brought[device])
        self._begun[device] = True
        collect_garbage_if_due()
        return ran, DONE_BUT_NO_EVIDENCE if self.alone else code

    def bring(self, device: int, begin: int, end: int) -> Any:
        """A slice of the batch, where the device computes."""
        take = self.batch.slice_apart if len(self.replicas) > 1 else self.batch.slice
        part = take(begin, end, self.places.mover(device))
        if self.places.queues is not None:
            self.brought(device)
        return part

    def brought(self, device: int) -> None:
        """Start the device's clocks: what it needs is on its way."""
        if self.places.queues is None:
            return
        if self._fresh[device]:
            self.places.brought(device)
        self._brought[device] = time.perf_counter()

    def _compute(self, device: int, begin: int, end: int) -> tuple[bool, int]:
        """Run one micro-batch. Returns whether there was anything to do, and the code for the engine."""
        sizes = self.seen.sizes[device]
        size = self.seen.size_of(self.batch, begin, end)
        first = not sizes or (self.seen.tunes and size not in sizes and len(sizes) < MOST_SIZES)
        first |= self.seen.captures and self.captures(device, size)
        waited = False
        if self.gate is not None:
            with self.gate.enter(first, self) as waited, self.draws.micro_batch(device, begin), self.state.replayed():
                seed_graph_trees()
                ran = self.compute(device, begin, end)
        elif self.draws.seeds or not self.state.is_plain:
            with self.draws.micro_batch(device, begin), self.state.replayed():
                ran = self.compute(device, begin, end)
        else:
            ran = self.compute(device, begin, end)
        if ran:
            self.ran[device] += 1
            self.seen.ever[device].add(end - begin)
            if len(sizes) < MOST_SIZES:
                sizes.add(size)
            self.after(device)
        return ran, DONE if ran and not first and not waited else DONE_BUT_NO_EVIDENCE

    def compute(self, device: int, begin: int, end: int) -> bool:
        raise TypeError("Executor.compute is for subclasses")

    def captures(self, device: int, size: tuple[Any, ...]) -> bool:
        """Whether the device's next micro-batch, of this size, will be captured."""
        return False

    def launched(self, device: int, seconds: float) -> None:
        """Called after each piece on a GPU, with the seconds from the arrival of its items until it was enqueued or, on the host, had run."""

    def after(self, device: int) -> None:
        """Called after each micro-batch, outside of the caller's state: the user's modes do not see it."""


class PredictRun(Executor):
    """Forward only."""

    kept = "gradients are untouched"

    def __init__(self, call: Call, *, fn: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__(call)
        self.fn = fn
        self.outputs: list[tuple[int, int, Any]] = []

    def compute(self, device: int, begin: int, end: int) -> bool:
        part = self.bring(device, begin, end)
        with torch.no_grad():
            output = self.fn(self.replicas[device].module, part)
        self.draws.look(device)
        self.outputs.append((begin, end, output))
        return True
