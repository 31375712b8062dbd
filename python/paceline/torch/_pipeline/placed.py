"""The passage of micro-batches through stages of which some are on GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from paceline._core.engine import Lanes
from paceline.torch._devices import cuda
from paceline.torch._devices.stages import StagePlaces
from paceline.torch._pipeline.blocks import Block
from paceline.torch._pipeline.crossing import Crossings, Shared, Strays, nothing
from paceline.torch._pipeline.gates import Journey, calls_replaced, journey_here
from paceline.torch._pipeline.loop import Outcome
from paceline.torch._pipeline.measure import BlockClock
from paceline.torch._pipeline.passage import Passage
from paceline.torch._pipeline.plans import Action, PipelinePlan
from paceline.torch._pipeline.visited import Visited
from paceline.torch._replicas.replica import Replica


class PlacedPassage(Passage):
    """A `Passage` whose stages have memories of their own.

    `called`: gets modules outside of the blocks, with the last block before their first call. `visited`: the user's modules whose calls are followed.
    `compiled`: the compiled blocks, by number, with their modules that may have tensors elsewhere. `strays`: whether tensors are brought to operators that they reach from elsewhere.
    """

    def __init__(
        self,
        blocks: list[Block],
        plan: PipelinePlan,
        replica: Replica,
        places: StagePlaces,
        called: dict[str, int],
        visited: Sequence[Visited],
        compiled: Mapping[int, Sequence[torch.nn.Module]],
        *,
        strays: bool,
    ) -> None:
        super().__init__(blocks, plan, replica)
        self.places = places
        self.called = called
        counterparts = replica.counterparts  # of all lanes, as to what is compiled
        self.compiled = {
            index: [counterparts.get(id(part), part) for part in parts] for index, parts in compiled.items()
        }
        wholes = [part for one in visited if one.compiled for part in one.module.modules()]
        self.shared = Shared(
            [*(counterparts.get(id(part), part) for part in wholes), *chain.from_iterable(self.compiled.values())]
        )
        self._visited = visited
        self._strays = strays
        self._journeys: dict[int, PlacedJourney] = {}
        self._clocks: list[EventClock] = []

    def _begin(self) -> None:
        self.places.follow_caller()
        self._journeys.clear()
        self._clocks.clear()
        self._starts = self.places.marks()
        _wait_for(self._starts)  # so that the clocks of all devices begin at the same time

    def _end(self, outcome: Outcome) -> None:
        if outcome.failed or self._clocks or len(self._journeys) < len(outcome.bounds):
            self.places.drain()
        if outcome.failed or len(self._journeys) < len(outcome.bounds):
            return
        for clock in self._clocks:
            clock.settle()
        self.places.lead_caller()
        ends, enqueued = self.places.marks(), outcome.record

        def times() -> list[list[Action]]:
            _wait_for(ends)
            return [[self._timed(stage, action) for action in actions] for stage, actions in enumerate(enqueued)]

        outcome.pending = times

    def _timed(self, stage: int, action: Action) -> Action:
        """The action with the times of its GPU, in place of those at which Python enqueued it."""
        kind, micro_batch, *_ = action
        began = self._starts[self.plan.order[stage]]
        if began is None:
            return action
        first, last = self._journeys[micro_batch].marks[kind, stage][:2]
        return kind, micro_batch, cuda.seconds_between(began, first), cuda.seconds_between(began, last)

    def _clock(self, planner: Any, parameters: Sequence[torch.Tensor]) -> BlockClock:
        clock: EventClock = planner.clock(parameters, EventClock)
        clock.use(self.places.stamp)
        self._clocks.append(clock)
        return clock

    def _journey(self, lanes: Lanes, micro_batch: int, clock: BlockClock | None, *, trains: bool) -> Journey:
        self.places.open()
        assert clock is None or isinstance(clock, EventClock)
        journey = self._journeys[micro_batch] = PlacedJourney(self, lanes, micro_batch, trains=trains, watcher=clock)
        return journey

    def _surround(self, stack: contextlib.ExitStack, journey: Journey) -> None:
        if self._strays and isinstance(journey, PlacedJourney):
            journey.strays = stack.enter_context(Strays(journey.crossings))

    def _calls(self, replicas: Iterable[Replica]) -> contextlib.AbstractContextManager[None]:
        return calls_replaced(
            (replica.counterparts.get(id(one.module), one.module), _visiting, (one, replica.counterparts))
            for replica in replicas
            for one in self._visited
        )


def _wait_for(events: Sequence[Any]) -> None:
    for event in events:
        if event is not None:
            cuda.wait(event)


class PlacedJourney(Journey):
    """A `Journey` that takes what a block is called with along to its device."""

    def __init__(
        self,
        passage: PlacedPassage,
        lanes: Lanes,
        micro_batch: int,
        *,
        trains: bool,
        watcher: EventClock | None = None,
    ) -> None:
        self.crossings = Crossings(passage.places, passage.shared)
        self.marks: dict[tuple[str, int], list[Any]] = {}  # when each action began and ended, by the device's clock
        self._places = passage.places
        self._order = passage.plan.order
        self._called = passage.called
        self._clock = watcher
        self._compiled = passage.compiled
        self.strays: Strays | None = None
        self._action: list[Any] = []
        self._kind = "F"
        super().__init__(passage, lanes, micro_batch, trains=trains, watcher=watcher)

    def _arrive(self, stage: int) -> None:
        self._places.arrive(self._order[stage])
        self._action = self.marks[self._kind, stage] = [None]
        self._start()

    def _start(self) -> None:
        """Begin to take the time of an action, behind what its stream waits for."""
        self._action[0] = self._places.stamp()
        if self._clock is not None:
            self._clock.arrived()

    def enter(self, index: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        target = self._places.devices[self._order[self._stage_of[index]]]
        goes_on = not self.backward and self._stage_of[index] > self.stage
        back = self._start if goes_on else nothing
        departed = self.crossings.departed((args, kwargs), target, back)  # before the turn is given back
        args, kwargs = super().enter(index, args, kwargs)
        args, kwargs = self.crossings.arrived((args, kwargs), departed)
        if goes_on:
            self._start()
        return args, kwargs

    def run(self, index: int, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        parts = self._compiled.get(index)
        if parts is None:
            return super().run(index, call, args, kwargs)
        args, kwargs = self.enter(index, args, kwargs)
        with self._at_once(parts):
            return call(*args, **kwargs)

    @contextlib.contextmanager
    def _at_once(self, parts: Iterable[torch.nn.Module]) -> Iterator[None]:
        """Around a call of compiled code, which shows nothing of what it calls: what these modules have is brought before."""
        with self.crossings.borrowed(parts), contextlib.nullcontext() if self.strays is None else self.strays.paused():
            yield

    def visit(
        self, visited: Visited, parts: Sequence[torch.nn.Module], call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Call a module that is no block, with what it has and what it gets on the device whose turn this micro-batch has."""
        if not self.backward:
            for name, _ in visited.parts:
                self._called[name] = min(self._called.get(name, self.block), self.block)
        args, kwargs = self.crossings.here((args, kwargs))
        with self._at_once(parts) if visited.compiled else self.crossings.borrowed(parts):
            return call(*args, **kwargs)

    def turn_back(self) -> list[torch.Tensor]:
        try:
            return super().turn_back()
        finally:
            self.crossings.turn_back()

    def forget(self) -> None:
        super().forget()
        self._action.append(self._places.stamp())
        self.crossings.forget()

    def _move(self, kind: str, stage: int) -> None:
        if self._clock is not None:
            self._clock.leaving()
        self._action.append(self._places.stamp())
        self._kind = kind
        super()._move(kind, stage)


def _visiting(about: tuple[Visited, Mapping[int, Any]], call: Callable[..., Any]) -> Callable[..., Any]:
    visited, counterparts = about
    parts = [counterparts.get(id(part), part) for _, part in visited.parts]

    def visiting_call(*args: Any, **kwargs: Any) -> Any:
        journey = journey_here()
        if isinstance(journey, PlacedJourney):
            return journey.visit(visited, parts, call, args, kwargs)
        return call(*args, **kwargs)

    return visiting_call


class EventClock(BlockClock):
    """A `BlockClock` by the clocks of the devices that a micro-batch comes to. Its times are there after `settle`."""

    def use(self, stamp: Callable[[], Any]) -> None:
        """Take the time by this function, from now on."""
        self._stamp = stamp
        self._laps: list[tuple[list[float], int, Any, Any]] = []
        self._last: Any = None
        self._forward = True

    @property
    def ran(self) -> bool:
        return bool(self._laps)

    def leaving(self) -> None:
        """The micro-batch is about to give a turn back."""
        self._lap(self.forward if self._forward else self.backward, self.block)

    def arrived(self) -> None:
        """The micro-batch has got a turn."""
        self._last = self._stamp()

    def paused(self, seconds: float) -> None:
        pass  # `arrived` begins anew

    def turned(self) -> None:
        super().turned()
        self._forward = False

    def settle(self) -> None:
        """Read the times. Everything has been waited for."""
        for seconds, index, first, last in self._laps:
            on_host = isinstance(first, float)
            seconds[index] += last - first if on_host else cuda.seconds_between(first, last)

    def _lap(self, seconds: list[float], index: int) -> None:
        now = self._stamp()
        self._laps.append((seconds, index, self._last, now))
        self._last = now
