"""Computes loss and gradients of chosen slices with the user's module, on the caller's thread. The module is put back after each run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from paceline.torch._batch.batch import Batch
from paceline.torch._batch.extras import parted
from paceline.torch._batch.items import OrderedBatch
from paceline.torch._batch.objective import Objective
from paceline.torch._check.leaves import OutsideLeaves
from paceline.torch._devices.noise import Noise, OtherGenerators
from paceline.torch._devices.places import Places, RandomStates
from paceline.torch._replicas.buffers import KeptBuffers
from paceline.torch._run.gradients import OwnStorages

LossFunction = Callable[[nn.Module, Any], Any]
Span = tuple[int, int]


@dataclasses.dataclass
class Probed:
    """The result of a run. The gradients belong to it: first those of the module's parameters, then those of leaves outside of it."""

    loss: float
    gradients: list[torch.Tensor | None]
    buffers: dict[str, torch.Tensor]


class Probe:
    """Runs slices. Every run starts from the same parameters, buffers and generators, and leaves them so. An item always draws the same."""

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[Any],
        places: Places,
        batch: Batch | OrderedBatch,
        objective: Objective,
        loss_fn: LossFunction,
        noise: Noise,
        outside: OutsideLeaves,
        modules: Sequence[tuple[str, nn.Module]],
    ) -> None:
        self.module = module
        self.loss_fn = loss_fn
        self.batch = batch
        self.noise = noise
        self._parameters = parameters
        self._places = places
        self._objective = objective
        self.outside = outside
        self.modules = modules  # with their names: the module, its submodules, and the modules in its plain lists

    def over(self, batch: Any, objective: Objective, noise: Noise | None = None) -> Probe:
        """A probe with the same module and loss over another batch."""
        return Probe(
            self.module,
            self._parameters,
            self._places,
            batch,
            objective,
            self.loss_fn,
            noise or self.noise,
            self.outside,
            self.modules,
        )

    def split(self, spans: Sequence[Span]) -> Probed:
        """The objective, summed over slices as `step` sums them."""
        busy = [span for span in spans if not self._objective.idle(*span)]
        return self._run([(self._slice(span), self.batch.rows(*span), partial(self._term, span)) for span in busy])

    def raw(self, spans: Sequence[Span], factor: float = 1.0) -> Probed:
        """The return value of ``loss_fn`` for the items of all `spans` together. It is summed if there is one loss for each item."""
        rows = torch.cat([self.batch.rows(*span) for span in spans])
        if len(spans) == 1:
            return self._run([(self._slice(spans[0]), rows, lambda loss: loss.sum() * factor)])
        return self._run([(self.batch.gathered(rows, self._places.to_home), rows, torch.sum)])

    def _term(self, span: Span, loss: Any) -> torch.Tensor:
        return self._objective.term(loss, *span)

    def _slice(self, span: Span) -> Any:
        return self.batch.slice(*span, self._places.to_home)

    def _run(self, parts: Sequence[tuple[Any, torch.Tensor, Callable[[Any], torch.Tensor]]]) -> Probed:
        random, others = RandomStates(self._places), OtherGenerators()
        buffers = KeptBuffers(part for _, part in self.modules)
        storages, outside = OwnStorages(self._parameters), self.outside
        replays = self.noise.recorded
        total = 0.0
        try:
            for data, rows, reduce in parts:
                with self.noise.of(rows):
                    term = reduce(parted(self.loss_fn(self.module, data))[0])
                    total += term.item()
                    if term.requires_grad:
                        outside.watch(term)
                        term.backward()
                storages.separate()
            self.noise.lost |= dict.fromkeys(others.moved)
            if replays and random.moved:
                self.noise.lost["code whose draws PyTorch does not show, such as compiled code"] = None
            ended = {
                f"{name}.{key}": buffer.clone()
                for name, part in self.modules
                for key, buffer in part._buffers.items()
                if buffer is not None
            }
            return Probed(total, [*(parameter.grad for parameter in self._parameters), *outside.taken()], ended)
        finally:
            for parameter in self._parameters:
                parameter.grad = None
            outside.clear()
            random.restore()
            others.restore()
            with torch.no_grad():
                buffers.restore()


def described_sizes(sizes: Sequence[int]) -> str:
    """The sizes of a split, equal ones together: "3 x 5 + 1 items"."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and runs[-1][1] == size:
            runs[-1][0] += 1
        else:
            runs.append([1, size])
    return " + ".join(f"{count} x {size}" if count > 1 else f"{size}" for count, size in runs) + " items"


def spans_of(sizes: Sequence[int]) -> list[Span]:
    """Slices of these sizes, one after the other."""
    spans = []
    begin = 0
    for size in sizes:
        spans.append((begin, begin + size))
        begin += size
    return spans


def distances(
    wanted: Sequence[torch.Tensor | None], got: Sequence[torch.Tensor | None], names: Sequence[str] = ()
) -> dict[str, float]:
    """For each parameter the norm of the difference, relative to the parameter's norm, or to a thousandth of the norm of all if that is more.

    The latter is for gradients that are zero in exact arithmetic (the key bias of attention), where a relative error means nothing.
    A gradient that one side does not have counts as zero there.
    """
    norms = [0.0 if tensor is None else _norm(tensor) for tensor in wanted]
    floor = max(1e-3 * sum(norm * norm for norm in norms) ** 0.5, 1e-300)
    result = {}
    for index, (norm, mine, theirs) in enumerate(zip_longest(norms, wanted, got)):
        if mine is None and theirs is None:
            continue
        if mine is not None and theirs is not None:
            difference = _norm(mine.double() - theirs.double())
        else:
            difference = sum(_norm(one) for one in (mine, theirs) if one is not None)
        relative = difference / max(norm or 0.0, floor)
        name = names[index] if index < len(names) else str(index)
        result[name] = relative if relative == relative else float("inf")  # NaN counts as infinite
    return result


def _norm(tensor: torch.Tensor) -> float:
    wide = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return float(torch.linalg.vector_norm(wide, dtype=torch.complex128 if wide.is_complex() else torch.float64))
