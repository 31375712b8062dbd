"""The ledger of a pool."""

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
