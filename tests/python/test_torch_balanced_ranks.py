"""`BalancedRanks`: unequal batches under DistributedDataParallel and FSDP2, with the gradient of the whole batch; and its clock."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import time
import types
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, TensorDataset

from paceline import InvalidArgument
from paceline.balance import replay
from paceline.torch import BalancedRanks
from paceline.torch._devices import cuda
from paceline.torch._ranks import waits
from paceline.torch._ranks.clock import Clock
from rank_processes import Run
from torch_support import worst_difference

BATCH = 12
SPLITS: dict[int, list[tuple[int, ...]]] = {
    2: [(9, 3), (2, 10), (11, 1), (5, 7), (1, 11), (6, 6)],
    3: [(8, 3, 1), (2, 4, 6), (1, 10, 1), (4, 4, 4)],
}
WRAPPED = ["ddp", "fsdp"]


class Numbered(Dataset[Any]):
    """Items that know their numbers, and have tokens of which some do not count."""

    def __init__(self, items: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(items, 5, 6, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, 3, (items, 5), generator=generator)
        self.y[torch.rand(items, 5, generator=generator) < 0.4] = -100

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return index, self.x[index], self.y[index]


class Script:
    """A balancer whose decisions are known before."""

    ledger_failed = False

    def __init__(self, splits: Sequence[tuple[int, ...]]) -> None:
        self.splits = itertools.cycle(splits)

    def record(self, *_: Any, **__: Any) -> None:
        pass

    def next_plan(self, batch_size: int) -> Any:
        return SimpleNamespace(shares=list(next(self.splits)))


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def wrapped(module: Any, how: str) -> Any:
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(module, bucket_cap_mb=0.0001)  # several buckets
    for part in module:
        if isinstance(part, nn.Linear):
            fully_shard(part)
    return fully_shard(module)


def gradients_of(model: Any) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    return [grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone() for grad in found]


@contextlib.contextmanager
def synchronised(model: Any, sync: bool) -> Iterator[None]:
    """As the guide has it for gradients that are summed over several batches."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(sync)
        yield
    else:
        with contextlib.nullcontext() if sync else model.no_sync():
            yield


def tokens(batch: Any) -> int:
    return int((batch[2] != -100).sum())


def loss_of(model: Any, batch: Any, weighted: bool) -> Any:
    output = model(batch[1])
    if weighted:  # the mean over tokens that count, and NaN if there are none
        return nn.functional.cross_entropy(output.flatten(0, 1), batch[2].flatten())
    return output.square().mean()  # the mean over items


def steps_of(rank: int, how: str, items: int, weigh: str, accumulate: int, poison: bool, epochs: int) -> Any:
    """In each step of an optimizer: the numbers of this rank's items, the loss and the gradients."""
    model = wrapped(network(), how)
    data = Numbered(items)
    ranks = BalancedRanks(len(data), BATCH)
    if rank == 0:
        ranks._times.dealt.balancer = Script(SPLITS[dist.get_world_size()])  # type: ignore[assignment]
    loader = DataLoader(data, batch_sampler=ranks.sampler, num_workers=rank)
    found, numbers, losses = [], list[int](), 0.0
    while ranks.sampler.epoch < epochs:
        given = tokens if weigh == "batches" else None
        for batch in ranks.batches(loader, accumulate=accumulate, weight=given):
            index, x, y = batch
            with ranks.step(), synchronised(model, ranks.sync_gradients):
                assert ranks._now is not None
                repeated = not ranks._now.stamp.shares[rank]
                if repeated and poison:
                    x = x * float("nan")
                loss = loss_of(model, (index, x, y), weigh != "items")
                loss = ranks.weigh(loss, weight=tokens(batch)) if weigh == "weigh" else ranks.weigh(loss)
                loss.backward()
                numbers += [] if repeated else index.tolist()
                losses += float(loss.detach())
                complete = ranks.sync_gradients
            assert complete == ranks.sync_gradients
            if complete:
                found.append((numbers, losses, gradients_of(model)))
                model.zero_grad()
                numbers, losses = [], 0.0
    return found


@pytest.mark.parametrize("how", WRAPPED)
@pytest.mark.parametrize(
    ("size", "items", "weigh", "accumulate", "poison"),
    [
        (2, 100, "items", 1, False),  # the last batch has four items
        (2, 100, "weigh", 1, False),
        (2, 100, "items", 4, False),  # the last step is for one batch
        (2, 100, "batches", 4, False),
        (2, 73, "batches", 1, True),  # the last batch has one item
        (2, 73, "items", 1, True),
        (2, 73, "weigh", 1, True),
        (2, 25, "items", 2, True),
        (3, 74, "weigh", 1, True),  # the last batch has two items
    ],
)
def test_the_gradient_is_that_of_the_whole_batch(
    on_ranks: Run, how: str, size: int, items: int, weigh: str, accumulate: int, poison: bool
) -> None:
    results = on_ranks(size, steps_of, how, items, weigh, accumulate, poison, 2)
    data, model = Numbered(items), network()
    seen = list[int]()
    splits = set()
    for parts in zip(*results, strict=True):
        numbers = [index for part in parts for index in part[0]]
        splits.add(tuple(len(part[0]) for part in parts))
        seen += numbers
        loss = loss_of(model, (None, data.x[numbers], data.y[numbers]), weigh != "items")
        wanted = list(torch.autograd.grad(loss, list(model.parameters())))
        assert abs(sum(part[1] for part in parts) / size - float(loss.detach())) < 1e-12
        for part in parts:
            assert worst_difference(part[2], wanted) < 1e-14
    assert len(splits) > (2 if items > 50 else 0), "shares did not change"
    assert sorted(seen) == sorted([*range(items)] * 2)
    assert poison == any(0 in split for split in splits)


class Slow(nn.Module):
    """A network whose forward takes so many seconds for an item."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.BatchNorm1d(8)  # which has buffers
        self.third = nn.Linear(8, 3)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.second(self.first(x))
        time.sleep(len(x) * self.seconds)
        return self.third(hidden) + 0  # not a view, which FSDP warns of


def slowly(rank: int, how: str, seconds: list[float], batch: int) -> Any:
    """Shares after some epochs, of a rank that sleeps so many seconds for an item in the forward and as many in the backward."""
    torch.manual_seed(0)
    module: Any = Slow(seconds[rank])
    module.third.register_full_backward_hook(lambda *_: time.sleep(module.items * seconds[rank]))
    if how == "ddp":
        model: Any = nn.parallel.DistributedDataParallel(module)
    else:
        for part in (module.first, module.second, module.third):
            fully_shard(part)
        model = fully_shard(module)
    data = torch.randn(10 * batch, 6)
    ranks = BalancedRanks(len(data), batch, ledger=True)
    loader: Any = DataLoader(TensorDataset(data), batch_sampler=ranks.sampler)
    while ranks.sampler.epoch < 4:
        for (x,) in ranks.batches(loader):
            module.items = len(x)
            with ranks.step():
                ranks.weigh(model(x).square().mean()).backward()
            model.zero_grad()
    return ranks.shares, ranks.report(), ranks.explain(), ranks.ledger() if rank == 0 else ""


@pytest.mark.alone
@pytest.mark.parametrize("how", WRAPPED)
def test_a_slow_rank_gets_fewer_items_although_the_others_wait_for_it(on_ranks: Run, how: str) -> None:
    (shares, report, text, ledger), (theirs, other, said, _) = on_ranks(2, slowly, how, [0.0002, 0.0006], 100)
    assert shares == theirs == report["shares"] == other["shares"]
    decided = [
        row["share"] for row in report["rank_shares"]["devices"]
    ]  # newer than `shares` if the last step gave reason to it
    assert sum(decided) == 100
    assert all(abs(share - 75) <= 3 for share in (shares[0], decided[0])), text
    assert report["ranks"] == other["ranks"]
    assert "rank_shares" not in other
    assert "ranks: auto balance" in text
    assert "Rank 0 decides" in said
    found = replay(ledger.splitlines())
    assert found.plans > 10
    assert not found.mismatches


@pytest.mark.alone
@pytest.mark.parametrize("how", WRAPPED)
def test_a_quiet_pair_keeps_equal_shares(on_ranks: Run, how: str) -> None:
    shares, _, text, _ = on_ranks(2, slowly, how, [0.0003, 0.0003], 100)[0]
    assert abs(shares[0] - 50) <= 1, text


def loader_of(ranks: BalancedRanks, items: int) -> Any:
    return DataLoader(TensorDataset(torch.arange(items)), batch_sampler=ranks.sampler)


class Event:
    """An event of a GPU, which comes to it late."""

    passed = False

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


def late(rank: int, most: int) -> Any:
    """Steps on a GPU whose host is `most` steps ahead. Returns the times that all ranks knew after each step, and how many wait."""
    ranks = BalancedRanks(1000, 8)
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
    ranks = BalancedRanks(40, 8)
    calls = []
    for batch in ranks.batches(loader_of(ranks, 40)):
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
