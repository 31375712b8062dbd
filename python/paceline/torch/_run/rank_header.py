"""What ranks tell each other in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

FAILED, AGAIN = 1, 2  # what a rank may say in place of yes


class Header(NamedTuple):
    """What a rank tells all others of a step, before or after its part.

    Everything is a number that float64 holds exactly, except for sums and seconds.
    """

    failed: float  # FAILED if the rank has nothing to commit, AGAIN if all ranks have to run once more
    stop: float  # 1 if a stop was asked for
    call: float  # a checksum of what was called
    layout: float = 0  # a checksum of names, shapes and types of the parameters
    present: float = 0  # a checksum of which gradients there are
    total: float = 0  # the caller's own denominator, or 0
    scale: float = 0  # of a scaler; 0 without one, and on a rank without items
    steps: float = 0  # that were trained before
    items: float = 0
    weight: float = 0
    loss: float = 0  # the weighted sum of the items' losses
    loss_type: float = -1  # its number in DTYPES
    seconds: float = 0  # of the rank's own work
    between: float = -1  # seconds of its own from the last exchange of gradients to this call; negative if unknown
    batch: float = 0  # a checksum of the sampler and of the global batch
    drawn: float = 0  # how many global batches the rank has drawn
    plan: float = 0  # the number of the newest plan of shares; that of rank 0 counts
    order: float = 0  # 1 if the rank has an order of the buckets to tell; that of rank 0 counts
    opens: float = 0  # 1 if the rank says later whether it has succeeded
    norms: float = 0  # a checksum of the normalisations in which ranks meet; 0 without any


class Whole(NamedTuple):
    """What is known of all parts of a batch together."""

    weight: float
    loss: float  # the weighted sum of the items' losses
    loss_type: torch.dtype
    same_gradients: bool  # whether all ranks have gradients of the same parameters
    order: bool = False  # whether rank 0 has an order of the buckets to tell
    again: bool = False  # whether all ranks have to make another attempt
    opens: bool = False  # whether a rank says later whether it has succeeded
    idle: tuple[int, ...] = ()  # the numbers of the ranks without items, where that is known


class Opening(NamedTuple):
    """The first headers of a step, on their way."""

    # Of the whole batch; None if they are not there yet, or do not agree. Waits for nothing.
    weight: Callable[[], float | None]
    whole: Callable[[], Whole]  # waits for them, and raises if they do not agree
    wait: Callable[[], object]  # for them
