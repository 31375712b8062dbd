"""PyTorch on the devices of a pool: streams, how requests get to a GPU and answers back."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from paceline import Device, InvalidArgument
from paceline.torch._devices import cuda
from paceline.torch._devices.caller_state import NOTHING
from paceline.torch._devices.worker_state import prepare_worker
from paceline.torch._replicas.capture import release_memory

_PLAIN = {type(None), bool, int, float, str, bytes, types.FunctionType, types.BuiltinFunctionType}  # no tensor in them
_LOOK = 0.5  # seconds between looks at whether a load that is waited for was given up
_MOST_ENTRIES = 10_000  # of a job's arguments: looking at them takes a millisecond


class Seat:
    """One device. What is done between `prepare` and the end of a job belongs to its worker. One job at a time is on the device."""

    def __init__(self, device: Device, stream_of: Callable[[str], int | None]) -> None:
        self.name, self.space = device.name, device.memory_space
        self.gpu = device.index if device.kind == "cuda" else None
        self.device = torch.device("cpu") if self.gpu is None else cuda.device(self.gpu)
        # A GPU's thread launches. With a team of OpenMP threads it would crowd out the others.
        self._threads = max(1, len(device.cores)) if self.gpu is None else 1
        self._stream_of = stream_of
        self._loading = threading.RLock()
        self._beside: cuda.Queue | None = None  # one for good: PyTorch keeps what a stream has had for this stream

    def prepare(self) -> None:
        """Prepare the calling worker."""
        prepare_worker(self._threads, self.gpu)

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Send the operators of the calling thread to the stream of the pool's jobs. The job ends when the GPU has done them."""
        if self.gpu is None or (stream := self._stream_of(self.name)) is None:
            return NOTHING
        return cuda.on_stream(self.gpu, stream)

    def beside(self) -> contextlib.AbstractContextManager[Any]:
        """Send the operators of the calling thread, which is no worker, to a stream of its own, beside the jobs."""
        if self.gpu is None:
            return NOTHING
        if self._beside is None:
            self._beside = cuda.Queue(self.gpu)
        return self._beside.entered()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Around loads and frees on other threads than its worker, one at a time."""
        while True:
            lock = self._loading
            if lock.acquire(timeout=_LOOK):
                if lock is self._loading:
                    break
                lock.release()
        try:
            yield
        finally:
            lock.release()

    def leave_load(self) -> None:
        """Let the next load begin, beside one that hangs."""
        self._loading, self._beside = threading.RLock(), None

    def stacked(self, items: Sequence[torch.Tensor]) -> torch.Tensor:
        """A batch of the items on the device. The host does not wait for the copy."""
        if self.gpu is None:
            return torch.stack(list(items))
        first = items[0]
        if not all(map(_is_plain, items)):
            return torch.stack(list(items)).to(self.device)
        return self.brought(torch.stack(list(items), out=self.room((len(items), *first.shape), first.dtype)))

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory of a batch that `brought` takes."""
        if self.gpu is None:
            return torch.empty(*shape, dtype=dtype, device="cpu")
        return cuda.pinned(math.prod(shape), dtype).view(*shape)

    def brought(self, batch: torch.Tensor) -> torch.Tensor:
        """The batch on the device. The host does not wait for the copy."""
        return batch if self.gpu is None else batch.to(self.device, non_blocking=True)

    def fetched(self, answer: torch.Tensor) -> torch.Tensor:
        """The answer in host memory: from a GPU it is there when the GPU has come to what `mark` returns afterwards."""
        answer = answer.detach()
        if self.gpu is None:
            return answer
        if answer.device != self.device or answer.layout is not torch.strided:
            return answer.cpu()
        # Otherwise the copy would go through memory that is not pinned, or be conjugated on the host before it has arrived.
        answer = answer.resolve_conj().resolve_neg().contiguous()
        return cuda.pinned_like(answer).copy_(answer, non_blocking=True)

    def mark(self) -> Any:
        """An event after all that the stream has to do; None on the host."""
        return None if self.gpu is None else cuda.mark_current(self.gpu)

    def wait(self) -> None:
        """Let the calling thread wait for what the device has to do."""
        if self.gpu is not None:
            cuda.wait(self.mark())

    def follow(self, events: Sequence[Any]) -> None:
        """Let the device wait for events of GPUs."""
        for event in events:
            if self.gpu is None:
                cuda.wait(event)
            else:
                cuda.follow_on_current(self.gpu, event)

    def release_memory(self) -> None:
        """Give back what PyTorch keeps of a GPU's memory without using it, after memory ran out."""
        if self.gpu is not None:
            with contextlib.suppress(RuntimeError):  # of a GPU that has failed, which the job reports
                release_memory()


@contextlib.contextmanager
def entered(seats: Sequence[Seat]) -> Iterator[None]:
    """The streams of a gang. The GPU of the first device is the current one."""
    with contextlib.ExitStack() as stack:
        for seat in reversed(seats):
            stack.enter_context(seat.entered())
        yield


def marks_of(values: Any, gpus: Callable[[], Iterable[int]]) -> list[Any]:
    """Events after what the calling thread's streams have to do on the GPUs of the tensors in modules, lists, tuples, dictionaries and arguments of a ``partial``.

    In very many entries nobody looks. Then it is all of `gpus`.
    """
    found: set[int] = set()
    left, seen = [values], 0
    while left:
        one = left.pop()
        if type(one) in _PLAIN:
            pass
        elif isinstance(one, (list, tuple)):
            left += one
        elif isinstance(one, dict):
            left += one.values()
        elif isinstance(one, torch.Tensor):
            if one.device.type not in ("cpu", "meta"):
                found.add(one.device.index)
        elif isinstance(one, nn.Module):
            left += [*one.parameters(), *one.buffers()]
        elif isinstance(one, functools.partial):
            left += [one.func, one.args, one.keywords]
        seen += 1
        if seen + len(left) > _MOST_ENTRIES:
            found.update(gpus())
            break
    return [cuda.mark_current(gpu) for gpu in found]


def hand_over(value: Any) -> None:
    """Keep PyTorch from reusing memory of a job's stream while its result may be in use on the GPU's default stream.

    Called when the stream has done its work. Looks at tensors and modules in a nest. Raises nothing, since the job has ended well: PyTorch refuses
    parameters of lazy modules, which have no memory, sparse tensors, and tensors of a GPU that has failed since; a nest may refuse to be looked at.
    """
    leaves: list[Any] = []
    with contextlib.suppress(Exception):
        leaves = pytree.tree_leaves(value)
    for leaf in leaves:
        for one in [*leaf.parameters(), *leaf.buffers()] if isinstance(leaf, nn.Module) else [leaf]:
            if isinstance(one, torch.Tensor) and one.device.type not in ("cpu", "meta"):
                with contextlib.suppress(Exception):
                    cuda.keep_for_default(one)


_unbind_copy: Any = torch.unbind_copy  # its stub says that it returns nothing


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized


def copies(batch: torch.Tensor) -> Sequence[torch.Tensor]:
    """Its rows, each in memory of its own. One call instead of many, after each of which the thread may lose Python's lock."""
    if _is_plain(batch) and batch.is_contiguous():
        rows: Sequence[torch.Tensor] = _unbind_copy(batch)
        return rows
    return [row.clone() for row in batch.unbind()]


class Fetched:
    """The answers of a batch on their way from a GPU to the host."""

    def __init__(self, rows: Sequence[Sequence[torch.Tensor]], spec: Any, arrived: Any) -> None:
        self._rows, self._spec, self._arrived = rows, spec, arrived

    def of(self, index: int) -> Any:
        """The answer of a request, in memory of its own. The GPU has done the batch, so this does not wait."""
        if self._arrived is not None:
            cuda.wait(self._arrived)
            self._arrived = None
        return pytree.tree_unflatten([rows[index].clone() for rows in self._rows], self._spec)


def home_of(module: nn.Module) -> torch.device:
    """Where the module is."""
    places: dict[torch.device, str] = {}
    named: list[tuple[str, torch.Tensor]] = [*module.named_parameters()]
    for name, one in named or module.named_buffers():
        places.setdefault(one.device, name)
    if not places:
        return torch.device("cpu")
    (place, name), *others = places.items()
    if others or place.type == "meta":
        what = (
            f"{name} is on {place}, and {others[0][1]} on {others[0][0]}"
            if others
            else f"{name} is on meta, and has no values"
        )
        raise InvalidArgument(
            f"serve: {what}. Move the module to one device. Each device of the pool gets its copy from there."
        )
    return place
