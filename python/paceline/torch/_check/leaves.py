"""Collects, run by run, the gradients of leaves outside of the module that a loss reaches."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from paceline.torch._run.outside import leaves_of


class OutsideLeaves:
    """Leaves that are not among the `known` ones. Their ``.grad`` is set aside when they are first met, and put back in the end."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        self._known = {id(tensor) for tensor in known}
        self.leaves: list[torch.Tensor] = []
        self._before: list[torch.Tensor | None] = []
        self._runs: list[int] = []  # number of runs in which each leaf was met
        self._met: set[int] = set()  # leaves of this run, by identity
        self._lasting: set[int] | None = None

    def watch(self, root: torch.Tensor) -> None:
        """Note the leaves that a backward from `root` will reach. To be called before each backward."""
        for leaf in leaves_of(root):
            if id(leaf) not in self._known:
                self._known.add(id(leaf))
                self.leaves.append(leaf)
                self._before.append(leaf.grad)
                self._runs.append(0)
                leaf.grad = None
            self._met.add(id(leaf))

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
