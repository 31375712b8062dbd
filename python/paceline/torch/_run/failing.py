"""Which of several failures a step raises, and where it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from paceline.torch._devices.failures import Failure, raise_failure
from paceline.torch._run.executor import Executor

_OF_SHAPE = (ValueError, RuntimeError, IndexError)


class Failing:
    """Says where failures were, in words."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def first(self, run: Executor, outcome: Any) -> tuple[int | None, int, int, BaseException]:
        """The failure that is to blame: its device (None: the reduction), its items and the error."""
        failed = outcome.failed_device
        return next((one for one in run.failures if one[0] == failed), run.failures[0])

    def where(self, device: int, outcome: Any) -> str:
        """Where the first failure was."""
        return self._names[device]

    def where_too(self, device: int | None) -> str:
        """Where another failure was."""
        return "what adds the gradients up" if device is None else self._names[device]

    def others(self, run: Executor, device: int | None, begin: int, end: int) -> list[Failure]:
        """All but the one of this device and these items."""
        return [
            Failure(self.where_too(one[0]), run.batch.described(*one[1:3]) if one[2] > one[1] else "", one[3])
            for one in run.failures
            if one[:3] != (device, begin, end)
        ]

    def fail(
        self,
        run: Executor,
        outcome: Any,
        place: tuple[int | None, int, int],
        error: BaseException,
        others: list[Failure],
    ) -> NoReturn:
        """Raise the error with what is known of it."""
        device, begin, end = place
        try:
            where = self.where_too(None) if device is None else self.where(device, outcome)
            items = run.batch.described(begin, end) if end > begin else ""
            if end - begin == 1 < run.batch.size and type(error) in _OF_SHAPE:
                items += ", a slice of one item (where squeeze() also drops the dimension of the items, and squeeze(-1) does not)"
            raise_failure(Failure(where, items, error), others, run.kept)
        finally:
            # They refer to this frame, and a dropped trainer must end without the garbage collector.
            del error, others
