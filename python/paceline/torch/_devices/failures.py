"""Errors from the workers and warnings, on their way to the caller."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from paceline import Error


class Failure(NamedTuple):
    """What a worker raised."""

    device: str  # where
    items: str  # at which, in words; empty if at none
    error: BaseException

    @property
    def where(self) -> str:
        """The device and the items, in words."""
        return f"{self.device}{' at ' if self.items else ''}{self.items}"


def raise_failure(failure: Failure, others: Sequence[Failure], kept: str) -> NoReturn:
    """Raise what a worker raised, with its own traceback. Notes say on which device, what is `kept`, and what `others` raised."""
    alike = dict.fromkeys(one.device for one in others if _mark(one.error) == _mark(failure.error))
    also = f"; the same on {', '.join(alike)}" if alike else ""
    try:
        noted(failure.error, f"raised on {failure.where}{also}; {kept}")
        note_others(failure.error, others)
        raise failure.error
    finally:
        del failure, others  # their tracebacks refer to this frame


def note_others(error: BaseException, others: Sequence[Failure]) -> None:
    """Note on the error that is about to be raised what others raised, with their tracebacks. Errors like it are left out."""
    for one in others:
        if _mark(one.error) != _mark(error):
            text = "".join(traceback.format_exception(type(one.error), one.error, one.error.__traceback__))
            noted(error, f"raised on {one.where}, too:\n{text.rstrip()}")


def _mark(error: BaseException) -> tuple[object, ...]:
    """What errors of the same type and text, which the same line has raised, have in common."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return type(error), str(error), (frames[-1][0].f_code, frames[-1][1]) if frames else None


def noted(error: BaseException, note: str) -> BaseException:
    """The error itself, with a note.

    Before Python 3.11 nothing prints notes. There the note is also the cause of the first error that led to this one, so that no error in
    between is hidden.
    """
    if hasattr(error, "add_note"):
        error.add_note(note)
        return error
    first, seen = error, {id(error)}
    while (before := first.__cause__ or (None if first.__suppress_context__ else first.__context__)) is not None:
        if id(before) in seen:
            return error
        seen.add(id(before))
        first = before
    first.__cause__ = Error(note)
    return error


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn at the line that called this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("paceline."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def error_of_lost(kind: type[Error], message: str, ranks: str | None) -> Error:
    """An error that names the ranks in place of a device."""
    error = kind(message)
    error.device = ranks
    return error
