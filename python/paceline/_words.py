"""Words for messages, and from the command line."""

from __future__ import annotations


def plural(count: int, noun: str, nouns: str | None = None) -> str:
    """Format a count with its noun: ``1 item``, ``2 items``, ``0 items``."""
    return f"{count} {noun if count == 1 else nouns or noun + 's'}"


def numbers(text: str) -> list[float]:
    """Parse text like ``1,1,0.5``."""
    return [float(part) for part in text.split(",")]
