"""The step taken apart: the library splits, weighs and reduces, and the caller's function runs forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from paceline import InvalidArgument, Unavailable
from paceline.torch._batch.objective import Objective
from paceline.torch._replicas.reach import name_of
from paceline.torch._run.call import Call
from paceline.torch._run.train_run import Loss, TrainRun

RunFunction = Callable[[nn.Module, "MicroBatch"], Any]


class _Weighs(Protocol):
    """What runs a micro-batch."""

    def term_of(self, loss: Any, begin: int, end: int) -> torch.Tensor: ...

    def weighed(self, device: int, term: torch.Tensor) -> torch.Tensor: ...

    def backward_of(self, device: int, term: torch.Tensor, retain_graph: bool) -> None: ...


class MicroBatch:
    """What a function given to `GlobalBatch.run` gets beside the replica: a slice of the batch, and its part of the objective.

    Attributes
    ----------
    data
        The slice, in the same nest as the batch, on the device.
    begin, end
        The items of the batch: ``[begin, end)``. With `cost` of `DataParallel.batch` these are positions in the order in which the items
        were dealt out. If `fn` has to know the items, put ``torch.arange(items)`` into the batch.
    """

    def __init__(self, run: _Weighs, device: int, begin: int, end: int, data: Any) -> None:
        self.data = data
        self.begin = begin
        self.end = end
        self.terms: list[torch.Tensor] = []
        self._run = run
        self._device = device

    def __len__(self) -> int:
        return self.end - self.begin

    def weigh(self, loss: Loss) -> torch.Tensor:
        """The slice's term of the objective, 0-dimensional, with its graph, for calling ``backward`` yourself.

        `loss` is what ``loss_fn`` would return: the mean over the slice (or the sum, if the trainer has ``reduction="sum"``), or one loss for each item,
        or a mapping of these if `weight` of `DataParallel.batch` is one.
        The term counts into what `GlobalBatch.run` returns. With a ``scaler`` the term is scaled. If random numbers cannot be seeded (parts of
        one GPU), activation checkpointing draws other numbers when it recomputes, and only `backward` notices that.
        """
        return self._run.weighed(self._device, self._term(loss))

    def backward(self, loss: Loss, *, retain_graph: bool = False) -> None:
        """Add to the gradients of the replica, as ``weigh(loss).backward()``.

        May be called several times. The objective is the sum of all losses.
        """
        self._run.backward_of(self._device, self._term(loss), retain_graph)

    def sum(self) -> torch.Tensor:
        """All terms that were taken, together."""
        return torch.stack([term.to(self.terms[0]) for term in self.terms]).sum()

    def _term(self, loss: Loss) -> torch.Tensor:
        term = self._run.term_of(loss, self.begin, self.end)
        self.terms.append(term.detach())
        return term


class GlobalBatch:
    """One batch, for any number of runs over all devices. `DataParallel.batch` makes it."""

    def __init__(
        self,
        size: int,
        start: Callable[[RunFunction, list[nn.Parameter] | None, Any, str], torch.Tensor],
    ) -> None:
        self._size = size
        self._start: Callable[..., torch.Tensor] | None = start

    def __len__(self) -> int:
        return self._size

    def run(
        self,
        fn: RunFunction,
        *,
        parameters: nn.Module | Iterable[nn.Parameter] | None = None,
        scaler: Any = None,
        name: str | None = None,
    ) -> torch.Tensor:
        """Call `fn` with every micro-batch, on all devices, and add the gradients of its backward passes to the parameters' ``.grad``.

        Parameters
        ----------
        fn
            ``fn(module, micro_batch)``: runs forward on the replica `module` and ``micro_batch.data``, and calls ``micro_batch.backward(loss)``
            once or more often. Its return value is ignored.
        parameters
            The parameters whose gradients are wanted: some of the trainer's module, or a submodule of it. All others keep their
            ``.grad``. Default: all.
        scaler
            A ``torch.amp.GradScaler``, as for `DataParallel.step`.
        name
            Runs of one name share their measured times. Default: the name of `fn`.

        Returns
        -------
        torch.Tensor
            The objective over the whole batch, all losses together: 0-dimensional, detached, unscaled.

        Raises
        ------
        InvalidArgument
            If the ``with`` block has ended, and as `DataParallel.step`.
        RuntimeError
            If `fn` left no gradient.
        Exception
            What `fn` raised. Then gradients and buffers are as before the run.
        """
        if self._start is None:
            raise Unavailable(
                "run: the batch has ended with its with block. Run inside of it, or make a new one with trainer.batch()."
            )
        wanted = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
        # A list: an attempt that runs out of memory must not use an iterator up.
        return self._start(fn, None if wanted is None else list(wanted), scaler, name or name_of(fn))

    def close(self) -> None:
        """Release the batch. A second call does nothing."""
        self._start = None

    def __enter__(self) -> GlobalBatch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class FunctionRun(TrainRun):
    """A run in which the caller's function runs forward and backward."""

    def __init__(
        self,
        call: Call,
        fn: RunFunction,
        objective: Objective,
        scale: torch.Tensor | None,
        parameters: list[nn.Parameter] | None,
    ) -> None:
        super().__init__(call, loss_fn=fn, objective=objective, scale=scale)
        replicas = call.all_replicas
        # Per device, those of the parameters that may have a gradient.
        self._wanted: list[list[torch.Tensor]] | None = None
        if parameters is not None:
            wanted = indices_of(parameters, replicas.parameters)
            ours = [[replica.parameters[index] for index in sorted(wanted)] for replica in self.replicas]
            self._wanted = [[one for one in ones if one.requires_grad] for ones in ours]
            self._unwanted = [index for index in range(len(replicas.parameters)) if index not in wanted]

    def compute(self, device: int, begin: int, end: int) -> bool:
        if self.idle(begin, end):
            return False
        data = self.bring(device, begin, end)
        part = MicroBatch(self, device, begin, end, data)
        self.loss_fn(self.replicas[device].module, part)
        self.draws.look(device)
        if not part.terms and not self.terms[device] and self.any_gradient(device):
            refuse_backward_of_its_own()
        if part.terms:
            self.terms[device].append((begin, part.sum()))
        if self._wanted is not None:  # a backward that the caller's function calls itself fills all gradients
            self.sink.forget(device, self._unwanted)
        if not self.with_gradient and self.any_gradient(device):
            self.with_gradient = True  # never reset, so workers may set it at the same time
        return True

    def weighed(self, device: int, term: torch.Tensor) -> torch.Tensor:
        """The tensor that the caller's function calls backward on. Called on a device's worker."""
        root = self.scaled(device, term)
        if self.outside is not None:
            self.outside.look(root)
        return root

    def backward_of(self, device: int, term: torch.Tensor, retain_graph: bool) -> None:
        """Fill the wanted gradients of a device's replica, on its worker."""
        if not term.requires_grad:
            return  # nothing in this slice depends on a parameter, so its gradient is zero
        self.draws.look(device)
        root = self.scaled(device, term)
        self.backward(device, root, retain_graph, None if self._wanted is None else self._wanted[device])

    def check(self) -> None:
        self.without_gradient = True
        try:
            super().check()
        except RuntimeError as error:
            if self.with_gradient:
                raise
            raise without_gradient(self._wanted is not None) from error


def refuse_backward_of_its_own() -> NoReturn:
    """Raise for a function that has filled gradients without a micro-batch's term."""
    raise InvalidArgument(
        "run: fn called backward on a loss of its own, which does not know its part of the batch: the gradient would be wrong. Call "
        "micro_batch.backward(loss), or micro_batch.weigh(loss).backward()."
    )


def without_gradient(some: bool) -> RuntimeError:
    """The error for a function that leaves no gradient. `some`: whether only some parameters are wanted."""
    return RuntimeError(
        "run: no gradient: fn has to call micro_batch.backward(loss) on a loss that depends on parameters"
        + (", here on those that were given as parameters=." if some else ".")
    )


def indices_of(wanted: Iterable[nn.Parameter], parameters: list[torch.Tensor]) -> set[int]:
    """The indices of the wanted parameters among the parameters of a module."""
    known = {id(parameter): index for index, parameter in enumerate(parameters)}
    found = set()
    for parameter in wanted:
        if id(parameter) not in known:
            raise InvalidArgument(
                "run: parameters= holds a parameter that is none of the trainer's module. Give parameters of that very module, or a "
                "submodule of it."
            )
        found.add(known[id(parameter)])
    if not found:
        raise InvalidArgument(
            "run: parameters= is empty (a generator that was used up?). Leave it out for all of them."
        )
    return found
