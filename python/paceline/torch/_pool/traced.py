"""A pool's last runs, for timelines and for what logs numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.torch._pool.tracing import Scalars

if TYPE_CHECKING:
    from paceline.torch._pool.jobs import Jobs


class Traced:
    """What a pool says of its last runs."""

    _jobs: Jobs
    _scalars: Scalars
    devices: Any
    report: Callable[[], dict[str, Any]]

    def scalars(self, prefix: str = "paceline/pool/") -> dict[str, float]:
        """Figures by flat names, for what logs numbers, such as TensorBoard.

        Returns
        -------
        dict
            ``waiting``, ``running`` and ``backlog_seconds`` are of now. What counts, is of the time since the call before, or since the pool was made: how
            many jobs ended how, such as ``completed``; ``wait_seconds``, the mean wait; and by device, with ``_`` in place of ``:``,
            ``jobs_per_second/host_0``, ``busy_ratio/host_0`` and ``retired/host_0``.
        """
        return self._scalars.of(self.report(), prefix)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the last 10,000 runs as a trace for https://ui.perfetto.dev or chrome://tracing.

        Each device has a row with its jobs and batches. A click shows how many requests a batch has, how long its first one has waited, and how it ended.
        Jobs that never ran are instants in a row of their own. Works after `close`, too.

        Parameters
        ----------
        path
            The JSON file. An existing one is replaced when the new one is complete.

        Raises
        ------
        Unavailable
            Before the first job.
        OSError
            If the file cannot be written.
        """
        self._jobs.figures.runs.write(path, [one.name for one in self.devices])
