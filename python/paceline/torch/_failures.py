"""Errors from the workers, on their way to the caller."""

from __future__ import annotations

from typing import NoReturn

from paceline import Error


def raise_failure(error: BaseException, device: str, begin: int, end: int, kept: str) -> NoReturn:
    """Raise what a worker raised, with its own traceback; say on which device it happened and what is `kept` as it was."""
    where = f" at items {begin} to {end - 1} of the batch" if end > begin else ""
    note = f"raised on {device}{where}; {kept}"
    try:
        if hasattr(error, "add_note"):
            error.add_note(note)
            raise error
        raise error from (error.__cause__ or Error(note))  # before Python 3.11
    finally:
        del error  # whose traceback refers to this frame
