"""Proves a forward: outputs and state of the whole batch, and of the batch that is split over the devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline.torch._batch.batch import Batch
from paceline.torch._batch.joining import concatenate
from paceline.torch._check.base import BaseProver, Found
from paceline.torch._check.proof import Proof
from paceline.torch._check.state import Snapshot, State, differing, same_nest
from paceline.torch._devices.caller_state import CallerThreads
from paceline.torch._devices.noise import UNSEEN, Noise
from paceline.torch._devices.run_draws import replayed_draws
from paceline.torch._replicas.parametrized import forget
from paceline.torch._run.call import Asked, Call
from paceline.torch._run.execution import Execution
from paceline.torch._run.executor import PredictRun
from paceline.torch._run.halves import ForwardRun
from paceline.torch._run.workload import Workload

_OF_OUTPUTS = (
    "What the forward makes of an item depends on the other items, such as by a mean over the batch or by its size. Compute that from the outputs, "
    "which are those of the whole batch. A 0-dim output is taken for the mean over its slice: where it is a mean over something else than items, such as labels, "
    "return sums and counts with one row per item."
)
_OF_STATE = (
    "What a forward keeps of its batch comes to the module from the device that ran most items; lists and dictionaries do not come at all. Let the "
    "forward return it, which gives it for the whole batch."
)


class _Replays(PredictRun):
    """A forward in which items draw what they drew before."""

    noise: Noise

    def compute(self, device: int, begin: int, end: int) -> bool:
        with self.noise.of(self.batch.rows(begin, end)):
            return super().compute(device, begin, end)


class _Forward(_Replays, ForwardRun):
    pass


class Outputs(NamedTuple):
    """What a forward gave for the batch, and the state that it left."""

    outputs: Any
    found: Snapshot


class ForwardProver(BaseProver):
    """Runs the forward of one batch whole, and then split."""

    _again, _splits = "call", True

    def __init__(
        self,
        execution: Execution,
        make_work: Callable[[], Workload],
        batch: Batch,
        fn: Callable[[nn.Module, Any], Any],
        *,
        call: str,
        graph: bool,
        pad: float | None = None,
    ) -> None:
        """`graph`: whether the outputs lead to parameters and inputs. `pad`: as for `concatenate`."""
        super().__init__(execution, make_work, batch, fn)
        self._call, self._graph, self._leaves, self._pad = call, graph, not graph, pad
        self._far: list[float] = []  # of the outputs that were compared last

    def _left(self, whole: Outputs, after: State, noise: Any) -> Any:
        if self._graph:  # once more, with a graph that nothing has written to
            self.take_back()
            return self._plain()
        return super()._left(whole, after, noise).outputs

    def _cause(self, found: Found, after: State) -> str:
        cause = _OF_OUTPUTS if "outputs" in found else _OF_STATE
        inside = self._batch.cut_inside
        return f"{cause} The batch is a list or tuple, {inside}." if inside else cause

    def _whole(self, start: State, noise: Any) -> Outputs:
        rows = self._batch.rows(0, self._batch.size)
        with self._stance(), noise.of(rows), torch.set_grad_enabled(self._graph):
            outputs = self._called()
        noise.lost |= dict.fromkeys(start.others.moved)
        if start.random.moved and not noise.drew:
            noise.lost[UNSEEN] = None
        return Outputs(self._joined([(0, self._batch.size, outputs)]), Snapshot(self._replicas))

    def _plain(self) -> Any:
        """The outputs with their graph."""
        with _copies_in_place(self._replicas.modules):
            return self._called()

    def _called(self) -> Any:
        modules = set(map(id, self._replicas.modules))
        forget(modules)
        size = self._batch.size
        with CallerThreads.here().lent():
            if self._graph:  # a leaf that requires a gradient refuses an operator in place, which devices allow
                part = self._batch.cut(
                    lambda one: one[:size].clone() if one.requires_grad else one[:size], self._places.to_home
                )
            else:
                part = self._batch.slice(0, size, self._places.to_home)
            outputs = self._function(self._module, part)
        forget(modules)
        return outputs

    def _joined(self, pieces: list[tuple[int, int, Any]]) -> Any:
        """Outputs by the rule for those of several devices, without a graph, and with memory of their own."""
        with torch.no_grad():
            options: dict[str, Any] = {"call": self._call, "pad": self._pad, "rows_only": self._graph}
            return concatenate(pieces, lambda one: self._places.to_home(one.detach()), torch.clone, **options)

    def _differences(self, start: State, own: Outputs, got: Outputs) -> Found:
        self._far = [0.0]
        differs = differing(own.outputs, got.outputs, self._tolerance, far=self._far)
        return ({"outputs": "the outputs differ"} if differs else {}) | own.found.differences(
            got.found, self._tolerance
        )

    def _beyond(
        self, found: Found, start: State, norms: Sequence[Any], noise: Any, results: tuple[Outputs, Outputs, Outputs]
    ) -> Found | None:
        own, again, _ = results
        if not same_nest(own.outputs, again.outputs, self._tolerance):
            return None
        by_itself = own.found.differences(again.found, self._tolerance)
        return {name: text for name, text in found.items() if name not in by_itself}

    def _measure(self, proof: Proof, own: Outputs, got: Outputs) -> str:
        proof.largest = max(proof.largest, *self._far)
        return "outputs"

    def _run_of(self, call: Call) -> _Replays:
        return _Forward(call, self._function, self._batch) if self._graph else _Replays(call, fn=self._function)

    def _split(self, start: State, noise: Any, *, normalises: bool) -> Outputs:
        def replays(call: Call) -> _Replays:
            run = self._run_of(call)
            run.noise = noise
            if noise.drew:
                run.draws = replayed_draws(call.places, call.random)
            return run

        with self._stance(), self._said():
            asked = Asked(self._new_work(normalises=normalises), self._batch, self._function, replays, hooks=True)
            run = self._execution.forward(asked)
        outputs = self._joined(sorted(run.outputs, key=lambda piece: piece[0]))
        self._places.drain()
        return Outputs(outputs, Snapshot(self._replicas))


@contextlib.contextmanager
def _copies_in_place(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let a graph have copies of buffers: calls on the devices write to those of the user's module before its backward."""
    held = [
        (part._buffers, name, one, one.clone())
        for part in modules
        for name, one in part._buffers.items()
        if one is not None and one.layout is torch.strided
    ]
    for slots, name, _, copy in held:
        slots[name] = copy
    try:
        yield
    finally:
        with torch.no_grad():
            for slots, name, one, copy in held:
                if slots.get(name) is copy:  # else the forward has set it to another tensor
                    slots[name] = one
                    one.copy_(copy.detach())
