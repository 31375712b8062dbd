"""One step of several processes: each is one rank, which owns all devices of its machine and computes the gradient of its part of the batch."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from paceline import DeviceLost, Error, InvalidArgument, Timeout
from paceline._stop import stop_requested
from paceline.torch._batch.objective import Objective
from paceline.torch._devices.failures import noted
from paceline.torch._replicas.replicas import Replicas
from paceline.torch._run.buckets import Layout
from paceline.torch._run.gradients import DTYPES

Gradients = list[torch.Tensor | None]

_PING = 7331  # the tag of messages that only ask whether a rank is there
_PATIENCE = timedelta(
    seconds=5
)  # how long to wait for an answer; other ranks notice the failure at about the same time
_TEXT_BYTES = 400  # of an error's text that the other ranks get to know


class Header(NamedTuple):
    """What a rank tells all others once in a step. Everything is a number that float64 holds exactly, except for sums and seconds."""

    failed: float  # 1 if the rank has nothing to commit
    stop: float  # 1 if a stop was asked for
    call: float  # a checksum of what was called
    layout: float = 0  # a checksum of names, shapes and types of the parameters
    present: float = 0  # a checksum of which gradients there are
    total: float = 0  # the caller's own denominator, or 0
    items: float = 0
    weight: float = 0
    loss: float = 0  # the weighted sum of the items' losses
    loss_type: float = -1  # its number in DTYPES
    seconds: float = 0  # of the rank's own work


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
        self._began = 0.0
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
            raise _lost(DeviceLost, f"{call}: {self._broken}", self._gone)
        self._call, self._exchanged, self._began = call, False, time.perf_counter()
        try:
            yield
            if not self._exchanged:  # a call without gradients
                self._meet(Header(0, stop_requested(), self._code))
        except BaseException as error:
            if not self._exchanged:
                with contextlib.suppress(Error):  # of a rank that is gone; the error at hand says more
                    self._meet(Header(1, stop_requested(), self._code), error)
            raise

    def sum(
        self, replicas: Replicas, objective: Objective, loss: torch.Tensor | None, gradients: Gradients
    ) -> tuple[torch.Tensor, Gradients]:
        """The objective over all ranks and its gradients, from those of this rank's part of the batch. `loss` is None if that is empty.

        Raises
        ------
        InvalidArgument
            On all ranks, if they do not agree about the call, the parameters or `total`, or if no rank has weight.
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
                call=self._code,
                layout=self._layout_of(replicas),
                present=zlib.crc32(bytes(present)),
                total=objective.total or 0,
                items=objective.size,
                weight=objective.weight,
                loss=0 if loss is None else float(loss) * objective.divisor,
                loss_type=-1 if loss is None else DTYPES.get(loss.dtype, 0),
                seconds=time.perf_counter() - self._began,
            )
        )
        divisor = objective.total or whole.weight
        if not divisor > 0:
            raise InvalidArgument(
                f"{self._call}: the weights of all ranks sum to {divisor}; the objective is divided by that sum, so it must be positive. Skip "
                "batches without weight, on all ranks."
            )
        with self._talking():
            if not whole.same_gradients:
                present = self._union(present)
                layout, buckets = self._filled(replicas, gradients, present)
            for bucket in buckets:
                if objective.divisor != divisor:
                    bucket.mul_(objective.divisor / divisor)
                self._add(bucket)
        if not any(present):
            raise RuntimeError(  # the type that plain PyTorch raises
                f"{self._call}: the loss does not require grad on any rank: no parameter that does reaches it (is it detached, or everything "
                "frozen?)."
            )
        self._agree()
        found = layout.gradients(buckets)
        value = torch.tensor(whole.loss / divisor, dtype=whole.loss_type, device=self._home)
        return value, [found.get(index) for index in range(len(gradients))]

    def _meet(self, header: Header, error: BaseException | None = None) -> Whole:
        """Exchange the headers of all ranks. `error`: why this rank has failed, which it raises itself."""
        self._exchanged = True
        return self._exchange(header, error)

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
        """Raise unless the step may be committed."""

    def _filled(
        self, replicas: Replicas, gradients: Gradients, present: Sequence[bool]
    ) -> tuple[Layout, list[torch.Tensor]]:
        """Buckets with the gradients that are present on some rank."""
        key = replicas.generation, bytes(present)
        if self._laid_out is None or self._laid_out[0] != key:
            wanted = [one if there else _FROZEN for one, there in zip(replicas.parameters, present, strict=True)]
            self._laid_out = key, Layout(wanted, replicas.names)
        layout = self._laid_out[1]
        buckets = []
        for dtype, count in layout.sizes:
            buckets.append(torch.empty(count, dtype=dtype, device=self._home))
            layout.fill(dtype, buckets[-1], gradients)
        return layout, buckets

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        """Around everything that ranks have to do in the same order. After an error they cannot go on together."""
        try:
            yield
        except RuntimeError as error:
            raise self._lost(error) from error
        except BaseException:
            self._broken = "an interrupt left an exchange between the ranks. End all ranks and start them anew from what you saved last."
            raise

    def _lost(self, error: RuntimeError) -> Error:
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

    def __init__(self, group: Any, module: nn.Module, home: torch.device) -> None:
        super().__init__(module, home)
        _check_group(group, home)
        self._group = group
        # Headers lie on the host if the backend takes host memory, so that nothing waits for a GPU on their behalf.
        self._place = torch.device("cpu") if "cpu:" in dist.get_backend_config(group) else home
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._numbers = [dist.get_global_rank(group, rank) for rank in range(self._size)]

    def share(self, replicas: Replicas) -> None:
        """Give all ranks the parameters and buffers of rank 0, as DistributedDataParallel does."""
        buffers = [buffer for part in replicas.modules for buffer in part._buffers.values() if buffer is not None]
        with self.together("DataParallel"):
            text = repr([(tuple(buffer.shape), str(buffer.dtype)) for buffer in buffers])
            self._meet(Header(0, 0, self._code, zlib.crc32(text.encode(), self._layout_of(replicas))))
        with self._talking(), torch.no_grad():
            for tensor in [*replicas.parameters, *buffers]:
                there = tensor.detach() if self._place.type == "cpu" else tensor.detach().to(self._home)
                # As bytes, since backends do not know all types.
                flat = there.contiguous().reshape(-1).view(torch.uint8)
                dist.broadcast(flat, self._numbers[0], group=self._group)
                tensor.copy_(flat.view(tensor.dtype).reshape(tensor.shape))

    def _exchange(self, header: Header, error: BaseException | None) -> Whole:
        with self._talking():
            found = self._gather(torch.tensor(header, dtype=torch.float64))
            headers = [Header(*row) for row in found.tolist()]
            self.stop = any(one.stop for one in headers)
            failed = [rank for rank, one in enumerate(headers) if one.failed]
            texts = self._texts(error) if failed else []
        others = [rank for rank in failed if rank != self._rank]
        what = "; ".join(f"rank {self._numbers[rank]}: {texts[rank]}" for rank in others)
        if error is not None:
            noted(
                error,
                f"raised on rank {self._numbers[self._rank]}; no rank has committed anything{'; ' * bool(what)}{what}",
            )
        elif failed:
            raise Error(
                f"{self._call}: {'ranks' if len(others) > 1 else 'a rank'} failed, so no rank has committed anything, and .grad is as before. "
                f"{what}. That process has the whole traceback."
            )
        else:
            self._check(headers)
            if header.seconds:
                self.last = [{"items": int(one.items), "seconds": one.seconds} for one in headers]
        number = max(one.loss_type for one in headers)
        return Whole(
            weight=sum(one.weight for one in headers),
            loss=sum(one.loss for one in headers),
            loss_type=next((dtype for dtype, code in DTYPES.items() if code == number), torch.float32),
            same_gradients=all(one.present == headers[0].present for one in headers),
        )

    def _check(self, headers: list[Header]) -> None:
        """Raise, on every rank, if ranks differ in what has to be equal."""
        first = headers[0]
        for rank, one in enumerate(headers):
            who, other = f"{self._call}: rank {self._numbers[rank]}", f"rank {self._numbers[0]}"
            if one.call != first.call:
                raise InvalidArgument(
                    f"{who} has called something else than {other}. All ranks of a group make the same calls of the trainer in the same order, also "
                    "where a rank has no items left: batch=None."
                )
            if one.layout != first.layout:
                raise InvalidArgument(
                    f"{who} has other parameters than {other}: names, shapes, types and requires_grad have to be equal. Make the same module on all "
                    "ranks, and freeze the same parameters."
                )
            if one.total != first.total:
                raise InvalidArgument(
                    f"{who} has total={one.total or None}, {other} has total={first.total or None}. It is the denominator over all ranks, so give "
                    "all the same number, or leave it out."
                )

    def _union(self, present: list[bool]) -> list[bool]:
        found: list[bool] = self._gather(torch.tensor(present, dtype=torch.uint8)).any(0).tolist()
        return found

    def _add(self, bucket: torch.Tensor) -> None:
        dist.all_reduce(bucket, group=self._group)

    def _gather(self, mine: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, one per row, on the host."""
        mine = mine.to(self._place)
        found = [torch.empty_like(mine) for _ in range(self._size)]
        dist.all_gather(found, mine, group=self._group)
        return torch.stack(found).cpu()

    def _texts(self, error: BaseException | None) -> list[str]:
        """What each rank says of its error."""
        text = "" if error is None else f"{type(error).__name__}: {error}"
        cut = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES)
        rows = self._gather(torch.frombuffer(bytearray(cut), dtype=torch.uint8))
        return [bytes(row.tolist()).decode(errors="ignore").strip() for row in rows]

    def _lost(self, error: RuntimeError) -> Error:
        reason = str(error).strip().splitlines()[0]
        late = "timed out" in reason.lower() or "timeout" in reason.lower()
        gone = self._unreachable()
        self._gone = f"rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone))}" if gone else None
        self._broken = (
            f"{self._gone or 'another rank'} {'did not answer in time' if late else 'is gone'} ({reason}). The step that noticed it has committed "
            "nothing, and left .grad as before. The process group is of no further use: save what you need, end all ranks and start them anew."
        )
        return _lost(Timeout if late else DeviceLost, f"{self._call}: {self._broken}", self._gone)

    def _unreachable(self) -> list[int]:
        """The ranks that cannot be reached after an exchange has failed, as far as that can be told: the error says it of none."""
        others = [number for rank, number in enumerate(self._numbers) if rank != self._rank]
        if len(others) == 1:
            return others
        if self._place.type != "cpu":  # NCCL would wait
            return []
        closed: list[int] = []
        asked: list[tuple[int, Any, Any]] = []
        for number in others:
            try:  # this raises at once where the connection is closed; the other ranks ask in the same way
                sent = dist.isend(torch.zeros(1), number, group=self._group, tag=_PING)
                asked.append((number, sent, dist.irecv(torch.zeros(1), number, group=self._group, tag=_PING)))
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


def _lost(kind: type[Error], message: str, ranks: str | None) -> Error:
    """An error that names the ranks in place of a device."""
    error = kind(message)
    error.device = ranks
    return error


_FROZEN = torch.empty(0)  # takes the place of a parameter that no rank has a gradient of


def _check_group(group: Any, home: torch.device) -> None:
    """Raise for what is no process group, and for one that cannot carry the gradients."""
    if not dist.is_available():
        raise InvalidArgument(
            "DataParallel: group= needs torch.distributed, which this build of PyTorch does not have."
        )
    if group is None:
        raise InvalidArgument(
            "DataParallel: group is None, as dist.group.WORLD is before torch.distributed.init_process_group(). Call that first. To train "
            "on this machine alone leave group= out."
        )
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidArgument(
            f"DataParallel: group is {group!r}; a torch.distributed.ProcessGroup is needed: dist.group.WORLD, or what new_group() returns on a member."
        )
    config = dist.get_backend_config(group)
    if f"{home.type}:" not in config:
        raise InvalidArgument(
            f"DataParallel: the module is on {home}, and the group's backends are {config}, none for {home.type} memory. Use "
            f"init_process_group('{'gloo' if home.type == 'cpu' else 'cpu:gloo,cuda:nccl'}')."
        )
    bound = getattr(group, "bound_device_id", None)
    if home.type == "cuda" and bound is not None and bound != home:
        raise InvalidArgument(
            f"DataParallel: the group is bound to {bound}, and the module is on {home}. Give init_process_group the module's GPU: device_id={home}."
        )


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
