"""``torch.compile`` on worker threads: state that PyTorch keeps for each thread, and how often it compiles the same code."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

_LIMITS = ("recompile_limit", "accumulated_recompile_limit")


def seed_graph_trees() -> None:
    """Give the calling thread the state of CUDA graph trees (``mode="reduce-overhead"``), if PyTorch has loaded them.

    Until 2.13 PyTorch gave it to no thread but the first one and those of autograd, and asserted on others (pytorch#123177).
    """
    local = getattr(sys.modules.get("torch._inductor.cudagraph_trees"), "local", None)
    if local is None or hasattr(local, "tree_manager_containers") or torch._C._is_key_in_tls("tree_manager_containers"):
        return
    local.tree_manager_containers = {}
    local.tree_manager_locks = defaultdict(threading.Lock)
    for name in ("tree_manager_containers", "tree_manager_locks"):
        torch._C._stash_obj_in_tls(name, getattr(local, name))


def has_compiled() -> bool:
    """Whether Dynamo has compiled something in this process since it was reset."""
    module = sys.modules.get("torch._dynamo.convert_frame")
    return module is not None and getattr(module, "FRAME_COUNTER", 1) > 0


class _Raised:
    """The limits of a PyTorch that has one setting for all threads, while runs have raised them."""

    lock = threading.Lock()
    times: list[int] = []  # noqa: RUF012  of each run
    before: dict[str, int] = {}  # noqa: RUF012


@contextlib.contextmanager
def compiled_for_each(devices: int, contexts: Sequence[contextvars.Context]) -> Iterator[None]:
    """Let the workers of a run, which are in these contexts, compile the same code as often for each device as one device may.

    Compiled code is of one device, and the devices share PyTorch's limit, beyond which code runs uncompiled.
    """
    config = _config()
    if config is None or devices < 2:
        yield
    elif _is_of_context(config):
        for name in _LIMITS:
            for context in contexts:
                context.run(setattr, config, name, devices * getattr(config, name))
        yield
    else:
        with _raised_for_all(config, devices):
            yield


@contextlib.contextmanager
def _raised_for_all(config: Any, devices: int) -> Iterator[None]:
    def change(runs: list[int]) -> None:
        _Raised.times = runs
        for name, limit in _Raised.before.items():
            setattr(config, name, limit * max(runs, default=1))

    with _Raised.lock:
        if not _Raised.times:
            _Raised.before = {name: getattr(config, name) for name in _LIMITS}
        change([*_Raised.times, devices])
    try:
        yield
    finally:
        with _Raised.lock:
            left = list(_Raised.times)
            left.remove(devices)
            change(left)


def _config() -> Any:
    """The settings of Dynamo, if it is loaded."""
    return sys.modules.get("torch._dynamo.config")


@functools.cache
def _is_of_context(config: Any) -> bool:
    """Whether a setting holds in the context in which it was made. Otherwise it holds in the process."""
    with _Raised.lock:
        limit = config.recompile_limit
        contextvars.copy_context().run(setattr, config, "recompile_limit", limit + 1)
        if config.recompile_limit == limit:
            return True
        config.recompile_limit = limit
        return False
