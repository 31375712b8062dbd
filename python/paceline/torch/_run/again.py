"""Why a call runs once more."""

from __future__ import annotations


class TryAgainError(Exception):
    """Nothing was committed, and the step must run once more.

    The reason is one of these: memory ran out, and smaller pieces may fit; a device ran the forward several times, and the forward turned out to
    write buffers; the run drew random numbers, or entered a dual level, before that was prepared; something normalises over a micro-batch, which
    takes two items; items without weight have extras; the run has compiled something, which did not wait for parameters; forwards have written to
    data that replicas had in common.
    """

    def __init__(self, *, complete: bool = False, out_of_memory: bool = False) -> None:
        super().__init__()
        self.complete = complete  # whether all items have run
        self.out_of_memory = out_of_memory  # whether unused memory has to be given back first
