"""What all proofs have in common: a batch runs whole on the user's own module, and again split over the devices.

The first result is that of plain PyTorch, and counts. The second is thrown away. So a loss, a module or a batch that a split changes is seen by its
effect, whatever the reason is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline import Cancelled
from paceline.torch._batch.batch import Batch
from paceline.torch._check.probe import LEAST_OF_PROOFS, tolerance_for, tolerance_of
from paceline.torch._check.proof import Proof, said_of_slices, thrown_away
from paceline.torch._check.state import Edited, State
from paceline.torch._devices.noise import Noise
from paceline.torch._replicas.batch_norm import standing_still, using_batch_statistics
from paceline.torch._replicas.compiled import eagerly, is_compiled, is_compiled_function
from paceline.torch._run.execution import Execution
from paceline.torch._run.workload import Workload

Found = dict[str, str]  # what differs, by name, in words


class BaseProver:
    """Runs one batch whole, and then split. A subclass says how, and compares. Results have the state that a run left, as `found`."""

    hooks = True  # whether parameters may have gradient hooks
    _leaves = False  # whether the function may write to tensors of the batch that require gradients
    _call = "step"
    _again = "step"  # what comes after this one, in words
    _splits = False  # whether the devices run, whose errors say that a split changes something

    # By a subclass: the batch on the user's own module, and on the devices; what differs; what of this neither rounding nor chance explains (None:
    # one device gives two results); what was compared, in words; and why something differs, if that is known.
    _whole: Callable[[State, Any], Any]
    _split: Callable[..., Any]
    _differences: Callable[[State, Any, Any], Found]
    _beyond: Callable[[Found, State, Sequence[Any], Any, tuple[Any, Any, Any]], Found | None]
    _measure: Callable[[Proof, Any, Any], str]
    _cause: Callable[[Found, State], str]

    def __init__(self, execution: Execution, make_work: Callable[[], Workload], batch: Batch, function: Any) -> None:
        """`make_work` makes work for the runs that are thrown away."""
        self._execution, self._make_work = execution, make_work
        self._module, self._places, self._replicas = execution.module, execution.places, execution.replicas
        self._batch, self._function = batch, function
        self._tolerance = max(LEAST_OF_PROOFS, tolerance_for(self._module, self._places))
        compiled = is_compiled(self._module) or is_compiled_function(function)
        self._stance: Callable[[], contextlib.AbstractContextManager[Any]]
        self._stance = eagerly if compiled else contextlib.nullcontext
        self._before: State | None = None
        self._first_noise: Noise | None = None

    def run(self, proof: Proof) -> Any:
        """The result of the whole batch, in which the module is left. `proof` gets what the comparison has found. If anything raises, all is as before."""
        self._edited = Edited(self._batch, leaves=self._leaves)
        self._before = before = self._state()
        proof.left_alone = list(before.around.left_alone)
        try:
            self._first_noise = noise = self._noise(counts=True)
            with self._replicas.hooks_watched(self._function):
                whole = self._first(before, noise, proof)
            # The types that ran, such as those of autocast inside of the function.
            self._tolerance = max(self._tolerance, tolerance_of(noise.types))
            before.hold_apart()
            after = self._state()
            self._edited.note()
            found = {} if proof.unproved else self._compared(before, noise, whole, proof)
            if found and not proof.unproved:
                found = self._lasting(found, after, proof)
            if found and not proof.unproved:
                proof.differences = list(found.values())
                proof.is_wrong = not all(text.startswith("attribute") for text in proof.differences)
                proof.cause = self._cause(found, after)
            return self._left(whole, after, noise)
        except BaseException:
            self.take_back()
            raise
        finally:
            self._execution.drop_gradients()

    def take_back(self) -> None:
        """Go back to where `run` began."""
        if self._before is not None:
            self._start(self._before)
        if self._first_noise is not None:
            self._first_noise.go_back()

    def _state(self) -> State:
        return State(self._replicas, self._places, self._function)

    def _start(self, state: State, norms: Sequence[Any] = ()) -> None:
        """Go back to a state. Modules that stand still go on to do so."""
        state.restore_but(norms)
        self._edited.begin()

    def _noise(self, *, counts: bool = False) -> Any:
        """What records the draws of the whole batch. `counts`: whether that run counts."""
        noise = Noise(self._batch.size, self._places, self._tolerance)
        noise.counts = counts
        return noise

    def _first(self, before: State, noise: Any, proof: Proof) -> Any:
        """The result that counts. `proof` gets why it is nothing to compare with."""
        return self._whole(before, noise)

    def _left(self, whole: Any, after: State, noise: Any) -> Any:
        """Leave everything as the run that counts has left it."""
        after.restore()
        noise.leave()
        self._edited.end()
        return whole

    def _lasting(self, found: Found, after: State, proof: Proof) -> Found:
        """The differences that are left in a second step: what a first forward sets up is on the module by then."""
        try:
            lasting = self._compared(after, self._noise(), None, proof)
        except Cancelled:
            raise
        except Exception as error:  # as for a state of the whole batch that a slice cannot go on from
            fails = f"a second {self._again} raises {type(error).__name__}: {error}"
            return found | ({"error": fails} if self._splits else {})
        return {name: text for name, text in found.items() if name in lasting}

    def _compared(self, start: State, noise: Any, own: Any, proof: Proof) -> Found:
        """Run the batch split from a state, and compare it with the whole batch. Returns what differs.

        Without the result of one device (None) it runs there, too: twice, since what differs by itself does not count.
        """
        apart = [] if self._execution.synchronised else using_batch_statistics(self._replicas.norms)
        norms: list[Any] = [part for _, part in apart]
        like = next(iter(self._replicas.parameters), torch.empty(0, device="cpu"))
        # Normalisation over a part of the batch is known to differ, and said elsewhere.
        with thrown_away(), standing_still(norms, like):
            first = own is not None
            if own is None or norms:
                self._start(start, norms)
                own = self._whole(start, noise)
            self._start(start, norms)
            got = self._split(start, noise, normalises=bool(norms))
            self._edited.begin()
            found: Found | None = self._differences(start, own, got)
            if found and not first:
                self._start(start, norms)
                found = self._beyond(found, start, norms, noise, (own, self._whole(start, noise), got))
        self._settle()
        if noise.lost:
            proof.unproved = [f"random draws that cannot be repeated ({', '.join(noise.lost)})"]
            return {}
        if found is None:
            proof.unproved = ["the same batch gave two results on one device"]
            return {}
        kept = f"{len(own.found.buffers)} buffers, {len(own.found.attributes)} attributes"
        proof.compared = f"{self._measure(proof, own, got)}; within {self._tolerance:.0e}: {kept}"
        if own.found.holds_containers(found):
            self._replicas.reset_containers()
        return found

    def _new_work(self, *, normalises: bool = False) -> Workload:
        work = self._make_work()
        work.normalises |= normalises
        return work

    def _said(self) -> contextlib.AbstractContextManager[None]:
        """Around a run on the devices."""
        return said_of_slices(self._call, self._batch.cut_inside)

    def _settle(self) -> None:
        """After all runs from one state."""
