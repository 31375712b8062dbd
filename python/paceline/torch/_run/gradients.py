"""Brings gradients from the replicas to the user's ``.grad``."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from paceline import InvalidArgument
from paceline._core.engine import TensorMemory
from paceline.torch._replicas.replica import Replica
from paceline.torch._replicas.replicas import Replicas

# Types that the reduction sums, with their number in paceline's DType. PyTorch sums others on the caller's thread.
DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}

View = tuple[int, int, int]

# These are read from every gradient in every step, by map(), which runs no line of Python for each.
_grad, _first = operator.attrgetter("grad"), operator.itemgetter(0)
_version = operator.attrgetter("_version")
_layout = operator.attrgetter("layout")
_dtype = operator.attrgetter("dtype")
_data_ptr: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_numel: Callable[[torch.Tensor], int] = torch.Tensor.numel
_is_contiguous: Callable[[torch.Tensor], bool] = torch.Tensor.is_contiguous
_memory = TensorMemory(torch.Tensor)


def is_sparse(name: str) -> InvalidArgument:
    """What to raise for a sparse gradient of the parameter of this name."""
    return InvalidArgument(
        f"step: the gradient of parameter {name} is sparse. Gradients of several devices are summed densely; make the layer dense "
        "(sparse=False), or use one device."
    )


def weakly(method: Callable[..., None], *given: Any) -> Callable[..., None]:
    """A call of the method that does not keep its object alive, since PyTorch keeps hooks where the garbage collector does not look."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*given, *arguments)

    return call


def grads_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """The ``.grad`` of each parameter."""
    return list(map(_grad, parameters))


class Sink:
    """Where the gradients of a step go, from the devices' backward passes to one tensor for each parameter."""

    def start(self, device: int) -> None:
        """On a device's worker, before its first micro-batch."""

    def last(self, device: int) -> None:
        """The next backward is the device's last one in this step."""

    def any(self, device: int) -> bool:
        """Whether a parameter of the device has got a gradient in this step."""
        raise TypeError("Sink.any is for subclasses")

    def separate(self, device: int) -> None:
        """After each micro-batch: the next one may add to all gradients."""

    def forget(self, device: int, indices: Iterable[int]) -> None:
        """Drop the gradients of these parameters, as if there had been none."""
        raise TypeError("Sink.forget is for subclasses")

    def finish(self, device: int, terms: Sequence[torch.Tensor]) -> list[View | None]:
        """What the device delivers, on its worker: where its gradients are, and its part of the objective."""
        raise TypeError("Sink.finish is for subclasses")

    def sums(self) -> list[View | None]:
        """Where to put the sums of what the devices deliver. Empty: in what the first one delivers."""
        return []

    def totals(self) -> list[torch.Tensor | None]:
        """The gradients of the batch, in the order of the parameters."""
        raise TypeError("Sink.totals is for subclasses")

    def loss(self, terms: list[list[tuple[int, torch.Tensor]]], home: torch.device) -> torch.Tensor:
        """The objective, 0-dimensional. `terms` has those of each device, with their first items."""
        raise TypeError("Sink.loss is for subclasses")


class PerTensor(Sink):
    """The gradients of one step on the host, or of one device: those that autograd has made."""

    def __init__(self, replicas: list[Replica], names: list[str]) -> None:
        self._replicas, self._names = replicas, names
        self._storages = [OwnStorages(replica.parameters) for replica in replicas]
        self._left_out: dict[int, set[int]] = {}  # by device, gradients whose layout or type the reduction cannot take

    def any(self, device: int) -> bool:
        return not _memory.without_gradients(self._replicas[device].parameters)

    def separate(self, device: int) -> None:
        self._storages[device].separate()

    def forget(self, device: int, indices: Iterable[int]) -> None:
        for index in indices:
            self._replicas[device].parameters[index].grad = None

    def finish(self, device: int, terms: Sequence[torch.Tensor]) -> list[View | None]:
        """Where the gradients are: (address, elements, type) for each, or None if there is none.

        Raises
        ------
        InvalidArgument
            For sparse gradients.
        """
        parameters = self._replicas[device].parameters
        gradients = [gradient for gradient in map(_grad, parameters) if gradient is not None]
        if (
            len(gradients) == len(parameters)
            and set(map(_layout, gradients)) <= {torch.strided}
            and all(map(_is_contiguous, gradients))
        ):
            codes = [DTYPES.get(dtype, -1) for dtype in map(_dtype, gradients)]
            if -1 not in codes:
                return list(zip(map(_data_ptr, gradients), map(_numel, gradients), codes, strict=True))
        found: list[View | None] = []
        for index, gradient in enumerate(map(_grad, parameters)):
            if gradient is not None and gradient.layout is not torch.strided:
                raise is_sparse(self._names[index])
            code = None if gradient is None else DTYPES.get(gradient.dtype)
            if code is not None and gradient.is_contiguous():
                found.append((gradient.data_ptr(), gradient.numel(), code))
            else:
                found.append(None)
                if gradient is not None:
                    self._left_out.setdefault(device, set()).add(index)
        return found

    def totals(self) -> list[torch.Tensor | None]:
        """The reduction has left its sum in the first device that has a gradient. What it has left out is added here."""
        totals: list[torch.Tensor | None] = list(map(_grad, self._replicas[0].parameters))
        if len(self._replicas) == 1:
            return totals
        if self._left_out:
            return [self._total(index) for index in range(len(totals))]
        return [self._total(index) if total is None else total for index, total in enumerate(totals)]

    def _total(self, index: int) -> torch.Tensor | None:
        total: torch.Tensor | None = None
        extra: list[torch.Tensor] = []
        for device, replica in enumerate(self._replicas):
            gradient = replica.parameters[index].grad
            if gradient is not None and index in self._left_out.get(device, ()):
                extra.append(gradient)
            elif total is None:
                total = gradient
        for gradient in extra:
            total = gradient if total is None else total + gradient
        return total

    def loss(self, terms: list[list[tuple[int, torch.Tensor]]], home: torch.device) -> torch.Tensor:
        """The sum of the terms, in the order of the items."""
        entries = sorted(itertools.chain(*terms), key=_first)
        if not entries:  # the caller's backward passes were their own
            return torch.zeros((), device=home)
        if len(entries) <= 2:
            return entries[0][1].clone() if len(entries) == 1 else entries[0][1] + entries[1][1]
        return torch.stack([term for _, term in entries]).sum()


def is_held_elsewhere(storage: torch.UntypedStorage) -> bool:
    """Whether there is a user beside one tensor and the Python object that is asked."""
    return torch._C._storage_Use_Count(storage._cdata) > 2


class OwnStorages:
    """Gives every gradient of a replica memory of its own, for one step.

    Autograd may give two parameters views of one tensor, as after ``a + b`` where nothing is broadcast. That is harmless until a second
    backward or the reduction adds to them in place: each would get what is meant for the other, too.

    With `midway` the other may be the backward itself, which still has the tensor as the gradient of what it comes to next.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], *, midway: bool = False) -> None:
        self._waiting = list(parameters)  # parameters that have no gradient yet
        self._known: set[int] = set()
        self._midway = midway

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Look after the gradients of these, too."""
        self._waiting = [*self._waiting, *tensors]

    def separate(self) -> None:
        """Copy new gradients that share memory with others. To be called after each backward, or `midway` in one."""
        if not self._waiting:
            return
        if not (self._midway or self._known) and _memory.apart(self._waiting):
            self._waiting = []
            return
        waiting = []
        for parameter in self._waiting:
            gradient = parameter.grad
            if gradient is None:
                waiting.append(parameter)
            elif gradient.layout is torch.strided:
                storage = gradient.untyped_storage()
                address = storage.data_ptr()
                if address in self._known or (self._midway and is_held_elsewhere(storage)):
                    parameter.grad = gradient.clone()
                else:
                    self._known.add(address)
        self._waiting = waiting


class UserGradients:
    """The user's own ``.grad`` during a step. It is set aside, so that a failure leaves it as it was, and added to in the end."""

    def __init__(self, replicas: Replicas, *, adds: bool = True) -> None:
        """`adds`: whether `commit` will add to the gradients."""
        self._replicas = replicas
        self._any = not _memory.without_gradients(replicas.parameters)
        self._before: list[torch.Tensor | None] = (
            list(map(_grad, replicas.parameters)) if self._any else [None] * len(replicas.parameters)
        )
        self._versions = list(map(_version, replicas.parameters)) if replicas.shared else []
        self._added_to: list[tuple[torch.Tensor, int]] = []
        self._is_added = False  # whether `commit` has come beyond adding
        if self._any:
            self._set_aside(replicas, adds=adds)

    def _set_aside(self, replicas: Replicas, *, adds: bool) -> None:
        present = {index: gradient for index, gradient in enumerate(self._before) if gradient is not None}
        for index, gradient in present.items():
            if gradient.layout is not torch.strided and adds and replicas.shared:
                raise InvalidArgument(
                    f"step: the .grad of parameter {replicas.names[index]} is sparse; a dense gradient cannot be added to it. Set it to None first."
                )
        try:
            for index in present:
                replicas.parameters[index].grad = None
        except BaseException:  # Ctrl-C in the middle
            self.restore()
            raise

    def check(self) -> None:
        """Raise if the loss used the user's module instead of the replicas, or if a shared parameter was written during the step."""
        if not self._replicas.shared:
            return  # the user's module itself ran, and may write what it likes, as in plain PyTorch
        names, parameters = self._replicas.names, self._replicas.parameters
        if _memory.without_gradients(parameters) and list(map(_version, parameters)) == self._versions:
            return
        for index, parameter in enumerate(parameters):
            if parameter._version != self._versions[index]:
                raise InvalidArgument(
                    f"step: parameter {names[index]} was written in place while the step ran; all devices share it. Write parameters "
                    "between steps only. Nothing was committed."
                )
            if parameter.grad is not None:
                raise InvalidArgument(
                    f"step: the gradient of parameter {names[index]} of the original module was touched during the step: "
                    f"{self._replicas.blame} Nothing was committed."
                )

    def restore(self) -> None:
        """Put ``.grad`` back as it was before the step."""
        for parameter, gradient in zip(self._replicas.parameters, self._before, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def commit(self, totals: list[torch.Tensor | None]) -> None:
        """Set or add the gradients of the batch. An interrupted call may be repeated, and adds nothing twice."""
        if self._any and not self.written:
            added_to, added = [], []
            for before, total in zip(self._before, totals, strict=True):
                if before is not None and total is not None:
                    added_to.append(before)
                    added.append(total)
            self._added_to = list(zip(added_to, map(_version, added_to), strict=True))
            if added:
                torch._foreach_add_(added_to, added)
        self._is_added = True
        for parameter, before, total in zip(self._replicas.parameters, self._before, totals, strict=True):
            parameter.grad = total if before is None else before

    @property
    def written(self) -> bool:
        """Whether `commit` has begun to write the user's gradients. Then the step is to be completed: what was added cannot be undone."""
        return self._is_added or any(gradient._version != version for gradient, version in self._added_to)
