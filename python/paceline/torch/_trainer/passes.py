"""Forward over all devices, and the backward that belongs to it, with the caller's own loss between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from paceline.torch._batch.batch import Batch
from paceline.torch._batch.joining import joined
from paceline.torch._run.call import Asked, Call
from paceline.torch._run.execution import Execution
from paceline.torch._run.halves import BackwardRun, ForwardRun
from paceline.torch._trainer.lifetime import Lifetime
from paceline.torch._trainer.proofs import Proofs
from paceline.torch._trainer.works import Works

_Gradients = Sequence[torch.Tensor | None]


class Passes:
    """Runs forward and backward apart. Devices run in a backward what they ran in its forward."""

    def __init__(self, works: Works, execution: Execution, lifetime: Lifetime, proofs: Proofs) -> None:
        self._works = works
        self._execution = execution
        self._lifetime = lifetime
        self._proofs = proofs

    def forward(self, fn: Callable[..., Any], batch: Any) -> Any:
        """What ``fn(module, slice)`` returns for the whole batch, with a graph that leads to the parameters and to `batch`."""
        replicas = self._execution.replicas
        with self._lifetime.between_steps("forward"):
            replicas.share()
            whole = Batch(batch, gradients=True)
            if (proved := self._proofs.forward("forward", fn, whole, graph=True)) is not None:
                return proved[0]
            self._execution.places.begin(whole)
            inputs = [tensor for _, tensor in whole.tensors()]

            executor = partial(ForwardRun, fn=fn, whole=whole)
            run: ForwardRun = self._execution.forward(Asked(self._works.steps, whole, fn, executor, hooks=True))
            with torch.no_grad():
                tensors, nest = run.gathered()
            replicas.graphs.add(run)
        trained = [index for index, parameter in enumerate(replicas.parameters) if parameter.requires_grad]
        parameters = [replicas.parameters[index] for index in trained]
        sources = [tensor for tensor in inputs if tensor.requires_grad]
        outside = list(run.outside_leaves.values())
        runs: list[ForwardRun] = [run]  # taken out by the backward, which frees the graphs

        def backward(gradients: _Gradients) -> _Gradients:
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
        apply: Any = _Passes.apply
        outputs = iter(apply(backward, tensors, differentiable, *parameters, *sources, *outside))
        return joined([(0, whole.size, nest)], "output", lambda pieces, path: next(outputs), "forward")

    def _backward(
        self, fn: Callable[..., Any], whole: Batch, runs: list[ForwardRun], gradients: _Gradients
    ) -> tuple[_Gradients, _Gradients, dict[int, torch.Tensor]]:
        """The gradients of the parameters, of the inputs, and of all other leaves by the leaf's identity. Takes the only run out of `runs`."""
        with self._lifetime.between_steps("backward"):
            forward = runs.pop()
            self._execution.places.begin(whole)
            work = self._works.of("backward")

            def executor(call: Call) -> BackwardRun:
                call.seen.drawing.draws = forward.draws.drew
                return BackwardRun(call, forward, gradients, self._execution.replicas.names)

            done = self._execution.train(Asked(work, whole, fn, executor, hooks=True, like=forward.constraints))
            by_leaf = {id(leaf): gradient for leaf, gradient in done.run.outside_gradients}
            return done.totals, forward.input_gradients(by_leaf), by_leaf


class _Passes(torch.autograd.Function):
    """Outputs that a forward on the devices has computed. Their backward runs on the devices."""

    @staticmethod
    def forward(
        ctx: Any,
        run_backward: Callable[[_Gradients], _Gradients],
        tensors: list[torch.Tensor],
        differentiable: list[bool],
        *leaves: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.run_backward = run_backward
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(tensor for tensor, yes in zip(tensors, differentiable, strict=True) if not yes))
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return None, None, None, *ctx.run_backward(gradients)
