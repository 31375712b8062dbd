"""Unequal batches for ranks that stay on DistributedDataParallel or FSDP."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline import InvalidArgument
from paceline.balance import Balancer
from paceline.torch._batch.by_cost import Cost
from paceline.torch._batch.global_sampler import GlobalBatchSampler
from paceline.torch._devices import cuda
from paceline.torch._ranks.clock import Clock
from paceline.torch._ranks.leaving_out import LeftOut
from paceline.torch._ranks.loop import Loop, RanksLoader, Taken, Weight
from paceline.torch._ranks.meeting import Meeting
from paceline.torch._ranks.times import Times
from paceline.torch._ranks.waits import Waits
from paceline.torch._run.rank_shares import explain_shares
from paceline.torch._trainer.arguments import Balance, policy_of
from paceline.torch._trainer.sampler_arguments import Items, Ledger, ledger_of, sampler_of


class BalancedRanks:
    """Unequal batches for the ranks of DDP or FSDP: each rank gets as many items of a batch as it runs in the same time.

    For training that stays on ``DistributedDataParallel`` or FSDP2 (``fully_shard``), also below Accelerate, Lightning or transformers. All
    ranks make one, with equal arguments, after ``init_process_group``. Its `sampler` gives each rank its own part of every global batch. `step`
    takes the time of a rank's own work. Rank 0 decides on the shares, with the balancer of `DataParallel`, and all ranks follow from the same
    batch on. `weigh` makes the mean over ranks, which DDP and FSDP compute, the gradient of the whole batch.

    A slow rank makes the others wait, so all ranks' steps take equally long. What counts is therefore the time that a rank does not wait. With
    DDP that is until its last gradient is there, before it waits for the sums, and without the sending of buffers before a forward. With FSDP2
    it is the sum of the pieces between collectives, in the forward, too. On a GPU, events on the stream of the rank's own work take the time,
    and the host does not wait for them. What ranks wait for in layers such as ``SyncBatchNorm`` counts as own work.

    Every rank has at least one item in every batch, since DDP and FSDP wait for every rank's backward. If a batch has fewer items than there
    are ranks, a rank runs an item of another one. Its loss is left out: all gradients that come from it are exact zeros, whatever its
    value. It does go through the forward, so running statistics count it.

    Parameters
    ----------
    items, batch_size, seed, shuffle, drop_last
        As for `DataParallel.batch_sampler`.
    cost
        With lengths: what an item costs. None: its length. A function of the length, e.g. ``ItemCostFit.item_seconds``, or one number per item. Items of
        each batch are dealt out so that the sums of costs fit the ranks' speeds. That is right where items are packed one after the other, or run one by one.
    padded
        With lengths: whether the collate function pads a rank's items to the longest of them, so that each costs as much as this one. Then some ranks get
        few long items and others many short ones; ranks of one speed take turns in that.
    balance
        ``"auto"``: by the measured times. ``"even"``: equal shares, with lengths of the work. A list with one number above 0 per rank: fixed ratios.
    ledger
        Whether rank 0 keeps all measurements and decisions, for `ledger`; as for `DataParallel.batch_sampler`.

    Raises
    ------
    InvalidArgument
        If no process group is up. On all ranks: for sizes, lengths, costs or ratios that do not fit, or if the ranks' arguments differ. On rank 0, if
        its ledger cannot be written.
    Error
        If another rank's arguments do not fit, or if rank 0 cannot write its ledger.

    Notes
    -----
    All ranks of ``dist.group.WORLD`` take part, and each has data of its own: no tensor or pipeline parallelism beside.

    If a rank fails inside of `step`, it raises its own error and tells the others nothing. They wait in DDP's or FSDP's collectives, as they do
    without paceline, until that process ends or the process group's time limit is over.

    Examples
    --------
    >>> ranks = BalancedRanks(len(dataset), batch_size=512)                          # doctest: +SKIP
    >>> loader = DataLoader(dataset, batch_sampler=ranks.sampler, num_workers=4)
    >>> for batch in ranks.batches(loader):
    ...     with ranks.step():
    ...         loss = ranks.weigh(loss_fn(ddp_model(batch[0]), batch[1]))
    ...         loss.backward()
    ...     optimizer.step(); optimizer.zero_grad()
    """

    def __init__(
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
    ) -> None:
        self._meeting = Meeting()
        error: Exception | None = None
        settings: dict[str, object] = {}
        names = [f"rank {number}" for number in range(self._meeting.size)]
        try:
            self._sampler = sampler_of(
                "BalancedRanks",
                items,
                batch_size,
                cost=cost,
                padded=padded,
                seed=seed,
                shuffle=shuffle,
                drop_last=drop_last,
                rank=self._meeting.rank,
                ranks=self._meeting.size,
                every_rank=True,
            )
            count = None if isinstance(balance, str) else len(names)
            policy, ratios = policy_of(balance, "BalancedRanks", "rank", count)
            if ratios and not min(ratios) > 0:
                raise InvalidArgument(
                    f"BalancedRanks: balance is {balance!r}. Every rank needs a number above 0: the others wait for its backward."
                )
            options: Any = {"policy": policy, "weights": ratios or None, "may_be_zero": False}
            options["unit"] = self._sampler.unit
            Balancer(names, **options)  # raises on every rank if it cannot be made
            kept = ledger_of("BalancedRanks", ledger)
            settings = {**self._sampler.equal(), "balance": (options["policy"], options["weights"])}
        except Exception as caught:
            error = caught
        kinds = self._meeting.agree("BalancedRanks", error, settings, cuda.name_of_present() or "host")
        balancer = None
        try:
            if self._meeting.rank == 0:
                balancer = Balancer(names, device_classes=kinds, ledger=kept, **options)
        except Exception as caught:  # its ledger cannot be written
            error = caught
        self._meeting.agree("BalancedRanks", error, {}, None)
        self._times = Times(self._sampler, self._meeting, balancer)
        self._loop = Loop(self._sampler, self._meeting)
        self._clock = Clock()
        self._waits = Waits(self._clock)
        self._left_out = LeftOut()
        self._now: Taken | None = None  # the batch of the present step
        self._last: Taken | None = None  # that of the last step
        self._weighed = self._returned = 0  # losses in this step, and those of them that had their backward
        self._on_gpu = False  # whether these losses are on a GPU
        self._began = 0.0
        self._ended: float | None = None  # when the last step had ended, unless it has failed

    @property
    def sampler(self) -> GlobalBatchSampler:
        """What to give to ``DataLoader(dataset, batch_sampler=...)``. Has ``len()``, ``epoch`` and ``set_epoch``."""
        return self._sampler

    @property
    def shares(self) -> tuple[int, ...]:
        """Items of each rank, in a full batch that is drawn now. With lengths it is their work, of which an average batch has 1,000,000."""
        return self._sampler.shares

    @property
    def sync_gradients(self) -> bool:
        """Whether the optimizer's step comes after the present batch. False for those before it with ``batches(loader, accumulate=k)``."""
        taken = self._now or self._loop.next or self._last
        return taken is None or taken.complete

    def batches(self, loader: Iterable[Any], *, accumulate: int = 1, weight: Weight = None) -> Iterator[Any]:
        """The batches of a loader, to the end of the epoch: this rank's part of each global batch.

        All ranks loop over it in the same way. A loop that ends early is continued by the next one: with the batch after the last one that was
        trained on, whatever the loader had drawn ahead.

        Parameters
        ----------
        loader
            A ``DataLoader`` that was made with ``batch_sampler=ranks.sampler``. It may have workers, and prefetch as it likes.
        accumulate
            How many batches there are in one step of the optimizer. `weigh` then makes the sum of their gradients that of all of their items.
            `sync_gradients` is False for all but the last of them.
        weight
            ``weight(batch)`` is the weight of this rank's items, such as the number of its tokens. With it, the batches of an optimizer's
            step are loaded before the first of them is trained on, and the ranks exchange their weights once.

        Raises
        ------
        InvalidArgument
            If the loader has another sampler, or does not keep the order. On all ranks, if weights are negative, not finite, or zero on all.
        """
        return self._loop.batches(loader, accumulate, weight)

    def loader(self, loader: Any, *, accumulate: int = 1, weight: Weight = None) -> RanksLoader:
        """A loader for frameworks that loop over it themselves. They may take batches ahead: each `step` is for the next one.

        It has ``len()`` and ``set_epoch``, and all else of the loader. The parameters are those of `batches`, and every batch needs its `step`.
        """
        return RanksLoader(self._loop, loader, accumulate, weight)

    def step(self) -> contextlib.AbstractContextManager[None]:
        """For the forward and the backward of one batch, once for each batch. Takes the time of this rank's own work.

        At its end the rank tells its times, which all ranks know one step later. What comes between two steps, such as the optimizer, counts as fixed work of a rank.

        Raises
        ------
        InvalidArgument
            If there is no batch that it is for, inside of another step, and at its end if there was no `weigh` or not every loss of it had its
            backward: DDP and FSDP make the other ranks wait for it. On all ranks, one step later, if they are not at the same batch.
        """
        return _Step(self)

    def weigh(self, loss: torch.Tensor, *, weight: Any = None) -> torch.Tensor:
        """Scale a loss so that the mean over ranks, of the loss and of its gradient, is that of the whole batch.

        Call it inside of `step`, and run the backward of what it returns there. With several losses in a step, each is about the same items.

        Parameters
        ----------
        loss
            The mean over this rank's items: one number.
        weight
            What the mean is over, if not over items: for example the number of this rank's tokens. The ranks exchange it before the
            backward, and all of them have to pass it. A tensor on a GPU makes the host wait for that GPU. A rank with weight 0 may have any
            loss, also NaN: it is left out.

        Returns
        -------
        torch.Tensor
            ``loss * this rank's items * ranks / items of all ranks``, or zero on a rank whose loss is left out.

        Raises
        ------
        InvalidArgument
            Outside of `step`, and for a loss that is not one number or does not require grad. On all ranks, if weights are negative, not finite, or zero on all.
        """
        now = self._now
        if now is None:
            raise InvalidArgument(
                "weigh: it is called outside of step(), so the batch of this loss is not known. Put forward, weigh and backward into: with ranks.step()."
            )
        if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad):
            raise InvalidArgument(
                "weigh: the loss has to be a tensor of one number that requires grad: the mean over this rank's items. DDP and FSDP wait for "
                "every rank's backward."
            )
        mine, whole = now.mine, now.whole
        if weight is not None:
            if now.weighed or not now.alone:
                raise InvalidArgument(
                    "weigh: weight= cannot be given here, since the weights of all batches of the optimizer's step have to be known before the first "
                    "backward. Give batches(loader, weight=) a function of a batch instead."
                )
            was = self._clock.pause()
            mine = self._loop.weight_of(weight) if now.mine else 0.0
            whole = self._loop.whole("weigh", [mine])
            if was:
                self._clock.resume()
        self._weighed += 1
        self._on_gpu = self._on_gpu or loss.is_cuda
        weighed = loss * (mine * self._meeting.size / whole) if mine else self._left_out(loss)
        weighed.register_hook(self._backward_begins)
        return weighed

    def watch(self, module: nn.Module) -> None:
        """Leave out of the times what `module` waits for other ranks in its forward and backward.

        DDP and FSDP2 modules that one of the first steps calls are found without this. It is for those that are first used later.
        """
        self._waits.watch(module)

    def state_dict(self) -> dict[str, Any]:
        """Where the training is in the data, for any number of ranks: the epoch, and the first global batch that was not trained on."""
        return self._sampler.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with the global batch that a state says. All ranks load the same.

        Raises
        ------
        InvalidArgument
            If it is no such state, or of a data set or batches of another size. Nothing is changed then.
        """
        self._sampler.load_state_dict(state_dict)
        self._loop.taken.clear()
        self._times.forget()

    def explain(self) -> str:
        """Text: on rank 0 what was measured, what was decided and why. On the others the shares and the last step."""
        balancer = self._times.balancer
        if balancer is not None:
            return explain_shares(balancer)
        rows = [f"rank {rank} {row['items']:g} in {row['seconds']:.4f} s" for rank, row in enumerate(self._times.last)]
        unit = self._sampler.unit
        of = "" if unit == "items" else f" of {self._sampler.units} {unit}, which an average batch has"
        return f"shares of ranks: {self.shares}{of}. Last step: {', '.join(rows) or 'none'}. Rank 0 decides: its explain() has the reasons."

    def report(self) -> dict[str, Any]:
        """What `explain` says, as numbers.

        Returns
        -------
        dict
            ``shares``; ``ranks``: for each rank ``items`` and ``seconds`` of its own work in the last step that all ranks know; on rank 0
            ``rank_shares``: what `paceline.balance.Balancer.report` returns, with ranks for devices.
        """
        balancer = self._times.balancer
        found: dict[str, Any] = {"shares": self.shares, "ranks": [dict(row) for row in self._times.last]}
        return found if balancer is None else found | {"rank_shares": balancer.report()}

    def ledger(self) -> str:
        """All measurements and decisions so far, as JSON lines for `paceline.balance.replay`. Here devices are ranks.

        With lengths, batches and shares in it are units of work, of which an average batch has 1,000,000.

        Raises
        ------
        InvalidArgument
            If this is not rank 0, or without ``ledger``, or if its file cannot be read.
        """
        if self._times.balancer is None:
            raise InvalidArgument("ledger: only rank 0 decides on shares, so only rank 0 has one.")
        return self._times.balancer.ledger()

    def write_ledger(self, path: str | os.PathLike[str]) -> None:
        """Write `ledger` to a file, which takes the place of an existing one. For rank 0."""
        Path(path).write_text(self.ledger(), encoding="utf-8")

    def _backward_begins(self, _: torch.Tensor) -> None:
        # Callbacks run in their order when all gradients are there. This one comes before that of DDP, which waits for its sums.
        self._returned += 1
        self._clock.resume()
        torch.autograd.Variable._execution_engine.queue_callback(self._clock.stop)

    def _begin(self) -> None:
        if self._now is not None:
            raise InvalidArgument("step: it is called inside of another step. Put one step around each batch.")
        if not self._loop.taken:
            raise InvalidArgument(
                "step: there is no batch that it is for. Loop over ranks.batches(loader), with one step for each batch."
            )
        self._times.dealt.check_ledger()
        self._now = self._loop.taken.popleft()
        self._weighed, self._returned, self._on_gpu = 0, 0, False
        self._began = time.perf_counter()
        self._waits.begin()
        self._clock.begin()

    def _end(self, failed: bool) -> None:
        now = self._last = self._now
        self._now = None
        assert now is not None
        reading = self._clock.end(self._on_gpu)
        self._waits.end()
        self._left_out.end()
        ended, self._ended = self._ended, None
        if failed:
            return
        if not 0 < self._returned >= self._weighed:
            raise InvalidArgument(
                f"step: it ended without a backward: {self._weighed} losses went through weigh(), and {self._returned} had their backward. DDP and "
                "FSDP make the other ranks wait for this rank's gradients. Call weigh(loss).backward() inside of step()."
            )
        self._sampler.trained(now.stamp)
        self._times.add(now.stamp, reading, -1.0 if ended is None or self._on_gpu else self._began - ended)
        if now.complete:
            self._times.exchange()
        self._ended = time.perf_counter()


class _Step(contextlib.AbstractContextManager[None]):
    def __init__(self, ranks: BalancedRanks) -> None:
        self._ranks = ranks

    def __enter__(self) -> None:
        self._ranks._begin()

    def __exit__(self, kind: object, *_: object) -> None:
        self._ranks._end(kind is not None)
