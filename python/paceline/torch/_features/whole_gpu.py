"""Kernels that need a whole GPU, where a device is a part of one."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from paceline.torch._devices.whole_gpu_kernels import is_channels_last, needing_a_whole_gpu, warn_of_whole_gpu_kernels
from paceline.torch._run.call import Call
from paceline.torch._run.feature import Bound, Feature


class WholeGpuKernels(Feature):
    """Warns once of modules that may run by such kernels."""

    def __init__(self) -> None:
        self._warned = False

    def key(self, call: Call) -> Hashable:
        if self._warned or not call.all_places.any_part:
            return None
        return torch.backends.cudnn.enabled, any(is_channels_last(tensor) for _, tensor in call.whole.tensors())

    def bind(self, call: Call) -> Bound | None:
        if not self._warned and call.all_places.any_part:
            replicas = call.all_replicas
            tensors = [*replicas.parameters, *(tensor for _, tensor in call.whole.tensors())]
            if named := needing_a_whole_gpu(replicas.named_modules, tensors):
                self._warned = True
                warn_of_whole_gpu_kernels(named)
        return None
