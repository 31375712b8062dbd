"""What a process of the race is told to do. Imports nothing heavy: the parent, which only waits, uses it too."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Literal

Network = Literal["convolution", "transformer"]
Rival = Literal[
    "ddp",
    "threads",
    "jax",
    "paceline",
    "ratio",
    "alone",
    "together",
    "text-ddp-random",
    "text-ddp-grouped",
    "text-ddp-padded",
    "text-paceline",
    "text-alone",
    "all-reduce-gloo",
    "all-reduce-paceline",
]

# After this many steps all rivals must have the same loss. Not later, since their sums differ in order and drift apart.
CHECKED_STEPS = 3
WARM_UP_STEPS = 15  # of every rival, and of each variant in it; by then the balancer has learnt what it needs
_LEAST_STEPS = 5  # of a large batch, to warm up and to measure: enough for the balancer, too
_FULL_BATCH = 512


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process measures."""

    rival: Rival
    folder: str  # with inputs.npy and labels.npy; of this job alone where processes meet (DDP)
    batch: int
    steps: int  # measured; of an all-reduce, calls of a small size
    network: Network = "convolution"
    warm_up: int = WARM_UP_STEPS
    cores: Sequence[int] = ()  # that the process may run on
    devices: Sequence[str] = ()  # of paceline
    parts: int = 1  # devices, ranks: the parts that a batch is made for
    rank: int = 0  # DDP
    rendezvous: str = ""  # DDP: a file
    tolerance: float = 0.0  # ratio: how tight its interval shall be
    seconds: float = 0.0  # ratio: how long to try; together: how long from the start, warm-up included
    sizes: list[int] = dataclasses.field(default_factory=list)  # all-reduce: bytes of a buffer


def to_text(jobs: Sequence[Job]) -> str:
    return json.dumps([dataclasses.asdict(job) for job in jobs])


def from_text(text: str) -> list[Job]:
    return [Job(**fields) for fields in json.loads(text)]


def steps_for(batch: int, steps: int) -> int:
    """Fewer where batches are large: about as many items, and so as much time, as in steps of 512."""
    return min(steps, max(_LEAST_STEPS, steps * _FULL_BATCH // batch))


def block_length(steps: int) -> int:
    """Steps of a block where two variants take turns: the first, with cold caches, is one of many."""
    return max(1, min(10, steps // 2))
