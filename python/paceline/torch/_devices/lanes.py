"""The places of a pipeline's lanes: threads that each carry one micro-batch at a time through all devices."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch

from paceline.torch._devices.caller_state import NOTHING
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
        self._derive()

    def enter(self, device: int) -> contextlib.AbstractContextManager[None]:
        # Autocast keeps casts of parameters by tensor, for all threads: a lane would use the nodes of another lane's graph. The thread is ours.
        torch.set_autocast_cache_enabled(False)
        return NOTHING


class SharedPlaces(Places):
    """Places for the lanes of pipelines. The modules of a pipeline's lanes share parameters, gradients and buffers."""

    def __init__(self, base: Places, pipelines: int = 1) -> None:
        vars(self).update(vars(base))
        self._lanes = [1] * pipelines
        self.need(dict.fromkeys(range(pipelines), 1))

    def __len__(self) -> int:
        return len(self.pipelines)

    def need(self, lanes: Mapping[int, int]) -> None:
        """Have at least so many lanes for these pipelines."""
        for pipeline, count in lanes.items():
            self._lanes[pipeline] = max(self._lanes[pipeline], count)
        self.pipelines = [pipeline for pipeline, count in enumerate(self._lanes) for _ in range(count)]  # of each place
        self.spaces = [self.home_space] * len(self.pipelines)
