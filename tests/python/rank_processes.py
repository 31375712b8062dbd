"""Processes that are the ranks of a group, in one test after another."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.torch import DataParallel
from torch_support import hosts

DEAD = "dead"
BACKEND = os.environ.get("PACELINE_RANKS_BACKEND", "gloo")  # with nccl all ranks are on the first GPU
Run = Callable[..., list[Any]]  # what the fixture `on_ranks` is
# Processes are forked from a server that has imported torch already, which takes seconds.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "paceline.torch", "pytest"])


def serve(pipe: Any) -> None:
    """What a process does: it takes the part of a rank in one test after another."""
    torch.set_num_threads(1)
    while True:
        try:
            rank, size, store, seconds, call, given = pipe.recv()
        except EOFError:  # the tests have ended
            return
        result: Any
        try:
            dist.init_process_group(
                BACKEND, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
            )
            result = call(rank, *given), None
        except Exception:
            result = None, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(result))
        pipe.recv()  # a rank that leaves closes its connections, and the others may not have their errors yet
        dist.destroy_process_group()


class Processes:
    """Processes that wait for what to do."""

    def __init__(self) -> None:
        self._alive: list[tuple[Any, Any]] = []

    def results(self, size: int, store: Path, call: Callable[..., Any], *given: Any, seconds: float = 40) -> list[Any]:
        """What ``call(rank, *given)`` returns on each rank of a new group, or `DEAD`."""
        while len(self._alive) < size:
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=serve, args=(theirs,))  # no daemon, which may not have loaders' workers
            process.start()
            theirs.close()
            self._alive.append((process, ours))
        ranks = self._alive[:size]
        for rank, (_, pipe) in enumerate(ranks):
            pipe.send((rank, size, str(store), seconds, call, given))
        answers = [self._answer(*entry) for entry in ranks]
        for (process, pipe), answer in zip(ranks, answers, strict=True):
            if answer is DEAD:
                self._alive.remove((process, pipe))
            else:
                pipe.send(None)
        errors = [
            f"rank {rank}: {answer[1]}" for rank, answer in enumerate(answers) if answer is not DEAD and answer[1]
        ]
        assert not errors, "\n".join(errors)
        return [DEAD if answer is DEAD else answer[0] for answer in answers]

    def _answer(self, process: Any, pipe: Any) -> Any:
        if not pipe.poll(110):  # what a rank imports may take long on a busy machine
            process.kill()
            pytest.fail("a rank does not answer")
        try:
            return pickle.loads(pipe.recv_bytes())
        except EOFError:
            return DEAD

    def close(self) -> None:
        for process, _ in self._alive:
            process.kill()
            process.join()


def part_of(batch: Any, rank: int, sizes: list[int]) -> Any:
    """The rank's part of a batch, or None if it has no items."""
    begin, end = sum(sizes[:rank]), sum(sizes[: rank + 1])
    if isinstance(batch, dict):
        return {name: tensor[begin:end] for name, tensor in batch.items()} if end > begin else None
    return tuple(tensor[begin:end] for tensor in batch) if end > begin else None


def trainer_of(module: nn.Module, rank: int = 0, *, more: int = 0, **options: Any) -> DataParallel:
    """Rank r has r + 1 host devices, and some `more`."""
    return DataParallel(module, hosts(rank + 1 + more), group=dist.group.WORLD, **options)


def error_of(call: Callable[[], Any]) -> tuple[type, str]:
    """The type and the text of what a call raises, with its notes."""
    try:
        call()
    except Exception as error:
        notes = getattr(error, "__notes__", []) or [str(error.__cause__)]
        return type(error), "; ".join([str(error), *notes])
    return type(None), ""
