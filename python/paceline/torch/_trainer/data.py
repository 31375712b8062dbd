"""Global batches of a data set, dealt out to the ranks by how long they take."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from paceline import InvalidArgument
from paceline._words import plural
from paceline.torch._batch.by_cost import Cost
from paceline.torch._batch.global_sampler import GlobalBatchSampler
from paceline.torch._run.group_ranks import GroupRanks
from paceline.torch._trainer.arguments import Balance, policy_of
from paceline.torch._trainer.parts import Core, Part
from paceline.torch._trainer.sampler_arguments import Items, Ledger, ledger_of, sampler_of


class Data(Part):
    """The sampler of a trainer, if it has one."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._loaded: Mapping[str, Any] | None = None  # the state for a sampler that is yet to be made

    def batch_sampler(
        self,
        items: Items,
        batch_size: int,
        *,
        cost: Cost = None,
        padded: bool = False,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        balance: Balance = "auto",
        ledger: Ledger = False,
    ) -> GlobalBatchSampler:
        """Make a sampler of global batches, which gives each rank of `group` as many items as it runs in the same time.

        Give it to a ``DataLoader`` as ``batch_sampler=``, and loop over ``sampler.batches(loader)``. All ranks make the same sampler. Rank 0
        decides on the shares, from the times of all ranks, and the others follow from the same global batch on. A rank without items
        gets None as its batch, for `step`. With ``batch_norm="synchronised"`` each rank has an item at least. A process alone has whole
        batches. `training_state` of the trainer has its state. If a state was loaded before, the sampler begins there, with the seed of
        that state.

        With the lengths of items, each rank gets as much work as it runs in the same time. What items cost decides which rank runs them, and
        nothing else: gradients are weighted by the number of items, or by `weight` of `step`. `cost` of `step` is apart from this. It
        deals a rank's items out to the devices of the rank.

        Parameters
        ----------
        items
            How many the data set has: ``len(dataset)``. For items of unequal length: the length of each of them.
        batch_size
            Items of a global batch, over all ranks; at least one for each rank.
        cost
            With lengths: what an item costs. None: its length. A function of the length, or one number per item. Items of each batch are dealt out
            so that the costs of the ranks fit their speeds.
        padded
            With lengths: whether the collate function pads a rank's items to the longest of them, so that each costs as much as this one.
        seed
            Seed of the permutations. Each epoch has another one.
        shuffle
            False: in the order of the data set.
        drop_last
            Leave out the last batch of an epoch if it is smaller than the others.
        balance
            ``"auto"``: by the measured times. ``"even"``: equal shares. A list with one number per rank: fixed ratios.
        ledger
            Whether rank 0 keeps all measurements and decisions about ranks, for `rank_ledger`. True: in memory. A path: in this file on the
            machine of rank 0, which is replaced. Each line is written as soon as it is decided, so the file of a process that was killed can be
            replayed. If a later line cannot be written, rank 0 warns once and training goes on. A process alone decides nothing, and writes none.

        Returns
        -------
        GlobalBatchSampler
            It takes the place of an earlier one of this trainer.

        Raises
        ------
        InvalidArgument
            On all ranks: for sizes, lengths, costs or ratios that do not fit, or if the ranks' samplers differ. With `reducer`, whose ranks are
            not known. With ``batch_norm="synchronised"`` also if the last batch of an epoch has fewer items than there are ranks. On rank 0, if
            its ledger cannot be written.
        Error
            If another rank's arguments do not fit, or if rank 0 cannot write its ledger.

        Examples
        --------
        >>> sampler = trainer.batch_sampler(len(dataset), batch_size=512)            # doctest: +SKIP
        >>> loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)
        >>> for batch in sampler.batches(loader):
        ...     trainer.step(loss_fn, batch)
        """
        with self._lifetime.between_steps("batch_sampler"):
            ranks = self._execution.ranks
            meets = ranks is not None and ranks.rounds is not None  # also if its modules are in evaluation mode now
            if ranks is not None and not isinstance(ranks, GroupRanks):
                raise InvalidArgument(
                    "batch_sampler: it needs group=, since with reducer= ranks come and go. Deal the batch out to the ranks of each step yourself."
                )

            def make(rank: int, size: int) -> GlobalBatchSampler:
                sampler = sampler_of(
                    "batch_sampler",
                    items,
                    batch_size,
                    cost=cost,
                    padded=padded,
                    seed=seed,
                    shuffle=shuffle,
                    drop_last=drop_last,
                    rank=rank,
                    ranks=size,
                    least=int(meets),
                )
                if self._loaded is not None:
                    sampler.load_state_dict(self._loaded)
                last = sampler.size_of(len(sampler) - 1)
                if meets and last < size:
                    raise InvalidArgument(
                        f"batch_sampler: the last batch of an epoch has {plural(last, 'item')} for {plural(size, 'rank')}, and with "
                        "batch_norm='synchronised' each rank needs one. Say drop_last=True, or take another batch_size."
                    )
                return sampler

            def decided() -> tuple[str, list[float], bool | str]:
                return *policy_of(balance, "batch_sampler", "rank"), ledger_of("batch_sampler", ledger)

            if ranks is None:
                decided()
                sampler = make(0, 1)
            else:
                devices = sorted((device.kind, device.sm_count or 0) for device in self._lifetime.group.devices)
                kind = zlib.crc32(repr(devices).encode())
                sampler = ranks.deal(make, decided, kind, meets)
            self._execution.sampler, self._loaded = sampler, None
            return sampler

    def rank_ledger(self) -> str:
        """The ledger of the ranks' shares, as JSON lines for `paceline.balance.replay`. Here devices are ranks.

        With the lengths of items, batches and shares in it are units of work, of which an average batch has 1,000,000.

        Raises
        ------
        InvalidArgument
            If this is not rank 0, or without ``ledger`` of `batch_sampler`, or if its file cannot be read.
        """
        dealt = self._dealt
        if dealt is None:
            raise InvalidArgument("rank_ledger: only rank 0 of a group has one, after batch_sampler(..., ledger=True).")
        return dealt.ledger()

    def state(self) -> dict[str, Any]:
        """What a state of the trainer has of the sampler."""
        if self._execution.sampler is not None:
            return {"sampler": self._execution.sampler.state_dict()}
        return {} if self._loaded is None else {"sampler": dict(self._loaded)}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise if `load` would."""
        if "sampler" in state and self._execution.sampler is not None:
            self._execution.sampler.check_state(state["sampler"])

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the trainer. If there is no sampler yet, the next one will."""
        if "sampler" not in state:
            return
        if self._execution.sampler is None:
            self._loaded = state["sampler"]
        else:
            self._execution.sampler.load_state_dict(state["sampler"])
