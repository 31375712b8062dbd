"""How PyTorch is set on a worker."""

from __future__ import annotations

import threading

import torch

from paceline.torch._devices import cuda
from paceline.torch._devices.caller_state import set_own_threads

_worker = threading.local()


def prepare_worker(threads: int, gpu: int | None) -> None:
    """Prepare the calling worker for computing with so many threads, or on a GPU, and undo what an earlier function has left set."""
    if not torch.is_grad_enabled():
        torch._C._set_grad_enabled(True)
    if getattr(_worker, "prepared", False):
        if torch.get_num_threads() != threads:
            set_own_threads(threads)
        return
    set_own_threads(threads)
    if gpu is not None:
        cuda.prepare_worker(gpu)
        # Otherwise backward runs on a thread that all devices of one GPU share. This is set for the thread's whole life.
        torch.autograd.set_multithreading_enabled(False)
    _worker.prepared = True
