"""The ranks of DistributedDataParallel over gloo, one process each."""

from __future__ import annotations

from datetime import timedelta

from torch import distributed, nn

from race.job import Job

_kept: list[nn.Module] = []


def meet(job: Job) -> None:
    """Join the process group, once. The ranks stay together until the parent ends their processes."""
    if not distributed.is_initialized():
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{job.rendezvous}",
            rank=job.rank,
            world_size=job.parts,
            timeout=timedelta(seconds=60),
        )


def replicate(module: nn.Module, job: Job) -> nn.Module:
    """This rank's replica.

    The replica is never freed. Freeing a reducer frees its process group, and ~ProcessGroupGloo then waits, holding the GIL, for a thread
    of gloo that may wait for the GIL (seen with PyTorch 2.13).
    """
    meet(job)
    # Gradients that are views of the buckets save a copy.
    _kept.append(nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True))
    return _kept[-1]
