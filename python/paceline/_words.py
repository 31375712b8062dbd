"""Words for messages, and from the command line."""

from __future__ import annotations

import contextlib
import warnings

from paceline import InvalidArgument


def plural(count: int, noun: str, nouns: str | None = None) -> str:
    """Format a count with its noun: ``1 item``, ``2 items``, ``0 items``."""
    return f"{count} {noun if count == 1 else nouns or noun + 's'}"


def numbers(text: str) -> list[float]:
    """Parse text like ``1,1,0.5``."""
    return [float(part) for part in text.split(",")]


def warn(message: str) -> None:
    """Warn from the caller's line where an error may not go on: the warning itself, where warnings are errors."""
    with contextlib.suppress(Exception):
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def require(fits: object, call: str, name: str, value: object, wanted: str) -> None:
    """Raise unless an argument of a call fits. `wanted` says what would."""
    if not fits:
        raise InvalidArgument(f"{call}: {name} is {value!r}; {wanted}.")


def require_one_of(call: str, name: str, value: object, *choices: object) -> None:
    """Raise unless an argument is one of these. 1 is not True."""
    *others, last = map(repr, choices)
    fits = any(value is one or (isinstance(value, str) and value == one) for one in choices)
    require(fits, call, name, value, f"it must be {', '.join(others)} or {last}")
