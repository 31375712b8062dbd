"""The places of a pipeline's lanes: threads that each carry one micro-batch at a time through all devices."""

from __future__ import annotations

import contextlib

import torch

from paceline.torch._devices.places import Places
from paceline.torch._devices.worker_draws import WorkerGenerator


class LanePlaces(Places):
    """Lanes in the place of devices. Each has a generator of its own on the host, also if there is one lane: so draws do not depend on the stages."""

    def __init__(self, base: Places, lanes: int) -> None:
        vars(self).update(vars(base))
        self._base = base
        self.names = ["the pipeline"] * lanes
        self.devices = [base.home] * lanes
        self._gpu = [None if base.any_host else base._home_gpu] * lanes
        self._threads = [max(base._threads)] * lanes
        self.queues = None  # turns have streams; lanes have none
        self.spaces = [base.home_space] * lanes
        self.own_generators = [WorkerGenerator() if base.any_host else None for _ in range(lanes)]

    def prepare_worker(self, device: int) -> None:
        if not self._base.any_host:
            return torch.autograd.set_multithreading_enabled(False) and None
        super().prepare_worker(device)

    def enter(self, device: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()
