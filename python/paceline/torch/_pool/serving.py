"""What `Pool.serve` makes of its arguments."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch._pool.answerer import Answerer, BatchOptions
from paceline.torch._pool.batcher import Batcher
from paceline.torch._pool.graphs import GraphedCopies, check_graphs
from paceline.torch._pool.jobs import Jobs
from paceline.torch._pool.needs import Needs, place_of
from paceline.torch._pool.padding import Padding
from paceline.torch._pool.served import Copies, Served, ServedFunction, ServedScript, WithState
from paceline.torch._replicas.compiled import is_compiled
from paceline.torch._replicas.copies import Replicate

_LOOSE = 5e-2  # how far padding may move an answer, of the largest value, in half precision
_OF_VERSIONS = ("initializer", "replicate", "compile", "graphs", "resident", "memory", "idempotent")


def bytes_of(call: str, name: str, value: Any) -> float:
    """A number of bytes."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise InvalidArgument(f"{call}: {name}={value!r} must be a number of bytes, finite and not negative.")
    return float(value)


def answerer_of(
    jobs: Jobs,
    model: Any,
    name: str,
    version: int,
    *,
    initializer: Callable[[torch.device], Any] | None,
    replicate: Replicate | None,
    compile: bool | Mapping[str, Any],
    graphs: bool,
    resident: float,
    max_batch: int,
    max_delay: float,
    idempotent: bool | None,
    cost: Callable[[Any], float] | None,
    pad: Any,
    length_dim: int,
    memory: float,
    needs: Needs,
    autocast: torch.dtype | None,
) -> Answerer:
    """What answers requests, by the arguments of `Pool.serve`."""
    if not (isinstance(max_batch, int) and max_batch >= 1 and 0 <= max_delay < math.inf):
        raise InvalidArgument(
            f"serve: max_batch={max_batch!r} must be at least 1, and max_delay={max_delay!r} finite and not negative."
        )
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise InvalidArgument(f"serve: autocast={autocast!r} must be torch.bfloat16, torch.float16 or None.")
    if pad is None and cost is not None:
        raise InvalidArgument(
            "serve: cost= is for requests of different lengths that share batches. Say what they are padded with: pad=0, for example."
        )
    is_module = isinstance(model, nn.Module)
    again = is_module if idempotent is None else idempotent
    if pad is not None and not again:
        raise InvalidArgument(
            "serve: with pad= some requests also run alone, to see which part of an answer is padding. Say idempotent=True if the function may be called again."
        )
    bytes_of("serve", "resident", resident)
    place = place_of(needs, jobs.devices, jobs.memory)  # raises
    if graphs:
        check_graphs(model, jobs.devices, place)
    copies = functools.partial(GraphedCopies, name) if graphs and pad is None else Copies
    served = _served(model, initializer, replicate, compile, resident, copies)
    padding = None
    if pad is not None:
        padding = Padding(name, pad, length_dim, cost, **({} if autocast is None else {"tolerance": _LOOSE}))
    options = BatchOptions(
        max_batch=max_batch,
        max_delay=max_delay,
        idempotent=again,
        padding=padding,
        memory=bytes_of("serve", "memory", memory),
        needs=needs,
        autocast=autocast,
    )
    jobs.serve(name, served)
    return Answerer(jobs, served, name, options, version)


def batcher_of(jobs: Jobs, model: Any, called: str, **given: Any) -> Batcher:
    """A batcher, by the arguments of `Pool.serve`."""

    def make(model: Any, version: int, options: Mapping[str, Any]) -> Answerer:
        if others := options.keys() - _OF_VERSIONS:
            raise InvalidArgument(
                f"publish: {min(others)}= is no option of a version. These are {', '.join(_OF_VERSIONS)}. What else was given to serve is that of all versions."
            )
        try:
            return answerer_of(jobs, model, f"{name}, version {version}", version, **{**given, **options})
        except InvalidArgument as error:  # it says the same of what serve() is given
            raise InvalidArgument(re.sub(r"^serve(?=: )", "publish", str(error))) from error.__cause__

    with jobs.numbered() as number:
        name = f"{called} {number}"
        first = answerer_of(jobs, model, name, 1, **given)
    return Batcher(jobs, first, make)


def _served(
    model: Any,
    initializer: Callable[[torch.device], Any] | None,
    replicate: Replicate | None,
    compile: bool | Mapping[str, Any],
    resident: float,
    copies: Callable[..., Served],
) -> Served:
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise InvalidArgument(f"serve: its first argument is a {type(model).__name__}, not a module or a function.")
        if replicate is not None:
            raise InvalidArgument("serve: replicate= is for modules.")
        if compile is not False:
            raise InvalidArgument("serve: compile= is for modules. Give a function that torch.compile has compiled.")
        if initializer is not None:
            return WithState(model, initializer, resident)
        if resident:
            raise InvalidArgument("serve: resident= is for the state that initializer= makes, which this call has not.")
        return ServedFunction(model)
    if _mixes_requests(model):
        raise InvalidArgument(
            "serve: the module, or a batch norm in it, is in training mode, or a batch norm keeps no statistics (track_running_stats=False). "
            "Then an answer may depend on other requests. Call eval() before. "
            "If this is meant, give a function that calls the module."
        )
    if initializer is not None:
        raise InvalidArgument("serve: initializer= is for a function fn(state, batch). A module is its own state.")
    if resident:
        raise InvalidArgument(
            "serve: resident= is for the state that initializer= makes. Copies of a module share its parameters."
        )
    if compile is not False:
        if isinstance(model, torch.jit.ScriptModule) or is_compiled(model):
            raise InvalidArgument(
                "serve: compile= is for a module that is not compiled. This one is: leave compile= out."
            )
        if compile is not True and not isinstance(compile, Mapping):
            raise InvalidArgument(
                f"serve: compile={compile!r} must be True, False or a dictionary of options of torch.compile."
            )
    if isinstance(model, torch.jit.ScriptModule):
        return ServedScript(model)
    options = None if compile is False else {} if compile is True else dict(compile)
    return copies(model, replicate, options)


def _mixes_requests(model: nn.Module) -> bool:
    # Other parts may have the flag of training for no reason, as those that quantization makes.
    norms = (part for part in model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm))
    return model.training or any(part.training or part.running_mean is None for part in norms)
