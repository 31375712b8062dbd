"""How each rival trains. Each function measures one process and returns the seconds of steps, in blocks, by variant."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader

from race import model, ranks
from race.figures import median_interval
from race.job import CHECKED_STEPS, Job, block_length

if TYPE_CHECKING:  # only the rival's own process imports it
    from paceline.torch import DataParallel

Blocks = dict[str, list[list[float]]]
Answer = tuple[Blocks, list[float]]  # blocks, and the losses that all rivals must agree on
Step = Callable[[Any], float]


class Variant:
    """A training loop, step by step, on an endless series of batches."""

    def __init__(
        self,
        step: Step,
        job: Job,
        prepare: Callable[[model.Pair], Any] = lambda batch: batch,
        batches: Iterator[Any] | None = None,
    ) -> None:
        self._step = step
        self._batches = batches or itertools.cycle(map(prepare, model.batches(job.folder, job.batch)))
        losses = [self._step(next(self._batches)) for _ in range(job.warm_up)]
        self.checked_loss = losses[CHECKED_STEPS - 1]

    def run(self, steps: int) -> list[float]:
        seconds = []
        for _ in range(steps):
            batch = next(self._batches)
            start = time.perf_counter()
            self._step(batch)
            seconds.append(time.perf_counter() - start)
        return seconds


def plain_step(module: nn.Module, part: Callable[[model.Pair], list[model.Pair]]) -> Step:
    """Forward, backward and optimizer over the parts of a batch that this process runs. DDP sums gradients in the last backward."""
    optimizer = model.optimizer(module)

    def step(batch: model.Pair) -> float:
        loss = torch.zeros(())
        parts = part(batch)
        total = sum(len(labels) for _, labels in parts)
        for number, (inputs, labels) in enumerate(parts, 1):
            sums_later = number < len(parts) and isinstance(module, nn.parallel.DistributedDataParallel)
            with module.no_sync() if sums_later else contextlib.nullcontext():
                term = model.loss_fn(module, (inputs, labels)) * (len(labels) / total)
                term.backward()
            loss += term.detach()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def cut(batch: model.Pair, parts: int) -> list[model.Pair]:
    return list(zip(batch[0].tensor_split(parts), batch[1].tensor_split(parts), strict=True))


def ddp(job: Job) -> Answer:
    """DistributedDataParallel over gloo: this process is one rank, and runs its part of each batch on one thread.

    `ddp-micro-batches` runs it in pieces of the size that paceline found for this rank.
    """
    torch.set_num_threads(1)
    module = ranks.replicate(model.network(job.network), job)

    def part(batch: model.Pair) -> list[model.Pair]:
        mine = cut(batch, job.parts)[job.rank]
        return cut(mine, -(-len(mine[1]) // job.sizes[job.rank])) if job.sizes else [mine]

    variant = Variant(plain_step(module, part), job)
    distributed.barrier()
    seconds = variant.run(job.steps)
    items = torch.empty(job.batch).tensor_split(job.parts)[job.rank].numel()
    loss = torch.tensor(variant.checked_loss * items / job.batch)
    distributed.all_reduce(loss)
    return {job.rival: [seconds]}, [float(loss)]


def threads(job: Job) -> Answer:
    """One process with PyTorch's own threads: as many as cores, not pinned."""
    torch.set_num_threads(job.parts)
    variant = Variant(plain_step(model.network(job.network), lambda batch: [batch]), job)
    return {"threads": [variant.run(job.steps)]}, [variant.checked_loss]


def alone(job: Job) -> Answer:
    """One core alone: the batch in one piece, and in micro-batches of several sizes, which cost less per item."""
    torch.set_num_threads(1)

    def in_pieces(count: int) -> Variant:
        return Variant(plain_step(model.network(job.network), lambda batch: cut(batch, count)), job)

    counts = [job.parts * times for times in (1, 2, 4) if job.parts * times <= job.batch]
    variants = {"whole": in_pieces(1), **{str(-(-job.batch // count)): in_pieces(count) for count in counts}}
    return take_turns(variants, job.steps), [variant.checked_loss for variant in variants.values()]


def together(job: Job) -> Answer:
    """One core with a batch of its own while the other cores do the same, until a common time."""
    end = time.monotonic() + job.seconds
    torch.set_num_threads(1)
    variant = Variant(plain_step(model.network(job.network), lambda batch: [batch]), job)
    seconds = variant.run(1)
    while time.monotonic() < end:
        seconds += variant.run(1)
    return {"together": [seconds]}, [variant.checked_loss]


def paceline(job: Job) -> Answer:
    """Two trainers in one process, with even and with balanced shares, in turns."""
    from paceline.torch import DataParallel

    with contextlib.ExitStack() as stack:
        variants: dict[str, Variant] = {}
        balances: tuple[Literal["even", "auto"], ...] = ("even", "auto")
        for balance in balances:
            trainer = stack.enter_context(DataParallel(model.network(job.network), job.devices, balance=balance))
            variants[balance] = Variant(paceline_step(trainer), job)
        blocks = take_until_tight(variants, job) if job.rival == "ratio" else take_turns(variants, job.steps)
        return blocks, [variant.checked_loss for variant in variants.values()]


def in_ranks(job: Job) -> Answer:
    """A rank of a trainer over several processes, which has one device and loads its own part of each batch."""
    from paceline.torch import DataParallel

    torch.set_num_threads(1)
    ranks.meet(job)
    data = ranks.in_memory(job)
    trainer = DataParallel(model.network(job.network), group=distributed.group.WORLD)
    sampler = trainer.batch_sampler(len(data), job.batch, shuffle=False)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=tuple)
    sizes: list[int] = []  # of all micro-batches

    def loss_fn(module: nn.Module, pair: model.Pair) -> torch.Tensor:
        sizes.append(len(pair[1]))
        return model.loss_fn(module, pair)

    variant = Variant(paceline_step(trainer, loss_fn), job, batches=endless(lambda: sampler.batches(loader)))
    distributed.barrier()
    sizes.clear()
    seconds = variant.run(job.steps)
    return {"ranks": [seconds], "figures": [[statistics.median_high(sizes)]]}, [variant.checked_loss]


def ddp_balanced(job: Job) -> Answer:
    """DDP over gloo as above, with the parts of each batch that `BalancedRanks` measures out. Also the milliseconds of its own code in a step."""
    from paceline.torch import BalancedRanks

    torch.set_num_threads(1)
    module = ranks.replicate(model.network(job.network), job)
    optimizer = model.optimizer(module)
    data = ranks.in_memory(job)
    balanced = BalancedRanks(len(data), job.batch, shuffle=False)
    loader = DataLoader(data, batch_sampler=balanced.sampler, collate_fn=tuple)
    own = ranks.OwnTime(balanced)

    def step(batch: model.Pair) -> float:
        with balanced.step():
            loss = balanced.weigh(model.loss_fn(module, batch))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    variant = Variant(step, job, batches=endless(lambda: own.batches(loader)))
    distributed.barrier()
    own.seconds = 0.0
    seconds = variant.run(job.steps)
    loss = torch.tensor(variant.checked_loss / job.parts)
    distributed.all_reduce(loss)
    return {"ddp-balanced": [seconds], "figures": [[1e3 * own.seconds / job.steps]]}, [float(loss)]


def endless(epoch: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """One epoch after the other."""
    while True:
        yield from epoch()


def paceline_step(
    trainer: DataParallel, loss_fn: Callable[[nn.Module, model.Pair], torch.Tensor] = model.loss_fn
) -> Step:
    optimizer = model.optimizer(trainer.module)

    def step(batch: model.Pair) -> float:
        loss = trainer.step(loss_fn, batch)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def take_turns(variants: dict[str, Variant], steps: int) -> Blocks:
    """Blocks in the order A B, B A, A B, ..., so that slow changes of the machine affect both alike."""
    length = block_length(steps)
    blocks: Blocks = {name: [] for name in variants}
    names = list(variants)
    for _ in range(-(-steps // length)):
        for name in names:
            blocks[name].append(variants[name].run(length))
        names.reverse()
    return blocks


def take_until_tight(variants: dict[str, Variant], job: Job) -> Blocks:
    """Like `take_turns`, until the ratio of the two is known well enough or the time is up."""
    begin = time.monotonic()
    length = block_length(job.steps)
    blocks: Blocks = {name: [] for name in variants}
    for _ in range(50 * -(-job.steps // length)):
        for name, more in take_turns(variants, 2 * length).items():
            blocks[name] += more
        interval = median_interval(
            [sum(even) / sum(auto) for even, auto in zip(blocks["even"], blocks["auto"], strict=True)]
        )
        tight = interval is not None and interval[1] - interval[0] <= 2 * job.tolerance
        if tight or time.monotonic() - begin > job.seconds:
            break
    return blocks


RIVALS: dict[str, Callable[[Job], Answer]] = {
    "ddp": ddp,
    "ddp-micro-batches": ddp,
    "threads": threads,
    "alone": alone,
    "together": together,
    "paceline": paceline,
    "ranks": in_ranks,
    "ddp-balanced": ddp_balanced,
    "ratio": paceline,
}
