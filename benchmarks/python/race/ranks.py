"""The ranks of DistributedDataParallel over gloo, one process each."""

from __future__ import annotations

from datetime import timedelta

from torch import distributed, nn

from race.job import Job

_kept: list[nn.Module] = []


def meet(job: Job) -> None:
    """Once. The ranks stay together until their processes are ended, which the parent does."""
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

    Nothing is freed before the process ends: when a reducer frees its process group, ~ProcessGroupGloo waits with Python's lock held
    for a thread of gloo that may wait for that lock (seen with PyTorch 2.13).
    """
    meet(job)
    # Gradients as views of the buckets saves a copy.
    _kept.append(nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True))
    return _kept[-1]
