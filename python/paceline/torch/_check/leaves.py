"""Leaves outside of the module that a loss reaches, and their gradients, run by run."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from paceline.torch._run.outside import leaves_of


class OutsideLeaves:
    """The ``.grad`` of leaves that are none of the `known`, set aside when they are first met, and in the end as before."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        self._known = {id(tensor) for tensor in known}
        self.leaves: list[torch.Tensor] = []
        self._before: list[torch.Tensor | None] = []
        self._runs: list[int] = []  # in how many each was met
        self._met: set[int] = set()  # in this one, by identity
        self._lasting: set[int] | None = None

    def watch(self, root: torch.Tensor) -> None:
        """Before each backward."""
        for leaf in leaves_of(root):
            if id(leaf) not in self._known:
                self._known.add(id(leaf))
                self.leaves.append(leaf)
                self._before.append(leaf.grad)
                self._runs.append(0)
                leaf.grad = None
            self._met.add(id(leaf))

    def settle(self) -> None:
        """After two runs: leaves that were met in one of them only are made anew in every run, and nobody's parameters."""
        self._lasting = {index for index, runs in enumerate(self._runs) if runs > 1}

    def lasting(self, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """What `taken` gave, without the leaves that do not last."""
        kept = self._lasting
        return gradients if kept is None else [one if index in kept else None for index, one in enumerate(gradients)]

    def taken(self) -> list[torch.Tensor | None]:
        """The gradients of this run."""
        return self.lasting([leaf.grad for leaf in self.leaves])

    def clear(self) -> None:
        """The run has ended: no gradients."""
        for index, leaf in enumerate(self.leaves):
            self._runs[index] += id(leaf) in self._met
            leaf.grad = None
        self._met.clear()

    def restore(self) -> None:
        """As they were."""
        for leaf, before in zip(self.leaves, self._before, strict=True):
            leaf.grad = before
