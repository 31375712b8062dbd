"""``batch_norm="synchronised"`` with ``group=``, if a rank dies, hangs or is interrupted while others wait for it in a normalisation."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from norm_cases import case
from paceline import Cancelled, DeviceLost, Error, Timeout
from rank_processes import DEAD, Processes, Run, error_of, part_of
from test_torch_rank_norms import assert_like_one_device, on_one_device, stepping, trainer_of
from torch_support import classify, gradients


def between(module: Any, part: Any, call: Any) -> Any:
    """The loss, with a call between the two norms."""
    hidden = module[:3](part[0])
    call()
    return nn.functional.cross_entropy(module[3:](hidden), part[1])


def losing(rank: int, how: str, devices: int) -> Any:
    """Rank 1 dies, or never comes back."""
    module, batch = case("rows", 12)
    part = part_of(batch, rank, [6, 6])
    with trainer_of(module, devices) as trainer:
        trainer.step(classify, part)
        before = gradients(module)

        def leave() -> None:
            if rank and how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if rank:
                threading.Event().wait(12)

        errors = []
        for _ in range(1 if rank else 2):
            try:
                trainer.step(lambda m, b: between(m, b, leave), part)
            except Error as error:
                errors.append((type(error), error.device, str(error)))
        return errors, all(torch.equal(a, b) for a, b in zip(before, gradients(module), strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_rank_that_dies_in_the_middle_is_named(on_ranks: Run, devices: int) -> None:
    (errors, kept), dead = on_ranks(2, losing, "dies", devices)
    assert dead == DEAD
    assert [error[:2] for error in errors] == [(DeviceLost, "rank 1")] * 2
    assert all("rank 1 is gone" in text for _, _, text in errors)
    assert kept


def test_a_rank_that_does_not_come_is_a_timeout(processes: Processes, tmp_path: Path) -> None:
    (errors, kept), (others, _) = processes.results(2, tmp_path / "store", losing, "hangs", 1, seconds=6)
    assert [error[:2] for error in errors] == [(Timeout, "rank 1"), (DeviceLost, "rank 1")]
    assert all("rank 1 did not answer in time" in text for _, _, text in errors)
    assert kept
    assert others[0][0] in (DeviceLost, Timeout)


def leaving(rank: int, how: str, devices: int) -> Any:
    """A rank is interrupted in the middle of a step: the one that others wait for, or one that waits."""
    module, batch = case("rows", 12)
    part = part_of(batch, rank, [6, 6])
    before = [one.clone() for one in module.buffers()]
    left = threading.Event()
    with trainer_of(module, devices) as trainer:
        work = trainer._works.steps.step_loop

        def interrupt() -> None:
            if how == "cancelled":
                work.cancel()
            else:
                os.kill(os.getpid(), signal.SIGINT)

        def call() -> None:
            if rank and how == "waits":  # rank 0 is interrupted while it waits for this one
                left.wait(1.5)
            elif rank:
                interrupt()
                left.wait(0.5)

        signal.signal(signal.SIGINT, signal.default_int_handler)
        if how == "waits" and not rank:
            threading.Timer(0.5, interrupt).start()
        try:
            error = error_of(lambda: trainer.step(lambda m, b: between(m, b, call), part))
        except KeyboardInterrupt as caught:
            error = type(caught), ""
        kept = gradients(module) == [None] * len(gradients(module)) and all(map(torch.equal, before, module.buffers()))
        return error, kept, stepping(module, lambda: trainer.step(classify, part))


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("how", ["cancelled", "interrupted", "waits"])
def test_a_rank_that_is_interrupted_leaves_nobody_waiting(on_ranks: Run, how: str, devices: int) -> None:
    module, batch = case("rows", 12)
    (first, kept, found), (second, kept_too, found_too) = on_ranks(2, leaving, how, devices)
    interrupted, (other, text) = (first, second) if how == "waits" else (second, first)
    assert interrupted[0] is (Cancelled if how == "cancelled" else KeyboardInterrupt)
    assert other is Error
    assert f"rank {0 if how == 'waits' else 1}: {interrupted[0].__name__}" in text
    assert kept
    assert kept_too
    assert_like_one_device([found, found_too], on_one_device(module, classify, batch))
