"""Compiles the copy of a module as the module is compiled. A copy of a module loses what ``module.compile()`` has made of it."""

from __future__ import annotations

from typing import Any

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
