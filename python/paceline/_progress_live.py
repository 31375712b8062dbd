"""Progress that is redrawn in place, by rich."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TextIO

from rich import live
from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline._progress import Figures

_BAR_COLUMNS = 24


class Live:
    """Draws when `show` is called and never else: without a thread of rich's, nothing is between Ctrl-C and the loop."""

    def __init__(self, file: TextIO) -> None:
        self._console = Console(file=file)
        self._live = live.Live(
            console=self._console,
            auto_refresh=False,
            # What is printed meanwhile appears above. Only what goes to a terminal anyway: the rest is for a file or a pipe.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )

    @property
    def possible(self) -> bool:
        """Whether the terminal can move its cursor."""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def __enter__(self) -> Live:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, figures: Figures) -> None:
        """Draw in place of what was drawn before."""
        head = Text("  ".join([figures.count, *figures.parts]), no_wrap=True, overflow="ellipsis")
        rows = Table.grid(padding=(0, 1))
        if figures.total:
            rows.add_row(Text("batches"), ProgressBar(figures.total, figures.done, width=_BAR_COLUMNS), head)
        else:
            rows.add_row(Text("batches"), Text(""), head)
        whole = sum(entry.amount for entry in figures.devices) or 1.0
        for entry in figures.devices:
            bar = ProgressBar(whole, entry.amount, width=_BAR_COLUMNS, complete_style="cyan", finished_style="cyan")
            amount = f"a cost of {entry.amount:.4g}" if figures.by_cost else f"{entry.amount:.4g} items"
            rows.add_row(Text(entry.name), bar, Text(f"{amount} a step, {entry.busy:.0%} busy"))
        self._live.update(Group(rows), refresh=True)
