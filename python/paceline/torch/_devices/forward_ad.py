"""Forward-mode differentiation on several workers, although PyTorch has one level of it for the whole process.

Dual numbers belong to a level. PyTorch enters and leaves the level by process-wide variables. A thread that leaves it takes the tangents
of all other threads away, without an error. So a trainer with several devices holds the level itself while they run. Then a worker that tries to
enter it gets an error from PyTorch, before anything is wrong. The step runs again with the level *shared*: ``torch.func`` then sees that it
is inside a level already, as in a nested ``jvp``, and neither enters nor leaves it. A loss that enters the level by hand cannot share it and
is refused.
"""

from __future__ import annotations

import inspect
import sys
import threading
import time
import traceback
import types
from typing import Any, cast

import torch
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace

from paceline import InvalidArgument

_PATIENCE = 1.0  # seconds for a torch.func.jvp of another thread to end; one around the caller never ends
_FILE = forward_ad.enter_dual_level.__code__.co_filename
_TRACING_FILE = inspect.getfile(_symbolic_trace)


_transforms: Any = torch._functorch.eager_transforms


class _Level:
    """The process's level, held by any number of trainers."""

    lock = threading.Lock()
    holders = 0
    open = shared = False
    methods: dict[str, Any] = {}  # noqa: RUF012  those of the module class that a trace patches, when the level was entered


class Held:
    """Holds the level while several workers run, so that nobody else enters it: refused if somebody is inside, and stays there. `shared`: the workers use it together."""

    def __init__(self, shared: bool) -> None:
        self._shared = shared

    def __enter__(self) -> None:
        with _Level.lock:
            if not _Level.open:
                _enter()
            _Level.holders += 1
            if self._shared and not _Level.shared:
                _share(1)

    def __exit__(self, *exception: object) -> None:
        with _Level.lock:
            _Level.holders -= 1
            if _Level.holders == 0:
                _leave()


def _enter() -> None:
    deadline = time.monotonic() + _PATIENCE
    while not _Level.open:
        try:
            torch._C._enter_dual_level()
            _Level.open = True
            now = vars(torch.nn.Module)
            if any(now[name] is not method for name, method in _Level.methods.items()) or len(_Level.methods) < 2:
                both = {name: now[name] for name in ("__call__", "__getattr__")}
                _Level.methods = {name: method for name, method in both.items() if not _is_of_a_trace(method)}
        except RuntimeError as error:
            if time.monotonic() > deadline:
                raise InvalidArgument(
                    "step: called while forward-mode differentiation is under way, around this call or in another thread "
                    "(torch.func.jvp, forward_ad.dual_level). Its level belongs to the whole process, so the devices would change its "
                    "tangents. Step outside of it, or use one device."
                ) from error
            time.sleep(1e-3)


def _leave() -> None:
    if _Level.shared:
        if _transforms.JVP_NESTING > 1:  # a jvp of another thread shares the level; the next step closes it
            return
        _share(-1)
    _Level.open = False
    torch._C._exit_dual_level(level=0)


def _share(change: int) -> None:
    """Set what `torch.func` and ``make_dual`` look at. There is no call between these lines, so no other thread runs in between."""
    _Level.shared = change > 0
    _transforms.JVP_NESTING += change
    forward_ad._current_level = 0 if change > 0 else -1


def wanted(error: BaseException | None) -> BaseException | None:
    """The error that a worker got when it tried to enter the level: `error` itself or one of its causes. None if it is neither."""
    while error is not None:
        frames = traceback.walk_tb(error.__traceback__)
        if isinstance(error, RuntimeError) and any(frame.f_code.co_filename == _FILE for frame, _ in frames):
            break
        error = error.__cause__ or error.__context__
    return error


def refused(error: BaseException) -> BaseException:
    """What to raise where the level was shared: a clearer error if the worker tried to enter it by hand."""
    met = wanted(error)
    if met is None or "Nested forward mode" not in str(met):
        return error
    _end_tracing()
    refusal = InvalidArgument(
        "loss_fn enters a level of forward-mode differentiation by hand (forward_ad.dual_level, torch.func.linearize). PyTorch has one for "
        "the whole process, so the devices would take each other's tangents away. Use torch.func.jvp, jacfwd or hessian, which may "
        "share it, or one device."
    )
    refusal.__cause__ = error
    return refusal.with_traceback(error.__traceback__)


def _end_tracing() -> None:
    """Put back what symbolic tracing changes for all threads. Two workers that trace at once (``torch.func.linearize``) leave it changed.

    What was there when the level was entered takes its place, with patches of other libraries.
    """
    tracing = cast(Any, _symbolic_trace)
    deadline = time.monotonic() + _PATIENCE
    while _is_traced():
        if time.monotonic() > deadline:  # its own end puts back what it has changed
            return
        time.sleep(1e-3)
    tracing.CURRENT_PATCHER = None  # else the next compilation patches the module class again
    tracing._is_fx_tracing_flag = False
    for name, plain in (("__call__", tracing._orig_module_call), ("__getattr__", tracing._orig_module_getattr)):
        if _is_of_a_trace(vars(torch.nn.Module)[name]):
            setattr(torch.nn.Module, name, _Level.methods.get(name, plain))


def _is_traced() -> bool:
    """Whether a thread is inside of a symbolic trace."""
    frames = (frame for top in sys._current_frames().values() for frame, _ in traceback.walk_stack(top))
    return any(_is_named(frame.f_code, "trace") for frame in frames)


def _is_of_a_trace(function: Any) -> bool:
    """Whether a symbolic trace has made this function."""
    names = "module_call_wrapper", "module_getattr_wrapper"
    return isinstance(function, types.FunctionType) and _is_named(function.__code__, *names)


def _is_named(code: types.CodeType, *names: str) -> bool:
    """Whether the code is one of these functions of PyTorch's file. Dynamo puts others in the place of functions, but not of their code."""
    return code.co_name in names and code.co_filename == _TRACING_FILE
