"""What one call asks for, and what an attempt of it starts from."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from paceline.torch._batch.batch import Batch
from paceline.torch._batch.items import Items, OrderedBatch
from paceline.torch._devices.caller_state import CallerState
from paceline.torch._devices.places import Places
from paceline.torch._devices.run_draws import RandomStates
from paceline.torch._replicas.replica import Replica
from paceline.torch._replicas.replicas import Replicas
from paceline.torch._run.flat_gradients import FlatGradients
from paceline.torch._run.recipe import Constraints, Recipe
from paceline.torch._run.workload import Workload


class Passage(Protocol):
    """How micro-batches pass through the stages of a module, each on a lane of its own. The lanes share one replica."""

    def begins(self, begin: int) -> bool:
        """Whether the micro-batch that begins at this item is the first, so that no other one can have run backward before its forward is over."""

    def turn_back(self) -> list[torch.Tensor]:
        """Called on the lane between forward and backward. Returns the roots of the backward beside the loss."""

    def end(self) -> None:
        """Called on the lane after the backward."""

    def surrounded(
        self, around: Callable[[str], contextlib.AbstractContextManager[Any]]
    ) -> contextlib.AbstractContextManager[Any]:
        """On the lane: `around` the part of its micro-batch that each device runs."""


_NO_RECIPE = Recipe(Constraints())


class Asked(NamedTuple):
    """One call, the same in every attempt."""

    work: Workload
    batch: Batch
    fn: Callable[..., Any]
    executor: Callable[[Call], Any]  # makes what runs micro-batches in an attempt
    costs: list[float] | None = None  # a plan orders the items by these
    order: list[int] | None = None  # in place of a plan
    hooks: bool = False  # whether parameters may have gradient hooks, since gradients of slices are not theirs to see
    like: Constraints | None = None  # those of the forward whose backward this is
    before: Callable[[], None] | None = None  # called before each attempt


class Call:
    """One attempt: everything that its executor starts from. The replicas follow the module as it is now."""

    def __init__(
        self,
        asked: Asked,
        replicas: Replicas,
        places: Places,
        random: RandomStates,
        *,
        number: int = 0,
        keep: bool = False,
    ) -> None:
        self.asked, self.work, self.whole, self.fn = asked, asked.work, asked.batch, asked.fn
        self.began = time.perf_counter()
        self.number = number  # of the trainer's calls
        self.keep = keep  # whether the result of a step is committed
        self.batch: Batch | OrderedBatch = asked.batch
        self.items: Items | None = None  # the plan of a batch with costs
        self.all_places, self.random = places, random
        self.all_replicas = replicas  # of the devices; in a pipeline, of all lanes
        self.places: Places = places  # those of the lanes, in a pipeline
        self.replicas: list[Replica] = replicas.list  # one for each device, or for each lane of a pipeline
        self.state = CallerState(places.types, len(places.devices))
        self.seen = asked.work.seen
        self.limits = asked.work.limits  # of memory, per device
        self.recipe: Recipe = _NO_RECIPE
        self.searches = False  # whether sizes of micro-batches may be tried
        self.divides = False  # whether a device may run its part in several micro-batches without being asked to
        self.passage: Passage | None = None  # set if devices are stages
        self.flat: FlatGradients | None = None  # where gradients are, with several devices of which some have queues
