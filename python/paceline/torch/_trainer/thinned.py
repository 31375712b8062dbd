"""A figure of each step of a whole run, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable

_CAPACITY = 1024  # rows, as `history` has


class Thinned:
    """Rows of equally many steps. When all rows are full, neighbours are merged, as in `history`. One thread adds, and any may read.

    A copy has the rows of now, which are never merged, beside a `history` that is read afterwards.
    """

    def __init__(self, merge: Callable[[float, float], float]) -> None:
        self._merge = merge  # `max`, or a sum
        # How many steps each has, and the rows: one name, so that readers see both as they belong together.
        self._rows: tuple[int, list[float]] = (1, [])
        self._steps = 0

    def add(self, value: float) -> None:
        """Note the figure of the next step."""
        each, rows = self._rows
        at = self._steps // each
        self._steps += 1
        if at < len(rows):
            rows[at] = self._merge(rows[at], value)
        elif at < _CAPACITY:
            rows.append(value)
        else:
            merged = [self._merge(first, second) for first, second in zip(rows[::2], rows[1::2], strict=True)]
            self._rows = 2 * each, [*merged, value]

    def put(self, step: int, value: float) -> None:
        """Note the figure of this step, from 0, and of those before it that have none. What was noted of it and of later ones is forgotten, as far as rows tell."""
        if step < self._steps:
            each, rows = self._rows
            self._rows, self._steps = (each, rows[: -(-step // each)]), step
        while self._steps <= step:
            self.add(value)

    def of(self, first: int, steps: int) -> float | None:
        """The rows of these steps, merged. Their figures are those of the steps if each row has at most so many. None if there are none."""
        each, rows = self._rows
        found = rows[first // each : -(-(first + steps) // each)]
        if not found:
            return None
        merged = found[0]
        for value in found[1:]:
            merged = self._merge(merged, value)
        return merged
