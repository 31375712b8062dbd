"""What captures of CUDA graphs have in common, in training and in serving: their order in a process, and what a replay would leave out."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import types
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

import paceline
from paceline.torch._devices import cuda
from paceline.torch._replicas.hooks import hooks_of_user
from paceline.torch._replicas.reach import CLOSED, LIBRARIES, SIMPLE

WARM_UPS = 2  # runs of a size that go without a graph first: libraries load, allocate and choose algorithms in them

# PyTorch captures one graph at a time in a process, whatever the number of trainers and pools.
_capture = threading.Lock()
_PATIENCE_SECONDS = 5.0  # many times what a capture takes

# During a capture PyTorch lets no other thread draw random numbers on its GPU.
_changed = threading.Condition()
_loads: dict[int, int] = {}  # threads that load onto a GPU, which may draw there
_captured: list[int] = []  # GPUs
_LOAD_SECONDS = 60.0  # then a capture or a load goes on beside the other one, as they may wait for each other

# What modules may refer to, and no graph reads.
_OTHERS = (
    *CLOSED,
    types.FrameType,
    types.TracebackType,
    types.GeneratorType,
    types.CoroutineType,
    types.AsyncGeneratorType,
    torch.optim.Optimizer,
    torch.utils.data.Dataset,
    torch.utils.data.DataLoader,
)
_DRIVERS = {"paceline", "lightning", "pytorch_lightning"}

_LIBRARIES = tuple(f"{Path(one.__file__ or '').parent}/" for one in (torch, paceline))


@contextlib.contextmanager
def capturing(graph: cuda.Graph) -> Iterator[None]:
    """Record the work of the ``with`` block in the graph. Nothing of it runs."""
    with _capture, graph.capturing():
        yield


@contextlib.contextmanager
def loading(gpu: int | None) -> Iterator[float]:
    """Around functions of the user's that load something, on a worker or beside one. A load waits for captures on its GPU: yields for how many seconds it did."""
    thread = threading.get_ident()
    if gpu is None or thread in _loads:
        yield 0.0
        return
    begun = time.monotonic()
    with _changed:
        _changed.wait_for(lambda: gpu not in _captured, _LOAD_SECONDS)
        _loads[thread] = gpu
    try:
        yield time.monotonic() - begun
    finally:
        with _changed:
            _loads.pop(thread, None)
            _changed.notify_all()


def forget_load(thread: int) -> None:
    """Let captures go on beside what this thread loads. Its run was given up."""
    with _changed:
        _loads.pop(thread, None)
        _changed.notify_all()


def is_loading(gpu: int | None) -> bool:
    """Whether another thread loads something onto the GPU."""
    return any(one == gpu and thread != threading.get_ident() for thread, one in list(_loads.items()))


@contextlib.contextmanager
def without_loads(gpu: int, seconds: float = _LOAD_SECONDS) -> Iterator[bool]:
    """Around a capture: loads onto the GPU wait until it is over. Yields whether those before have ended within so many seconds."""
    with _changed:
        ended = _changed.wait_for(lambda: not is_loading(gpu), seconds)
        _captured.append(gpu)
    try:
        yield ended
    finally:
        with _changed:
            _captured.remove(gpu)
            _changed.notify_all()


def release_memory() -> None:
    """Let PyTorch give back unused memory of GPUs, which it refuses during a capture. One that hangs is not waited for."""
    if _capture.acquire(timeout=_PATIENCE_SECONDS):
        try:
            cuda.release_memory(False)
        finally:
            _capture.release()


def place_of(tensor: torch.Tensor | None) -> int:
    """Where a tensor is. A sparse one has no memory of its own, but is not written to."""
    if tensor is None:
        return 0
    return tensor.data_ptr() if tensor.layout is torch.strided else id(tensor)


def hook_of_user(modules: Iterable[nn.Module]) -> str | None:
    """A hook that a replay would not call, in words. None if there is none."""
    for kind, name in hooks_of_user(modules):
        return f"the module has a {kind} ({name}), which a replay would not call"
    return None


class Attributes:
    """What modules hold before a capture on a GPU. Keep it as long as the graph, which goes on reading the tensors: a forward may replace them.

    These may be anywhere in attributes: in containers, plain objects, closures and bound methods.
    """

    def __init__(self, modules: Sequence[nn.Module], gpu: int) -> None:
        device = cuda.device(gpu)
        self._held = [one for one in _leaves_of([vars(module) for module in modules]) if _is_read(one, device)]
        self._before = [(module, dict(vars(module)), dict(module._buffers)) for module in modules]

    def change(self) -> str | None:
        """What the capture has set and a replay would not, in words. None if there is nothing."""
        for module, attributes, buffers in self._before:
            for name, value in chain(vars(module).items(), module._buffers.items()):
                old = buffers if name in module._buffers else attributes
                if name not in old or old[name] is not value:
                    return f"the forward of {type(module).__name__} sets its attribute '{name}', which a replay would not do"
        return None


def _leaves_of(left: list[Any]) -> Iterator[Any]:
    """The tensors, and what Python sees nothing inside of, that can be reached from there, but not by way of classes, modules of Python, globals and `_OTHERS`."""
    seen: dict[int, Any] = {}
    while left:
        one = left.pop()
        kind = type(one)  # isinstance() would ask a weak proxy for the type of what is gone
        if id(one) in seen or issubclass(kind, _OTHERS) or _drives(kind):
            continue
        seen[id(one)] = one
        if issubclass(kind, torch.Tensor):
            inside = []
        elif kind is types.FunctionType:
            inside = [one.__closure__, one.__defaults__, one.__kwdefaults__, vars(one)]
        else:
            inside = gc.get_referents(one)
        inside = [each for each in inside if type(each) not in SIMPLE and not issubclass(type(each), type)]
        if not inside:
            yield one
        left += inside


def _drives(kind: type) -> bool:
    """Whether this is of a trainer, which modules may refer to."""
    drives = any(_package_of(base) in _DRIVERS for base in kind.__mro__)  # a user's subclass, too
    return drives and not issubclass(kind, (nn.Module, torch.Tensor, dict, list))


def _package_of(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]  # a class may have None or a property there


def _is_read(leaf: Any, device: torch.device) -> bool:
    """Whether a graph on the device may read the memory of this leaf. Copies in it read other GPUs and pinned memory in each replay."""
    if not issubclass(type(leaf), torch.Tensor):
        return _package_of(type(leaf)) not in LIBRARIES - {"torch"}
    plain = type(leaf) in (torch.Tensor, nn.Parameter) and leaf.layout is torch.strided
    return not plain or leaf.device.type == device.type or (leaf.device.type == "cpu" and leaf.is_pinned())


def refusal(what: str, error: BaseException) -> str | None:
    """Why `what` cannot be captured, in words. None if the error says something else."""
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError) or "captur" not in str(error):
        return None
    where, trace = "", error.__traceback__
    while trace is not None:
        code: Any = trace.tb_frame.f_code
        # Not in a mode or a tensor subclass either, which see the operators of the line that is wanted.
        if not code.co_filename.startswith(_LIBRARIES) and not code.co_name.startswith("__torch_"):
            where = f" at {code.co_filename}:{trace.tb_lineno}, in {code.co_name}"
        trace = trace.tb_next
    return (
        f"{what} cannot be captured{where}: {str(error).splitlines()[0]}. A captured graph cannot wait for the "
        "GPU, so Python must not read values of tensors: no item(), no print, no copy to the host, no if or while on a tensor, no boolean mask, no "
        "nonzero(). Use torch.where and tensors of fixed shape"
    )
