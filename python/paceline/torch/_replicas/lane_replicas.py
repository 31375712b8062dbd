"""Modules of the lanes of pipelines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import nn

from paceline.torch._devices.places import Places
from paceline.torch._replicas.compiled import compiles
from paceline.torch._replicas.copies import Copied, Replicate
from paceline.torch._replicas.reach import Reach
from paceline.torch._replicas.replica import Replica
from paceline.torch._replicas.replicas import Replicas


class LaneReplicas(Replicas):
    """Modules of lanes, which each carry one micro-batch at a time through all stages of a pipeline.

    Those of a pipeline share gradients and buffers, too: each stage takes micro-batches in order, so these are what they would be with one
    module. What a forward writes to attributes of its module belongs to its micro-batch, so each lane has a module of its own. Its compiled
    parts are those of the first lane, since each module compiles by itself.
    """

    def __init__(self, module: nn.Module, places: Places, replicate: Replicate | None, pipelines: int = 1) -> None:
        self._pipelines = list(range(pipelines))  # of each lane
        self._aliases: dict[tuple[int, int], torch.Tensor] = {}
        self._first: dict[int, Copied] = {}  # the module of each pipeline's first lane
        super().__init__(module, places, replicate)
        self.share()

    @property
    def _spaces(self) -> list[int]:
        return [self._places.home_space] * len(self._pipelines)

    def need(self, lanes: Mapping[int, int]) -> None:
        """Have modules for at least so many lanes of these pipelines."""
        self._pipelines = sorted((Counter(self._pipelines) | Counter(lanes)).elements())
        if len(self.list) < len(self._pipelines):
            with torch.inference_mode(False):
                self._build()

    def of(self, pipeline: int) -> list[Replica]:
        """Those of the lanes of a pipeline."""
        return [one for one, owner in zip(self.list, self._pipelines, strict=True) if owner == pipeline]

    def _build(self) -> None:
        self._aliases.clear()
        self._first.clear()
        super()._build()
        for pipeline in set(self._pipelines):
            for replica in self.of(pipeline)[1:]:
                replica.buffers = None  # those of the first one

    def _alias(self, parameter: torch.Tensor, storage: torch.Tensor | None, device: int) -> torch.Tensor:
        key = self._pipelines[device], id(parameter)
        if key not in self._aliases:
            self._aliases[key] = super()._alias(parameter, storage, device)
        return self._aliases[key]

    def _share(self, made: Copied, reach: Reach, device: int) -> None:
        first = self._first.setdefault(self._pipelines[device], made)
        if first is made:
            return
        for _, ours in reach.modules:
            vars(made.counterparts[id(ours)])["_buffers"] = first.counterparts[id(ours)]._buffers
        for _, ours in reach.modules:
            for name, part in ours._modules.items():
                if part is not None and compiles(part):
                    made.counterparts[id(ours)]._modules[name] = first.counterparts[id(part)]
                    for inner in part.modules():
                        made.counterparts[id(inner)] = first.counterparts[id(inner)]
