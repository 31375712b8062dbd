"""Errors from the workers and warnings, on their way to the caller."""

from __future__ import annotations

import sys
import warnings
from typing import NoReturn

from paceline import Error


def raise_failure(error: BaseException, device: str, items: str, kept: str) -> NoReturn:
    """Raise what a worker raised, with its own traceback. A note says on which device, at which `items` (if any), and what is `kept`."""
    note = f"raised on {device}{' at ' if items else ''}{items}; {kept}"
    try:
        raise noted(error, note)
    finally:
        del error  # its traceback refers to this frame


def noted(error: BaseException, note: str) -> BaseException:
    """The error itself, with a note. Before Python 3.11 the note is the error's cause, unless it has one."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.__cause__ is None:
        error.__cause__ = Error(note)
    return error


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn at the line that called this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("paceline."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
