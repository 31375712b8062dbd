"""What a device's forward has written to buffers and attributes, on its way to the user's module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.torch._devices.places import Places
from paceline.torch._replicas.buffer_rules import BufferRules, put
from paceline.torch._replicas.replicas import Replicas


class Pushing:
    """Gives the user's module what the device with most items has written. Buffers with a rule of their own get what all devices have."""

    def __init__(self, replicas: Replicas, places: Places, rules: BufferRules | None = None) -> None:
        self._replicas, self._places, self._rules = replicas, places, rules
        self._joined: tuple[Any, list[Any]] | None = None  # what the rules say of an outcome

    def most(self, outcome: Any) -> int:
        """The replica that ran most items of a step."""
        ran: list[int] = outcome.items
        return ran.index(max(ran))

    def buffers(self, outcome: Any) -> None:
        """Write the buffers. An interrupted call may be repeated."""
        replicas, places = self._replicas, self._places
        if not replicas.shared or (buffers := replicas.list[self.most(outcome)].buffers) is None:
            return
        # Once for an outcome: a commit that was interrupted is repeated, and then the user's buffers are not those before the step.
        if self._rules is not None and (self._joined is None or self._joined[0] is not outcome):
            home = places.devices.index(places.home)
            self._joined = outcome, self._rules.joined(replicas, outcome.items, home, places.to_home)
        buffers.push()
        if self._joined is not None:
            put(self._joined[1])

    def attributes(self, outcome: Any, micro_batches: Sequence[int]) -> None:
        """Write the attributes. `micro_batches`: how many each device has run."""
        if self._replicas.shared:
            self._replicas.push_written(self.most(outcome), list(micro_batches), outcome)

    def release(self) -> None:
        """Let go of the last outcome."""
        self._joined = None
