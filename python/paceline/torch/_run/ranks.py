"""One step of several processes: each is one rank, which owns all devices of its machine and computes the gradient of its part of the batch."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from paceline import DeviceLost, Error, InvalidArgument
from paceline._stop import stop_requested
from paceline.torch._batch.objective import Objective
from paceline.torch._devices.failures import error_of_lost
from paceline.torch._replicas.replicas import Replicas
from paceline.torch._run.gradients import DTYPES
from paceline.torch._run.rank_header import AGAIN, FAILED, Header, Opening, Whole
from paceline.torch._run.rank_module import ParameterMark, check_module
from paceline.torch._run.rank_rounds import Rounds, without_items
from paceline.torch._run.rank_sums import Buckets, RankSums
from paceline.torch._run.recipe import Retry, RetryError

Gradients = list[torch.Tensor | None]

_AGAIN = Retry("the gradients of a rank did not count, after some had been sent", most=8, complete=True)
_MOST_LAYOUTS = 4  # two networks that are frozen in turns have two; each keeps memory for all gradients


class Ranks:
    """The ranks that train one module, of which this process is one. Subclasses say how they exchange what they know.

    All ranks make the same calls. In a call that trains, all exchange a `Header` first: what they were called with, and the weight of every
    part. No rank waits for it. Each runs its own part of the batch, and its gradients are summed with those of the others, bucket by bucket in
    the order that rank 0 has told. A bucket is sent when its gradients are final, while backward goes on, and not before the first headers are
    there and agree. In the end all exchange a second header: whether they have succeeded, and which gradients there are. All ranks commit, or none.

    What a rank computes is divided by the weight that the last batch of all ranks had. If the headers tell another weight, each bucket is
    rescaled before it is sent.

    A rank that has failed sends zeros in place of the buckets that are left, and says no. A rank whose memory was too short sends nothing
    before its next attempt, which sends what the first one had not. If another attempt is needed for any other reason, and something was
    sent, all ranks make another one.

    If norms meet over all ranks, every attempt begins on all of them together, when they agree.
    """

    early = False  # whether buckets may be sent from a worker, while backward goes on

    def __init__(self, module: nn.Module, home: torch.device) -> None:
        check_module(module)
        self.stop = False  # whether any rank was asked to stop, as all ranks know since the last call
        self.last: list[dict[str, float]] = []  # of each rank in the last step, where that is known
        self._home = home
        self._broken = ""  # why no further call is possible
        self._gone: str | None = None  # the ranks that cannot be reached, if that is known
        self._call = ""
        self._exchanged = True  # whether the ranks have exchanged headers in this call
        self._sums: RankSums | None = None  # of this call, from its first header to its second
        self._replicas: Any = None  # of this call
        self._weight: float | None = None  # of the last batch of all ranks
        self._alone = False  # whether an error of this rank would be news to the others, which go on
        self.agreed: tuple[torch.Tensor, Gradients] | None = None  # the objective and gradients that all ranks commit
        self.rank = 0
        self._began = 0.0  # when this call began; later by the time that it has waited for other ranks
        self.rounds: Rounds | None = None  # in which their norms meet, if they do
        self._ended: float | None = None  # when the ranks had last exchanged gradients, unless a call has failed since
        self._mark = ParameterMark()
        self._buckets: dict[int, Buckets] = {}  # by the checksum of the parameters, least recently used first

    def share(self, replicas: Replicas, *, synchronised: bool = False) -> None:
        """Before the first call: make sure that all ranks have the same parameters and buffers. `synchronised`: their norms meet, too."""

    @contextlib.contextmanager
    def together(self, call: str) -> Iterator[None]:
        """One call that all ranks make. If it fails here, the other ranks are told; if it fails elsewhere, it raises here."""
        if self._broken:
            raise error_of_lost(DeviceLost, f"{call}: {self._broken}", self._gone)
        self._begin(call)
        try:
            yield
            if not self._exchanged:  # a call without gradients
                self._meet(Header(0, stop_requested(), self._code))
        except BaseException as error:
            self._ended = None
            try:
                with contextlib.suppress(Error):  # of a rank that is gone; the error at hand says more
                    if not self._exchanged:
                        self._meet(Header(FAILED, stop_requested(), self._code), error)
                    elif self._sums is not None and not self._alone:
                        self._leave(self._sums, FAILED, error)
            finally:
                if self._alone and not self._broken:
                    self._broken = (
                        f"this rank has left {call} in the middle ({type(error).__name__}), and the other ranks have not. End all ranks and "
                        "start them anew from what you saved last."
                    )
            raise

    def _begin(self, call: str) -> None:
        self._call, self._exchanged, self._alone, self._began = call, False, False, time.perf_counter()
        self.agreed = self._sums = None

    def weights(self, described: str, mine: list[float]) -> list[float]:
        """The weights of several terms over all ranks. One rescaling afterwards cannot do, so they are exchanged before the step.

        Raises
        ------
        InvalidArgument
            On all ranks, if they do not agree about the terms, which are `described`.
        """
        arrived = time.perf_counter()
        self._meet(Header(0, stop_requested(), zlib.crc32(f"{self._call} {described}".encode())), goes_on=True)
        found = torch.tensor(mine, dtype=torch.float64, device=self._home)
        with self._talking():
            self._add(found)
        self._exchanged = self._alone = False
        self._began += time.perf_counter() - arrived
        numbers: list[float] = found.tolist()
        return numbers

    def open(
        self,
        replicas: Replicas,
        objective: Objective,
        *,
        scale: torch.Tensor | None = None,
        steps: int = 0,
        divisor: float | None = None,
    ) -> RankSums:
        """Tell the other ranks what they have to agree on, and the weight of this rank's part. Later attempts of the call get the same sums.

        Nothing waits here, unless norms meet: a rank that comes first begins with its work. What the others tell is looked at before the first bucket is sent.

        Parameters
        ----------
        objective
            That of this rank's part, whose magnitude is 0 if the part is empty.
        scale
            What the gradients are multiplied by, if they are.
        steps
            How many steps this rank has trained before.
        divisor
            What the objective is divided by on this rank. None: the weight of the last whole batch, or that of this part if it is larger.
        """
        if self._sums is not None:
            return self._sums
        norms = 0 if self.rounds is None else self.rounds.mark(replicas)
        runs = objective.size > 0 and (objective.magnitude > 0 or norms)
        layout = self._mark.of(replicas)
        known = self._buckets.pop(layout, None)
        buckets = self.buckets = Buckets() if known is None else known
        if len(self._buckets) >= _MOST_LAYOUTS:
            del self._buckets[next(iter(self._buckets))]
        self._buckets[layout] = buckets
        buckets.begin(replicas)
        header = Header(
            failed=0,
            stop=stop_requested(),
            call=zlib.crc32(f"{self._call} {objective.reduction}".encode()),
            layout=layout,
            total=objective.total or 0,
            scale=0 if scale is None or not runs else float(scale),
            steps=steps,
            items=objective.size,
            weight=objective.weight,
            norms=norms,
        )
        self._exchanged = self._alone = True
        opening = self._post(header)
        if divisor is None:
            # The whole weighs at least what the part does. A divisor that is far too small could overflow half precision.
            divisor = objective.total or max(self._weight or 0.0, objective.divisor)
        sums = RankSums(buckets.layout, buckets.memory(self._home), divisor, self._start, opening)
        sums.header = header._replace(call=zlib.crc32(f"{self._call} ends".encode()))
        sums.between = -1 if self._ended is None else self._began - self._ended
        self._sums, self._replicas, self._alone = sums, replicas, False
        if self.rounds is not None and norms:
            self._begin_rounds(sums, self.rounds)
        return sums

    def _begin_rounds(self, sums: RankSums, rounds: Rounds) -> None:
        """Begin an attempt in which ranks meet, together with all ranks."""
        rounds.begin()
        sums.rounds = rounds
        arrived = time.perf_counter()
        whole = self._settle(sums)
        # Devices sum gradients over all ranks in the middle of their backward, so all have to divide by the same.
        sums.divide_by(sums.header.total or whole.weight)
        self._began += time.perf_counter() - arrived
        if whole.idle:
            self._sums = None
            raise without_items(self._call, whole.idle)

    def _end_rounds(self, sums: RankSums, *, failed: bool) -> None:
        """The devices of this rank have ended. Raises if ranks have not met in the same norms, unless this one has `failed`."""
        if sums.rounds is not None:
            with self._talking():
                apart = sums.rounds.end(failed=failed)
            if apart is not None and not failed:
                raise apart

    def _settle(self, sums: RankSums) -> Whole:
        """Wait for what the other ranks have opened the step with."""
        self._alone = True
        try:
            whole = sums.opening.whole()
            divisor = sums.header.total or whole.weight
            if not divisor > 0:
                self._agree()
                raise InvalidArgument(
                    f"{self._call}: the weights of all ranks sum to {divisor}; the objective is divided by that sum, so it must be positive. Skip "
                    "batches without weight, on all ranks."
                )
        except Error:  # all ranks raise it, or cannot be reached
            self._sums, self._alone = None, False
            raise
        sums.settle(divisor)
        self._weight, self._alone = whole.weight, False
        return whole

    def close(self, loss: torch.Tensor | None, gradients: Gradients) -> tuple[torch.Tensor, Gradients]:
        """The objective over all ranks and its gradients, which are `agreed` from now on.

        Parameters
        ----------
        loss
            The sum over this rank's items, divided by the sums' divisor. None if this rank's part is empty.
        gradients
            Those of `loss`. Those that were sent already are not looked at.

        Raises
        ------
        RetryError
            On all ranks, if one has to run again.
        RuntimeError
            On all ranks, if no rank has a gradient.
        InvalidArgument
            On all ranks, if they do not agree about the call, the parameters, `total`, `scale` or `steps`, if no rank has weight, or if their
            norms have not met in the same order.
        DeviceLost, Timeout
            If another rank cannot be reached. No further call is possible then.
        Error
            If another rank has failed.
        """
        sums, seconds = self._sums, time.perf_counter() - self._began
        assert sums is not None
        seconds -= 0.0 if sums.rounds is None else sums.rounds.waited
        self._settle(sums)
        self._end_rounds(sums, failed=False)
        sums.fill_rest(gradients)
        present = sums.present(len(gradients))
        header = sums.header._replace(
            stop=stop_requested(),
            present=zlib.crc32(bytes(present)),
            loss=0 if loss is None else float(loss) * sums.factor,
            loss_type=-1 if loss is None else DTYPES.get(loss.dtype, 0),
            seconds=seconds,
            between=sums.between,
            order=self.rank == 0 and bool(self.buckets.news),
        )
        with self._talking():
            sums.wait()
        whole = self._meet(header, goes_on=True)
        self._sums = None
        if not whole.same_gradients:
            with self._talking():
                present = self._union(present)
        if whole.order:
            with self._talking():
                order = self._tell(self.buckets.news or [0] * len(gradients))
            self.buckets.follow(self._replicas, order)
        self._agree()
        self._ended = time.perf_counter()
        if not any(present):
            self._alone = False
            raise RuntimeError(  # the type that plain PyTorch raises
                f"{self._call}: the loss does not require grad on any rank: no parameter that does reaches it (is it detached, or everything "
                "frozen?)."
            )
        value = torch.tensor(whole.loss, dtype=whole.loss_type, device=self._home)
        self.agreed = agreed = value, sums.totals(present)
        self._alone = False
        if self._home.type == "cpu" and sums.layout is self.buckets.layout:
            self.buckets.kept = sums.flats
        return agreed

    def sum(
        self,
        replicas: Replicas,
        objective: Objective,
        loss: torch.Tensor | None,
        gradients: Gradients,
        *,
        scale: torch.Tensor | None = None,
        steps: int = 0,
    ) -> tuple[torch.Tensor, Gradients]:
        """`open` and `close` in one, for gradients that are there already, divided by `Objective.divisor`."""
        while True:
            self.open(replicas, objective, scale=scale, steps=steps, divisor=objective.divisor)
            try:
                return self.close(loss, gradients)
            except RetryError:
                continue

    def run_again(self, *, memory: bool) -> None:
        """Before another attempt of the call: let all ranks make one if gradients were sent that do not count, or if norms meet.

        `memory`: the attempt before has run out of memory, so what it has sent does count.
        """
        if self._sums is None or self._alone:
            return
        if (memory or not self._sums.sent) and self._sums.rounds is None:
            self._sums.forget()
            return
        with contextlib.suppress(RetryError):
            self._leave(self._sums, AGAIN, None)

    def _leave(self, sums: RankSums, vote: int, error: BaseException | None) -> None:
        """Take part in the sums that are left without gradients, so that no rank waits, and say that they do not count."""
        try:
            self._settle(sums)
        except Error:  # no rank has sent anything
            return
        self._alone = True
        self._end_rounds(sums, failed=True)
        sums.fill_rest([None] * len(self._replicas.parameters))
        with self._talking():
            sums.wait()
        self._meet(sums.header._replace(failed=vote, stop=stop_requested()), error)

    def _meet(self, header: Header, error: BaseException | None = None, *, goes_on: bool = False) -> Whole:
        """Exchange the headers of all ranks.

        `error`: why this rank has failed, which it raises itself. `goes_on`: whether other exchanges follow, if all have succeeded.
        """
        self._alone = True
        self._exchanged = True
        try:
            whole = self._exchange(header, error)
        except Error:  # all ranks raise it, or cannot be reached
            self._sums, self._alone = None, False
            raise
        if whole.again:
            self._sums, self._alone, self._exchanged, self._began = None, False, False, time.perf_counter()
            raise RetryError(_AGAIN)
        self._alone = goes_on
        return whole

    def _post(self, header: Header) -> Opening:
        """Start to exchange the headers that open a step."""
        whole = self._meet(header, goes_on=True)
        return Opening(lambda: whole.weight, lambda: whole)

    def _exchange(self, header: Header, error: BaseException | None) -> Whole:
        """Raise on every rank unless all are in the same call and have succeeded."""
        raise TypeError("Ranks._exchange is for subclasses")

    def _union(self, present: list[bool]) -> list[bool]:
        """Which gradients there are on any rank."""
        raise TypeError("Ranks._union is for subclasses")

    def _tell(self, numbers: list[int]) -> list[int]:
        """The numbers of rank 0."""
        raise TypeError("Ranks._tell is for subclasses")

    def _start(self, bucket: torch.Tensor) -> Any:
        """Start to sum a bucket over all ranks, in place. The result is None, or has a method ``wait`` that returns when the sum is there."""
        raise TypeError("Ranks._start is for subclasses")

    def _add(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over all ranks, in place."""
        work = self._start(tensor)
        if work is not None and hasattr(work, "wait"):
            work.wait()

    def _agree(self) -> None:
        """Raise, on all ranks, unless the sums were complete."""

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        """Around an exchange, and nothing else."""
        try:
            yield
        except Exception as error:
            lost = self._lost(error)
            self._sums, self._alone = None, False
            raise lost from error

    def _lost(self, error: Exception) -> Error:
        """What to raise for an error of the exchange."""
        raise TypeError("Ranks._lost is for subclasses")

    @property
    def _code(self) -> int:
        return zlib.crc32(self._call.encode())
