"""Proves a forward: the batch runs whole on the user's own module, and again split over the devices. Outputs and state are compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from paceline import Cancelled
from paceline.torch._batch.batch import Batch
from paceline.torch._batch.joining import concatenate
from paceline.torch._check.proof import Proof, said_of_slices, thrown_away
from paceline.torch._check.result import Edited
from paceline.torch._check.state import Snapshot, State, same_nest
from paceline.torch._check.tolerance import LEAST_OF_PROOFS, tolerance_for, tolerance_of
from paceline.torch._devices.caller_state import CallerThreads
from paceline.torch._devices.noise import Noise
from paceline.torch._devices.run_draws import replayed_draws
from paceline.torch._replicas.batch_norm import standing_still, using_batch_statistics
from paceline.torch._replicas.compiled import eagerly, is_compiled, is_compiled_function
from paceline.torch._replicas.parametrized import forget
from paceline.torch._run.call import Asked, Call
from paceline.torch._run.execution import Execution
from paceline.torch._run.executor import PredictRun
from paceline.torch._run.halves import ForwardRun
from paceline.torch._run.workload import Workload

_Outputs = Any
_DIFFER = "the outputs differ"
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


class ForwardProver:
    """Runs the forward of one batch whole, and then split."""

    def __init__(
        self,
        execution: Execution,
        make_work: Callable[[], Workload],
        batch: Batch,
        fn: Callable[[nn.Module, Any], Any],
        *,
        graph: bool,
        pad: float | None = None,
    ) -> None:
        """`graph`: whether the outputs lead to parameters and inputs. `pad`: as for `concatenate`."""
        self._execution, self._make_work, self._batch, self._fn = execution, make_work, batch, fn
        self._module, self._places, self._replicas = execution.module, execution.places, execution.replicas
        self._graph, self._pad = graph, pad
        self._before: State | None = None
        self._tolerance = max(LEAST_OF_PROOFS, tolerance_for(self._module, self._places))
        self._stance: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        if is_compiled(self._module) or is_compiled_function(fn):
            self._stance = eagerly

    def run(self, proof: Proof) -> _Outputs:
        """The outputs for the whole batch, as plain PyTorch gives them. `proof` gets what differs. If anything raises, all is as before."""
        self._call = proof.call
        self._edited = edited = Edited(self._batch, leaves=not self._graph)
        self._first_noise = noise = self._noise()
        self._before = before = State(self._replicas, self._places, self._fn)
        noise.counts = True
        proof.left_alone = list(before.around.left_alone)
        try:
            with self._stance(), self._replicas.hooks_watched(self._fn):
                ours, found = self._whole(before, noise)
            self._tolerance = max(self._tolerance, tolerance_of(noise.types))
            before.hold_apart()
            after = State(self._replicas, self._places, self._fn)
            edited.note()
            differences = self._compared(before, noise, ours, found, proof)
            if differences and not proof.unproved:
                proof.differences = list(self._lasting(differences, after, proof).values())
            if proof.differences:
                proof.is_wrong = not all(text.startswith("attribute") for text in proof.differences)
                proof.cause = _OF_OUTPUTS if _DIFFER in proof.differences else _OF_STATE
                if self._batch.cut_inside:
                    proof.cause += f" The batch is a list or tuple, {self._batch.cut_inside}."
            if self._graph:  # once more, with a graph that nothing above has written to
                self.take_back()
                return self._plain()
            self._restore(after)
            noise.leave()
            edited.end()
            return ours
        except BaseException:
            self.take_back()
            raise

    def take_back(self) -> None:
        """Go back to where `run` began."""
        if self._before is not None:
            self._restore(self._before)
            self._first_noise.go_back()

    def _restore(self, state: State) -> None:
        state.restore()
        self._edited.begin()

    def _noise(self) -> Noise:
        return Noise(self._batch.size, self._places, max(self._tolerance, 1e-9))

    def _whole(self, start: State, noise: Noise) -> tuple[_Outputs, Snapshot]:
        """The batch on the user's own module."""
        with noise.of(self._batch.rows(0, self._batch.size)), torch.set_grad_enabled(self._graph):
            outputs = self._called()
        noise.lost |= dict.fromkeys(start.others.moved)
        if start.random.moved and not noise.drew:
            noise.lost["code whose draws PyTorch does not show"] = None
        return self._joined([(0, self._batch.size, outputs)]), Snapshot(self._replicas)

    def _plain(self) -> _Outputs:
        """The outputs with their graph."""
        with _copies_in_place(self._replicas.modules):
            return self._called()

    def _called(self) -> _Outputs:
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
            outputs = self._fn(self._module, part)
        forget(modules)
        return outputs

    def _joined(self, pieces: list[tuple[int, int, Any]]) -> _Outputs:
        """Outputs by the rule for those of several devices, without a graph, and with memory of their own."""
        with torch.no_grad():
            options: dict[str, Any] = {"call": self._call, "pad": self._pad, "rows_only": self._graph}
            return concatenate(pieces, lambda one: self._places.to_home(one.detach()), torch.clone, **options)

    def _compared(
        self, start: State, noise: Noise, ours: _Outputs, found: Snapshot | None, proof: Proof
    ) -> dict[str, str]:
        """Run the batch split from a state, and compare it with what the whole batch gave. Without that it runs whole here, too: twice."""
        apart = [] if self._execution.synchronised else using_batch_statistics(self._replicas.norms)
        norms: Sequence[Any] = [part for _, part in apart]
        like = next(iter(self._replicas.parameters), torch.empty(0))
        by_itself: dict[str, str] = {}
        with thrown_away(), standing_still(norms, like), self._stance():
            if found is None or norms:
                start.restore_but(norms)
                self._edited.begin()
                was = ours, found
                ours, found = self._whole(start, noise)
                if was[1] is None:
                    start.restore_but(norms)
                    self._edited.begin()
                    again, left = self._whole(start, noise)
                    by_itself = found.differences(left, self._tolerance)
                    if not same_nest(ours, again, self._tolerance):
                        proof.unproved = ["the same batch gave two results on one device"]
                        return {}
            start.restore_but(norms)
            self._edited.begin()
            theirs, kept = self._split(noise, normalises=bool(norms))
        if noise.lost:
            proof.unproved = [f"random draws that cannot be repeated ({', '.join(noise.lost)})"]
            return {}
        proof.compared = f"outputs, {len(found.buffers)} buffers, {len(found.attributes)} attributes"
        proof.largest = self._tolerance
        differs = {} if same_nest(ours, theirs, self._tolerance) else {"outputs": _DIFFER}
        state = found.differences(kept, self._tolerance)
        if found.holds_containers(state):
            self._replicas.reset_containers()
        return differs | {name: text for name, text in state.items() if name not in by_itself}

    def _lasting(self, found: dict[str, str], after: State, proof: Proof) -> dict[str, str]:
        """The differences that are left in a second call: what a first forward sets up is on the module by then."""
        try:
            lasting = self._compared(after, self._noise(), None, None, proof)
        except Cancelled:
            raise
        except Exception as error:
            return found | {"error": f"a second call raises {type(error).__name__}: {error}"}
        return {} if proof.unproved else {name: text for name, text in found.items() if name in lasting}

    def _said(self) -> contextlib.AbstractContextManager[None]:
        """Around a run on the devices."""
        return said_of_slices(self._call, self._batch.cut_inside)

    def _new_work(self) -> Workload:
        return self._make_work()

    def _run_of(self, call: Call) -> _Replays:
        return _Forward(call, self._fn, self._batch) if self._graph else _Replays(call, fn=self._fn)

    def _split(self, noise: Noise, *, normalises: bool) -> tuple[_Outputs, Snapshot]:
        execution = self._execution
        work = self._new_work()
        work.normalises |= normalises

        def replays(call: Call) -> _Replays:
            run = self._run_of(call)
            run.noise = noise
            if noise.drew:
                run.draws = replayed_draws(call.places, call.random)
            return run

        with self._said():
            run = execution.forward(Asked(work, self._batch, self._fn, replays, hooks=True))
        outputs = self._joined(sorted(run.outputs, key=lambda piece: piece[0]))
        self._places.drain()
        return outputs, Snapshot(self._replicas)


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
