"""What the workers run in one step or one prediction."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline import Cancelled, InvalidArgument
from paceline._core.engine import collect_garbage_if_due
from paceline.torch._batch.batch import Batch
from paceline.torch._batch.items import Items, OrderedBatch
from paceline.torch._batch.objective import Objective
from paceline.torch._devices.caller_state import CallerState, backward_watched
from paceline.torch._devices.places import Places, RandomStates
from paceline.torch._devices.run_draws import RunDraws
from paceline.torch._replicas.replicas import Replica
from paceline.torch._run.buckets import Buckets
from paceline.torch._run.gradients import OwnStorages, View, views
from paceline.torch._run.launch import Launch
from paceline.torch._run.memory import MemoryCaps
from paceline.torch._run.micro_batch_size import SizeSearch
from paceline.torch._run.outside import OutsideGradients
from paceline.torch._run.seen import Seen

LossFunction = Callable[[nn.Module, Any], torch.Tensor]

# Of one device. A compiler that meets so many has long turned to shapes that may vary, or given up (its own limit is 8).
_MOST_SIZES = 64

DONE = 0
DONE_BUT_NO_EVIDENCE = 1
FAILED = -1


class Frame(NamedTuple):
    """What every run starts from."""

    batch: Batch | OrderedBatch
    replicas: list[Replica]
    seen: Seen
    state: CallerState
    random: RandomStates  # what all generators are like
    places: Places
    caps: MemoryCaps
    items: Items | None = None  # the plan of a batch whose items do not cost the same
    search: SizeSearch | None = None  # for the size of micro-batches
    least: int = 1  # items of a micro-batch
    divides: bool = False  # whether a device may run its part in several micro-batches that nobody asked for


class Run:
    """What all have in common: the caller's state around every slice, failures kept with their traceback."""

    def __init__(self, frame: Frame) -> None:
        self.batch, self.replicas, self.seen, self.state, _, self.places, self.caps, self.items, self.search = frame[:9]
        self.least, self.divides = frame[9:]
        places = self.places
        self._pieces = [(0, 0)] * len(places)  # of each device: what is in work
        self._fresh = [True] * len(places)  # whether that is the first of its run
        self._brought = [0.0] * len(places)  # when its items were there: from then on Python enqueues
        self.queues_empty = True  # when this began
        self.claims: list[list[tuple[int, int]]] | None = None  # of each device, instead of planned ones
        self.alone = False  # whether one device runs all of it, as a trial
        # Of each device, in order: what ran, and whether it was more than one piece of a claim.
        self._ran: list[list[tuple[int, int, int]]] = [[] for _ in range(len(places))]
        self._divided = False
        # Of each device, of each claim: items and seconds of its pieces.
        self.timed: list[list[list[tuple[int, float]]]] = [[] for _ in range(len(places))]
        self.failures: list[tuple[int | None, int, int, BaseException]] = []  # None: in the reduction
        self._inside: dict[int, int] = {}
        self._interrupted = False
        self.draws = RunDraws(places, self.seen.drawing, self.seen.compiled, frame.random)

    def body(self, device: int, begin: int, end: int, last: bool) -> int:
        try:
            self._inside[device] = threading.get_ident()
            if self._interrupted:  # before this worker could be seen inside
                raise Cancelled
            self.places.prepare_worker(device)
            return self.state.contexts[device].run(self._slice, device, begin, end)
        except BaseException as error:
            self.failures.append((device, *self._pieces[device], error))
            return FAILED
        finally:
            self._inside.pop(device, None)

    def run_alone(self, device: int) -> None:
        """One device shall run the whole batch at once. That it is faster alone is no evidence of its speed beside the others."""
        self.claims = [[(0, self.batch.size)] if index == device else [] for index in range(len(self.places))]
        self.alone, self.search = True, None

    def interrupt(self) -> None:
        """Raise `Cancelled` in every worker that is inside user code, at its next Python instruction, or comes there later."""
        self._interrupted = True
        for thread in list(self._inside.values()):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Cancelled))

    @property
    def kept(self) -> str:
        """What a failure leaves as it was."""
        return "gradients and buffers are as before the step"

    @property
    def on_a_worker(self) -> bool:
        """Whether the calling thread is one of the workers that run this."""
        return threading.get_ident() in self._inside.values()

    def finish(self, device: int) -> list[View | None] | None:
        return []

    def sums(self) -> list[View | None] | None:
        """Where the sums of what `finish` gave go; called on the worker that was last."""
        return []

    def _slice(self, device: int, begin: int, end: int) -> int:
        on_trial = self.alone or (self.search is not None and self.search.on_trial)
        codes: list[int] = [DONE_BUT_NO_EVIDENCE] if on_trial else []
        spans = ((begin, end),) if self.search is None else self.search.pieces(begin, end)
        times: list[tuple[int, float]] = []
        before = len(self._ran[device])
        with self.places.enter(device):
            for span in spans:
                began = time.perf_counter()
                for piece in self.caps.pieces(device, *span, self.batch, self.least):
                    codes.append(self._run_piece(device, piece, fresh=piece[0] == begin))
                times.append((span[1] - span[0], time.perf_counter() - began))
        self.timed[device].append(times)
        if len(self._ran[device]) > before + 1:  # only ever set, whichever worker is first
            self._divided = True
        return max(codes)

    def _run_piece(self, device: int, piece: tuple[int, int], *, fresh: bool) -> int:
        self._pieces[device] = piece
        self._fresh[device] = fresh
        self.replicas[device].forget_cached()
        with self.caps.measured(device, *piece, self.batch) as measuring:
            ran, code = self._piece(device, *piece)
            ended = time.perf_counter()
            measuring.counts = ran
        if ran:
            self.launched(device, ended - self._brought[device])
        self._ran[device].append((device, *piece))
        collect_garbage_if_due()
        return code

    def bring(self, device: int, begin: int, end: int) -> Any:
        """A slice of the batch, where the device computes."""
        part = self.batch.slice(begin, end, self.places.mover(device))
        if self._fresh[device]:
            self.places.brought(device)
        self._brought[device] = time.perf_counter()
        return part

    @property
    def micro_batches(self) -> int:
        """How many ran."""
        return sum(map(len, self._ran))

    @property
    def divided(self) -> bool:
        """Whether a device ran several, without those that memory asked for."""
        return any(sum(map(len, claims)) > 1 for claims in self.timed)

    @property
    def pieces(self) -> list[tuple[int, int, int]]:
        """What ran, (device, begin, end) each, if that is not what was claimed."""
        return [piece for lane in self._ran for piece in lane] if self._divided else []

    def _piece(self, device: int, begin: int, end: int) -> tuple[bool, int]:
        """Whether anything was to be done, and what the engine is told."""
        sizes = self.seen.sizes[device]
        # Costs may be all different: they take up room only where they tell of something to tune.
        padded_to = self.batch.padded_to(begin, end) if self.seen.tunes else None
        size = (end - begin, self.seen.mode, self.batch.item_shapes, padded_to)
        first = not sizes or (self.seen.tunes and size not in sizes and len(sizes) < _MOST_SIZES)
        gate = self.seen.gate.enter(first) if self.seen.compiled else contextlib.nullcontext(False)
        with gate as waited, self.draws.micro_batch(device, begin), self.state.replayed():
            ran = self.compute(device, begin, end)
        if ran:
            self.seen.ever[device].add(end - begin)
            if len(sizes) < _MOST_SIZES:
                sizes.add(size)
            self.after(device)
        return ran, DONE if ran and not first and not waited else DONE_BUT_NO_EVIDENCE

    def compute(self, device: int, begin: int, end: int) -> bool:
        raise TypeError("Run.compute is for subclasses")

    def launched(self, device: int, seconds: float) -> None:
        """A piece has brought its items, and then was enqueued, or on the host has run, in that time."""

    def after(self, device: int) -> None:
        """What follows a micro-batch outside of the caller's state: modes of the user do not see it."""


class TrainRun(Run):
    """Forward, backward and the slice's term of the objective."""

    def __init__(
        self,
        frame: Frame,
        *,
        loss_fn: LossFunction,
        objective: Objective,
        scale: torch.Tensor | None,
        names: list[str],
    ) -> None:
        super().__init__(frame)
        replicas, places = self.replicas, self.places
        self.loss_fn = loss_fn
        self.objective = objective
        self.scales: list[torch.Tensor | None] = [scale] * len(places)
        self.names = names
        self.terms: list[list[tuple[int, torch.Tensor]]] = [[] for _ in replicas]
        self.launches: list[Launch] = []
        self.buckets = Buckets(replicas, names, places) if places.queues is not None and len(replicas) > 1 else None
        self.left_out: dict[int, set[int]] = {}
        self.outside: OutsideGradients | None = None  # where somebody puts them back after a failure
        self._storages = [OwnStorages(replica.parameters) for replica in replicas]
        self.without_gradient = self.with_gradient = False

    def compute(self, device: int, begin: int, end: int) -> bool:
        if self.objective.idle(begin, end):
            return False
        part = self.bring(device, begin, end)
        loss = self.loss_fn(self.replicas[device].module, part)
        self.draws.look(device)
        if not self.terms[device] and self.any_gradient(device):
            raise InvalidArgument(
                "step: loss_fn called backward itself, so gradients would count twice. Return the loss; step calls backward. Backward "
                "by hand is what trainer.batch() is for."
            )
        term = self.objective.term(loss, begin, end)
        self.terms[device].append((begin, term.detach()))
        if not term.requires_grad:  # nothing in this slice depends on a parameter: its gradient is zero
            self.without_gradient = True
            return False
        self.with_gradient = True
        self.backward(device, self.scaled(device, term))
        return True

    def any_gradient(self, device: int) -> bool:
        """Whether a parameter of the device's replica has one; before its first backward of a run none has."""
        return any(parameter.grad is not None for parameter in self.replicas[device].parameters)

    def backward(
        self,
        device: int,
        root: torch.Tensor,
        retain_graph: bool = False,
        inputs: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Fill the gradients of the device's replica, all or those of `inputs`."""
        if inputs is not None and not inputs:
            return
        if inputs is None and self.outside is not None:
            self.outside.look(root)
        if self.draws.watches:
            with self.draws.watches[device]:
                backward_watched(root, retain_graph, inputs)
        else:
            root.backward(retain_graph=retain_graph, inputs=inputs)
        if not retain_graph:  # PyTorch itself empties the cache only when no thread is inside cached()
            self.replicas[device].forget_cached()

    def scaled(self, device: int, term: torch.Tensor) -> torch.Tensor:
        """The term as the caller's GradScaler wants it."""
        scale = self.scales[device]
        if scale is None:
            return term
        if scale.device != self.places.devices[device]:
            scale = self.scales[device] = self.places.mover(device)(scale)
        return term * scale

    def launched(self, device: int, seconds: float) -> None:
        # Of a step's later pieces nothing tells whether the device is still at the one before.
        room = self.queues_empty if not self._ran[device] else None
        self.launches.append(Launch(device, seconds, room))

    def after(self, device: int) -> None:
        self._storages[device].separate()

    def finish(self, device: int) -> list[View | None] | None:
        if len(self.replicas) == 1:
            return []
        try:
            if self.buckets is not None:
                with self.places.enter(device):
                    return self.buckets.fill(device, [term for _, term in self.terms[device]])
            found, left_out = views(self.replicas[device], self.names)
        except BaseException as error:
            self.failures.append((device, 0, 0, error))
            return None
        self.left_out[device] = set(left_out)
        return found

    def sums(self) -> list[View | None] | None:
        try:
            return [] if self.buckets is None else self.buckets.sums()
        except BaseException as error:
            self.failures.append((None, 0, 0, error))
            return None

    def check(self) -> None:
        """After all have run: raise if there is no gradient, or one that is silently wrong."""
        if self.without_gradient and not self.with_gradient:
            raise RuntimeError(  # the type that plain PyTorch raises
                "step: the loss does not require grad: no parameter that does reaches it (is it detached, or everything frozen?)."
            )
        self.draws.check()

    def loss(self) -> torch.Tensor:
        """The objective: the sum of the terms, in the order of the items where they lie in one memory."""
        if self.buckets is not None:
            dtypes = [term.dtype for terms in self.terms for _, term in terms]
            return self.buckets.loss().to(dtypes[0] if dtypes else torch.float32)
        if not any(self.terms):  # the caller's backward passes were their own
            return torch.zeros((), device=self.places.home)
        terms = [
            term for _, term in sorted((entry for terms in self.terms for entry in terms), key=lambda entry: entry[0])
        ]
        if len(terms) <= 2:
            return terms[0].clone() if len(terms) == 1 else terms[0] + terms[1]
        return torch.stack(terms).sum()


class PredictRun(Run):
    """Forward only."""

    def __init__(self, frame: Frame, *, fn: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__(frame)
        self.fn = fn
        self.outputs: list[tuple[int, int, Any]] = []

    @property
    def kept(self) -> str:
        return "gradients are untouched"

    def compute(self, device: int, begin: int, end: int) -> bool:
        part = self.bring(device, begin, end)
        with torch.no_grad():
            output = self.fn(self.replicas[device].module, part)
        self.draws.look(device)
        self.outputs.append((begin, end, output))
        return True
