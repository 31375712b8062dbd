"""A placement of the user's own."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable
from typing import Any

from paceline import InvalidArgument
from paceline._pool_question import Place, asker
from paceline._words import warn


class Placing:
    """Asks the user's function, and keeps account of its errors. Threads: any, one at a time."""

    def __init__(self, place: Place) -> None:
        self._ask = asker(place)
        self.name = getattr(place, "__qualname__", type(place).__qualname__)
        self.failures = 0
        self.last_failure: str | None = None

    def __call__(self, *question: Any) -> int | str:
        """The place of the device among the candidates; -1: none; or the text of an error, which the engine shows in `explain`."""
        try:
            return self._ask(*question)
        except KeyboardInterrupt:  # the binding knows whether it is meant for the caller
            raise
        except BaseException as error:  # the job has to run
            text = f"{type(error).__name__}: {error}"
            self.failures += 1
            if self.last_failure is None:
                warn(
                    f"paceline: the placement {self.name} of a pool has failed. The fastest idle device takes the job, and those of later errors, "
                    f"which explain() and report() count.\n{''.join(traceback.format_exception(error)).rstrip()}"
                )
            self.last_failure = text
            return text

    def weak(self) -> Callable[..., int | str]:
        """The same for the engine, whose references Python's collector does not see."""
        itself = weakref.ref(self)

        def ask(*question: Any) -> int | str:
            placing = itself()
            return -1 if placing is None else placing(*question)

        return ask


def placing_of(placement: Any) -> Placing | None:
    """For a function. None: for a name."""
    if isinstance(placement, str):
        return None
    if not callable(placement):
        raise InvalidArgument(
            f"Pool: placement is a {type(placement).__name__}; it must be a name, or a function of a PoolQuestion."
        )
    return Placing(placement)
