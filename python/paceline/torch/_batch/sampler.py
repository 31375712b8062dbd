"""Batches for DDP and FSDP whose ranks take equally long: items dealt out by cost, not by count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed
from torch.utils.data import Sampler

from paceline import InvalidArgument
from paceline._words import plural
from paceline.torch._batch.by_cost import ByCost, Cost


class BalancedBatchSampler(Sampler[list[int]]):
    """The items of each rank, batch by batch, so that all ranks of a batch finish together.

    For training that stays on `DistributedDataParallel` or FSDP, with items of unequal length: one such sampler per process,
    as the `batch_sampler` of its `DataLoader`. Global batches are drawn as torch's `DistributedSampler` draws them, by a
    permutation of (seed, epoch); within each, `paceline.plan` deals the items to the ranks. Every rank computes the same plan
    and yields its own part: nothing is communicated.

    A rank's time depends on what the collate function does with its items. **If it pads them to the rank's longest item, pass**
    ``padded=True``: a rank's time is then the number of its items times the cost of the longest, and
    `paceline.plan.split_padded` makes the largest of these times as small as it can be. Some ranks get few long items, others many
    short ones; ranks of one speed take turns in having the long ones. Without `padded`, `paceline.plan.split_items` makes the *sums*
    of costs equal. That is right where items are packed one after the other (nested tensors, attention over sequences of a packed
    batch) or run one by one. It is of little use where they are padded, since every rank then has some of the longest.

    Each index comes exactly once per epoch, on one rank (with `drop_last`, the last incomplete batch does not come). Nothing
    is repeated to fill a batch. All ranks have the same number of batches and at least one item in each. **The ranks' item
    counts differ**, so a mean over ranks of mean losses is not the batch's mean: multiply the rank's mean loss by `weight`
    before `backward`, and the averaged gradient is exactly that of the mean over the global batch.

    Parameters
    ----------
    lengths
        One number per item of the data set, e.g. its tokens.
    ranks, rank
        The number of processes, and which of them this is. None: as torch.distributed says, which must then be initialised.
    batch_size
        Items of a *global* batch, over all ranks; at least one per rank.
    cost
        None: an item costs its length. A function of the length, e.g. ``ItemCostFit.item_seconds``, or one number per item.
        With `padded`, the cost of an item that is padded to this length; the longest item must be the costliest.
    padded
        Whether the collate function pads each rank's items to the longest of them.
    seed
        Seed of the permutation; the same on all ranks.
    shuffle
        False: in the order of the data set.
    drop_last
        Leave out the last batch if it is incomplete. Otherwise, if it has fewer items than there are ranks, it takes some items
        from the batch before. If that would leave the batch before with too few, the two become one batch.
    speeds
        How fast each rank is, in any unit: one number per rank. None: all are equally fast.

    Raises
    ------
    InvalidArgument
        If arguments do not fit together, or if there are fewer items than ranks.

    Notes
    -----
    A `DataLoader` with workers draws batches ahead, so `weight` belongs to a later batch than the present one. Use
    ``weights[step]`` of the running epoch instead.

    Examples
    --------
    >>> from paceline.torch import BalancedBatchSampler
    >>> sampler = BalancedBatchSampler([9, 1, 8, 2], ranks=2, rank=0, batch_size=4, shuffle=False)
    >>> next(iter(sampler)), sampler.weight
    ([0, 1], 1.0)
    >>> sampler = BalancedBatchSampler([9, 2, 3, 2], ranks=2, rank=0, batch_size=4, shuffle=False, padded=True)
    >>> next(iter(sampler)), sampler.weight
    ([0], 0.5)

    In a training loop, with a collate function that pads::

        sampler = BalancedBatchSampler(lengths, batch_size=512, padded=True)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4, collate_fn=pad)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for step, batch in enumerate(loader):
                (loss_fn(model, batch) * sampler.weights[step]).backward()
                optimizer.step()
                optimizer.zero_grad()
    """

    def __init__(
        self,
        lengths: Sequence[float] | torch.Tensor,
        *,
        batch_size: int,
        ranks: int | None = None,
        rank: int | None = None,
        cost: Cost = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        speeds: Sequence[float] | None = None,
        padded: bool = False,
    ) -> None:
        super().__init__()
        self.ranks, self.rank = _place(ranks, rank)
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.padded = padded
        self.epoch = 0
        self._by_cost = ByCost(lengths, cost, padded)
        self._speeds = _speeds(speeds, self.ranks)
        self._weights: list[float] = []
        if batch_size < self.ranks:
            raise InvalidArgument(
                f"batch_size is {batch_size} for {plural(self.ranks, 'rank')}; it counts the items of the global batch, of which every rank "
                f"needs one: pass at least {self.ranks}"
            )
        least = batch_size if drop_last else self.ranks
        if len(self._by_cost.costs) < least:
            raise InvalidArgument(
                f"the items are too few, {len(self._by_cost.costs)}: {least} are needed for one batch of {plural(self.ranks, 'rank')}"
                + (" with drop_last" if drop_last else "")
            )
        self._sizes = _batch_sizes(len(self._by_cost.costs), batch_size, self.ranks, drop_last)

    def __len__(self) -> int:
        """Batches per epoch, the same on every rank."""
        return len(self._sizes)

    def __iter__(self) -> Iterator[list[int]]:
        """The indices of this rank's items, ascending, batch by batch."""
        weights: list[float] = []
        self._weights = weights
        order = self._order()
        first = self.epoch * len(self)
        begin = 0
        for number, size in enumerate(self._sizes, first):
            batch = sorted(order[begin : begin + size])
            begin += size
            mine = self._by_cost.parts(batch, self._speeds, number)[self.rank]
            weights.append(len(mine) * self.ranks / size)
            yield mine

    def set_epoch(self, epoch: int) -> None:
        """Draw other batches. Call it with the same number on every rank, before the epoch's iteration starts."""
        self.epoch = epoch

    @property
    def weight(self) -> float:
        """What to multiply this rank's mean loss by, for the batch drawn last: items here * ranks / items of the batch.

        DDP and FSDP average gradients over ranks; the mean over ranks of weight * (mean over the rank's items) is the mean
        over the batch. If a loss is a mean over something else than items, e.g. unmasked tokens, count those instead of items:
        the count here * ranks / the count in the batch.
        """
        if not self._weights:
            raise InvalidArgument("no batch was drawn yet: weight belongs to the batch drawn last; iterate first")
        return self._weights[-1]

    @property
    def weights(self) -> Sequence[float]:
        """The weights of the batches drawn so far in the epoch that was started last, by step."""
        return self._weights

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(len(self._by_cost.costs)))
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        order: list[int] = torch.randperm(len(self._by_cost.costs), generator=generator, device="cpu").tolist()
        return order


def _place(ranks: int | None, rank: int | None) -> tuple[int, int]:
    if ranks is None or rank is None:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise InvalidArgument(
                "ranks and rank are not known, since torch.distributed is not initialised: pass both, or call "
                "torch.distributed.init_process_group first"
            )
        ranks = torch.distributed.get_world_size() if ranks is None else ranks
        rank = torch.distributed.get_rank() if rank is None else rank
    if ranks < 1 or not 0 <= rank < ranks:
        raise InvalidArgument(f"rank is {rank} of {ranks}; it must be from 0 to ranks - 1")
    return ranks, rank


def _speeds(speeds: Sequence[float] | None, ranks: int) -> list[float]:
    if speeds is None:
        return [1.0] * ranks
    if len(speeds) != ranks or not all(0.0 < speed < float("inf") for speed in speeds):
        raise InvalidArgument(f"speeds is {list(speeds)}; pass one finite number above 0 for each of the {ranks} ranks")
    return [float(speed) for speed in speeds]


def _batch_sizes(items: int, batch_size: int, ranks: int, drop_last: bool) -> list[int]:
    full, rest = divmod(items, batch_size)
    sizes = [batch_size] * full
    if rest == 0 or drop_last:
        return sizes
    if rest >= ranks:
        return [*sizes, rest]
    missing = ranks - rest
    if batch_size - missing >= ranks:
        return [*sizes[:-1], batch_size - missing, ranks]
    return [*sizes[:-1], batch_size + rest]
