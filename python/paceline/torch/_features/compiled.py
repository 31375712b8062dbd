"""``torch.compile``: code that is compiled on worker threads, for each device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from paceline import InvalidArgument
from paceline.torch._devices.compiling import compiled_for_each, has_compiled, seed_graph_trees
from paceline.torch._run.call import Call
from paceline.torch._run.executor import Executor
from paceline.torch._run.feature import Bound, Feature
from paceline.torch._run.recipe import Retry


class CompiledCode(Feature):
    """Lets each device compile as often as one device may."""

    def bind(self, call: Call) -> Bound | None:
        if call.seen.compiler_captures and call.places.share_gpu:
            raise InvalidArgument(
                "torch.compile with CUDA graphs of its own (mode='reduce-overhead' or 'max-autotune') together with several parts of one GPU. PyTorch "
                "keeps the memory of such graphs in a way that one thread for each GPU may use, and ends the process if there are two. Use "
                "mode='max-autotune-no-cudagraphs' or no mode, or whole GPUs."
            )
        return self if call.seen.compiled else None

    @contextlib.contextmanager
    def run(self, run: Executor) -> Iterator[None]:
        with compiled_for_each(len(run.call.all_places), run.state.contexts):
            yield
        seed_graph_trees()  # a worker may have loaded them, and the caller's thread may want to use them, too


class ArrivingParameters(Feature):
    """Parameters on their way to devices in another memory, which wait for a parameter when Python reads it.

    Compiled code does not read it by Python. A run that turns out to have compiled something does not count.
    """

    def bind(self, call: Call) -> Bound | None:
        return self if call.seen.waits else None

    @contextlib.contextmanager
    def run(self, run: Executor) -> Iterator[None]:
        try:
            yield
        finally:
            for replica in run.replicas:
                if replica.arrivals is not None:
                    replica.arrivals.end()

    def retry(self, run: Executor, outcome: Any, *, failed: bool) -> Retry | None:
        if not failed and run.repeatable and not run.seen.waits_at_once and has_compiled():
            return Retry("something was compiled, which did not wait for parameters", complete=True)
        return None
