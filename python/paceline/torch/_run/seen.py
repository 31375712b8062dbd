"""What each kind of work has run before, to know the first runs, which may compile."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.torch._batch.batch import Batch
from paceline.torch._batch.items import OrderedBatch
from paceline.torch._devices.caller_state import CallerState
from paceline.torch._devices.compiling import has_compiled
from paceline.torch._devices.run_draws import Drawing
from paceline.torch._replicas.compiled import captures_graphs, is_compiled, is_compiled_function
from paceline.torch._replicas.replicas import Replicas

_PATIENCE_SECONDS = 60.0  # with another call that compiles


class CompileGate:
    """Lets the first call of a size run alone in compiled modules, and all others together. Dynamo is not thread-safe while it compiles.

    A capture runs alone, too: PyTorch captures one graph at a time, and a draw elsewhere would break it.
    """

    _inside = threading.local()  # its `one` is the gate that the thread is inside of

    def __init__(self) -> None:
        self._process = os.getpid()
        self._condition = threading.Condition()
        self._running: Counter[Any] = Counter()  # how many threads of each call are inside
        self._compiling: Counter[Any] = Counter()  # of these, those with a first call

    @classmethod
    def of_call(cls) -> CompileGate:
        """The gate for a call on this thread: that of the process, as what PyTorch keeps while it compiles is.

        A call of a loss function, which is inside a gate, cannot wait for those that are inside, as they may wait for it: they may share a lock
        of the user's. So it has a gate of its own. Usually whoever calls is inside alone, as the first call also compiles what it calls.
        """
        global _of_process
        if getattr(cls._inside, "one", None) is not None:
            return cls()
        if _of_process._process != os.getpid():  # a forked child, which has none of the threads that were inside
            _of_process = cls()
        return _of_process

    @contextlib.contextmanager
    def enter(self, first: bool, call: Any) -> Any:
        """Yield whether a thread of this `call` had to wait. Then its time says nothing about the device's speed.

        Threads of one call wait for each other for as long as it takes. Another call is waited for only so long: what compiles may be a loss that
        waits for this call, which it has given to another thread.
        """
        with self._condition:
            waited = self._holds_up(first)
            begin = time.monotonic()
            while self._holds_up(first):
                left = None if self._holds_up(first, call) else begin + _PATIENCE_SECONDS - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._condition.wait(left)
            self._running[call] += 1
            self._compiling[call] += first
        self._inside.one = self
        try:
            yield waited
        finally:
            self._inside.one = None
            with self._condition:
                for inside, count in ((self._running, 1), (self._compiling, int(first))):
                    inside[call] -= count
                    if not inside[call]:
                        del inside[call]
                self._condition.notify_all()

    def _holds_up(self, first: bool, call: Any = None) -> bool:
        """Whether a thread, or one of this `call`, has to be over first."""
        inside = self._running if first else self._compiling
        return bool(sum(inside.values()) if call is None else inside.get(call))


_of_process = CompileGate()


class Seen:
    """Which micro-batch sizes each device has run before. A first run may compile, allocate and choose algorithms."""

    def __init__(self, device_count: int) -> None:
        self.compiled = self.tunes = self.captures = False
        self.sizes: list[set[tuple[Any, ...]]] = [set() for _ in range(device_count)]
        self.ever: list[set[int]] = [set() for _ in range(device_count)]  # sizes in items, never cleared
        self.mode: Any = None
        self.drawing = Drawing()
        self.forward_ad = False  # whether this work uses forward-mode differentiation
        self.extras: set[Any] = (
            set()
        )  # functions that return extras, so that their items without weight have to run, too
        self.waits = False  # whether devices wait for parameters
        self.waits_at_once = False  # whether all parameters have to be there before the first micro-batch
        self._generation = 0
        self._compiled_module = self._module_captures = False
        self.compiler_captures = False  # whether torch.compile makes CUDA graphs of its own

    def follow(
        self,
        replicas: Replicas,
        module: nn.Module,
        fn: Callable[..., Any],
        state: CallerState,
        *,
        captures: bool = False,
    ) -> None:
        """Follow the module before a step. New replicas have run nothing yet, and other modes and compiled functions compile again."""
        compiled_fn = is_compiled_function(fn)
        if replicas.generation != self._generation:
            self._generation = replicas.generation
            self._compiled_module = is_compiled(module)
            self._module_captures = self._compiled_module and any(map(captures_graphs, module.modules()))
            # Compiled code reads parameters behind the back of what waits for them, and anything may call it.
            self.waits = any(replica.arrivals is not None for replica in replicas.list)
            for sizes in self.sizes:
                sizes.clear()
        self.compiled = self._compiled_module or compiled_fn
        self.compiler_captures = self._module_captures or (compiled_fn and captures_graphs(fn))
        self.waits_at_once = self.waits and (self.compiled or has_compiled())
        # cuDNN searches the fastest algorithm for each new size. Like compilation and capture, this takes long once.
        self.captures = captures
        self.tunes = self.compiled or captures or (state.on_gpu and torch.backends.cudnn.benchmark)
        self.mode = (module.training, state.autocast, state.default_device, fn if compiled_fn else None)

    def size_of(self, batch: Batch | OrderedBatch, begin: int, end: int) -> tuple[Any, ...]:
        """All that code may be compiled anew for: the entry in `sizes` of these items as a micro-batch."""
        # Costs may all differ, so they are kept only where something is tuned by size.
        padded_to = batch.padded_to(begin, end) if self.tunes else None
        return (end - begin, self.mode, batch.item_shapes, padded_to)
