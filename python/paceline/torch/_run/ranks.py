"""One step of several processes: each is one rank, which owns all devices of its machine and computes the gradient of its part of the batch."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from paceline import DeviceLost, Error, InvalidArgument
from paceline._stop import stop_requested
from paceline.torch._batch.objective import Objective
from paceline.torch._devices.failures import error_of_lost
from paceline.torch._replicas.replicas import Replicas
from paceline.torch._run.gradients import DTYPES
from paceline.torch._run.rank_checks import check_module
from paceline.torch._run.rank_exchange import Exchange
from paceline.torch._run.rank_header import AGAIN, FAILED, Header, Opening, Whole
from paceline.torch._run.rank_rounds import Rounds, without_items
from paceline.torch._run.rank_sums import Layouts, RankSums
from paceline.torch._run.recipe import Retry, RetryError

Gradients = list[torch.Tensor | None]

_AGAIN = Retry("the gradients of a rank did not count, after some had been sent", most=8, complete=True)


class Ranks(Exchange):
    """The ranks that train one module, of which this process is one. Subclasses say how they exchange what they know.

    All ranks make the same calls. Each runs its own part of a batch, and its gradients are summed with those of the others, bucket by bucket in
    the order that rank 0 has told. All ranks commit, or none. What they have to know of each other is in a `Header`.

    A rank that can send buckets while backward goes on exchanges a header first, and waits for nothing: what it was called with, and the
    weight of its part. It sends a bucket when its gradients are final, and not before the first headers are there and agree. Beside the last
    sums it exchanges a second header: whether it has succeeded, and which gradients there are.

    A rank that has nothing to send early (one bucket, several devices, no items) says all of this in one header, when its part has ended, and
    sends its buckets then. If others send early, it exchanges their second header with them.

    What a rank computes is divided by the weight that the last batch of all ranks had, since a divisor that is far too small could overflow
    half precision. If the headers tell another weight, each bucket is rescaled before it is sent.

    A rank that has failed sends zeros in place of the buckets that are left, and says no. A rank whose memory was too short sends nothing
    before its next attempt, which sends what the first one had not. If another attempt is needed for any other reason, and something was
    sent, all ranks make another one.
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
        self._sums: RankSums | None = None  # of this call, from `open` to its second header
        self._weight: float | None = None  # of the last batch of all ranks
        self._alone = False  # whether an error of this rank would be news to the others, which go on
        self.agreed: tuple[torch.Tensor, Gradients] | None = None  # the objective and gradients that all ranks commit
        self.rank = 0
        self._began = 0.0  # when this call began; later by the time that it has waited for other ranks
        self._ended: float | None = None  # when the ranks had last exchanged gradients, unless a call has failed since
        self._laid_out = Layouts()
        self.rounds: Rounds | None = None  # in which their norms meet, if they do
        self.norms = 0  # a checksum of the norms that meet in this call; 0: none

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

    def prepare(self, replicas: Replicas) -> bool:
        """Lay the gradients out in buckets, before `open` and `close`. Whether there are several, so that some can be sent early."""
        self._layout, self.buckets = self._laid_out.of(replicas)
        self.norms = 0 if self.rounds is None else self.rounds.mark(replicas)
        self._replicas = replicas
        return len(self.buckets.layout.buckets) > 1

    def divisor(self, objective: Objective) -> float:
        """What a part is divided by before all is known: the weight of the last whole batch, or that of the part if it is larger."""
        return objective.total or max(self._weight or 0.0, objective.divisor)

    @property
    def opened(self) -> bool:
        """Whether this call was opened, by this attempt or an earlier one."""
        return self._sums is not None

    def open(self, objective: Objective, *, scale: torch.Tensor | None = None, steps: int = 0) -> RankSums:
        """Tell the other ranks what they have to agree on, and the weight of this rank's part. Later attempts of the call get the same sums.

        Nothing waits here, unless norms meet: a rank that comes first begins with its work. What the others tell is looked at before the first
        bucket is sent. The parameters are those of `close`.
        """
        if self._sums is not None:
            return self._sums
        header = self._header(objective, scale, steps)
        self._exchanged = self._alone = True
        opening = self._post(header._replace(opens=1))
        self._sums = sums = self._sums_of(header, self.divisor(objective), opening)
        if self.rounds is not None and self.norms:
            self.rounds.begin()
            sums.rounds = self.rounds
        self._alone = False
        if sums.rounds is not None:
            self._begin_rounds(sums, opening)
        return sums

    def _begin_rounds(self, sums: RankSums, opening: Opening) -> None:
        """Begin an attempt in which ranks meet, together with all ranks."""
        arrived = time.perf_counter()
        with self._talking():
            opening.wait()  # an interrupt meanwhile is no news to the others
        whole = self._settle(sums, opening.whole)
        if whole.idle:
            self._sums, self._alone = None, False
            raise without_items(self._call, whole.idle)
        # Devices sum gradients over all ranks in the middle of their backward, so all have to divide by the same.
        sums.divide_by(sums.header.total or whole.weight)
        self._began += time.perf_counter() - arrived
        self._alone = False

    def _end_rounds(self, sums: RankSums, *, failed: bool) -> None:
        """The devices of this rank have ended. Raises if ranks have not met in the same norms, unless this one has `failed`."""
        if sums.rounds is not None:
            with self._talking():
                apart = sums.rounds.end(failed=failed)
            if apart is not None and not failed:
                raise apart

    def _header(self, objective: Objective, scale: torch.Tensor | None, steps: int) -> Header:
        runs = objective.size > 0 and (objective.magnitude > 0 or self.norms)
        return Header(
            failed=0,
            stop=stop_requested(),
            call=zlib.crc32(f"{self._call} {objective.reduction}".encode()),
            layout=self._layout,
            total=objective.total or 0,
            scale=0 if scale is None or not runs else float(scale),
            steps=steps,
            items=objective.size,
            weight=objective.weight,
            norms=self.norms,
        )

    def _sums_of(self, header: Header, divisor: float, opening: Opening | None = None) -> RankSums:
        sums = RankSums(self.buckets.layout, self.buckets.memory(self._home), divisor, self._start, header, opening)
        sums.between = -1 if self._ended is None else self._began - self._ended
        return sums

    def _settle(self, sums: RankSums, opening: Callable[[], Whole]) -> Whole:
        """Wait for what the other ranks have told first. From here on an error of this rank would be news to them."""
        self._alone = True
        try:
            whole = opening()
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
        self._weight = whole.weight
        return whole

    def close(
        self,
        objective: Objective,
        loss: torch.Tensor | None,
        gradients: Gradients,
        *,
        scale: torch.Tensor | None = None,
        steps: int = 0,
    ) -> tuple[torch.Tensor, Gradients]:
        """The objective over all ranks and its gradients, which are `agreed` from now on. Without `open` it says yes in its first header.

        Parameters
        ----------
        objective
            That of this rank's part, whose magnitude is 0 if the part is empty.
        loss, gradients
            The sum over this rank's items, divided by the sums' divisor, without `open` by the objective's, and its gradients. None if the part
            is empty. Gradients that were sent already are not looked at.
        scale, steps
            What the gradients are multiplied by, if they are, and how many steps this rank has trained before.

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
        opened = sums is not None
        if sums is None:
            sums = self._sums_of(self._header(objective, scale, steps), objective.divisor)
        else:
            seconds -= 0.0 if sums.rounds is None else sums.rounds.waited
            self._settle(sums, sums.opening_headers)
            self._alone = False
            self._end_rounds(sums, failed=False)
        sums.fill_rest(gradients)
        present = sums.present(len(gradients))
        header = sums.header._replace(
            stop=stop_requested(),
            present=zlib.crc32(bytes(present)),
            loss=0 if loss is None else float(loss) * sums.divisor,
            loss_type=-1 if loss is None else DTYPES.get(loss.dtype, 0),
            seconds=seconds,
            between=sums.between,
            order=self.rank == 0 and bool(self.buckets.news),
        )
        if opened:
            whole = self._vote(sums, header, goes_on=True)
        else:
            whole = self._settle(sums, lambda: self._meet(header, goes_on=True))
            sums.send()
            if whole.opens:  # others have not
                whole = self._vote(sums, header, goes_on=True)
            else:
                with self._talking():
                    sums.wait()
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
        divisor = sums.header.total or whole.weight
        value = torch.tensor(whole.loss / divisor, dtype=whole.loss_type, device=self._home)
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
        """`close` for gradients that are there already, divided by `Objective.divisor`. Again, if another rank has to run again."""
        self.prepare(replicas)
        while True:
            if self.norms:  # raises on all ranks, since this one has no items
                self.open(objective, scale=scale, steps=steps)
            try:
                return self.close(objective, loss, gradients, scale=scale, steps=steps)
            except RetryError:
                continue

    def run_again(self, *, memory: bool) -> None:
        """Before another attempt: let all ranks make one if norms meet, or if sent gradients do not count. After running out of `memory` they do."""
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
            self._settle(sums, sums.opening_headers)
        except Error:  # no rank has sent anything
            return
        self._alone = True
        self._end_rounds(sums, failed=True)
        sums.fill_rest([None] * len(self._replicas.parameters))
        self._vote(sums, sums.header._replace(failed=vote, stop=stop_requested()), error)

    def _vote(
        self, sums: RankSums, header: Header, error: BaseException | None = None, *, goes_on: bool = False
    ) -> Whole:
        """Exchange the headers that end a step, while the last sums are under way: a rank that cannot finish its sums is gone for all."""
        header = header._replace(call=zlib.crc32(f"{self._call} ends".encode()))
        with self._talking():
            sums.check()
        return self._meet(header, error, goes_on=goes_on, meanwhile=sums.wait)

    def _meet(
        self,
        header: Header,
        error: BaseException | None = None,
        *,
        goes_on: bool = False,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Whole:
        """Exchange the headers of all ranks.

        `error`: why this rank has failed, which it raises itself. `goes_on`: whether other exchanges follow, if all have succeeded. `meanwhile`:
        another exchange, which is waited for together with this one.
        """
        self._alone = True
        self._exchanged = True
        try:
            whole = self._exchange(header, error, meanwhile)
        except Error:  # all ranks raise it, or cannot be reached
            self._sums, self._alone = None, False
            raise
        if whole.again:
            self._sums, self._alone, self._exchanged, self._began = None, False, False, time.perf_counter()
            raise RetryError(_AGAIN)
        self._alone = goes_on
        return whole

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        """Around an exchange, and nothing else."""
        try:
            yield
        except Exception as error:
            lost = self._lost(error)
            self._sums, self._alone = None, False
            raise lost from error

    @property
    def _code(self) -> int:
        return zlib.crc32(self._call.encode())
