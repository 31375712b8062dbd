"""The places of a pipeline's lanes: threads that each carry one micro-batch at a time through all devices."""

from __future__ import annotations

import contextlib

import torch

from paceline.torch._devices.caller_state import NOTHING
from paceline.torch._devices.places import Place, Places
from paceline.torch._devices.worker_draws import WorkerGenerator


class LanePlaces(Places):
    """Lanes in the place of devices. Each has a generator of its own on the host, also if there is one lane: so draws do not depend on the stages."""

    def __init__(self, stages: Places, lanes: int) -> None:
        lane = Place("the pipeline", threads=max(stages._threads))
        super().__init__([lane] * lanes, stages.home, [WorkerGenerator() for _ in range(lanes)])
        self.devices = [stages.home] * lanes

    def enter(self, device: int) -> contextlib.AbstractContextManager[None]:
        # Autocast keeps casts of parameters by tensor, for all threads: a lane would use the nodes of another lane's graph. The thread is ours.
        torch.set_autocast_cache_enabled(False)
        return NOTHING
