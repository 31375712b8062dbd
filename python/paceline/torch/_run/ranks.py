"""One step of several processes: each is one rank, which owns all devices of its machine and computes the gradient of its part of the batch."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from paceline import DeviceLost, Error, InvalidArgument
from paceline._stop import stop_requested
from paceline.torch._batch.objective import Objective
from paceline.torch._replicas.replicas import Replicas
from paceline.torch._run.buckets import Layout
from paceline.torch._run.gradients import DTYPES

Gradients = list[torch.Tensor | None]


class Header(NamedTuple):
    """What a rank tells all others once in a step. Everything is a number that float64 holds exactly, except for sums and seconds."""

    failed: float  # 1 if the rank has nothing to commit
    stop: float  # 1 if a stop was asked for
    call: float  # a checksum of what was called
    layout: float = 0  # a checksum of names, shapes and types of the parameters
    present: float = 0  # a checksum of which gradients there are
    total: float = 0  # the caller's own denominator, or 0
    scale: float = 0  # of a scaler; 0 without one, and on a rank without items
    steps: float = 0  # that were trained before
    items: float = 0
    weight: float = 0
    loss: float = 0  # the weighted sum of the items' losses
    loss_type: float = -1  # its number in DTYPES
    seconds: float = 0  # of the rank's own work
    between: float = -1  # seconds of its own from the last exchange of gradients to this call; negative if unknown
    batch: float = 0  # a checksum of the sampler and of the global batch
    drawn: float = 0  # how many global batches the rank has drawn
    plan: float = 0  # the number of the newest plan of shares; that of rank 0 counts


class Whole(NamedTuple):
    """What is known of all parts of a batch together."""

    weight: float
    loss: float  # the weighted sum of the items' losses
    loss_type: torch.dtype
    same_gradients: bool  # whether all ranks have gradients of the same parameters


class Ranks:
    """The ranks that train one module, of which this process is one. Subclasses say how they exchange what they know.

    All ranks make the same calls. In each call a rank runs its own part of the batch, and then all exchange one `Header`. If every rank has
    succeeded, the gradients are summed, bucket by bucket in a fixed order. Otherwise all ranks raise. What a rank computes is divided by a
    number of its own, `Objective.divisor`. The header has the weight of every part, so each rank multiplies its buckets once by
    ``divisor / weight of all parts``, and the rest are sums.
    """

    def __init__(self, module: nn.Module, home: torch.device) -> None:
        _check_module(module)
        self.stop = False  # whether any rank was asked to stop, as all ranks know since the last call
        self.last: list[dict[str, float]] = []  # of each rank in the last step, where that is known
        self._home = home
        self._broken = ""  # why no further call is possible
        self._gone: str | None = None  # the ranks that cannot be reached, if that is known
        self._call = ""
        self._exchanged = True  # whether the ranks have exchanged headers in this call
        self._alone = False  # whether an error of this rank would be news to the others, which go on
        self.agreed: tuple[torch.Tensor, Gradients] | None = None  # the objective and gradients that all ranks commit
        self.rank = 0
        self._began = 0.0
        self._ended: float | None = None  # when the ranks had last exchanged gradients, unless a call has failed since
        self._checksum: tuple[int, int] = (
            -1,
            0,
        )  # of the parameters, after the generation of the replicas that it is for
        self._laid_out: tuple[tuple[int, bytes], Layout] | None = None  # the last layout, after what it was made for

    def share(self, replicas: Replicas) -> None:
        """Before the first call: make sure that all ranks have the same parameters and buffers."""

    @contextlib.contextmanager
    def together(self, call: str) -> Iterator[None]:
        """One call that all ranks make. If it fails here, the other ranks are told; if it fails elsewhere, it raises here."""
        if self._broken:
            raise error_of_lost(DeviceLost, f"{call}: {self._broken}", self._gone)
        self._call, self._exchanged, self._alone, self._began = call, False, False, time.perf_counter()
        self.agreed = None
        try:
            yield
            if not self._exchanged:  # a call without gradients
                self._meet(Header(0, stop_requested(), self._code))
        except BaseException as error:
            self._ended = None
            if not self._exchanged:
                with contextlib.suppress(Error):  # of a rank that is gone; the error at hand says more
                    self._meet(Header(1, stop_requested(), self._code), error)
            elif self._alone and not self._broken:
                self._broken = (
                    f"this rank has left {call} in the middle ({type(error).__name__}), and the other ranks have not. End all ranks and start them "
                    "anew from what you saved last."
                )
            raise

    def weights(self, described: str, mine: list[float]) -> list[float]:
        """The weights of several terms over all ranks. One rescaling afterwards cannot do, so they are exchanged before the step.

        Raises
        ------
        InvalidArgument
            On all ranks, if they do not agree about the terms, which are `described`.
        """
        self._meet(Header(0, stop_requested(), zlib.crc32(f"{self._call} {described}".encode())), goes_on=True)
        found = torch.tensor(mine, dtype=torch.float64, device=self._home)
        with self._talking():
            self._add(found)
        self._exchanged = self._alone = False
        numbers: list[float] = found.tolist()
        return numbers

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
        """The objective over all ranks and its gradients, from those of this rank's part of the batch. They are `agreed` from now on.

        Parameters
        ----------
        loss
            None if this rank's part is empty.
        scale
            What the gradients are multiplied by, if they are.
        steps
            How many steps this rank has trained before.

        Raises
        ------
        InvalidArgument
            On all ranks, if they do not agree about the call, the parameters, `total`, `scale` or `steps`, or if no rank has weight.
        RuntimeError
            On all ranks, if no rank has a gradient.
        DeviceLost, Timeout
            If another rank cannot be reached. No further call is possible then.
        Error
            If another rank has failed.
        """
        present = [gradient is not None for gradient in gradients]
        layout, buckets = self._filled(replicas, gradients, present)
        whole = self._meet(
            Header(
                failed=0,
                stop=stop_requested(),
                call=zlib.crc32(f"{self._call} {objective.reduction}".encode()),
                layout=self._layout_of(replicas),
                present=zlib.crc32(bytes(present)),
                total=objective.total or 0,
                scale=0 if scale is None or loss is None else float(scale),
                steps=steps,
                items=objective.size,
                weight=objective.weight,
                loss=0 if loss is None else float(loss) * objective.divisor,
                loss_type=-1 if loss is None else DTYPES.get(loss.dtype, 0),
                seconds=time.perf_counter() - self._began,
                between=-1 if self._ended is None else self._began - self._ended,
            ),
            goes_on=True,
        )
        divisor = objective.total or whole.weight
        if not divisor > 0:
            self._agree()
            self._alone = False
            raise InvalidArgument(
                f"{self._call}: the weights of all ranks sum to {divisor}; the objective is divided by that sum, so it must be positive. Skip "
                "batches without weight, on all ranks."
            )
        if not whole.same_gradients:
            with self._talking():
                present = self._union(present)
            layout, buckets = self._filled(replicas, gradients, present)
        for bucket in buckets:
            if objective.divisor != divisor:
                bucket.mul_(objective.divisor / divisor)
            with self._talking():
                self._add(bucket)
        self._agree()
        if not any(present):
            self._alone = False
            raise RuntimeError(  # the type that plain PyTorch raises
                f"{self._call}: the loss does not require grad on any rank: no parameter that does reaches it (is it detached, or everything "
                "frozen?)."
            )
        self._ended = time.perf_counter()
        found = layout.gradients(buckets)
        value = torch.tensor(whole.loss / divisor, dtype=whole.loss_type, device=self._home)
        self.agreed = agreed = value, [found.get(index) for index in range(len(gradients))]
        self._alone = False
        return agreed

    def _meet(self, header: Header, error: BaseException | None = None, *, goes_on: bool = False) -> Whole:
        """Exchange the headers of all ranks.

        `error`: why this rank has failed, which it raises itself. `goes_on`: whether other exchanges follow, if all have succeeded.
        """
        self._alone = True
        self._exchanged = True
        try:
            whole = self._exchange(header, error)
        except Error:  # all ranks raise it, or cannot be reached
            self._alone = False
            raise
        self._alone = goes_on
        return whole

    def _exchange(self, header: Header, error: BaseException | None) -> Whole:
        """Raise on every rank unless all are in the same call and have succeeded."""
        raise TypeError("Ranks._exchange is for subclasses")

    def _union(self, present: list[bool]) -> list[bool]:
        """Which gradients there are on any rank."""
        raise TypeError("Ranks._union is for subclasses")

    def _add(self, bucket: torch.Tensor) -> None:
        """Sum a bucket over all ranks, in place."""
        raise TypeError("Ranks._add is for subclasses")

    def _agree(self) -> None:
        """Raise, on all ranks, unless the sums were complete."""

    def _filled(
        self, replicas: Replicas, gradients: Gradients, present: Sequence[bool]
    ) -> tuple[Layout, list[torch.Tensor]]:
        """Buckets with the gradients that are present on some rank."""
        key = replicas.generation, bytes(present)
        if self._laid_out is None or self._laid_out[0] != key:
            wanted = [one if there else _FROZEN for one, there in zip(replicas.parameters, present, strict=True)]
            self._laid_out = key, Layout(wanted, replicas.names)
        layout = self._laid_out[1]
        buckets = layout.empty(self._home)
        for k, bucket in enumerate(buckets):
            layout.fill(k, bucket, gradients)
        return layout, buckets

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        """Around an exchange, and nothing else."""
        try:
            yield
        except Exception as error:
            lost = self._lost(error)
            self._alone = False
            raise lost from error

    def _lost(self, error: Exception) -> Error:
        """What to raise for an error of the exchange."""
        raise TypeError("Ranks._lost is for subclasses")

    @property
    def _code(self) -> int:
        return zlib.crc32(self._call.encode())

    def _layout_of(self, replicas: Replicas) -> int:
        """A checksum of the parameters' names, shapes and types, and of which are frozen."""
        if self._checksum[0] != replicas.generation:
            named = zip(replicas.names, replicas.parameters, strict=True)
            text = repr([(name, tuple(one.shape), str(one.dtype)) for name, one in named])
            self._checksum = replicas.generation, zlib.crc32(text.encode())
        return zlib.crc32(bytes(one.requires_grad for one in replicas.parameters), self._checksum[1])


def error_of_lost(kind: type[Error], message: str, ranks: str | None) -> Error:
    """An error that names the ranks in place of a device."""
    error = kind(message)
    error.device = ranks
    return error


_FROZEN = torch.empty(0)  # takes the place of a parameter that no rank has a gradient of


def _check_module(module: nn.Module) -> None:
    """Raise for a module that sums gradients by itself, or whose parameters have no shape yet."""
    for name, part in module.named_modules():
        if isinstance(part, nn.parallel.DistributedDataParallel):
            raise InvalidArgument(
                f"DataParallel: {name or 'the module'} is a DistributedDataParallel, which sums gradients over the ranks, and so does the trainer. Pass "
                "its .module."
            )
        if any(isinstance(one, nn.parameter.UninitializedParameter) for one in part._parameters.values()):
            raise InvalidArgument(
                f"DataParallel: {name or 'the module'} has parameters without a shape, which cannot be brought to all ranks. Run its forward "
                "once before."
            )
