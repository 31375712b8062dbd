"""Redraw progress in place in a notebook, as HTML that needs no widgets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from html import escape
from typing import Any, TextIO

from paceline._progress import Figures, Show


def html_display() -> Callable[[TextIO], AbstractContextManager[Show] | None] | None:
    """What draws in place here; None if this is no notebook."""
    try:
        from IPython import get_ipython
        from IPython.display import HTML, display
    except ImportError:
        return None
    shell: Any = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):  # a script, or IPython in a terminal
        return None
    return lambda _: _drawing(display, HTML)


@contextmanager
def _drawing(display: Callable[..., Any], html: Callable[[str], Any]) -> Iterator[Show]:
    handle = display(html("<p>The first step runs.</p>"), display_id=True)
    yield lambda figures: handle.update(html(drawn(figures)))


def drawn(figures: Figures) -> str:
    """HTML of the figures: a bar for the batches, and for each device its part of the work, as a table."""
    bar = "" if not figures.total else f'<progress value="{figures.done}" max="{figures.total}"></progress> '
    whole = sum(entry.amount for entry in figures.devices) or 1.0
    amount = "cost" if figures.by_cost else "items"
    rows = "".join(
        f"<tr><th>{escape(entry.name)}</th><td><meter value='{entry.amount / whole:.3f}'></meter></td>"
        f"<td>{entry.amount:.4g} {amount} a {escape(figures.per)}</td><td>{entry.busy:.0%} busy</td></tr>"
        for entry in figures.devices
    )
    return f"<div>{escape(figures.of)} {bar}{escape(figures.head)}<table>{rows}</table></div>"
