"""The ledger of a pool, and its trace."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from paceline.torch._replicas.reach import Handle

if TYPE_CHECKING:
    from paceline.torch._pool.jobs import Jobs


class WritesLedger(Handle):
    """What a pool can write down."""

    _jobs: Jobs

    def write_ledger(self, path: str | os.PathLike[str]) -> None:
        """Write every event that the pool's decisions see, and every decision, to a file of JSON lines.

        `paceline.sim.replay_pool` and ``paceline replay`` reproduce the decisions. Each line is there as soon as its event is over, so submits wait for the
        disk.

        Parameters
        ----------
        path
            The file. An existing file is replaced.

        Raises
        ------
        InvalidArgument
            If a job was submitted or a device was retired before (an incomplete ledger cannot be replayed), if the pool writes one already, or if the
            file cannot be written.
        Unavailable
            In another process than that of the pool.
        """
        self._jobs.engine.write_ledger(os.fspath(path))

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
        self._jobs.figures.runs.write(path, [one.name for one in self._jobs.devices])
