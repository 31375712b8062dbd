"""A loss whose gradients are computed already. Its ``backward`` hands them out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Gradients = Sequence[torch.Tensor | None]


class Carried:
    """The gradients of one batch, from the run that computed them until ``backward`` is called on the loss.

    The objective is a scalar, so the chain rule multiplies its gradient by one number: the gradient that arrives at the loss.

    Parameters
    ----------
    names
        The names of the first leaves. The others are tensors outside of the module.
    leaves
        The tensors that the loss depends on. They require gradients.
    gradients
        The gradient of each leaf, or None. They belong to this object, and are multiplied in place.
    scale
        What the gradients are multiplied by already, 0-dimensional, or None. ``backward`` divides by it.
    """

    def __init__(
        self,
        names: list[str],
        leaves: list[torch.Tensor],
        gradients: list[torch.Tensor | None],
        scale: torch.Tensor | None,
    ) -> None:
        self._names = names
        self._leaves = leaves
        self._versions = [leaf._version for leaf in leaves]
        self._gradients: list[torch.Tensor | None] | None = gradients
        self._scale = scale

    def loss(self, value: torch.Tensor) -> torch.Tensor:
        """The loss with this value, as an operator's output whose inputs are the leaves."""
        apply: Any = HandOut.apply
        # Not the value itself, so that the caller may change it in place, as by ``loss /= 4``.
        loss: torch.Tensor = apply(self.hand_out, [value.clone()], [True], *self._leaves)[0]
        return loss

    def hand_out(self, factors: Gradients) -> Gradients:
        """The gradients times the only factor, once.

        Raises
        ------
        RuntimeError
            If they were handed out already, if gradients of the gradients are wanted, or if a leaf was written since the run. It is the type
            that PyTorch raises for these.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward: create_graph=True on a loss of trainer.loss(), whose gradients come from the devices without a graph. Compute what "
                "needs gradients of gradients inside of loss_fn, with torch.autograd.grad(..., create_graph=True)."
            )
        if self._gradients is None:
            raise RuntimeError(
                "backward: called a second time on a loss of trainer.loss(), which hands its gradients out once and keeps no copy. Call "
                "backward once, on the sum of all that depends on the loss, or call trainer.loss() again."
            )
        reached = zip(self._leaves, self._versions, self._gradients, strict=True)
        for index, (leaf, version, gradient) in enumerate(reached):
            if gradient is not None and leaf._version != version:
                name = self._names[index] if index < len(self._names) else f"of shape {tuple(leaf.shape)}"
                raise RuntimeError(
                    f"backward: parameter {name} was written in place since trainer.loss() computed this loss, so its gradients belong to other "
                    "parameters. Call backward before optimizer.step()."
                )
        gradients, self._gradients = self._gradients, None
        factor: Any = factors[0]
        factor = factor.detach() if self._scale is None else factor.detach() / self._scale
        if factor.device.type != "cpu" or factor.item() != 1:  # a GPU is not asked, since the host would wait for it
            present = [gradient for gradient in gradients if gradient is not None]
            # Stages and tensors outside of the module have devices of their own.
            for device in {gradient.device for gradient in present}:
                torch._foreach_mul_([one for one in present if one.device == device], factor.to(device))
        return gradients


class HandOut(torch.autograd.Function):
    """Outputs that the devices have computed. In backward a function makes the gradients of the leaves from those of the outputs."""

    @staticmethod
    def forward(
        ctx: Any,
        gradients_of: Callable[[Gradients], Gradients],
        tensors: Sequence[torch.Tensor],
        differentiable: Sequence[bool],
        *leaves: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.gradients_of = gradients_of
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(tensor for tensor, yes in zip(tensors, differentiable, strict=True) if not yes))
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return None, None, None, *ctx.gradients_of(gradients)
