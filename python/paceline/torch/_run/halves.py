"""Forward and backward as two runs, with the caller's own loss between them."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch

from paceline import InvalidArgument
from paceline.torch._batch.batch import Batch
from paceline.torch._batch.joining import Piece, joined, rows_of
from paceline.torch._batch.objective import Objective
from paceline.torch._devices.caller_state import RecomputeWatch, backward_watched, outside_autocast
from paceline.torch._run.call import Call
from paceline.torch._run.executor import PredictRun
from paceline.torch._run.outside import leaves_of
from paceline.torch._run.train_run import TrainRun


@dataclasses.dataclass(frozen=True)
class Slice:
    """What the forward of a slice leaves for its backward: the inputs that require a gradient, and the outputs with their graph."""

    begin: int
    end: int
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


class ForwardRun(PredictRun):
    """Forward with a graph. Tensors of the batch may require gradients."""

    def __init__(self, call: Call, fn: Any, whole: Batch) -> None:
        super().__init__(call, fn=fn)
        self._whole = whole
        self._wanted = [tensor.requires_grad for _, tensor in whole.tensors()]
        self._own = {id(parameter) for replica in self.replicas for parameter in replica.parameters}
        self.slices: list[list[Slice]] = [[] for _ in self.replicas]
        self.outside_leaves: dict[int, torch.Tensor] = {}  # leaves that belong neither to the module nor to the batch

    def compute(self, device: int, begin: int, end: int) -> bool:
        inputs: list[torch.Tensor] = []
        wanted = iter(self._wanted)

        self._whole.next_slice()

        def take(tensor: torch.Tensor) -> torch.Tensor:
            part = tensor.detach()[begin:end]
            if next(wanted):
                inputs.append(part.requires_grad_())
                return part.clone()  # the module may begin with an operator in place, which a leaf refuses
            return self._whole.apart(tensor, part)

        part = self._whole.cut(take, self.places.mover(device))
        self.brought(device)
        output = self.fn(self.replicas[device].module, part)
        self._whole.count_edits()
        self.draws.look(device)
        outputs: list[torch.Tensor] = []

        def leaf(pieces: list[Piece], path: str) -> torch.Tensor:
            tensor: torch.Tensor = pieces[0][2]
            outputs.append(tensor)
            return tensor.detach()

        self.outputs.append((begin, end, joined([(begin, end, output)], "output", leaf, "forward")))
        known = self._own.union(map(id, inputs))
        for root in outputs:
            if root.requires_grad:
                self.outside_leaves.update({id(one): one for one in leaves_of(root) if id(one) not in known})
        self.slices[device].append(Slice(begin, end, inputs, outputs))
        return True

    def gathered(self) -> tuple[list[torch.Tensor], Any]:
        """The outputs of the batch, detached: as a list, and as the nest that the module returned, with placeholders in the order of the list."""
        tensors: list[torch.Tensor] = []

        def leaf(pieces: list[Piece], path: str) -> Any:
            tensors.append(rows_of(pieces, path, self.places.to_home, self.places.owned, "forward"))
            return torch.tensor(len(tensors) - 1, device="cpu")

        nest = joined(sorted(self.outputs, key=lambda piece: piece[0]), "output", leaf, "forward")
        return tensors, nest

    def input_gradients(self, by_leaf: dict[int, torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradient of each input that required one, for the whole batch. `by_leaf` has those of the slices."""
        parts = sorted((part for parts in self.slices for part in parts), key=lambda part: part.begin)
        return [self._put_together(column, by_leaf) for column in zip(*(part.inputs for part in parts), strict=True)]

    @staticmethod
    def _put_together(column: tuple[torch.Tensor, ...], by_leaf: dict[int, torch.Tensor]) -> torch.Tensor | None:
        if not any(id(part) in by_leaf for part in column):
            return None
        return torch.cat([by_leaf[id(part)] if id(part) in by_leaf else torch.zeros_like(part) for part in column])


class BackwardRun(TrainRun):
    """Backward of slices, each on the device that ran its forward. `gradients` are those of the outputs, or None where there is none."""

    repeatable = False  # the graphs are gone

    def __init__(self, call: Call, forward: ForwardRun, gradients: Sequence[torch.Tensor | None]) -> None:
        objective = Objective(None, call.batch.size, "sum", None)
        super().__init__(call, loss_fn=forward.fn, objective=objective, carries=True)
        if any(map(operator.is_not, self.replicas, forward.replicas)):
            raise RuntimeError(
                "backward: the module was changed since its forward (another structure, or other parameters), so the devices have new copies of "
                "it, which know nothing of that forward. Change it between backward and the next forward."
            )
        self._forward = forward
        self._gradients = gradients
        self.claims = [[(part.begin, part.end) for part in parts] for parts in forward.slices]
        # A worker's own generator draws again what it drew in the forward. One that devices share would draw other numbers.
        self._refuses_recomputation = forward.draws.drew and self.places.share_generators and not self.draws.seeds
        if self._refuses_recomputation:
            self.draws.watches = [RecomputeWatch() for _ in self.replicas]

    def compute(self, device: int, begin: int, end: int) -> bool:
        part = next(one for one in self._forward.slices[device] if one.begin == begin)
        move = self.places.mover(device)
        roots, gradients = [], []
        for output, gradient in zip(part.outputs, self._gradients, strict=True):
            if gradient is not None and output.requires_grad:
                roots.append(output)
                gradients.append(move(gradient[begin:end]))
        self.brought(device)
        if not roots:
            return False
        self.with_gradient = True
        if self.outside is not None:
            self.outside.hold([*part.inputs, *self._forward.outside_leaves.values()])
        self.seal_if_last(device)
        watch = self.draws.watches[device] if self._refuses_recomputation else contextlib.nullcontext()
        with outside_autocast(), watch:
            backward_watched(roots, gradients)
        return True

    def check(self) -> None:
        super().check()
        self.draws.repeated_others()
        if self._refuses_recomputation and any(watch.seen for watch in self.draws.watches):
            raise InvalidArgument(
                "backward: random draws together with activation checkpointing, on devices that share a random generator: a recomputed forward "
                "would silently draw other numbers than the first. Set dropout to 0, train without checkpointing, or use one device."
            )
