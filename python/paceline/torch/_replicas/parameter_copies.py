"""Copies of parameters in other memory spaces than that of the user's module, which each step begins by bringing up to date."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from paceline.torch._devices.places import Places
from paceline.torch._replicas.arrivals import Arrivals, buckets_of
from paceline.torch._replicas.copies import check_sent, in_one_piece
from paceline.torch._replicas.flat_buffers import BUCKET, Copy


class ParameterCopies:
    """Where the copies lie, and in which order they are sent."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self.entries: list[Copy] = []
        self._memory: dict[int, dict[int, torch.Tensor]] = {}  # keeps it alive: the queues have only addresses

    def memory_for(self, named: dict[str, torch.Tensor]) -> dict[int, dict[int, torch.Tensor]]:
        """For each memory space but home: memory for a copy of each parameter, by the parameter's identity."""
        copies: dict[int, dict[int, torch.Tensor]] = {}
        for device, space in enumerate(self._places.spaces):
            if space == self._places.home_space or space in copies:
                continue
            for name, parameter in named.items():
                check_sent(name, parameter, self._places.names[device])
            ours = list(named.values())
            copies[space] = dict(zip(map(id, ours), self._memory_like(ours, device), strict=True))
        return copies

    def _memory_like(self, parameters: list[torch.Tensor], device: int) -> list[torch.Tensor]:
        """Memory on the device for a copy of each. On GPUs each bucket is one piece, which goes from GPU to GPU as such."""
        place = self._places.devices[device]
        if place.type == "cpu" and self._places.home.type != "cpu":
            pinned = self._places.pinned
            return [pinned(one.numel(), one.dtype).as_strided(one.shape, one.stride()) for one in parameters]
        found: list[torch.Tensor] = []
        # PyTorch gives memory of this stream again only to this stream, whose work ends before a step begins to copy.
        with self._places.enter(device):
            numbered = zip(buckets_of(parameters), parameters, strict=True)
            for _, bucket in itertools.groupby(numbered, operator.itemgetter(0)):
                found += in_one_piece([one for _, one in bucket], place)
        return found

    def begin(self, copies: dict[int, dict[int, torch.Tensor]], ours: list[torch.Tensor], made: Sequence[Any]) -> None:
        """Let every step begin by copying the parameters to the other memory spaces, bucket by bucket."""
        if self._places.queues is None:
            return
        self.entries = []
        buckets = buckets_of(ours)
        found = sorted((bucket, space, index) for index, bucket in enumerate(buckets) for space in copies)
        for bucket, space, index in found:
            parameter, copy = ours[index], copies[space][id(ours[index])]
            self.entries.append(
                (space, copy.data_ptr(), parameter.data_ptr(), copy.numel() * copy.element_size(), bucket)
            )
        self._places.queues.set_copies(self.entries)
        if copies and torch.are_deterministic_algorithms_enabled():
            self._places.drain()  # PyTorch has filled the memory on the devices' streams, which the copies do not wait for
        self._memory = copies
        for replica, space in zip(made, self._places.spaces, strict=True):
            if space in copies and len(set(buckets)) > 1:
                first = (BUCKET,) if replica.buffer_pairs else ()
                replica.arrivals = Arrivals(replica.parameters, buckets, replica.modules, at_once=first)

    def of(self, parameter: torch.Tensor) -> dict[int, torch.Tensor]:
        """The copies that other memory spaces have of a parameter, by space."""
        return {space: copies[id(parameter)] for space, copies in self._memory.items() if id(parameter) in copies}

    def release(self) -> None:
        """Let go of the memory."""
        self._memory = {}
