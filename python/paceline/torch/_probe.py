"""Loss and gradients of chosen slices, on the caller's thread, by one replica that is put back after each run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.torch._batch import Batch, concatenate
from paceline.torch._buffers import KeptBuffers
from paceline.torch._gradients import OwnStorages
from paceline.torch._items import OrderedBatch
from paceline.torch._objective import Objective
from paceline.torch._places import Places, RandomStates
from paceline.torch._replicas import Replica

LossFunction = Callable[[nn.Module, Any], Any]
Span = tuple[int, int]


@dataclasses.dataclass
class Probed:
    """What a run gave. The gradients are its own."""

    loss: float
    gradients: list[torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    drew: bool  # random numbers of PyTorch's


class Probe:
    """Every run starts from the same parameters, buffers and random generators, and leaves them so."""

    def __init__(
        self, replica: Replica, places: Places, batch: Batch | OrderedBatch, objective: Objective, loss_fn: LossFunction
    ) -> None:
        self.module = replica.module
        self._parameters = replica.parameters
        self._places = places
        self._batch = batch
        self._objective = objective
        self._loss_fn = loss_fn

    def split(self, spans: Sequence[Span]) -> Probed:
        """The objective, summed over slices as `step` sums them."""
        busy = [span for span in spans if not self._objective.idle(*span)]
        return self._run([(self._slice(span), partial(self._term, span)) for span in busy])

    def raw(self, spans: Sequence[Span]) -> Probed:
        """What ``loss_fn`` itself returns for the items of all `spans` together, summed if there is one loss for each item."""
        slices = [(end - begin, self._slice((begin, end))) for begin, end in spans]
        if len(slices) == 1:
            return self._run([(slices[0][1], torch.sum)])
        bounds = [sum(items for items, _ in slices[:index]) for index in range(len(slices) + 1)]
        joined = concatenate([(bounds[index], bounds[index + 1], part) for index, (_, part) in enumerate(slices)])
        return self._run([(joined, torch.sum)])

    def _term(self, span: Span, loss: Any) -> torch.Tensor:
        return self._objective.term(loss, *span)

    def _slice(self, span: Span) -> Any:
        return self._batch.slice(*span, self._places.to_home)

    def _run(self, parts: Sequence[tuple[Any, Callable[[Any], torch.Tensor]]]) -> Probed:
        random, buffers = RandomStates(self._places), KeptBuffers(self.module)
        storages = OwnStorages(self._parameters)
        total = 0.0
        try:
            for data, reduce in parts:
                term = reduce(self._loss_fn(self.module, data))
                total += term.item()
                if term.requires_grad:
                    term.backward()
                    storages.separate()
            ended = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
            return Probed(total, [parameter.grad for parameter in self._parameters], ended, random.moved)
        finally:
            for parameter in self._parameters:
                parameter.grad = None
            random.restore()
            with torch.no_grad():
                buffers.restore()


def sizes_told(sizes: Sequence[int]) -> str:
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
    wanted: Sequence[torch.Tensor | None], got: Sequence[torch.Tensor | None], names: Sequence[str]
) -> dict[str, float]:
    """Of each parameter: the norm of the difference, relative to the norm or to a thousandth of the norm of all.

    The second is for gradients that are zero in exact arithmetic (the key bias of attention), where a relative error means nothing.
    A gradient that is missing on one side is zero there.
    """
    norms = [0.0 if tensor is None else _norm(tensor) for tensor in wanted]
    floor = max(1e-3 * sum(norm * norm for norm in norms) ** 0.5, 1e-300)
    result = {}
    for name, norm, mine, theirs in zip(names, norms, wanted, got, strict=True):
        if mine is None and theirs is None:
            continue
        if mine is None or theirs is None:
            difference = _norm(theirs if mine is None else mine)  # type: ignore[arg-type]
        else:
            difference = _norm(mine.double() - theirs.double())
        relative = difference / max(norm, floor)
        result[name] = relative if relative == relative else float("inf")  # NaN: as far off as can be
    return result


def _norm(tensor: torch.Tensor) -> float:
    wide = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return float(torch.linalg.vector_norm(wide, dtype=torch.complex128 if wide.is_complex() else torch.float64))
