"""What a pool asks a placement of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from paceline import InvalidArgument

PRIORITIES = ("interactive", "normal", "batch", "background")


class PoolCandidate(NamedTuple):
    """A device that may run the job.

    Attributes
    ----------
    device
        Its name, such as ``"cuda:0"``.
    idle
        Whether it is free now.
    free_in_seconds
        Until it is free, as predicted: 0 if it is idle or late, infinity if nothing is known of what it runs.
    seconds
        That one such job takes there alone, as predicted, with loading its model. Infinity if it is not known.
    """

    device: str
    idle: bool
    free_in_seconds: float
    seconds: float


class PoolQuestion(NamedTuple):
    """Where the job that is next of its kind shall start: what a function as ``Pool(placement=...)`` is given.

    Attributes
    ----------
    now_seconds
        Of the pool's clock.
    kind
        The name of its kind.
    priority
        ``"interactive"``, ``"normal"``, ``"batch"`` or ``"background"``.
    deadline_seconds
        From now. Infinity: it has none.
    waiting
        How many jobs like it wait, itself included.
    candidates
        All devices that may run it, the fastest first.
    """

    now_seconds: float
    kind: str
    priority: str
    deadline_seconds: float
    waiting: int
    candidates: tuple[PoolCandidate, ...]


Place = Callable[[PoolQuestion], "str | None"]
Row = tuple[str, bool, float, float]
Ask = Callable[[float, str, int, float, int, tuple[Row, ...]], int]


def asker(place: Place) -> Ask:
    """The function as the binding calls it: it answers the place of a candidate, or -1."""

    def ask(now: float, kind: str, priority: int, deadline: float, waiting: int, rows: tuple[Row, ...]) -> int:
        candidates = tuple(map(PoolCandidate._make, rows))
        answer = place(PoolQuestion(now, kind, PRIORITIES[priority], deadline, waiting, candidates))
        if answer is None:
            return -1
        for number, one in enumerate(candidates):
            if one.device == answer:
                return number
        names = ", ".join(one.device for one in candidates)
        raise InvalidArgument(
            f"placement has answered {answer!r}; it must answer the name of a device that may run the job, one of {names}, or None to let it wait."
        )

    return ask
