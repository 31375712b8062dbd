"""Errors from the workers, on their way to the caller."""

from __future__ import annotations

from typing import NoReturn

from paceline import Error


def raise_failure(error: BaseException, device: str, items: str, kept: str) -> NoReturn:
    """Raise what a worker raised, with its own traceback; say on which device, at which `items` (if any), and what is `kept` as it was."""
    note = f"raised on {device}{' at ' if items else ''}{items}; {kept}"
    try:
        if hasattr(error, "add_note"):
            error.add_note(note)
            raise error
        raise error from (error.__cause__ or Error(note))  # before Python 3.11
    finally:
        del error  # whose traceback refers to this frame
