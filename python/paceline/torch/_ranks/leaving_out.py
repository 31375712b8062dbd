"""A loss that does not count, on a rank whose backward has to run."""

from __future__ import annotations

from typing import Any

import torch

from paceline.torch._run.outside import leaf_nodes


class LeftOut:
    """Leaves a loss out of the gradients, while the backward runs through the whole graph of it.

    DDP and FSDP hang if a rank has no backward. A loss times zero would not do: where the loss or something on the way to it is not finite,
    zero times that is NaN. So every parameter gets zeros in place of what arrives at it.
    """

    def __init__(self) -> None:
        self._hooks: list[Any] = []

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        """A loss of zero with the same graph."""
        for node in leaf_nodes(loss):
            self._hooks.append(node.register_prehook(_zeros))
        return torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, torch.zeros_like(loss))

    def end(self) -> None:
        """After the backward. The nodes of parameters live on in DDP."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _zeros(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)
