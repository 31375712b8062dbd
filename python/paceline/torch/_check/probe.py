"""Computes loss and gradients of chosen slices with the user's module, on the caller's thread. The module is put back after each run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, groupby, pairwise, zip_longest
from typing import Any

import torch
from torch import nn

from paceline.torch._batch.extras import parted
from paceline.torch._batch.objective import Objective
from paceline.torch._batch.terms import Terms
from paceline.torch._devices.caller_state import outside_autocast
from paceline.torch._devices.noise import UNSEEN, Noise, OtherGenerators
from paceline.torch._devices.places import Places
from paceline.torch._devices.run_draws import RandomStates
from paceline.torch._replicas.buffers import KeptBuffers
from paceline.torch._replicas.kept_parameters import KeptParameters
from paceline.torch._run.gradients import OwnStorages
from paceline.torch._run.outside import RestingHooks, leaves_of

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
LEAST_OF_PROOFS = (
    1e-4  # a module in double precision may compute some things in single precision, as transformers' norms do
)
_TENSOR_CORES = 5e-3  # float32 on GPUs, where convolutions round to 10 bits by default


def tolerance_of(types: Iterable[torch.dtype]) -> float:
    """The largest relative difference that rounding to these types may cause."""
    return max((_TOLERANCE.get(one, 0.0) for one in types), default=0.0)


def tolerance_for(module: nn.Module, places: Places) -> float:
    """The largest relative difference that rounding alone may cause, by the least precise type in use."""
    types = {parameter.dtype for parameter in module.parameters()}
    worst = tolerance_of(types) or _TOLERANCE[torch.float32]
    for kind in places.types:
        if torch.is_autocast_enabled(kind):
            worst = max(worst, _TOLERANCE.get(torch.get_autocast_dtype(kind), 0.0))
    if places.reduce_dtype is not None:
        worst = max(worst, _TOLERANCE[places.reduce_dtype])
    return (
        max(worst, _TENSOR_CORES)
        if any(place.type == "cuda" for place in places.devices) and torch.float32 in types
        else worst
    )


LossFunction = Callable[[nn.Module, Any], Any]
Span = tuple[int, int]


class OutsideLeaves:
    """Leaves that are not among the `known` ones. Their ``.grad`` is set aside when they are first met, and put back in the end."""

    def __init__(self, known: Iterable[torch.Tensor], *, hooks_rest: bool = False) -> None:
        """`hooks_rest`: whether their hooks are not called, since somebody else's backward will call them."""
        self._known = {id(tensor) for tensor in known}
        self.leaves: list[torch.Tensor] = []
        self._before: list[torch.Tensor | None] = []
        self._runs: list[int] = []  # number of runs in which each leaf was met
        self._met: set[int] = set()  # leaves of this run, by identity
        self._lasting: set[int] | None = None
        self._hooks = RestingHooks() if hooks_rest else None

    def watch(self, root: torch.Tensor) -> None:
        """Note the leaves that a backward from `root` will reach. To be called before each backward."""
        for leaf in leaves_of(root):
            if self._meets(leaf, leaf.grad):
                leaf.grad = None
                self.let_hooks_rest(leaf)

    def note(self, set_aside: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """Note leaves that a run on devices has reached, with the gradients that they had before it."""
        for leaf, before in set_aside:
            self._meets(leaf, before)

    def _meets(self, leaf: torch.Tensor, before: torch.Tensor | None) -> bool:
        """Whether a leaf is met for the first time."""
        self._met.add(id(leaf))
        if id(leaf) in self._known:
            return False
        self._known.add(id(leaf))
        self.leaves.append(leaf)
        self._before.append(before)
        self._runs.append(0)
        return True

    def let_hooks_rest(self, leaf: torch.Tensor) -> None:
        """Call its hooks no more until `restore`, if hooks rest."""
        if self._hooks is not None:
            self._hooks.add(leaf)

    def settle(self) -> None:
        """Drop, after two runs, leaves that only one of them has met: each run makes such leaves anew, so they are not parameters."""
        self._lasting = {index for index, runs in enumerate(self._runs) if runs > 1}

    def lasting(self, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The result of an earlier `taken`, without the dropped leaves."""
        kept = self._lasting
        return gradients if kept is None else [one if index in kept else None for index, one in enumerate(gradients)]

    def taken(self) -> list[torch.Tensor | None]:
        """The gradients of this run."""
        return self.lasting([leaf.grad for leaf in self.leaves])

    def clear(self) -> None:
        """Clear the gradients at the end of a run."""
        for index, leaf in enumerate(self.leaves):
            self._runs[index] += id(leaf) in self._met
            leaf.grad = None
        self._met.clear()

    def restore(self) -> None:
        """Put the gradients back as they were."""
        for leaf, before in zip(self.leaves, self._before, strict=True):
            leaf.grad = before
        if self._hooks is not None:
            self._hooks.restore()


@dataclasses.dataclass
class Probed:
    """The result of a run. The gradients belong to it: first those of the module's parameters, then those of leaves outside of it."""

    loss: float
    gradients: list[torch.Tensor | None]
    buffers: dict[str, torch.Tensor]


def loss_distance(wanted: Probed, got: Probed) -> float:
    """How much the losses differ, relative to the loss. One that is near zero, where large terms cancel, is held against the gradients."""
    if math.isnan(wanted.loss) or math.isnan(got.loss):
        return math.inf
    largest = (
        float(gradient.abs().max()) for gradient in wanted.gradients if gradient is not None and gradient.numel()
    )
    scale = max([abs(wanted.loss), *(1e-3 * one for one in largest)])
    return abs(got.loss - wanted.loss) / max(scale, 1e-300) if got.loss != wanted.loss else 0.0


@dataclasses.dataclass
class Probe:
    """Runs slices. Every run starts from the same parameters, buffers and generators, and leaves them so. An item always draws the same."""

    module: nn.Module
    parameters: Sequence[Any]
    places: Places
    batch: Any  # a `Batch`, or one in another order
    objective: Objective
    loss_fn: LossFunction
    noise: Noise
    outside: OutsideLeaves
    # With their names: the module, its submodules, the modules in its plain lists.
    modules: Sequence[tuple[str, nn.Module]]

    def terms(self) -> Iterator[tuple[str, Probe]]:
        """The terms of the loss by name, each as a loss of its own. A loss with one term has no name."""
        if not isinstance(self.objective, Terms):
            yield "", self
            return
        for name, objective in self.objective.parts.items():

            def one(module: nn.Module, part: Any, name: str = name) -> Any:
                losses = parted(self.loss_fn(module, part))[0]
                return losses[name]

            yield name, dataclasses.replace(self, loss_fn=one, objective=objective)

    def split(self, spans: Sequence[Span]) -> Probed:
        """The objective, summed over slices as `step` sums them."""
        busy = [span for span in spans if not self.objective.idle(*span)]
        return self._run([(self._slice(span), self.batch.rows(*span), partial(self._term, span)) for span in busy])

    def raw(self, spans: Sequence[Span]) -> Probed:
        """The return value of ``loss_fn`` for the items of all `spans` together. It is summed if there is one loss for each item."""
        rows = torch.cat([self.batch.rows(*span) for span in spans])
        if len(spans) == 1:
            return self._run([(self._slice(spans[0]), rows, torch.sum)])
        return self._run([(self.batch.gathered(rows, self.places.to_home), rows, torch.sum)])

    def _term(self, span: Span, loss: Any) -> torch.Tensor:
        return self.objective.term(loss, *span)

    def _slice(self, span: Span) -> Any:
        return self.batch.slice(*span, self.places.to_home)

    def _run(self, parts: Sequence[tuple[Any, torch.Tensor, Callable[[Any], torch.Tensor]]]) -> Probed:
        random, others = RandomStates(self.places), OtherGenerators()
        buffers = KeptBuffers(part for _, part in self.modules)
        written, storages, outside = KeptParameters(self.parameters), OwnStorages(self.parameters), self.outside
        replays = self.noise.recorded
        total = 0.0
        try:
            for data, rows, reduce in parts:
                with self.noise.of(rows):
                    term = reduce(parted(self.loss_fn(self.module, data))[0])
                    total += term.item()
                    if term.requires_grad:
                        outside.watch(term)
                        with outside_autocast():
                            term.backward()
                storages.separate()
            self.noise.lost |= dict.fromkeys(others.moved)
            if replays and random.moved:
                self.noise.lost[UNSEEN] = None
            ended = {
                f"{name}.{key}": buffer.clone()
                for name, part in self.modules
                for key, buffer in part._buffers.items()
                if buffer is not None
            }
            return Probed(total, [*(parameter.grad for parameter in self.parameters), *outside.taken()], ended)
        finally:
            for parameter in self.parameters:
                parameter.grad = None
            outside.clear()
            random.restore()
            others.restore()
            with torch.no_grad():
                buffers.restore()
            written.restore()


def described_sizes(sizes: Sequence[int]) -> str:
    """The sizes of a split, equal ones together: "3 x 5 + 1 items"."""
    runs = [(len(list(run)), size) for size, run in groupby(sizes)]
    return " + ".join(f"{count} x {size}" if count > 1 else f"{size}" for count, size in runs) + " items"


def spans_of(sizes: Sequence[int]) -> list[Span]:
    """Slices of these sizes, one after the other."""
    return list(pairwise(accumulate(sizes, initial=0)))


def distances(
    wanted: Sequence[torch.Tensor | None],
    got: Sequence[torch.Tensor | None],
    names: Sequence[str] = (),
    floor: float = 1e-3,
) -> dict[str, float]:
    """For each parameter the norm of the difference, relative to the parameter's norm, or to the part `floor` of the norm of all if that is more.

    The latter is for gradients that are zero in exact arithmetic (the key bias of attention), where a relative error means nothing.
    A gradient that one side does not have counts as zero there.
    """
    norms = [0.0 if tensor is None else _norm(tensor) for tensor in wanted]
    least = max(floor * sum(norm * norm for norm in norms) ** 0.5, 1e-300)
    result = {}
    for index, (norm, mine, theirs) in enumerate(zip_longest(norms, wanted, got)):
        if mine is None and theirs is None:
            continue
        if mine is not None and theirs is not None:
            difference = _norm(mine.double() - theirs.double())
        else:
            difference = sum(_norm(one) for one in (mine, theirs) if one is not None)
        relative = difference / max(norm or 0.0, least)
        name = names[index] if index < len(names) else str(index)
        result[name] = relative if relative == relative else float("inf")  # NaN counts as infinite
    return result


def _norm(tensor: torch.Tensor) -> float:
    wide = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return float(torch.linalg.vector_norm(wide, dtype=torch.complex128 if wide.is_complex() else torch.float64))
