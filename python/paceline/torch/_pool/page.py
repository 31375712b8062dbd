"""The page of a pool."""

from __future__ import annotations

import os
from typing import Any

from paceline import Unavailable
from paceline._page.document import write
from paceline._page.pool import page_of
from paceline.torch._replicas.reach import Handle


class Paged(Handle):
    """A pool that can write its page."""

    def page(self, path: str | os.PathLike[str]) -> None:
        """Write the last 10,000 runs as one page of HTML, which needs no network and opens by a double click. Works after `close`, too.

        At the top it says how busy devices were, what cost most, and what to change. Charts show over time how many jobs wait, how long they have waited when
        they start, the sizes of batches, and how busy each device is. `explain` says which devices leave jobs waiting, and why.

        Parameters
        ----------
        path
            The file. An existing one is replaced when the new one is complete.

        Raises
        ------
        Unavailable
            Before the first job.
        OSError
            If the file cannot be written.
        """
        pool: Any = self
        runs, never = pool._jobs.figures.runs.noted()
        if not runs and not never:
            raise Unavailable("page: no job has run yet, so there is nothing to show.")
        report = pool.report()
        names = list(report["devices"])  # also one that is just added, and of which there may be runs
        explained = pool._jobs.explain(report["devices"])
        write(path, page_of(names, runs, never, report, explained))
