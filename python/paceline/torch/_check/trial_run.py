"""What the devices run in a check, which commits nothing."""

from __future__ import annotations

from typing import Any

import torch

from paceline.torch._check.leaves import OutsideLeaves
from paceline.torch._devices.noise import Noise
from paceline.torch._devices.places import Places, RandomStates
from paceline.torch._devices.run_draws import Drawing, RunDraws
from paceline.torch._run.run import Frame, TrainRun


class TrialRun(TrainRun):
    """A run in which items draw what they drew before. After it, `reached` has the gradients of leaves outside of the module."""

    def __init__(self, frame: Frame, *, leaves: OutsideLeaves, noise: Noise, **options: Any) -> None:
        super().__init__(frame, **options)
        self._leaves = leaves
        self._noise = noise
        self.reached: list[torch.Tensor | None] = []
        if noise.drew:
            self.draws = _ReplayedDraws(self.places, frame.random)

    def compute(self, device: int, begin: int, end: int) -> bool:
        with self._noise.of(self.batch.rows(begin, end)):
            return super().compute(device, begin, end)

    def check(self) -> None:
        super().check()
        self.reached = self._leaves.taken()


class _ReplayedDraws(RunDraws):
    """Replayed draws need no seeds and no watching, and recomputation draws the same."""

    def __init__(self, places: Places, before: RandomStates) -> None:
        super().__init__(places, Drawing(), compiled=True, before=before)
        self.watches = []
        self._generators = []
        self._moved = []
