"""What a step changes of the caller's: all of it, or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from paceline.torch._run.executor import Executor

Gradients = list[torch.Tensor | None]


class Done(NamedTuple):
    """A run that has succeeded."""

    run: Any
    outcome: Any
    loss: torch.Tensor
    totals: Gradients
    extras: Any = None  # what loss_fn returned beside the loss
    seconds: float = 0.0  # of the attempt


class Participant:
    """One thing that a step changes."""

    def prepare(self) -> None:
        """Note the state before the step."""

    @property
    def written(self) -> bool:
        """Whether a commit has begun that cannot be undone."""
        return False

    def check(self, run: Executor, outcome: Any) -> None:
        """Raise if the run has touched what it may not."""

    def commit(self, done: Done) -> None:
        """Write the result. If it was interrupted it is called again, and does nothing twice."""

    def rollback(self) -> None:
        """Put everything back as it was before the step, also after half of a `prepare`."""


class Journal:
    """Commits participants in their order. After the first one has begun it only goes forward, interrupted or not."""

    def __init__(self, participants: Sequence[Participant]) -> None:
        self._participants = participants
        self._next = 0

    def prepare(self) -> None:
        """Note the state before the step."""
        for one in self._participants:
            one.prepare()

    def check(self, run: Executor, outcome: Any) -> None:
        """Raise if the run has touched what it may not."""
        for one in self._participants:
            one.check(run, outcome)

    def commit(self, done: Done) -> None:
        """Write everything."""
        while self._next < len(self._participants):
            self._participants[self._next].commit(done)
            self._next += 1

    @property
    def begun(self) -> bool:
        """Whether something is written, so that the rest has to be, too."""
        return self._next > 0 or any(one.written for one in self._participants)

    def rollback(self) -> None:
        """Put everything back, the last one first."""
        for one in reversed(self._participants):
            one.rollback()
