"""What each kind of work has run before, to know the first runs, which may compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.torch._batch.batch import Batch
from paceline.torch._batch.items import OrderedBatch
from paceline.torch._devices.caller_state import CallerState
from paceline.torch._devices.compile_gate import CompileGate as CompileGate
from paceline.torch._devices.compiling import has_compiled
from paceline.torch._devices.run_draws import Drawing
from paceline.torch._replicas.compiled import captures_graphs, is_compiled, is_compiled_function
from paceline.torch._replicas.replicas import Replicas


class Seen:
    """Which micro-batch sizes each device has run before. A first run may compile, allocate and choose algorithms."""

    def __init__(self, device_count: int) -> None:
        self.compiled = self.tunes = self.captures = False
        self.sizes: list[set[tuple[Any, ...]]] = [set() for _ in range(device_count)]
        self.ever: list[set[int]] = [set() for _ in range(device_count)]  # sizes in items, never cleared
        self.mode: Any = None
        self.drawing = Drawing()
        self.forward_ad = False  # whether this work uses forward-mode differentiation
        # Functions that return extras, so that their items without weight have to run, too.
        self.extras: set[Any] = set()
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
