"""What a process of the race is told to do. Imports nothing heavy: the parent, which only waits, uses it too."""

from __future__ import annotations

import dataclasses
import json
from typing import Literal

Rival = Literal[
    "ddp",
    "threads",
    "paceline",
    "ratio",
    "alone",
    "together",
    "text-ddp-random",
    "text-ddp-grouped",
    "text-ddp-balanced",
    "text-paceline",
    "text-alone",
    "all-reduce-gloo",
    "all-reduce-paceline",
]

# After this many steps all rivals must have the same loss. Not later, since their sums differ in order and drift apart.
CHECKED_STEPS = 3
WARM_UP_STEPS = 15  # of every rival, and of each variant in it; by then the balancer has learnt what it needs


@dataclasses.dataclass(frozen=True)
class Job:
    """One process."""

    rival: Rival
    folder: str  # with images.npy and labels.npy; of this job alone where processes meet (DDP)
    cores: list[int]  # that the process may run on
    devices: list[str]  # of paceline
    batch: int
    steps: int  # measured; of an all-reduce, calls of a small size
    parts: int = 1  # devices, ranks: the parts that a batch is made for
    rank: int = 0  # DDP
    rendezvous: str = ""  # DDP: a file
    tolerance: float = 0.0  # ratio: how tight its interval shall be
    seconds: float = 0.0  # ratio: how long to try; together: how long from the start, warm-up included
    sizes: list[int] = dataclasses.field(default_factory=list)  # all-reduce: bytes of a buffer

    def to_text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Job:
        return cls(**json.loads(text))


def block_length(steps: int) -> int:
    """Steps of a block where two variants take turns: the first, with cold caches, is one of many."""
    return max(1, min(10, steps // 2))
