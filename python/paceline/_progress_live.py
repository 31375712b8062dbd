"""Redraw progress in place with rich."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline._progress import Figures, Show

_BAR_COLUMNS = 24


def live(file: TextIO) -> AbstractContextManager[Show] | None:
    """A function that redraws in place; None if the terminal cannot move its cursor."""
    console = Console(file=file)
    return _drawing(console) if console.is_terminal and not console.is_dumb_terminal else None


@contextmanager
def _drawing(console: Console) -> Iterator[Show]:
    # Draws only when figures are shown. So rich starts no thread, and nothing stands between Ctrl-C and the loop.
    with Live(
        console=console,
        auto_refresh=False,
        # Printed text appears above. Only redirect terminals, so that files and pipes get their text unchanged.
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=sys.stderr.isatty(),
    ) as display:
        yield lambda figures: display.update(_rows(figures), refresh=True)


def _rows(figures: Figures) -> Table:
    head = Text(figures.head, no_wrap=True, overflow="ellipsis")
    rows = Table.grid(padding=(0, 1))
    bar = ProgressBar(figures.total, figures.done, width=_BAR_COLUMNS) if figures.total else Text("")
    rows.add_row(Text(figures.of), bar, head)
    whole = sum(entry.amount for entry in figures.devices) or 1.0
    for entry in figures.devices:
        bar = ProgressBar(whole, entry.amount, width=_BAR_COLUMNS, complete_style="cyan", finished_style="cyan")
        amount = f"a cost of {entry.amount:.4g}" if figures.by_cost else f"{entry.amount:.4g} items"
        rows.add_row(Text(entry.name), bar, Text(f"{amount} a {figures.per}, {entry.busy:.0%} busy"))
    return rows
