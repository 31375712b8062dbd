"""The task of one process of the race. Imports nothing heavy, because the waiting parent uses it, too."""

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
    "ranks",
    "ddp-balanced",
    "ddp-micro-batches",
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
    "pipeline-torch-gpipe",
    "pipeline-torch-1f1b",
    "pipeline-even",
    "pipeline-auto",
    "pipeline-data-parallel",
    "pipeline-single",
]

# After this many steps all rivals must have the same loss. Later their losses drift apart, because they add in different orders.
CHECKED_STEPS = 3
WARM_UP_STEPS = 15  # of every rival and of each variant; enough for the balancer to learn the speeds
_LEAST_STEPS = 5  # minimum for large batches, for warm-up and for measuring; enough for the balancer
_FULL_BATCH = 512


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process measures."""

    rival: Rival
    folder: str  # contains inputs.npy and labels.npy; belongs to this job alone if processes meet (DDP)
    batch: int
    steps: int  # measured steps; for an all-reduce, calls per small size
    network: Network = "convolution"
    warm_up: int = WARM_UP_STEPS
    cores: Sequence[int] = ()  # the cores that the process may use
    devices: Sequence[str] = ()  # paceline's devices
    parts: int = 1  # devices or ranks that share a batch
    rank: int = 0  # for DDP
    rendezvous: str = ""  # for DDP, a file
    tolerance: float = 0.0  # ratio: the wanted width of the interval
    seconds: float = 0.0  # ratio: the time limit; together: the time from the start, with warm-up
    sizes: list[int] = dataclasses.field(
        default_factory=list
    )  # all-reduce: bytes per buffer; DDP: of micro-batches, by rank
    micro_batches: int = 1  # pipelines: how many in a batch
    blocks: int = 0  # pipelines: of the transformer
    width: int = 0  # pipelines: of its blocks


def to_text(jobs: Sequence[Job]) -> str:
    return json.dumps([dataclasses.asdict(job) for job in jobs])


def from_text(text: str) -> list[Job]:
    return [Job(**fields) for fields in json.loads(text)]


def steps_for(batch: int, steps: int) -> int:
    """Fewer steps for large batches: about as many items, and so as much time, as in steps of 512."""
    return min(steps, max(_LEAST_STEPS, steps * _FULL_BATCH // batch))


def block_length(steps: int) -> int:
    """The number of steps in a block when two variants take turns. Long enough that the first step, with cold caches, counts little."""
    return max(1, min(10, steps // 2))
