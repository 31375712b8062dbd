"""What a step changes of the caller's: all of it, or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from paceline.torch._run.recipe import overriding

Gradients = list[torch.Tensor | None]


class Done(NamedTuple):
    """A run that has succeeded: a step or a forward on the devices, a proof (without an outcome), or that of a rank without items (also without a run)."""

    run: Any
    outcome: Any
    loss: torch.Tensor
    totals: Gradients
    items: list[int]  # of each device; empty for a forward
    extras: Any = None  # what loss_fn returned beside the loss
    carries: bool = False  # whether the gradients go to whoever calls backward, and not to ``.grad``


class Participant:
    """One thing that steps change. A method that a class does not override is never called."""

    def prepare(self, run: Any) -> None:
        """Note the state before the step. `run`: its `TrainRun`, `PredictRun` or `Prover`; None on a rank without items."""

    @property
    def written(self) -> bool:
        """Whether a commit has begun that cannot be undone."""
        return False

    def check(self) -> None:
        """Raise if the run has touched what it may not."""

    def commit(self, done: Done) -> None:
        """Write the result. If it was interrupted it is called again, and does nothing twice."""

    def rollback(self) -> None:
        """Put everything back as it was before the step, also after half of a `prepare`."""

    def release(self) -> None:
        """Let go of what was noted: the step is over."""

    def end(self) -> None:
        """Let go of what is kept from step to step."""


class Journal:
    """Commits participants in their order. After the first one has begun it only goes forward, interrupted or not."""

    def __init__(self, participants: Sequence[Participant]) -> None:
        self._participants = participants
        self._prepares = overriding(Participant, participants, "prepare")
        self._checks = overriding(Participant, participants, "check")
        self._commits = overriding(Participant, participants, "commit")
        self._rollbacks = overriding(Participant, participants, "rollback")[::-1]
        self._releases = overriding(Participant, participants, "release")
        self._next = 0

    def prepare(self, run: Any) -> None:
        """Note the state before the step."""
        self._next = 0
        for prepare in self._prepares:
            prepare(run)

    def check(self) -> None:
        """Raise if the run has touched what it may not."""
        for check in self._checks:
            check()

    def commit(self, done: Done) -> None:
        """Write everything."""
        while self._next < len(self._commits):
            self._commits[self._next](done)
            self._next += 1

    @property
    def begun(self) -> bool:
        """Whether something is written, so that the rest has to be, too."""
        return self._next > 0 or any(one.written for one in self._participants)

    def rollback(self) -> None:
        """Put everything back, the last one first."""
        for rollback in self._rollbacks:
            rollback()

    def release(self) -> None:
        """Let go of what was noted: the step is over."""
        for release in self._releases:
            release()

    def end(self) -> None:
        """Let go of what is kept from step to step."""
        for one in self._participants:
            one.end()
