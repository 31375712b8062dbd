"""What is compiled: finds it, and compiles the copy of a module as the module is, since a copy loses what ``module.compile()`` has made of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def carry_compiled(ours: nn.Module, theirs: nn.Module) -> None:
    """Compile `theirs` with the options of ``ours.compile()``, if that was called."""
    call = vars(ours).get("_compiled_call_impl")
    context = _context_of(call)
    if context is not None:
        vars(theirs)["_compiled_call_impl"] = context(theirs._call_impl)


def _context_of(call: Any) -> Any:
    """What ``torch.compile`` made of its options. PyTorch keeps it nowhere but in the function that it returns."""
    code, cells = getattr(call, "__code__", None), getattr(call, "__closure__", None)
    if code is None or cells is None or not hasattr(call, "_torchdynamo_orig_callable"):
        return None
    options = dict(zip(code.co_freevars, cells, strict=True)).get("self")
    return options.cell_contents if options is not None and callable(options.cell_contents) else None


def is_compiled(module: nn.Module) -> bool:
    """Whether `module` or a part of it runs through ``torch.compile``."""
    return any(map(compiles, module.modules()))


def compiles(module: nn.Module) -> bool:
    """Whether ``torch.compile`` or ``module.compile()`` has compiled this very module."""
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def is_compiled_function(fn: Any) -> bool:
    """Whether `fn` is what ``torch.compile`` returned for a function."""
    return getattr(fn, "_torchdynamo_orig_callable", None) is not None


class _Eager:
    """How many threads want compiled code to run as it was written. PyTorch has one stance for the process."""

    lock = threading.Lock()
    users = 0
    stance: Any = None


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """Run compiled code as it was written, in all threads, until the last one of those that want it leaves."""
    with _Eager.lock:
        if _Eager.users == 0:
            _Eager.stance = torch.compiler.set_stance("force_eager")
            _Eager.stance.__enter__()
        _Eager.users += 1
    try:
        yield
    finally:
        with _Eager.lock:
            _Eager.users -= 1
            if _Eager.users == 0:
                _Eager.stance.__exit__(None, None, None)


def captures_graphs(compiled: Any) -> bool:
    """Whether PyTorch captures CUDA graphs of what ``torch.compile`` has compiled, as in ``mode="reduce-overhead"``."""
    call = getattr(compiled, "_compiled_call_impl", None) or compiled
    options = getattr(call, "get_compiler_config", lambda: None)()
    return bool(options and options.get("triton.cudagraphs"))
