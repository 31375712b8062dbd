"""Training on text of variable length: how each rival splits pieces over its devices. Each function measures one process.

All train the transformer of examples/python/text.py on the same pieces. An epoch covers every piece once, so seconds per step compare
although batches are drawn differently. All take the mean over a global batch's tokens, and all trim what they run at once to its longest
piece.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader

from race import example
from race.job import Job
from race.ranks import replicate

MEGABATCH = 50  # number of batches that are sorted together, as length-grouped samplers do
Batch = dict[str, torch.Tensor]
Ranks = list[torch.Tensor]  # per rank, the indices of its pieces in one global batch
Answer = tuple[dict[str, list[list[float]]], list[float]]


class Setting:
    """The same pieces, weights and optimizer for every rival."""

    def __init__(self, job: Job) -> None:
        self.example = example.load()
        self.data: Batch = self.example.pieces(job.batch * job.steps)
        torch.manual_seed(0)
        self.module: nn.Module = self.example.Transformer()
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=2e-3, fused=True)

    def take(self, items: torch.Tensor) -> Batch:
        return {name: tensor[items] for name, tensor in self.data.items()}

    def random_batches(self, epoch: int, size: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(epoch)
        return list(torch.randperm(len(self.data["length"]), generator=generator).split(size))


def random_ranks(setting: Setting, job: Job, epoch: int) -> list[Ranks]:
    """The batches of a DistributedSampler."""
    return [list(batch.tensor_split(job.parts)) for batch in setting.random_batches(epoch, job.batch)]


def grouped_ranks(setting: Setting, job: Job, epoch: int) -> list[Ranks]:
    """Batches of pieces of similar length: random megabatches, each sorted by length and cut into batches, in random order.

    They need less padding, but the batches are no longer random, and steps differ in length.
    """
    lengths = setting.data["length"]
    batches: list[torch.Tensor] = []
    for mega in setting.random_batches(epoch, job.batch * MEGABATCH):
        batches += mega[lengths[mega].argsort(descending=True)].split(job.batch)
    order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(epoch)).tolist()
    # Neighbours go to different ranks, which is the best order for this method.
    return [[batches[k][rank :: job.parts] for rank in range(job.parts)] for k in order]


def ddp(job: Job) -> Answer:
    deal: Callable[[Setting, Job, int], list[Ranks]] = {
        "text-ddp-random": random_ranks,
        "text-ddp-grouped": grouped_ranks,
    }[job.rival]
    torch.set_num_threads(1)
    setting = Setting(job)
    module = replicate(setting.module, job)
    lengths = setting.data["length"]

    def step(ranks: Ranks) -> float:
        mine = ranks[job.rank]
        total = sum(int(lengths[part].sum()) for part in ranks)
        # DDP averages the ranks' means over their tokens.
        factor = job.parts * int(lengths[mine].sum()) / total
        loss = setting.example.loss_fn(module, setting.take(mine)) * factor
        loss.backward()
        setting.optimizer.step()
        setting.optimizer.zero_grad()
        return float(loss.detach()) / job.parts

    for ranks in deal(setting, job, 0)[: job.warm_up]:
        step(ranks)
    seconds, losses = timed(deal(setting, job, 1), step, distributed.barrier)
    loss = torch.tensor(losses[-1])
    distributed.all_reduce(loss)
    return {job.rival: [seconds]}, [float(loss)]


def ddp_padded(job: Job) -> Answer:
    """DDP with random batches, and ranks that take equally long with their padding, by `BalancedRanks`."""
    from paceline.torch import BalancedRanks

    torch.set_num_threads(1)
    setting = Setting(job)
    module = replicate(setting.module, job)
    lengths = setting.data["length"]
    ranks = BalancedRanks(lengths, job.batch, padded=True, balance="even")
    loader: Any = DataLoader(range(len(lengths)), batch_sampler=ranks.sampler, collate_fn=torch.tensor)

    def step(items: torch.Tensor) -> float:
        batch = setting.take(items)
        with ranks.step():
            loss = ranks.weigh(setting.example.loss_fn(module, batch), weight=batch["length"].sum())
            loss.backward()
        setting.optimizer.step()
        setting.optimizer.zero_grad()
        return float(loss.detach()) / job.parts

    for items in itertools.islice(ranks.batches(loader), job.warm_up):
        step(items)
    ranks.sampler.set_epoch(1)
    seconds, losses = timed(ranks.batches(loader), step, distributed.barrier)
    loss = torch.tensor(losses[-1])
    distributed.all_reduce(loss)
    return {job.rival: [seconds]}, [float(loss)]


def paceline(job: Job) -> Answer:
    """`text-paceline` on all devices, `text-alone` on one."""
    from paceline.torch import DataParallel

    setting = Setting(job)
    with DataParallel(setting.module, list(job.devices)) as trainer:

        def step(items: torch.Tensor) -> float:
            batch = setting.take(items)
            loss = trainer.step(setting.example.loss_fn, batch, weight=batch["length"], cost=batch["length"])
            setting.optimizer.step()
            setting.optimizer.zero_grad()
            return float(loss)

        for items in setting.random_batches(0, job.batch)[: job.warm_up]:
            step(items)
        before = trainer.report()
        seconds, losses = timed(setting.random_batches(1, job.batch), step, lambda: None)
        after = trainer.report()
    return {job.rival: [seconds], "figures": [split_figures(before, after)]}, [losses[-1]]


def split_figures(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[float]:
    """For the steps between two reports: the devices' busy time over the time that they had, the padded and the contiguous cost over the items'
    own cost, and the error."""
    busy = sum(
        after["devices"][name]["busy_seconds"] - entry["busy_seconds"] for name, entry in before["devices"].items()
    )
    compute = after["compute_seconds"] - before["compute_seconds"]
    cost, padded, contiguous = (
        after["items"][key] - before["items"][key] for key in ("cost", "padded_cost", "contiguous_cost")
    )
    return [
        busy / (compute * len(after["devices"])),
        padded / cost,
        contiguous / cost,
        after["items"].get("error", 0.0),
    ]


def timed(
    batches: Iterable[Any], step: Callable[[Any], float], before: Callable[[], Any]
) -> tuple[list[float], list[float]]:
    before()
    seconds, losses = [], []
    for batch in batches:
        start = time.perf_counter()
        losses.append(step(batch))
        seconds.append(time.perf_counter() - start)
    return seconds, losses


RIVALS: dict[str, Callable[[Job], Answer]] = {
    "text-ddp-random": ddp,
    "text-ddp-grouped": ddp,
    "text-ddp-padded": ddp_padded,
    "text-paceline": paceline,
    "text-alone": paceline,
}
