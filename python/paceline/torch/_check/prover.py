"""Proves a step: the batch runs whole on the user's own module, and again split over the devices. Both results are compared.

The first result is that of plain PyTorch, and counts. The second is thrown away. So a loss, a module or a batch that a split changes is seen by its
effect, whatever the reason is.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from paceline import Cancelled
from paceline.torch._batch.batch import Batch
from paceline.torch._batch.extras import Extras, parted
from paceline.torch._batch.objective import Objective
from paceline.torch._check.check import TrialRun
from paceline.torch._check.comparison import Comparison
from paceline.torch._check.probe import OutsideLeaves
from paceline.torch._check.proof import Proof, said_of_slices, thrown_away
from paceline.torch._check.result import Edited, Result
from paceline.torch._check.rounding import round_otherwise
from paceline.torch._check.state import Snapshot, State
from paceline.torch._check.tolerance import LEAST_OF_PROOFS, tolerance_for, tolerance_of
from paceline.torch._devices.caller_state import CallerThreads, outside_autocast
from paceline.torch._devices.noise import Noise
from paceline.torch._replicas.batch_norm import standing_still, using_batch_statistics
from paceline.torch._replicas.buffer_rules import BufferRule, BufferRules
from paceline.torch._replicas.compiled import eagerly, is_compiled, is_compiled_function
from paceline.torch._replicas.parametrized import forget
from paceline.torch._replicas.replicas import Replicas
from paceline.torch._run.call import Asked, Call
from paceline.torch._run.execution import Execution
from paceline.torch._run.gradients import OwnStorages
from paceline.torch._run.memory import is_out_of_memory
from paceline.torch._run.train_run import LossFunction, refuse_own_backward, refuse_without_gradient
from paceline.torch._run.workload import Workload

_OF_THE_LOSS = {"loss", "gradient", "extras"}
_OF_STATE = (
    "What a forward keeps of its batch comes to the module from the device that ran most items; lists and dictionaries do not come at all. Let loss_fn "
    "return it beside the loss (extras has it for the whole batch), pass it in with the batch, or keep it outside of the forward."
)


class Prover:
    """Runs one batch whole, and then split."""

    _knows_rules = True  # whether buffers may come from all devices

    def __init__(
        self,
        execution: Execution,
        make_work: Callable[[], Workload],
        batch: Batch,
        objective: Objective,
        loss_fn: LossFunction,
        *,
        scale: torch.Tensor | None,
        costs: list[float] | None,
        carries: bool,
        micro_batch: int | None,
        explain: Callable[[], str],
    ) -> None:
        """`make_work` makes work for the runs that are thrown away. `explain` names the cause of a difference, if it can."""
        self._execution, self._make_work = execution, make_work
        self._module, self._places, self._replicas = execution.module, execution.places, execution.replicas
        self._batch, self._objective, self._loss_fn = batch, objective, loss_fn
        self._scale, self._costs, self._carries = scale, costs, carries
        self._micro_batch, self._explain = micro_batch or batch.size, explain
        tolerance = max(LEAST_OF_PROOFS, tolerance_for(self._module, self._places))
        self._stance: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        if is_compiled(self._module) or is_compiled_function(loss_fn):
            self._stance = eagerly
        self.outside = OutsideLeaves(self._replicas.parameters, hooks_rest=carries)
        self._comparison = Comparison(self._replicas, self.outside, loss_fn, tolerance)
        self._splits = self._tries_rules = False  # whether the devices run, and whether rules of buffers are tried
        self._before: State | None = None
        self._first_noise: Noise | None = None
        self.size = batch.size

    def run(self, proof: Proof) -> Result:
        """The result of the whole batch, in which the module is left. `proof` gets what the comparison has found. If anything raises, all is as before."""
        self._edited = Edited(self._batch)
        self._before = before = State(self._replicas, self._places, self._loss_fn)
        proof.left_alone = list(before.around.left_alone)
        proof.reaches_batch = any(before.around.holds(one) for _, one in self._batch.tensors())
        try:
            for parameter in self._replicas.parameters:
                self.outside.let_hooks_rest(parameter)
            self._first_noise = noise = self._noise(counts=True)
            with self._replicas.hooks_watched(self._loss_fn):
                whole = self._first(before, noise)
            # The types that ran, such as those of autocast inside of loss_fn.
            self._comparison.tolerance = max(self._comparison.tolerance, tolerance_of(noise.types))
            before.hold_apart()
            after = State(self._replicas, self._places, self._loss_fn)
            self._edited.note()
            if not whole.finite:
                proof.unproved.append("the loss or a gradient of the whole batch is not a finite number")
            elif all(one is None for one in whole.gradients):
                proof.unproved.append("no parameter of the module has a gradient")
            else:
                found = self._compared(before, noise, whole, proof)
                if found and not proof.unproved:
                    found = self._lasting(found, after, proof)
                if found and not proof.unproved:
                    proof.differences = list(found.values())
                    proof.is_wrong = not all(text.startswith("attribute") for text in proof.differences)
                    proof.cause = self._cause(found, after)
            after.restore()
            noise.leave()
            self._edited.end()
            return whole
        except BaseException:
            self.take_back()
            raise
        finally:
            self._execution.drop_gradients()

    def take_back(self) -> None:
        """Go back to where `run` began."""
        if self._before is not None:
            self._before.restore()
            self._edited.begin()
        if self._first_noise is not None:
            self._first_noise.go_back()

    def _lasting(self, found: dict[str, str], after: State, proof: Proof) -> dict[str, str]:
        """The differences that are left in a second step: what a first forward sets up is on the module by then."""
        self._tries_rules = self._knows_rules and any(text.startswith("buffer") for text in found.values())
        try:
            lasting = self._compared(after, self._noise(), None, proof)
        except Cancelled:
            raise
        except Exception as error:  # as for a state of the whole batch that a slice cannot go on from
            fails = f"a second step raises {type(error).__name__}: {error}"
            return found | ({"error": fails} if self._splits else {})
        return {name: text for name, text in found.items() if name in lasting}

    def _cause(self, found: dict[str, str], after: State) -> str:
        causes = []
        if found.keys() & _OF_THE_LOSS:
            after.restore()
            self._edited.begin()
            with thrown_away(), contextlib.suppress(Exception):  # the difference is known anyway
                causes.append(self._explain())
            if self._batch.cut_inside:
                causes.append(f"The batch is a list or tuple, {self._batch.cut_inside}.")
        if found.keys() - _OF_THE_LOSS:
            causes.append(self._about_state())
            rules = {name: rule for name, rule in self._comparison.rules.items() if name in found}
            if rules:
                causes.append(f"DataParallel(..., buffers={rules}) gives these the values of one device: it was tried.")
        return " ".join(filter(None, causes))

    def _noise(self, *, counts: bool = False) -> Noise:
        noise = Noise(self._batch.size, self._places, max(self._comparison.tolerance, 1e-9))
        noise.counts = counts
        noise.recorded = self._micro_batch < self._batch.size  # as an empty record: several slices draw apart
        return noise

    def _first(self, before: State, noise: Noise) -> Result:
        """The result that counts. If the whole batch does not fit, it runs in slices."""
        while True:
            try:
                return self._whole(before, noise)
            except BaseException as error:
                if not is_out_of_memory(error) or self._micro_batch == 1:
                    raise
            before.restore()
            self.outside.clear()
            for parameter in self._replicas.parameters:
                parameter.grad = None
            self._edited.begin()
            self._places.release_memory()
            self._micro_batch = -(-self._micro_batch // 2)
            noise.draws.clear()
            noise.recorded = True

    def _spans(self) -> list[tuple[int, int]]:
        """The whole batch, or equal slices of at most so many items. Batch normalisation takes two at least."""
        items, least = self._batch.size, 2 if using_batch_statistics(self._replicas.norms) else 1
        count = max(1, min(-(-items // self._micro_batch), items // least))
        return list(pairwise([items * index // count for index in range(count + 1)]))

    def _whole(self, start: State, noise: Noise) -> Result:
        """The batch on the user's own module."""
        parameters, objective = self._replicas.parameters, self._objective
        storages, extras = OwnStorages(parameters), Extras(objective)
        terms = []
        spans = self._spans()
        any_gradient, modules = False, set(map(id, self._replicas.modules))
        with self._stance(), CallerThreads.here().lent():
            for begin, end in spans:
                if len(spans) > 1 and objective.idle(begin, end):
                    continue
                forget(modules)
                with noise.of(self._batch.rows(begin, end)):
                    data = self._batch.slice(begin, end, self._places.to_home)
                    term = self._one(data, begin, end, extras, first=not any_gradient)
                    any_gradient |= term.requires_grad
                    terms.append(term.detach())
                storages.separate()
        forget(modules)
        if not any_gradient and self._execution.ranks is None:  # other ranks may have one
            self._refuse_without_gradient()
        noise.lost |= dict.fromkeys(start.others.moved)
        if start.random.moved and not noise.drew:
            noise.lost["code whose draws PyTorch does not show, or that runs in slices"] = None
        gradients, outside = [one.grad for one in parameters], self.outside.taken()
        for one in parameters:
            one.grad = None
        self.outside.clear()
        with torch.no_grad():
            return Result(
                terms[0] if len(terms) == 1 else torch.stack(terms).sum(),
                gradients,
                outside,
                extras.whole(None, self._places.to_home),
                Snapshot(self._replicas),
                start.parameters.written(),
            )

    def _one(self, data: Any, begin: int, end: int, extras: Extras, *, first: bool) -> torch.Tensor:
        """Run forward and backward of a slice. Returns its term of the objective. `first`: whether no slice before has left a gradient."""
        loss, beside = parted(self._loss_fn(self._module, data))
        if beside is not None:
            extras.add(begin, end, beside)
        if first and any(one.grad is not None for one in self._replicas.parameters):
            refuse_own_backward()
        term = self._objective.term(loss, begin, end)
        if term.requires_grad:
            root = self._scaled(term)
            self.outside.watch(root)
            with outside_autocast():
                root.backward()
        return term

    def _scaled(self, term: torch.Tensor) -> torch.Tensor:
        return term if self._scale is None else term * self._scale

    def _refuse_without_gradient(self) -> None:
        refuse_without_gradient()

    def _trial(self, call: Call, **options: Any) -> TrialRun:
        """A run on the devices that repeats the draws of the whole batch."""
        return TrialRun(call, loss_fn=self._loss_fn, names=self._replicas.names, carries=self._carries, **options)

    def _compared(self, start: State, noise: Noise, own: Result | None, proof: Proof) -> dict[str, str]:
        """Run the batch split from a state, and compare it with the whole batch. Returns what differs, in words.

        Without the result of one device it runs there, too: twice, since what differs by itself does not count.
        """
        apart = [] if self._execution.synchronised else using_batch_statistics(self._replicas.norms)
        norms: list[Any] = [part for _, part in apart]
        like = next(iter(self._replicas.parameters), torch.empty(0))
        # Normalisation over a part of the batch is known to differ, and said elsewhere.
        with thrown_away(), standing_still(norms, like):
            first = own is not None
            if own is None or norms:
                self._start(start, norms)
                own = self._whole(start, noise)
            self._start(start, norms)
            got = self._split(start, noise, normalises=bool(norms))
            self._edited.begin()
            found: dict[str, str] | None = self._comparison.differences(start, own, got)
            if found and not first:
                self._start(start, norms)
                again = self._whole(start, noise)
                found = self._beyond(start, norms, noise, (own, again, got))
        self.outside.settle()
        if noise.lost:
            proof.unproved = [f"random draws that cannot be repeated ({', '.join(noise.lost)})"]
            return {}
        if found is None:
            proof.unproved = ["the same batch gave two results on one device"]
            return {}
        by_name = self._comparison.distances(own, got)
        proof.largest = max(proof.largest, *by_name.values())
        proof.compared = f"loss, {len(by_name) - 1} gradients, {len(own.found.buffers)} buffers, {len(own.found.attributes)} attributes"
        if own.found.holds_containers(found):
            self._replicas.reset_containers()
        return found

    def _beyond(
        self, start: State, norms: Sequence[Any], noise: Noise, results: tuple[Result, Result, Result]
    ) -> dict[str, str] | None:
        """What differs by more than rounding does, and not by itself. None if one device gives two results: the first two of these."""
        own, again, got = results
        if max(self._comparison.distances(own, again).values()) > self._comparison.tolerance:
            return None
        found = self._comparison.differences(start, own, got, self._rounding(start, norms, noise, own))
        # A time of day changes by itself. A number that is the size of the batch after a second step tells the size of a slice.
        by_itself = own.found.differences(again.found, self._comparison.tolerance)
        sizes = {
            name for name, value in own.found.attributes.items() if type(value) is int and value == self._batch.size
        }
        return {name: text for name, text in found.items() if name not in by_itself and name not in sizes}

    def _rounding(self, start: State, norms: Sequence[Any], noise: Noise, own: Result) -> dict[str, float]:
        """How far the result of one device is from itself with parameters that were rounded otherwise.

        Near an optimum the gradient is a small rest of large terms, so that rounding is most of it. The order of the items is no measure: it may be
        what a split changes. Nor is the batch, whose numbers may be labels.
        """
        self._start(start, norms)
        if not start.parameters.keeps_values:
            return {}
        try:
            round_otherwise(list(self._replicas.parameters), noise.types)
            found = self._comparison.distances(own, self._whole(start, noise))
        except Cancelled:
            raise
        except Exception:
            return {}
        return {name: far for name, far in found.items() if math.isfinite(far)}

    def _start(self, start: State, norms: Sequence[Any]) -> None:
        """Go back to a state. Modules that stand still go on to do so."""
        start.restore_but(norms)
        self._edited.begin()

    def _joined(self, outcome: Any) -> dict[BufferRule, dict[str, torch.Tensor]]:
        """What each rule would make of the buffers that the devices have written."""
        named = dict(self._module.named_buffers())
        home = self._places.devices.index(self._places.home)
        found: dict[BufferRule, dict[str, torch.Tensor]] = {}
        for rule in ("sum", "mean"):
            names = [
                name
                for name, one in named.items()
                if one.layout is torch.strided and (rule == "sum" or one.is_floating_point())
            ]
            rules = BufferRules(dict.fromkeys(names, rule), self._module)
            values = rules.joined(self._replicas, outcome.items, home, self._places.to_home)
            found[rule] = dict(zip(names, (value for *_, value in values), strict=True))
        return found

    def _about_state(self) -> str:
        """What to say of other buffers and attributes."""
        return _OF_STATE

    def _said(self) -> contextlib.AbstractContextManager[None]:
        """Around a run on the devices."""
        return said_of_slices("step", self._batch.cut_inside)

    def _new_work(self) -> Workload:
        return self._make_work()

    def _split(self, start: State, noise: Noise, *, normalises: bool) -> Result:
        execution, replicas = self._execution, self._replicas
        work = self._new_work()
        work.normalises |= normalises
        memory: list[list[int]] = []

        def trial(call: Call) -> TrialRun:
            memory[:] = _addresses(replicas)
            objective = self._objective if call.items is None else call.items.objective(self._objective)
            return self._trial(call, objective=objective, scale=self._scale, leaves=self.outside, noise=noise)

        asked = Asked(
            work, self._batch, self._loss_fn, trial, self._costs, hooks=self._carries, before=self.outside.clear
        )
        self._splits = True
        with self._stance(), self._said():
            done = execution.train(asked, keep=False)
            with torch.no_grad():
                inside, outside = (
                    [None if one is None else self._places.to_home(one) for one in ones]
                    for ones in (done.totals, done.run.reached)
                )
                joined = self._joined(done.outcome) if self._tries_rules else {}
                # As a step would: what the busiest device has written comes to the user's module.
                execution.push(done.outcome)
            result = Result(done.loss, inside, outside, done.extras, Snapshot(replicas), {}, joined)
        self._splits = False
        self.outside.clear()
        self._places.drain()
        now = _addresses(replicas)
        # A forward that gives a parameter other memory writes to its own copy only.
        moved = {
            index
            for before, after in zip(memory, now, strict=True)
            for index, one in enumerate(before)
            if one != after[index]
        }
        result.written = {**start.parameters.written(), **dict.fromkeys(moved)}
        if moved:
            start.restore()
            replicas.renew()
        return result


def _addresses(replicas: Replicas) -> list[list[int]]:
    return [[one.data_ptr() for one in replica.parameters] for replica in replicas.list]
