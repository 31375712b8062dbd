"""Gradients on their way from the replicas to the user's ``.grad``."""

from __future__ import annotations

import torch

from paceline import InvalidArgument
from paceline.torch._replicas import Replica, Replicas

# Types that the reduction sums itself, by their number in paceline's DType; others are summed by PyTorch on the caller.
_DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}

View = tuple[int, int, int]


def views(replica: Replica, names: list[str]) -> tuple[list[View | None], list[int]]:
    """Where the replica's gradients lie: (address, elements, type) each, None where there is none.

    The second list names the gradients whose layout or type the reduction cannot take; `commit` adds those.

    Raises
    ------
    InvalidArgument
        For sparse gradients.
    """
    found: list[View | None] = []
    left_out: list[int] = []
    for index, parameter in enumerate(replica.parameters):
        gradient = parameter.grad
        if gradient is None:
            found.append(None)
            continue
        if gradient.layout is not torch.strided:
            raise InvalidArgument(
                f"step: the gradient of parameter {names[index]} is sparse. Gradients of several devices are summed densely; make the layer "
                "dense (sparse=False), or use one device."
            )
        code = _DTYPES.get(gradient.dtype)
        if code is None or not gradient.is_contiguous():
            found.append(None)
            left_out.append(index)
            continue
        found.append((gradient.data_ptr(), gradient.numel(), code))
    return found, left_out


class UserGradients:
    """The user's own ``.grad`` during a step: who else touched it, and what is committed in the end."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._before = [parameter.grad for parameter in replicas.parameters]
        for name, gradient in zip(replicas.names, self._before, strict=True):
            if gradient is not None and gradient.layout is not torch.strided and replicas.list[0].shared:
                raise InvalidArgument(
                    f"step: the .grad of parameter {name} is sparse; a dense gradient cannot be added to it. Set it to None first."
                )
        self._before_versions = [-1 if gradient is None else gradient._version for gradient in self._before]
        self._versions = [parameter._version for parameter in replicas.parameters]
        if not replicas.list[0].shared:  # the user's module itself runs: its gradients of this step must stand alone
            for parameter in replicas.parameters:
                parameter.grad = None

    def check(self) -> None:
        """Raise if the loss reached around the replicas, or somebody wrote a shared parameter while the step ran."""
        if not self._replicas.list[0].shared:
            return  # the user's own module: what it writes in its forward is its business, as in plain PyTorch
        names = self._replicas.names
        for index, parameter in enumerate(self._replicas.parameters):
            if parameter._version != self._versions[index]:
                raise InvalidArgument(
                    f"step: parameter {names[index]} was written in place while the step ran; all devices share it. Write parameters "
                    "between steps only. Nothing was committed."
                )
            before = self._before[index]
            changed = parameter.grad is not before or (
                before is not None and before._version != self._before_versions[index]
            )
            if changed:
                raise InvalidArgument(
                    f"step: the gradient of parameter {names[index]} of the original module was touched during the step: loss_fn (or a "
                    "closure, a patched forward, a stored reference) uses the original module instead of the one it is given. "
                    "Use the module argument of loss_fn(module, batch). Nothing was committed."
                )

    def restore(self) -> None:
        """After a failure: ``.grad`` as it was before the step."""
        for parameter, gradient in zip(self._replicas.parameters, self._before, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def commit(self, left_out: dict[int, set[int]]) -> None:
        """Set or add the summed gradients. The first device that has one holds the sum of all that the reduction could take."""
        targets: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []
        for index, parameter in enumerate(self._replicas.parameters):
            total = self._total(index, left_out)
            if total is None:
                parameter.grad = self._before[index]
                continue
            before = self._before[index]
            if before is None:
                parameter.grad = total
            else:
                parameter.grad = before
                targets.append(before)
                sums.append(total)
        if targets:
            torch._foreach_add_(targets, sums)

    def _total(self, index: int, left_out: dict[int, set[int]]) -> torch.Tensor | None:
        total: torch.Tensor | None = None
        extra: list[torch.Tensor] = []
        for device, replica in enumerate(self._replicas.list):
            gradient = replica.parameters[index].grad
            if gradient is None:
                continue
            if index in left_out.get(device, ()):
                extra.append(gradient)
            elif total is None:
                total = gradient
        for gradient in extra:
            total = gradient if total is None else total + gradient
        return total
