"""What the workers run in one step: forward, backward and a term of the objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.utils import parametrize

from paceline import InvalidArgument
from paceline.torch._batch.extras import Extras, parted
from paceline.torch._batch.objective import Objective
from paceline.torch._devices.caller_state import NOTHING, backward_watched, outside_autocast
from paceline.torch._run.alone import AloneTrials
from paceline.torch._run.call import Call
from paceline.torch._run.executor import MOST_SIZES, Executor
from paceline.torch._run.finite import refuse_means_over_nothing
from paceline.torch._run.gradients import PerTensor, Sink, View
from paceline.torch._run.launch import Launch
from paceline.torch._run.outside import OutsideGradients, code_of

# One loss, or those of several terms by name, and what is returned beside them.
Loss = torch.Tensor | Mapping[str, torch.Tensor]
LossFunction = Callable[[nn.Module, Any], Loss | tuple[Loss, Any]]


class TrainRun(Executor):
    """Forward, backward and the slice's term of the objective."""

    def __init__(
        self,
        call: Call,
        *,
        loss_fn: LossFunction,
        objective: Objective,
        scale: torch.Tensor | None = None,
        carries: bool = False,
        finite: bool = False,
    ) -> None:
        super().__init__(call)
        replicas = self.replicas
        self.loss_fn = loss_fn
        self.objective, self.weighted = objective, objective.is_weighted
        self.scale = scale
        self.scales: list[torch.Tensor | None] = [scale] * len(replicas)
        self.carries = carries  # whether the gradients go to whoever calls backward, and not to .grad
        self._finite = finite  # whether loss_fn's result must be finite in each slice, if it is for the whole batch
        self.extras = Extras(objective)
        self._skipped = False  # whether items without weight did not run
        self.terms: list[list[tuple[int, torch.Tensor]]] = [[] for _ in replicas]
        self.launches: list[Launch] = []
        self.sink: Sink = PerTensor(replicas, call.all_replicas.names) if call.flat is None else call.flat
        if call.flat is not None:
            call.flat.begin()
        self.outside: OutsideGradients | None = None  # set if they are put back after a failure
        self.outside_gradients: list[tuple[torch.Tensor, torch.Tensor]] = []  # with their tensors, if the run carries
        self.without_gradient = self.with_gradient = False
        self.trial_of: AloneTrials | None = None  # what the step's time is for, beside the balancer
        self.seconds = 0.0  # from the beginning of the attempt to its commit
        self.part = False  # whether other ranks run other parts of the batch, which may have the gradient

    def compute(self, device: int, begin: int, end: int) -> bool:
        idle = self.weighted and self.idle(begin, end)
        if idle and code_of(self.loss_fn) not in self.seen.extras:
            self._skipped = True
            return False
        part = self.bring(device, begin, end)
        with torch.no_grad() if idle else NOTHING:
            loss, extras = parted(self.loss_fn(self.replicas[device].module, part))
        self.draws.look(device)
        if extras is not None:
            self.extras.add(begin, end, extras)
        if idle:
            return True
        if not self.terms[device] and self.any_gradient(device, begin):
            refuse_own_backward()
        term = self.term_of(loss, begin, end)
        self.terms[device].append((begin, term.detach()))
        if not term.requires_grad:  # nothing in this slice depends on a parameter: its gradient is zero
            self.without_gradient = True
            return False
        self.with_gradient = True
        self.seal_if_last(device)
        self.backward(device, self.scaled(device, term))
        return True

    def first(self, device: int) -> None:
        self.sink.start(device)

    def seal_if_last(self, device: int) -> None:
        """To be called before a device's only backward of a micro-batch."""
        if self._last[device]:
            self.sink.last(device)

    def idle(self, begin: int, end: int) -> bool:
        """Whether the slice is left out, since no item of it has weight. In statistics over the batch such items count, too."""
        return not self.constraints.all_items and self.objective.idle(begin, end)

    def term_of(self, loss: Any, begin: int, end: int) -> torch.Tensor:
        """The slice's term of the objective, 0-dimensional, with its graph."""
        return self.objective.term(loss, begin, end, all_run=self.constraints.all_items)

    def any_gradient(self, device: int, begin: int = 0) -> bool:
        """Whether a parameter of the device's replica has a gradient. None has one before the first backward of a run."""
        return (self.passage is None or self.passage.begins(begin)) and self.sink.any(device)

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
        self.batch.count_edits()
        roots = [root] if self.passage is None else [root, *self.passage.turn_back()]
        ones = map(torch.ones_like, roots)
        with outside_autocast():
            if self.draws.watches:
                with self.draws.watches[device]:
                    backward_watched(roots, ones, retain_graph, inputs)
            elif self.state.is_plain and not (root.is_complex() or torch._C._are_functorch_transforms_active()):
                backward_watched(roots, ones, retain_graph, inputs)
            elif len(roots) > 1:
                torch.autograd.backward(roots, list(ones))
            else:
                root.backward(retain_graph=retain_graph, inputs=inputs)
        if parametrize._cache and not retain_graph:  # PyTorch empties it only when no thread is inside cached()
            self.replicas[device].forget_cached()

    def scaled(self, device: int, term: torch.Tensor) -> torch.Tensor:
        """The term as the caller's GradScaler wants it."""
        scale = None if self.scale is None else self.scale_on(device)
        return term if scale is None else term * scale

    def scale_on(self, device: int) -> torch.Tensor | None:
        """The scale of the caller's GradScaler in the device's memory."""
        scale = self.scales[device]
        if scale is not None and scale.device != self.places.devices[device]:
            scale = self.scales[device] = self.places.mover(device)(scale)
        return scale

    def launched(self, device: int, seconds: float) -> None:
        # When a later piece of a step comes, the device may still be busy with the piece before. Nothing tells whether it is.
        room = self.queues_empty if not self._begun[device] else None
        self.launches.append(Launch(device, seconds, room))

    def after(self, device: int) -> None:
        if self.passage is not None:
            self.passage.end()
        else:
            self.sink.separate(device)

    def finish(self, device: int) -> list[View | None] | None:
        if len(self.replicas) == 1:
            return []
        try:
            return self.sink.finish(device, [term for _, term in self.terms[device]])
        except BaseException as error:
            self.failures.append((device, 0, 0, error))
            return None

    def sums(self) -> list[View | None]:
        return self.sink.sums()

    def check(self) -> None:
        """After all have run: raise if there is no gradient, or one that is silently wrong."""
        if self.without_gradient and not self.with_gradient and not self.part:
            refuse_without_gradient()
        if self._finite:
            refuse_means_over_nothing(self)
        self.draws.check()

    @property
    def lacks_extras(self) -> bool:
        """Whether items did not run because they have no weight, though each of them has extras."""
        return self._skipped and bool(self.extras)

    def note_extras(self) -> None:
        """Let items without weight run from now on, for the sake of their extras."""
        if len(self.seen.extras) >= MOST_SIZES:
            self.seen.extras.clear()
        self.seen.extras.add(code_of(self.loss_fn))

    def loss(self) -> torch.Tensor:
        """The objective."""
        return self.sink.loss(self.terms, self.places.home)


def refuse_own_backward() -> NoReturn:
    """Raise for a `loss_fn` that has filled gradients."""
    raise InvalidArgument(
        "step: loss_fn called backward itself, so gradients would count twice. Return the loss; step calls backward. Backward "
        "by hand is what DataParallel.batch() is for."
    )


def refuse_without_gradient() -> NoReturn:
    """Raise for a loss without a graph, by the type that plain PyTorch raises."""
    raise RuntimeError(
        "step: the loss does not require grad: no parameter that does reaches it (is it detached, or everything frozen?)."
    )
