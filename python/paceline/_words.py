"""Words for messages."""

from __future__ import annotations


def plural(count: int, noun: str, nouns: str | None = None) -> str:
    """Format a count with its noun: ``1 item``, ``2 items``, ``0 items``."""
    return f"{count} {noun if count == 1 else nouns or noun + 's'}"
