"""Proves a run of `DataParallel.batch`, in which the caller's function runs forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paceline.torch._batch.extras import Extras
from paceline.torch._check.check import TrialRun
from paceline.torch._check.prover import Prover
from paceline.torch._devices.caller_state import outside_autocast
from paceline.torch._run.call import Call
from paceline.torch._trainer.global_batch import (
    FunctionRun,
    MicroBatch,
    indices_of,
    refuse_backward_of_its_own,
    without_gradient,
)


class _Trial(TrialRun, FunctionRun):
    pass


class FunctionProver(Prover):
    """Runs the function over the whole batch, and then over the slices of the devices."""

    def __init__(self, *given: Any, parameters: list[nn.Parameter] | None, **options: Any) -> None:
        """`parameters`: those whose gradients are wanted, or None for all."""
        super().__init__(*given, **options)
        self._wanted: list[torch.Tensor] | None = None
        self._given = parameters
        if parameters is not None:
            ours = self._replicas.parameters
            self._wanted = [ours[index] for index in sorted(indices_of(parameters, ours)) if ours[index].requires_grad]

    def _one(self, data: Any, begin: int, end: int, extras: Extras, *, first: bool) -> torch.Tensor:
        part = MicroBatch(self, 0, begin, end, data)
        self._function(self._module, part)
        parameters = self._replicas.parameters
        filled = any(one.grad is not None for one in parameters)
        if filled and first and not part.terms:
            refuse_backward_of_its_own()
        if self._wanted is not None:
            wanted = set(map(id, self._wanted))
            for one in parameters:
                if id(one) not in wanted:
                    one.grad = None
            filled = any(one.grad is not None for one in self._wanted)
        return (part.sum() if part.terms else torch.zeros((), device=self._places.home)).requires_grad_(filled)

    def term_of(self, loss: Any, begin: int, end: int) -> torch.Tensor:
        return self._objective.term(loss, begin, end)

    def weighed(self, device: int, term: torch.Tensor) -> torch.Tensor:
        root = self._scaled(term)
        self.outside.watch(root)
        return root

    def backward_of(self, device: int, term: torch.Tensor, retain_graph: bool) -> None:
        if not term.requires_grad or self._wanted == []:
            return
        root = self._scaled(term)
        if self._wanted is None:
            self.outside.watch(root)
        with outside_autocast():
            root.backward(retain_graph=retain_graph, inputs=self._wanted)

    def _refuse_without_gradient(self) -> None:
        raise without_gradient(self._given is not None)

    def _trial(self, call: Call, **options: Any) -> TrialRun:
        return _Trial(call, fn=self._function, parameters=self._given, **options)
