"""The places of a pipeline's lanes: threads that each carry one micro-batch at a time through all devices."""

from __future__ import annotations

import contextlib

from paceline.torch._devices.places import Places
from paceline.torch._devices.worker_draws import WorkerGenerator


class LanePlaces(Places):
    """Lanes in the place of devices. Each has a generator of its own on the host, also if there is one lane: so draws do not depend on the stages."""

    def __init__(self, base: Places, lanes: int) -> None:
        vars(self).update(vars(base))
        self.names = ["the pipeline"] * lanes
        self.devices = [base.home] * lanes
        self._gpu = [None] * lanes
        self._threads = [max(base._threads)] * lanes
        self.spaces = [base.home_space] * lanes
        self.own_generators = [WorkerGenerator() for _ in range(lanes)]

    def enter(self, device: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class SharedPlaces(Places):
    """One place for all `lanes`, whose modules share parameters, gradients and buffers."""

    def __init__(self, base: Places) -> None:
        vars(self).update(vars(base))
        self.lanes = 1

    def __len__(self) -> int:
        return self.lanes

    @property
    def lanes(self) -> int:
        """How many there are."""
        return len(self.spaces)

    @lanes.setter
    def lanes(self, count: int) -> None:
        self.spaces = [self.home_space] * count
