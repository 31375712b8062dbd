"""PyTorch's per-thread state: read from the caller once a step, and set in every worker."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

from paceline._core.engine import Nothing

# Of a new thread: whether it casts, and to what.
_PLAIN_AUTOCAST = {("cpu", False, torch.bfloat16), ("cuda", False, torch.float16)}


class CallerState:
    """The state that a new thread does not inherit, and on which the result of a step may depend.

    Autocast, the default device (a function mode), function and dispatch modes, saved-tensor hooks and a copy of the context
    variables for each device. Modes are pushed on the worker's stack and not entered again, since entering may reset what they collect.
    """

    def __init__(self, device_types: list[str], device_count: int, *, caches_casts: bool = True) -> None:
        kinds = map(torch.is_autocast_enabled, device_types), map(torch.get_autocast_dtype, device_types)
        self.autocast = tuple(zip(device_types, *kinds, strict=True))
        casts = not _PLAIN_AUTOCAST.issuperset(self.autocast)
        self.on_gpu = "cuda" in device_types
        self._autocast_cache = casts and caches_casts and torch.is_autocast_cache_enabled()
        self._function_modes = _get_current_function_mode_stack() if torch._C._len_torch_function_stack() else []
        self._dispatch_modes = _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else []
        self._saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        # A function mode, too, but it looks at no results. What was compiled or captured under one may do something else under another.
        self.default_device = tuple(mode.device for mode in self._function_modes if isinstance(mode, DeviceContext))
        self.contexts = [contextvars.copy_context() for _ in range(device_count)]
        self.is_plain = not (casts or self._function_modes or self._dispatch_modes or self._saved_tensor_hooks)

    @property
    def sees_operators(self) -> bool:
        """Whether modes or hooks of the caller are called for operators. The default device does not count."""
        observing = len(self._function_modes) > len(self.default_device)
        return bool(observing or self._dispatch_modes or self._saved_tensor_hooks)

    @contextlib.contextmanager
    def _replayed(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for mode in self._function_modes:
                _push_function_mode(mode)
                stack.callback(_pop_function_mode)
            for mode in self._dispatch_modes:
                _push_dispatch_mode(mode)
                stack.callback(_pop_dispatch_mode)
            if self._saved_tensor_hooks is not None:
                torch._C._autograd._push_saved_tensors_default_hooks(*self._saved_tensor_hooks)
                stack.callback(torch._C._autograd._pop_saved_tensors_default_hooks)
            for kind, enabled, dtype in self.autocast:
                stack.callback(torch.set_autocast_dtype, kind, torch.get_autocast_dtype(kind))
                torch.set_autocast_dtype(kind, dtype)
                if enabled:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self._autocast_cache))
            yield

    def replayed(self) -> contextlib.AbstractContextManager[None]:
        """Set the state for the length of a ``with`` block on a worker."""
        return NOTHING if self.is_plain else self._replayed()


NOTHING: contextlib.AbstractContextManager[Any] = Nothing()


def outside_autocast() -> contextlib.AbstractContextManager[Any]:
    """Turn autocast off on the calling thread, around a backward pass: its operators take the types that the forward chose."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return _outside_autocast()
    return NOTHING


@contextlib.contextmanager
def _outside_autocast() -> Iterator[None]:
    on = [kind for kind, *_ in _PLAIN_AUTOCAST if torch.is_autocast_enabled(kind)]
    for kind in on:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind in on:
            torch.set_autocast_enabled(kind, True)


class NoGrad:
    """``torch.no_grad()`` at a fifth of its cost, for what every step enters."""

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *exception: object) -> None:
        torch._C._set_grad_enabled(self._before)


class RecomputeWatch(TorchFunctionMode):
    """Notices that a forward runs again during a backward pass (activation checkpointing).

    If Python code inside the autograd engine calls PyTorch with gradients enabled, that is such a forward: the backward of a custom
    ``autograd.Function`` runs with gradients off. Ordinary backward passes make no calls from Python, so watching is free.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.seen and torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled():
            self.seen = True
        return func(*args, **(kwargs or {}))


def backward_watched(
    roots: Sequence[torch.Tensor],
    gradients: Iterable[torch.Tensor],
    retain_graph: bool = False,
    inputs: Sequence[torch.Tensor] | None = None,
) -> None:
    """``torch.autograd.backward(roots, gradients, ...)``, inside of which function modes stay on.

    ``Tensor.backward`` and ``torch.autograd.backward`` are PyTorch calls themselves, and a function mode is off while it handles a call.
    """
    given = tuple(roots), tuple(gradients), retain_graph, False, tuple(inputs or ())
    torch.autograd.graph._engine_run_backward(*given, allow_unreachable=True, accumulate_grad=True)


def forget_failed_backward() -> None:
    """Drop what a backward that failed on this thread has left behind.

    The engine keeps the nodes that were ready, with their graph and all that it has saved, until the thread's next backward. So this runs one.
    """
    with torch._C.DisableTorchFunction(), torch.enable_grad():
        leaf = torch.zeros((), requires_grad=True, device="cpu")
        torch.autograd.graph._engine_run_backward(
            (leaf * 1,), (torch.ones((), device="cpu"),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )


def bytes_of(state: torch.Tensor) -> bytes:
    """The bytes of a generator's state. No operator runs, so the user's modes do not see this."""
    return ctypes.string_at(state.data_ptr(), state.numel())


def set_own_threads(number: int) -> None:
    """Set PyTorch's number of threads for the calling thread alone.

    ``torch.set_num_threads`` also sets the number that another thread gets, and keeps, when it first uses PyTorch. A new thread sees that
    number, and any thread can put it back.
    """
    torch.get_num_threads()  # else PyTorch would give this thread the other number at some later operator
    others: list[int] = []
    with _setting_threads:
        try:
            _in_new_thread(lambda: others.append(torch.get_num_threads()))
        except RuntimeError as error:
            if type(error) is not RuntimeError:  # `Cancelled`, which gets this thread out of Python
                raise
            torch.set_num_threads(number)  # the interpreter ends, and starts no thread that could be given a number
            return
        try:
            torch.set_num_threads(number)
        finally:
            _in_new_thread(lambda: torch.set_num_threads(others[0]))


# Reentrant, since the collector may drop a trainer, whose end comes here, in the middle.
_setting_threads = threading.RLock()


def _in_new_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()  # until nothing of it is left, which the end of the interpreter could stop in PyTorch's code


class CallerThreads:
    """Keeps PyTorch at one thread in a thread that has opened trainers on host devices, and in any other one during its calls of these.

    The caller's own thread pool would spin on the cores that the devices compute on. That costs 6 to 17 % (measured). PyTorch cannot set the
    number of another thread. So a thread that does not close what it has opened gets its own number back at its next call of a trainer, open or
    closed; and a thread that opens nothing is not limited between its calls, because there may be no further one.
    """

    _here = threading.local()

    def __init__(self) -> None:
        self._uses: list[None] = []  # open trainers and present calls. A list, whose methods need no lock.
        self._before: int | None = None  # the thread's own number, while the thread is limited

    @classmethod
    def here(cls) -> CallerThreads:
        """Those of the calling thread."""
        try:
            found: CallerThreads = cls._here.threads
        except AttributeError:
            found = cls._here.threads = cls()
        return found

    def hold(self) -> None:
        """Limit the calling thread, whose own these are, until `release`."""
        if self._before is None:
            self._before = torch.get_num_threads()
            set_own_threads(1)
        self._uses.append(None)

    def leave(self) -> None:
        """End one `hold`, on the thread whose own these are."""
        self._uses.pop()
        self.settle()

    def release(self) -> None:
        """End one `hold`. Called on any thread, which gets its own number back if nothing holds that one any more."""
        self._uses.pop()
        self.here().settle()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Give the calling thread its own number for a while in which the devices wait."""
        if self._before in (None, 1):
            yield
            return
        set_own_threads(self._before)
        try:
            yield
        finally:
            set_own_threads(1)

    def settle(self) -> None:
        """Give the calling thread, whose own these are, its own number back if nothing holds it any more."""
        if self._before is not None and not self._uses:
            set_own_threads(self._before)
            self._before = None
