"""Forward over all devices, and the backward that belongs to it, with the caller's own loss between them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from paceline import InvalidArgument
from paceline._words import plural
from paceline.torch._batch.batch import Batch
from paceline.torch._batch.joining import joined
from paceline.torch._run.call import Asked
from paceline.torch._run.carried import Gradients, HandOut
from paceline.torch._run.halves import BackwardRun, ForwardRun
from paceline.torch._trainer.parts import Core, Part
from paceline.torch._trainer.proofs import Proofs

_LEAST = 0.01  # of the time of a call: what step would save is said from here on


class PassesClock:
    """What calls with a backward of their own cost, beside forward and backward."""

    def __init__(self, *, on_gpu: bool) -> None:
        self.bytes = 0  # of outputs that were brought to one device
        self._on_gpu = on_gpu  # then the caller's clock says nothing about the devices
        self._calls = self._backwards = 0
        self._inside = self._between = 0.0  # seconds of passes, and of the caller's between a forward and its backward
        self._left: float | None = None  # when the last forward ended, if nothing ran since

    @contextlib.contextmanager
    def __call__(self, kind: str) -> Iterator[None]:
        """Around a forward or a backward."""
        began = time.perf_counter()
        if kind == "backward" and self._left is not None:
            self._between += began - self._left
        self._left = None
        yield  # a pass that fails does not count
        ended = time.perf_counter()
        self._inside += ended - began
        self._calls += kind == "forward"
        self._backwards += kind == "backward"
        self._left = ended if kind == "forward" else None

    def explain(self) -> str:
        """What `step` would gain, in words; empty before the first backward."""
        if not self._backwards:
            return ""
        text = (
            f"Calls: {plural(self._calls, 'forward')}, {plural(self._backwards, 'backward')}. The graphs of the whole batch stay in memory "
            f"between them, and {self.bytes / self._calls / 1e6:.3g} MB of outputs a call come to one device, which computes the loss.\n"
        )
        gains = "step(loss_fn, batch) computes the loss on the devices, in micro-batches that fit the memory, and lets a device that is done early take over work."
        per, of = (1e3 * one / self._backwards for one in (self._between, self._between + self._inside))
        if not self._on_gpu and per >= _LEAST * of:
            gains += f" Between forward and backward the devices waited {per:.3g} of {of:.3g} ms ({per / of:.0%}): step would save most of this."
        return f"{text}Faster: {gains}\n"


class Passes(Part):
    """Runs forward and backward apart. Devices run in a backward what they ran in its forward."""

    def __init__(self, core: Core, proofs: Proofs) -> None:
        super().__init__(core)
        self._proofs = proofs
        self.clock = PassesClock(on_gpu=any(core.execution.places.on_gpu))

    def forward(self, fn: Callable[..., Any], batch: Any) -> Any:
        """What ``fn(module, slice)`` returns for the whole batch, with a graph that leads to the parameters and to `batch`."""
        replicas = self._execution.replicas
        if self._execution.ranks is not None:
            raise InvalidArgument(
                "forward: a call of a DataParallel that trains together with other processes. Its backward would have the gradients of this rank only. "
                "Use step or loss, whose gradients are those of all ranks; under torch.no_grad() a call is a prediction. With group='alone' the "
                "trainer does not join the others."
            )
        with self._lifetime.between_steps("forward"), self.clock("forward"):
            replicas.share()
            whole = Batch(batch, gradients=True)
            if (proved := self._proofs.forward("forward", fn, whole, graph=True)) is not None:
                return proved[0]
            self._execution.places.begin(whole)
            inputs = [tensor for _, tensor in whole.tensors()]

            work, executor = self._works.of("forward", whole=True), partial(ForwardRun, fn=fn, whole=whole)
            run: ForwardRun = self._execution.forward(Asked(work, whole, fn, executor, hooks=True))
            with torch.no_grad():
                tensors, nest = run.gathered()
            self.clock.bytes += sum(tensor.nbytes for tensor in tensors)
            replicas.graphs.add(run)
        trained = [index for index, parameter in enumerate(replicas.parameters) if parameter.requires_grad]
        parameters = [replicas.parameters[index] for index in trained]
        sources = [tensor for tensor in inputs if tensor.requires_grad]
        outside = list(run.outside_leaves.values())
        runs: list[ForwardRun] = [run]  # taken out by the backward, which frees the graphs

        def backward(gradients: Gradients) -> Gradients:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "backward: create_graph=True through a module that runs on several devices, whose gradients come without a graph. Compute "
                    "what needs gradients of gradients inside of the function of DataParallel.loss."
                )
            if not runs:
                raise RuntimeError(
                    "backward: called a second time through one forward, whose graphs on the devices are gone. Add the losses up and call "
                    "backward once, or run the module again."
                )
            totals, of_inputs, by_leaf = self._backward(fn, whole, runs, gradients)
            return [*(totals[index] for index in trained), *of_inputs, *(by_leaf.get(id(one)) for one in outside)]

        differentiable = [
            any(part.outputs[index].requires_grad for parts in run.slices for part in parts)
            for index in range(len(tensors))
        ]
        apply: Any = HandOut.apply
        outputs = iter(apply(backward, tensors, differentiable, *parameters, *sources, *outside))
        return joined([(0, whole.size, nest)], "output", lambda pieces, path: next(outputs), "forward")

    def _backward(
        self, fn: Callable[..., Any], whole: Batch, runs: list[ForwardRun], gradients: Gradients
    ) -> tuple[Gradients, Gradients, dict[int, torch.Tensor]]:
        """The gradients of the parameters, of the inputs, and of all other leaves by the leaf's identity. Takes the only run out of `runs`."""
        with self._lifetime.between_steps("backward"), self.clock("backward"):
            forward = runs.pop()
            self._execution.places.begin(whole)
            work = self._works.of("backward", whole=True)

            def draw_as_forward() -> None:
                # Checkpointing sets the generator that its forward has read: the worker's own, also where that forward drew nothing.
                work.seen.drawing.draws = forward.draws.seeds or forward.draws.drew

            executor = partial(BackwardRun, forward=forward, gradients=gradients)
            asked = Asked(work, whole, fn, executor, hooks=True, like=forward.constraints, before=draw_as_forward)
            done = self._execution.train(asked)
            by_leaf = {id(leaf): gradient for leaf, gradient in done.run.outside_gradients}
            return done.totals, forward.input_gradients(by_leaf), by_leaf
