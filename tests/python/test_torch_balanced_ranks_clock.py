"""The clock of `BalancedRanks`: it stands while a rank waits for others, and times of GPUs come when they are there."""

from __future__ import annotations

import itertools
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import InvalidArgument
from paceline.torch import BalancedRanks
from paceline.torch._devices import cuda
from paceline.torch._ranks import waits
from paceline.torch._ranks.clock import Clock
from rank_processes import Run

ITEMS, BATCH = 40, 8


def loader_of(ranks: BalancedRanks, items: int = ITEMS) -> Any:
    return DataLoader(TensorDataset(torch.arange(items)), batch_sampler=ranks.sampler)


class Event:
    """An event of a GPU, which comes to it late."""

    passed = False

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


def late(rank: int, most: int) -> Any:
    """Steps on a GPU whose host is `most` steps ahead. Returns the times that all ranks knew after each step, and how many wait."""
    ranks = BalancedRanks(1000, BATCH)
    events: list[Event] = []
    seconds = [0.0]

    def mark(_: int) -> Event:
        events.append(Event(seconds[0]))
        return events[-1]

    kept = cuda.present, cuda.mark_current, cuda.has_passed, cuda.seconds_between
    cuda.present, cuda.mark_current = (lambda: 0), mark  # type: ignore[assignment]
    cuda.has_passed, cuda.seconds_between = (lambda e: e.passed), (lambda a, b: b.seconds - a.seconds)  # type: ignore[assignment]
    model, found, ends = nn.Linear(1, 1), [], list[int]()
    try:
        for step, batch in enumerate(itertools.islice(ranks.batches(loader_of(ranks, 1000)), 30)):
            with ranks.step():
                seconds[0] += step + 1 + rank / 10
                ranks.weigh(model(batch[0][:, None].float()).square().mean()).backward()
                ranks._on_gpu = True
                seconds[0] += 100  # what comes after the last gradient
            ends.append(len(events))
            if step >= most:
                for event in events[: ends[step - most]]:
                    event.passed = True
            found.append((ranks.report()["ranks"], len(ranks._times._timed)))
    finally:
        cuda.present, cuda.mark_current, cuda.has_passed, cuda.seconds_between = kept
    return found


def test_times_of_gpus_come_when_they_are_there_and_nothing_waits_for_them(on_ranks: Run) -> None:
    (found, _) = on_ranks(2, late, 3)
    assert found[2][0] == []
    # Events of step 0 are there from the end of step 3 on. Step 4 tells it, and at the end of step 5 all ranks know.
    for step in range(5, 30):
        assert [row["seconds"] for row in found[step][0]] == pytest.approx([step - 4, step - 4 + 0.1])
        assert found[step][1] == 5


def test_times_that_do_not_come_are_given_up(on_ranks: Run) -> None:
    assert on_ranks(2, late, 99)[0][-1] == ([], 8)


def sending_buffers(rank: int) -> Any:
    torch.manual_seed(0)
    model: Any = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4)))
    ranks = BalancedRanks(ITEMS, BATCH)
    calls = []
    for batch in ranks.batches(loader_of(ranks)):
        counted = list[bool]()
        inner = model._sync_buffers
        if isinstance(inner, waits.Waiting):
            inner._method = noting(counted, ranks._clock, type(model)._sync_buffers.__get__(model))
        with ranks.step():
            ranks.weigh(model(batch[0][:, None].float()).square().mean()).backward()
        calls.append(counted)
    return calls


def noting(counted: list[bool], clock: Clock, method: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        counted.append(clock._since is not None)
        method()

    return run


def test_the_clock_stands_while_ddp_sends_buffers(on_ranks: Run) -> None:
    for calls in on_ranks(2, sending_buffers):
        assert calls == [[], *[[False]] * 4]


def test_a_copy_of_a_watched_module_works_and_is_not_watched() -> None:
    module = nn.Linear(1, 1)
    module.forward = waits.Waiting(Clock(), module.forward)  # type: ignore[method-assign]
    copied = pickle.loads(pickle.dumps(module))
    assert copied.forward._clock is None
    assert copied.forward._method.__self__ is copied
    assert torch.equal(copied(torch.ones(1)), module(torch.ones(1)))


def test_fsdp_of_the_first_kind_is_refused_with_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    class First(nn.Module):
        pass

    import torch.distributed.fsdp as fsdp

    monkeypatch.setattr(fsdp, "FullyShardedDataParallel", First)
    with pytest.raises(InvalidArgument, match=r"Use torch.distributed.fsdp.fully_shard"):
        waits.Waits(Clock()).watch(nn.Sequential(First()))


def test_modules_are_looked_for_in_the_first_steps_only() -> None:
    found = waits.Waits(Clock())
    hooks = nn.modules.module._global_forward_pre_hooks
    for step in range(5):
        found.begin()
        assert len(hooks) == (step < 3)
        found.end()
    assert not hooks


def test_a_clock_counts_only_between_begin_and_end() -> None:
    now = iter(range(100))
    clock = Clock()
    clock._mark = types.MethodType(lambda _: (next(now), None), clock)  # type: ignore[method-assign]
    clock.resume()
    clock.begin()
    assert clock.pause()
    assert not clock.pause()
    clock.resume()
    clock.resume()
    reading = clock.end()
    clock.resume()
    assert reading.pieces == [((0, None), (1, None)), ((2, None), (3, None))]
    assert reading.seconds() == 2
    assert reading.ready()
