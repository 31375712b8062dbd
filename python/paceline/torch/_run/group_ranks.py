"""The ranks of a process group of torch.distributed."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline import DeviceLost, Error, InvalidArgument, Timeout
from paceline._stop import stop_requested
from paceline._words import plural
from paceline.balance import Balancer
from paceline.torch._batch.global_sampler import GlobalBatchSampler
from paceline.torch._devices.failures import error_of_lost, noted
from paceline.torch._replicas.replicas import Replicas
from paceline.torch._run.gradients import DTYPES
from paceline.torch._run.rank_checks import check_group
from paceline.torch._run.rank_header import AGAIN, FAILED, Header, Opening, Whole
from paceline.torch._run.rank_rounds import rounds_of
from paceline.torch._run.rank_shares import RankShares
from paceline.torch._run.ranks import Ranks

_PING = 7331  # the tag of messages that only ask whether a rank is there
# How long to wait for an answer; other ranks notice the failure at about the same time.
_PATIENCE = timedelta(seconds=5)
_TEXT_BYTES = 400  # of an error's text that the other ranks get to know

# What has to be equal on all ranks, and what to say if it is not.
_EQUAL = {
    "call": "called something else than {other}. All ranks of a group make the same calls of the trainer in the same order, with the same "
    "terms in weight= and total=, and the same reduction=, also where a rank has no items left: batch=None.",
    "layout": "other parameters than {other}: names, shapes, strides, types and requires_grad have to be equal. Make the same module on all ranks, "
    "and freeze the same parameters.",
    "batch": "another sampler than {other}, or is at another global batch. All ranks make the same sampler, of the same size, lengths, costs, seed "
    "and state, and take all of its batches in the same order.",
    "steps": "trained {mine:g} steps before, {other} {theirs:g}. Load the same save on all ranks: load() warns if it takes an older one than "
    "the newest.",
    "scale": "a scaler with the scale {mine:g}, {other} with {theirs:g}. Give all ranks scalers of the same state.",
    "norms": "other normalisations with the statistics of the batch than {other}, in which ranks would meet. Make all trainers with the same "
    "batch_norm=, and put the same modules into training mode on all ranks.",
    "total": "total={mine}, {other} has total={theirs} (0: none). It is the denominator over all ranks, so give all the same number, or leave "
    "it out.",
}


class GroupRanks(Ranks):
    """The ranks of a process group.

    Parameters
    ----------
    group
        The process group. Its backend has to move memory of `home`.
    module
        The trainer's module.
    home
        Where the parameters are.

    Raises
    ------
    InvalidArgument
        If `group` or `module` cannot be used.
    """

    early = True

    def __init__(self, group: Any, module: nn.Module, home: torch.device) -> None:
        super().__init__(module, home)
        check_group(group, home)
        self._group = group
        # Headers lie on the host if the backend takes host memory, so that nothing waits for a GPU on their behalf.
        self._place = torch.device("cpu") if "cpu:" in dist.get_backend_config(group) else home
        self.rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self.dealt: RankShares | None = None  # set where global batches are dealt out to the ranks
        self._numbers = [dist.get_global_rank(group, rank) for rank in range(self._size)]

    def share(self, replicas: Replicas, *, synchronised: bool = False) -> None:
        """Give all ranks the parameters and buffers of rank 0, as DistributedDataParallel does."""
        if replicas.sparse:
            raise InvalidArgument(
                f"DataParallel: group= together with a sparse buffer ({replicas.sparse[0][1]!r}), which is not sent to other ranks. Make it a plain "
                "attribute that every rank sets, or dense."
            )
        buffers = [buffer for part in replicas.modules for buffer in part._buffers.values() if buffer is not None]
        with self.together("DataParallel"):
            if synchronised and not dist.is_gloo_available():
                raise InvalidArgument(
                    "DataParallel: batch_norm='synchronised' together with group= needs gloo, which this build of PyTorch does not have."
                )
            text = repr([(tuple(buffer.shape), str(buffer.dtype)) for buffer in buffers])
            layout = zlib.crc32(text.encode(), self._laid_out.checksum(replicas))
            self._meet(Header(0, 0, self._code, layout, norms=synchronised))
        if synchronised:
            with self._talking():
                self.rounds = rounds_of(self._group, self._place)
        with torch.no_grad():
            for tensor in [*replicas.parameters, *buffers]:
                there = tensor.detach() if self._place.type == "cpu" else tensor.detach().to(self._home)
                # As bytes, since backends do not know all types.
                flat = there.contiguous().reshape(-1).view(torch.uint8)
                with self._talking():
                    dist.broadcast(flat, self._numbers[0], group=self._group)
                if self.rank > 0:
                    tensor.copy_(flat.view(tensor.dtype).reshape(tensor.shape))

    def deal(
        self,
        make: Callable[[int, int], GlobalBatchSampler],
        decided: Callable[[], tuple[str, list[float], bool | str]],
        kind: int,
        every_rank: bool,
    ) -> GlobalBatchSampler:
        """A sampler of global batches for this rank, which `make` makes for a rank of so many.

        Parameters
        ----------
        decided
            Returns how to share a batch: a policy of `Balancer`, its ratios, and the balancer's `ledger`. What it returns on rank 0 counts.
        kind
            A checksum of the devices of this rank. Ranks of equal kind count as equally fast until measured.
        every_rank
            Whether each rank has an item of every batch at least.
        """
        self.dealt = None
        names = [f"rank {number}" for number in self._numbers]
        with self.together("batch_sampler"):
            policy, ratios, ledger = decided()
            if ratios and len(ratios) != self._size:
                raise InvalidArgument(
                    f"batch_sampler: balance has {plural(len(ratios), 'ratio')} for {plural(self._size, 'rank')}. Give one for each rank of the group."
                )
            if every_rank and ratios and not min(ratios) > 0:
                raise InvalidArgument(
                    f"batch_sampler: balance is {ratios}, and with batch_norm='synchronised' each rank needs items. Give each a number above 0."
                )
            sampler = make(self.rank, self._size)
            options: dict[str, Any] = {
                "policy": policy,
                "weights": ratios or None,
                "unit": sampler.unit,
                "may_be_zero": not every_rank,
            }
            if policy == "auto" and sampler.least_units > 1:
                # A rank with less would get an item all the same, and take longer than planned.
                options["minimum"] = sampler.least_units
            Balancer(names, **options)  # raises on every rank if it cannot be made
            self._meet(Header(0, stop_requested(), self._code, batch=sampler.mark()), goes_on=True)
            with self._talking():
                kinds = self._gather(torch.tensor([kind], device="cpu"))[:, 0].tolist()
            self._exchanged = self._alone = False  # all ranks hear if rank 0 cannot write its ledger
            classes = [f"kind {kinds.index(one) + 1}" for one in kinds]
            balancer = None if self.rank else Balancer(names, device_classes=classes, ledger=ledger, **options)
            dealt = RankShares(sampler, balancer)
            self._meet(Header(0, stop_requested(), self._code), goes_on=True)
            with self._talking(), sampler.lock:
                self._follow(dealt, 0)
            self._alone = False
        self.dealt = dealt
        return sampler

    def _follow(self, dealt: RankShares, first: int) -> None:
        """Bring the shares that rank 0 has decided on to all ranks, for global batches from `first` on."""
        plan, *shares = self._tell([dealt.plan, *dealt.shares])
        dealt.follow(first, plan, shares)

    def _exchange(self, header: Header, error: BaseException | None, meanwhile: Callable[[], None]) -> Whole:
        if self.dealt is None:
            return self._exchanged_headers(header, error, meanwhile)[1]
        dealt = self.dealt

        def both() -> None:
            dealt.decide()
            meanwhile()

        # No batch is drawn meanwhile, also not by a thread of the caller's: each rank says how many it has drawn, and new shares hold after these.
        # Rank 0 decides while the headers are on their way, which costs no time, and says so in the next step.
        with dealt.sampler.lock:
            header = header._replace(batch=dealt.sampler.mark(), drawn=dealt.sampler.drawn, plan=dealt.plan)
            headers, whole = self._exchanged_headers(header, error, both)
            if whole.opens:  # another header of all ranks follows
                return whole
            if header.seconds and not header.failed and not whole.again:
                dealt.measured(headers)
            if error is None and headers[0].plan != dealt.followed:
                with self._talking():
                    self._follow(dealt, int(max(one.drawn for one in headers)))
        return whole

    def _post(self, header: Header) -> Opening:
        if self.dealt is not None:
            with self.dealt.sampler.lock:
                header = header._replace(batch=self.dealt.sampler.mark())
        with self._talking():
            work, found = self._gathering(torch.tensor(header, dtype=torch.float64, device="cpu"))

        def headers() -> list[Header]:
            return [Header(*row) for row in torch.stack(found).tolist()]

        def weight() -> float | None:
            if self._place.type != "cpu" or not work.is_completed():
                return None
            told = headers()
            agree = not any(one.failed for one in told) and self._difference(told) is None
            return sum(one.weight for one in told) if agree else None

        def whole() -> Whole:
            with self._talking():
                work.wait()
                told = headers()
            return self._judged(header, told, None)

        return Opening(weight, whole, work.wait)

    def _exchanged_headers(
        self, header: Header, error: BaseException | None, meanwhile: Callable[[], None]
    ) -> tuple[list[Header], Whole]:
        with self._talking():
            work, found = self._gathering(torch.tensor(header, dtype=torch.float64, device="cpu"))
            meanwhile()
            work.wait()
            headers = [Header(*row) for row in torch.stack(found).tolist()]
        return headers, self._judged(header, headers, error)

    def _judged(self, header: Header, headers: list[Header], error: BaseException | None) -> Whole:
        """What the headers of all ranks say together. Raises, on every rank, if they do not agree, or a rank has failed."""
        with self._talking():
            self.stop = any(one.stop for one in headers)
            failed = [rank for rank, one in enumerate(headers) if one.failed == FAILED]
            again = not failed and any(one.failed == AGAIN for one in headers)
            texts = self._texts(error) if failed else []
        others = [rank for rank in failed if rank != self.rank]
        what = "; ".join(f"rank {self._numbers[rank]}: {texts[rank]}" for rank in others)
        if error is not None:
            noted(
                error,
                f"raised on rank {self._numbers[self.rank]}; no rank has committed anything{'; ' * bool(what)}{what}",
            )
        elif failed:
            raise Error(
                f"{self._call}: {'ranks' if len(others) > 1 else 'a rank'} failed, so no rank has committed anything, and .grad is as before. "
                f"{what}. That process has the whole traceback."
            )
        else:
            if (different := self._difference(headers)) is not None:
                raise InvalidArgument(f"{self._call}: {different}")
            if header.seconds and not again and not any(one.opens for one in headers):
                self.last = [{"items": int(one.items), "seconds": one.seconds} for one in headers]
        number = max(one.loss_type for one in headers)
        return Whole(
            weight=sum(one.weight for one in headers),
            loss=sum(one.loss for one in headers),
            loss_type=next((dtype for dtype, code in DTYPES.items() if code == number), torch.float32),
            same_gradients=all(one.present == headers[0].present for one in headers),
            order=bool(headers[0].order),
            again=again,
            opens=any(one.opens for one in headers),
            idle=tuple(number for number, one in zip(self._numbers, headers, strict=True) if not one.items),
        )

    def _difference(self, headers: list[Header]) -> str | None:
        """In which way ranks differ in what has to be equal. The same on every rank."""
        first = headers[0]
        for rank, one in enumerate(headers):
            for field, text in _EQUAL.items():
                mine, theirs = getattr(one, field), getattr(first, field)
                if mine == theirs or (field == "scale" and not (mine and theirs)):
                    continue
                other = f"rank {self._numbers[0]}"
                return f"rank {self._numbers[rank]} has {text.format(mine=mine, theirs=theirs, other=other)}"
        return None

    def _union(self, present: list[bool]) -> list[bool]:
        found: list[bool] = self._gather(torch.tensor(present, dtype=torch.uint8, device="cpu")).any(0).tolist()
        return found

    def _start(self, bucket: torch.Tensor) -> Any:
        return dist.all_reduce(bucket, group=self._group, async_op=True)

    def _tell(self, numbers: list[int]) -> list[int]:
        told = torch.tensor(numbers, device=self._place)
        dist.broadcast(told, self._numbers[0], group=self._group)
        found: list[int] = told.tolist()
        return found

    def _gather(self, mine: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, one per row, on the host."""
        work, found = self._gathering(mine)
        work.wait()
        return torch.stack(found).cpu()

    def _gathering(self, mine: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
        """Start to bring the tensors of all ranks to this one."""
        mine = mine.to(self._place)
        found = [torch.empty_like(mine) for _ in range(self._size)]
        return dist.all_gather(found, mine, group=self._group, async_op=True), found

    def _texts(self, error: BaseException | None) -> list[str]:
        """What each rank says of its error."""
        text = "" if error is None else type(error).__name__
        with contextlib.suppress(Exception):  # of an error that cannot say what it is
            text += "" if error is None else f": {error}"
        cut = text.encode(errors="replace")[:_TEXT_BYTES].ljust(_TEXT_BYTES)
        rows = self._gather(torch.frombuffer(bytearray(cut), dtype=torch.uint8))
        return [bytes(row.tolist()).decode(errors="ignore").strip() for row in rows]

    def _lost(self, error: Exception) -> Error:
        reason = str(error).strip().splitlines()[0]
        late = "timed out" in reason.lower() or "timeout" in reason.lower()
        gone = self._unreachable()
        self._gone = f"rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone))}" if gone else None
        self._broken = (
            f"{self._gone or 'another rank'} {'did not answer in time' if late else 'is gone'} ({reason}). The step that noticed it has committed "
            "nothing, and left .grad as before. The process group is of no further use: save what you need, end all ranks and start them anew."
        )
        return error_of_lost(Timeout if late else DeviceLost, f"{self._call}: {self._broken}", self._gone)

    def _unreachable(self) -> list[int]:
        """The ranks that cannot be reached after an exchange has failed, as far as that can be told: the error says it of none."""
        others = [number for rank, number in enumerate(self._numbers) if rank != self.rank]
        if len(others) == 1:
            return others
        if self._place.type != "cpu":  # NCCL would wait
            return []
        closed: list[int] = []
        asked: list[tuple[int, Any, Any]] = []
        for number in others:
            try:  # this raises at once where the connection is closed; the other ranks ask in the same way
                sent = dist.isend(torch.zeros(1, device="cpu"), number, group=self._group, tag=_PING)
                asked.append(
                    (number, sent, dist.irecv(torch.zeros(1, device="cpu"), number, group=self._group, tag=_PING))
                )
            except RuntimeError:
                closed.append(number)
        silent = []
        for number, *works in asked:
            try:
                for work in works:
                    work.wait(_PATIENCE)
            except RuntimeError:
                silent.append(number)
        return closed or silent
