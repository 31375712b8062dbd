"""What attempts of one kind have in common: which features act in them, and what their plan may do."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple


class Retry(NamedTuple):
    """Why a call runs once more, from the same state. Nothing was committed."""

    reason: str
    most: int = 1  # times in one call
    complete: bool = False  # whether all items have run
    out_of_memory: bool = False  # whether unused memory has to be given back first


class RetryError(Exception):
    """Leaves an attempt, for another one."""

    def __init__(self, retry: Retry) -> None:
        super().__init__(retry.reason)
        self.retry = retry


class Constraints(NamedTuple):
    """What a plan may do. Those of several features hold together."""

    least: int = 1  # items of a micro-batch
    undivided: bool = False  # whether a device runs its share as one micro-batch
    all_items: bool = False  # whether items without weight run, too

    def both(self, other: Constraints) -> Constraints:
        """What holds under both."""
        return Constraints(
            max(self.least, other.least), self.undivided or other.undivided, self.all_items or other.all_items
        )


class Recipe:
    """The features that do something in attempts of one kind, by what they do. It is made once, and used as long as its key holds."""

    def __init__(
        self, constraints: Constraints, base: type = object, bound: Sequence[Any] = (), key: Hashable = None
    ) -> None:
        """`base`: the class of what is `bound`, whose own methods do nothing."""
        self.constraints, self.key = constraints, key
        self.names = [type(one).__name__ for one in bound]
        self.begin = overriding(base, bound, "begin")
        self.run = overriding(base, bound, "run")
        self.micro_batch = overriding(base, bound, "micro_batch")
        self.failed = overriding(base, bound, "failed")
        self.ended = overriding(base, bound, "ended")
        self.retry = overriding(base, bound, "retry")
        self.check = overriding(base, bound, "check")


def overriding(base: type, ones: Sequence[Any], method: str) -> list[Any]:
    """The method of each one whose class overrides that of `base`."""
    return [getattr(one, method) for one in ones if getattr(type(one), method) is not getattr(base, method)]
