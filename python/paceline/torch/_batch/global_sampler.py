"""Global batches of a data set, of which each rank loads its own part."""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import Sampler

from paceline import InvalidArgument
from paceline._words import plural
from paceline.torch._batch.by_cost import ByCost

_VERSION = 1


class Stamp(NamedTuple):
    """Which global batch this is, and how it was dealt out. Equal on all ranks."""

    serial: int  # how many global batches of this process came before it
    epoch: int
    position: int  # in the epoch
    size: int  # items on all ranks
    plan: int  # the number of the plan that dealt it out
    shares: tuple[int, ...]  # items of each rank
    work: tuple[int, ...]  # of each rank: its items, or what they cost


class GlobalBatchSampler(Sampler[list[int]]):
    """Global batches of a data set, of which each rank loads its own part. `DataParallel.batch_sampler` makes it.

    All ranks draw the same permutation, from the seed and the epoch. A global batch is a range of it, and each rank has a range of the global
    batch, or with costs some of its items. So each item comes exactly once in an epoch, on one rank. Nothing is repeated to fill a batch; the last one may be smaller.

    A loader draws batches ahead, so a batch may come from an older split than the present one. Therefore every global batch is stamped with its
    split when it is drawn, and `batches` hands the stamps out in step with the loader's batches. That works for any dataset and any number of
    loader processes: samplers run in the process of the loop, and loaders keep their order.

    Attributes
    ----------
    epoch
        The epoch that the next batch belongs to. It goes up at the end of `batches`.
    current
        The stamp of the global batch that `batches` has handed out last, or None outside of its loop.

    Examples
    --------
    >>> sampler = trainer.batch_sampler(len(dataset), batch_size=512)                # doctest: +SKIP
    >>> loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)
    >>> while sampler.epoch < epochs:
    ...     for batch in sampler.batches(loader):
    ...         trainer.step(loss_fn, batch)
    ...         optimizer.step(); optimizer.zero_grad()
    """

    def __init__(
        self,
        items: int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int = 0,
        ranks: int = 1,
        every_rank: bool = False,
        least: int = 0,
        by_cost: ByCost | None = None,
        call: str = "batch_sampler",
    ) -> None:
        super().__init__()
        self.items, self.seed, self.shuffle, self.drop_last = items, seed, shuffle, drop_last
        self.batch_size = min(batch_size, items)  # of a full batch
        self.epoch = 0
        self.current: Stamp | None = None
        # Held while a batch is drawn, and while ranks agree from which batch on a plan holds.
        self.lock = threading.Lock()
        self._asked = batch_size
        self._rank = rank
        self._every_rank = every_rank  # whether `batches` has a batch for ranks without items, too
        self._least = max(least, int(every_rank))  # items of each rank, if there are enough
        self._by_cost = by_cost  # how to deal out items that cost differently
        self._position = 0  # the index in the epoch of the batch handed out last, or of the next one
        self._trained = False  # whether that batch was handed out and trained on
        self._serial = 0  # of that batch
        self._drawn = 0  # the serial of the next batch to draw
        self._stamps: deque[Stamp] = deque()  # drawn, but not handed out
        self._iteration = 0  # which iteration draws
        self._mark = zlib.crc32(repr(self.equal()).encode())
        if batch_size < ranks:
            raise InvalidArgument(
                f"{call}: batch_size is {batch_size} for {plural(ranks, 'rank')}. It counts the items of the global batch, over all ranks: give "
                f"at least {ranks}."
            )
        least = batch_size if drop_last else 1
        if items < least:
            raise InvalidArgument(
                f"{call}: {plural(items, 'item')} for a data set; one batch needs {least}{' with drop_last' if drop_last else ''}."
            )
        # What plans are made of, and how much of it a full batch has.
        self.unit = "items" if by_cost is None else "units of work"
        self.units = self.batch_size if by_cost is None else by_cost.UNITS
        # The least that a rank gets, if anything: one item, or the work of an average one.
        self.least_units = max(1, self.units // max(self.batch_size, ranks))
        whole, rest = divmod(self.units, ranks)
        even = tuple(whole + (rank < rest) for rank in range(ranks))
        self._plans: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, even)]  # the first serial, the number, the shares

    def __len__(self) -> int:
        """Global batches in an epoch, the same on every rank."""
        full, rest = divmod(self.items, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of this rank in each global batch, from the position on. Without items it is one index, whose batch `batches` drops."""
        with self.lock:
            self._settle()
            self._iteration += 1
            mine, epoch, first = self._iteration, self.epoch, self._position
        order = self._order(epoch)
        for index in range(first, len(self)):
            begin = index * self.batch_size
            with self.lock:
                if mine != self._iteration:
                    return
                found, shares, work = self._deal(order[begin : begin + self.size_of(index)])
                self._stamps.append(
                    Stamp(self._drawn, epoch, index, sum(shares), self._plan(self._drawn)[1], shares, work)
                )
                self._drawn += 1
            yield found

    def size_of(self, index: int) -> int:
        """Items of the global batch with this index in an epoch."""
        return min(self.batch_size, self.items - index * self.batch_size)

    def batches(self, loader: Iterable[Any], *, ahead: bool = False) -> Iterator[Any]:
        """The batches of a loader with this sampler, to the end of the epoch. None where this rank has no items.

        All ranks loop over it in the same way. A loop that ends early is continued by the next one: with the batch after the last one that
        was trained on, whatever the loader had drawn ahead.

        Parameters
        ----------
        loader
            A ``DataLoader`` that was made with ``batch_sampler=`` this sampler. It may have workers, and prefetch as it likes.
        ahead
            Whether batches may be taken before the earlier ones were trained on. `trained` is then given the stamp of its batch.

        Raises
        ------
        InvalidArgument
            If the loader has another sampler, or does not keep the order (``in_order=False``). In the loop: if another iteration has begun, or
            a state was loaded.
        """
        if getattr(loader, "batch_sampler", None) is not self:
            raise InvalidArgument(
                "batches: the loader does not have this sampler. Make it so: DataLoader(dataset, batch_sampler=sampler)."
            )
        if not getattr(loader, "in_order", True):
            raise InvalidArgument(
                "batches: the loader has in_order=False, so its batches come in another order than on other ranks. Leave it out."
            )
        mine = None
        try:
            for batch in loader:
                if mine is None:
                    mine = self._iteration
                stamp = self._hand_out(mine, ahead)
                yield batch if stamp.shares[self._rank] or self._every_rank else None
            with self.lock:
                self._check_goes_on(self._iteration if mine is None else mine)
                self._settle()
                self.epoch, self._position = self.epoch + 1, 0
        finally:
            if mine == self._iteration:
                with self.lock:
                    self._settle()
                    self._iteration += 1  # the loader's iterator draws nothing more

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch. Not needed in a loop over `batches`. The present epoch goes on where it is."""
        with self.lock:
            self._settle()
            if epoch != self.epoch:
                self.epoch, self._position = epoch, 0
                self._iteration += 1

    def begin_epoch(self) -> None:
        """If all batches of the epoch were trained on, go to the next one: for loops that do not ask whether there is another batch."""
        if self._position + self._trained >= len(self):
            self.set_epoch(self.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Where the training is in the data: numbers only. It does not depend on the number of ranks, their devices, or what was drawn ahead.

        ``position`` is the index in the epoch of the first global batch that was not trained on. A trainer's ``state_dict`` has this, too.
        """
        with self.lock:
            return {
                "version": _VERSION,
                **self.data(),
                "epoch": self.epoch,
                "position": self._position + self._trained,
            }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with the global batch that a state says. All ranks load the same.

        Raises
        ------
        InvalidArgument
            If it is no such state, or if it is of a data set or batches of another size. Nothing is changed then.
        """
        self.check_state(state_dict)
        with self.lock:
            self._settle()
            self._iteration += 1
            self.seed, self.epoch, self._position = (int(state_dict[name]) for name in ("seed", "epoch", "position"))
            self._mark = zlib.crc32(repr(self.equal()).encode())

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise if `load_state_dict` would."""
        wanted = {"version": _VERSION, **self.data(), "epoch": 0, "position": 0}
        if not isinstance(state_dict, Mapping) or not all(isinstance(state_dict.get(name), int) for name in wanted):
            raise InvalidArgument(
                "load_state_dict: this is not a state of a sampler. Give what state_dict() of a GlobalBatchSampler returned."
            )
        for name, value in wanted.items():
            if name not in ("seed", "epoch", "position") and state_dict[name] != value:
                raise InvalidArgument(
                    f"load_state_dict: the sampler was saved with {name}={state_dict[name]}, and this one has {value}. Its position counts global batches, "
                    "so make the sampler as it was."
                )

    @property
    def drawn(self) -> int:
        """The serial of the next global batch to draw here. Requires `lock`."""
        return self._drawn

    @property
    def shares(self) -> tuple[int, ...]:
        """Items of each rank, in a full batch that is drawn now. With lengths it is their work, of which an average batch has 1,000,000."""
        return self._plan(self._drawn)[2]

    def follow(self, first: int, plan: int, shares: Sequence[int]) -> None:
        """Deal batches out in this way from a serial on. Requires `lock`, and that no rank has drawn this batch."""
        before = [one for one in self._plans if one[0] < first][-2:]  # batches in between may be drawn again
        self._plans = [*before, (first, plan, tuple(shares))]

    def trained(self, stamp: Stamp | None = None) -> None:
        """To be called when a batch was trained on: it does not come again. `stamp` is for batches that were taken ahead."""
        if stamp is None:
            self._trained = self.current is not None
        elif stamp.epoch == self.epoch:
            self._position, self._serial, self._trained = stamp.position, stamp.serial, True

    def mark(self, stamp: Stamp | None = None) -> int:
        """A checksum of what all ranks have to agree on: the data, and the batch that is being trained on."""
        batch = stamp or self.current or (self.epoch, self._position)
        return zlib.crc32(repr(tuple(batch)).encode(), self._mark)

    def check_handed_out(self) -> None:
        """Raise if batches were drawn, but not through `batches`: who has them is unknown then."""
        if self.current is None and self._stamps:
            raise InvalidArgument(
                "a loader with the trainer's sampler was iterated directly, so the trainer does not know which global batch this is. Write: for "
                "batch in sampler.batches(loader)."
            )

    def data(self) -> dict[str, int]:
        """What makes the global batches."""
        return {
            "items": self.items,
            "batch_size": self._asked,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
            "drop_last": int(self.drop_last),
        }

    def equal(self) -> dict[str, int]:
        """What has to be equal on all ranks. A state lacks the costs, which do not change the items of a global batch."""
        return self.data() | ({} if self._by_cost is None else {"costs": self._by_cost.mark()})

    def _order(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.items, device="cpu")
        generator = torch.Generator().manual_seed(zlib.crc32(repr((self.seed, epoch)).encode()))
        return torch.randperm(self.items, generator=generator, device="cpu")

    def _plan(self, serial: int) -> tuple[int, int, tuple[int, ...]]:
        return next(plan for plan in reversed(self._plans) if plan[0] <= serial)

    def _deal(self, batch: torch.Tensor) -> tuple[list[int], tuple[int, ...], tuple[int, ...]]:
        """Of the next global batch, the items of this rank, and how many each rank has and how much work they are.

        Collate functions do not take empty lists, so a rank without items loads one of another rank, and `batches` drops it unless every rank has
        to have a batch.
        """
        plan = self._plan(self._drawn)[2]
        if self._by_cost is None:
            shares = scaled(plan, len(batch), least=self._least)
            begin = sum(shares[: self._rank]) if shares[self._rank] else 0
            return batch[begin : begin + max(1, shares[self._rank])].tolist(), shares, shares
        items = sorted(batch.tolist())
        parts = self._by_cost.parts(items, plan, self._drawn)
        found = parts[self._rank] or items[:1]
        return found, tuple(map(len, parts)), self._by_cost.units(parts, self.batch_size)

    def _hand_out(self, iteration: int, ahead: bool = False) -> Stamp:
        with self.lock:
            self._check_goes_on(iteration)
            stamp = self._stamps.popleft()
            self.current = stamp
            if not ahead:
                self._position, self._serial, self._trained = stamp.position, stamp.serial, False
            return stamp

    def _check_goes_on(self, iteration: int) -> None:
        if iteration != self._iteration:
            raise InvalidArgument(
                "batches: another iteration of the sampler has begun, or a state was loaded or an epoch set, so this loop cannot go on. Begin a "
                "new one over sampler.batches(loader)."
            )

    def _settle(self) -> None:
        """Forget what was drawn ahead. The next batch is the one after the last that was trained on."""
        self._position += self._trained
        self._serial += self._trained
        self.current, self._trained = None, False
        self._stamps.clear()
        self._drawn = self._serial


def scaled(shares: Sequence[int], size: int, *, least: int = 0) -> tuple[int, ...]:
    """Shares of a batch of another size, in proportion, of `least` items or more if there are enough. Only integers decide, so all machines get the same."""
    total = sum(shares)
    found = [size * share // total for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda rank: (-(size * shares[rank] % total), rank))
    for rank in by_rest[: size - sum(found)]:
        found[rank] += 1
    while min(found) < least and size >= least * len(found):
        found[found.index(max(found))] -= 1
        found[found.index(min(found))] += 1
    return tuple(found)
