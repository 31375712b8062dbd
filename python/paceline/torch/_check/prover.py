"""Proves a step: loss, gradients, extras and state of the whole batch, and of the batch that is split over the devices."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch

from paceline import Cancelled
from paceline.torch._batch.batch import Batch
from paceline.torch._batch.extras import Extras, parted
from paceline.torch._batch.objective import Objective
from paceline.torch._check.base import BaseProver, Found
from paceline.torch._check.check import TrialRun
from paceline.torch._check.probe import OutsideLeaves, Probed, distances, loss_distance
from paceline.torch._check.proof import EXTRAS_OF_SLICES, Proof, thrown_away
from paceline.torch._check.state import DEVICES, ROUNDINGS, Result, Snapshot, State, Words, close, differing
from paceline.torch._devices.caller_state import CallerThreads, outside_autocast
from paceline.torch._devices.noise import UNSEEN, Noise
from paceline.torch._replicas.batch_norm import using_batch_statistics
from paceline.torch._replicas.buffer_rules import BufferRule, BufferRules
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


class Prover(BaseProver):
    """Runs a step of one batch whole, and then split."""

    _knows_rules = True  # whether buffers may come from all devices
    _words: Words = DEVICES

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
        """`explain` names the cause of a difference, if it can."""
        super().__init__(execution, make_work, batch, loss_fn)
        self._objective, self._scale, self._costs, self.hooks, self.carries = objective, scale, costs, carries, carries
        self._micro_batch, self._explain = micro_batch or batch.size, explain
        self.outside = OutsideLeaves(self._replicas.parameters, hooks_rest=carries)
        self._rules: dict[str, BufferRule] = {}  # that give buffers the values of one device
        self._tries_rules = False
        self.size = batch.size

    def _noise(self, *, counts: bool = False) -> Any:
        noise: Noise = super()._noise(counts=counts)
        noise.recorded = self._micro_batch < self._batch.size  # as an empty record: several slices draw apart
        return noise

    def _first(self, before: State, noise: Any, proof: Proof) -> Result:
        proof.reaches_batch = any(before.around.holds(one) for _, one in self._batch.tensors())
        for parameter in self._replicas.parameters:
            self.outside.let_hooks_rest(parameter)
        whole = self._fitting(before, noise)
        if not whole.finite:
            proof.unproved.append("the loss or a gradient of the whole batch is not a finite number")
        elif all(one is None for one in whole.gradients):
            proof.unproved.append("no parameter of the module has a gradient")
        return whole

    def _fitting(self, before: State, noise: Any) -> Result:
        """The whole batch. If that does not fit, it runs in slices."""
        while True:
            try:
                return self._whole(before, noise)
            except BaseException as error:
                if not is_out_of_memory(error) or self._micro_batch == 1:
                    raise
            self._start(before)
            self.outside.clear()
            for parameter in self._replicas.parameters:
                parameter.grad = None
            self._places.release_memory()
            self._micro_batch = -(-self._micro_batch // 2)
            noise.draws.clear()
            noise.recorded = True

    def _lasting(self, found: Found, after: State, proof: Proof) -> Found:
        self._tries_rules = self._knows_rules and any(text.startswith("buffer") for text in found.values())
        return super()._lasting(found, after, proof)

    def reached(self, result: Result) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The leaves outside of the module, with their gradients in a result."""
        return list(zip(self.outside.leaves, result.outside, strict=False))

    def _settle(self) -> None:
        self.outside.settle()

    def _cause(self, found: Found, after: State) -> str:
        causes = []
        if found.keys() & _OF_THE_LOSS:
            self._start(after)
            with thrown_away(), contextlib.suppress(Exception):  # the difference is known anyway
                causes.append(self._explain())
            if self._batch.cut_inside:
                causes.append(f"The batch is a list or tuple, {self._batch.cut_inside}.")
        if found.keys() - _OF_THE_LOSS:
            causes.append(self._about_state())
            rules = {name: rule for name, rule in self._rules.items() if name in found}
            if rules:
                causes.append(f"DataParallel(..., buffers={rules}) gives these the values of one device: it was tried.")
        return " ".join(filter(None, causes))

    def _spans(self) -> list[tuple[int, int]]:
        """The whole batch, or equal slices of at most so many items. Batch normalisation takes two at least."""
        items, least = self._batch.size, 2 if using_batch_statistics(self._replicas.norms) else 1
        count = max(1, min(-(-items // self._micro_batch), items // least))
        return list(pairwise([items * index // count for index in range(count + 1)]))

    def _whole(self, start: State, noise: Any) -> Result:
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
            noise.lost[UNSEEN if len(spans) == 1 else "code that runs in slices"] = None
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
        loss, beside = parted(self._function(self._module, data))
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
        return TrialRun(call, loss_fn=self._function, carries=self.hooks, **options)

    def _distances(self, own: Result, got: Result) -> dict[str, float]:
        """How far a result is from the wanted one: the loss, under an empty name, and the gradients."""
        mine, theirs = (
            Probed(one.loss.item(), [*one.gradients, *self.outside.lasting(one.outside)], {}) for one in (own, got)
        )
        # A gradient that is nothing but rounding is no larger than what rounding does to the others.
        floor = max(1e-3, self._tolerance)
        by_name = distances(mine.gradients, theirs.gradients, self._replicas.names, floor)
        return {"": loss_distance(mine, theirs), **by_name}

    def _differences(self, start: State, own: Result, got: Result, rounded: Result | None = None) -> Found:
        """`rounded`: the result of one device with parameters that were rounded otherwise."""
        kept = own.found.differences(got.found, self._tolerance, self._words)
        for rule, values in got.joined.items():
            for name, value in values.items():
                if name in kept and close(own.found.buffers[name], value, self._tolerance):
                    self._rules.setdefault(name, rule)
        return self._of_the_loss(own, got, rounded) | self._of_parameters(start, own, got) | kept

    def _of_the_loss(self, own: Result, got: Result, rounded: Result | None) -> dict[str, str]:
        said = {}
        by_name = self._distances(own, got)
        changed = {} if rounded is None else self._distances(own, rounded)
        rounding = {name: far for name, far in changed.items() if math.isfinite(far)}
        limits = {name: max(self._tolerance, ROUNDINGS * rounding.get(name, 0.0)) for name in by_name}
        if by_name[""] > limits[""]:
            said["loss"] = f"the loss is {got.loss.item():.6g} instead of {own.loss.item():.6g}"
        wrong = [name for name, far in by_name.items() if name and far > limits[name]]
        if wrong:
            worst = max(wrong, key=lambda name: by_name[name])
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            name = worst if worst in self._replicas.names else "a tensor outside of the module"
            said["gradient"] = f"the gradient of {name}{more} differs by {_percent(by_name[worst])}"
        of_slices = getattr(self._function, EXTRAS_OF_SLICES, False)
        again = None if rounded is None else rounded.extras
        paths = [] if of_slices else differing(own.extras, got.extras, self._tolerance, again)
        if paths:
            where = ", ".join(filter(None, paths[:5]))
            said["extras"] = f"what loss_fn returns beside the loss differs{where and f', at {where}'}"
        return said

    def _of_parameters(self, start: State, own: Result, got: Result) -> dict[str, str]:
        said = {}
        for index in {**own.written, **got.written}:
            mine, theirs, name = own.written.get(index), got.written.get(index), self._replicas.names[index]
            if mine is None or theirs is None or not close(mine, theirs, self._tolerance):
                moved = [start.parameters.distance(index, one) for one in (mine, theirs)]
                said[f"parameter {name}"] = (
                    f"the forward writes parameter {name}, and moves it by {moved[0]:.3g} {self._words[0]} and {moved[1]:.3g} {self._words[1]}"
                )
        return said

    def _beyond(
        self, found: Found, start: State, norms: Sequence[Any], noise: Any, results: tuple[Result, Result, Result]
    ) -> Found | None:
        own, again, got = results
        if max(self._distances(own, again).values()) > self._tolerance:
            return None
        found = self._differences(start, own, got, self._rounding(start, norms, noise))
        # A time of day changes by itself. A number that is the size of the batch after a second step tells the size of a slice.
        by_itself = own.found.differences(again.found, self._tolerance)
        sizes = {
            name for name, value in own.found.attributes.items() if type(value) is int and value == self._batch.size
        }
        return {name: text for name, text in found.items() if name not in by_itself and name not in sizes}

    def _rounding(self, start: State, norms: Sequence[Any], noise: Any) -> Result | None:
        """The result of one device with parameters that were rounded otherwise, if it has one.

        Near an optimum the gradient is a small rest of large terms, so that rounding is most of it. The order of the items is no measure: it may be
        what a split changes. Nor is the batch, whose numbers may be labels.
        """
        self._start(start, norms)
        if not start.parameters.keeps_values:
            return None
        try:
            round_otherwise(list(self._replicas.parameters), noise.types)
            return self._whole(start, noise)
        except Cancelled:
            raise
        except Exception:
            return None

    def _measure(self, proof: Proof, own: Result, got: Result) -> str:
        by_name = self._distances(own, got)
        proof.largest = max(proof.largest, *by_name.values())
        return f"loss, {len(by_name) - 1} gradients"

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

    def _split(self, start: State, noise: Any, *, normalises: bool) -> Result:
        execution, replicas = self._execution, self._replicas
        work = self._new_work(normalises=normalises)
        memory: list[list[int]] = []

        def trial(call: Call) -> TrialRun:
            memory[:] = _addresses(replicas)
            objective = self._objective if call.items is None else call.items.objective(self._objective)
            return self._trial(call, objective=objective, scale=self._scale, leaves=self.outside, noise=noise)

        asked = Asked(
            work, self._batch, self._function, trial, self._costs, hooks=self.hooks, before=self.outside.clear
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


def _percent(value: float) -> str:
    if not math.isfinite(value):
        return "something that is no number"
    return f"{value:.0%}" if value >= 0.01 else f"{value:.0e}"


@torch.no_grad()
def round_otherwise(parameters: Sequence[torch.Tensor], types: Iterable[torch.dtype]) -> None:
    """Move each parameter up or down by the unit in its last place, in the least precise type that is used."""
    types = {*types, *(one.dtype for one in parameters)}
    by = max((torch.finfo(one).eps for one in types if one.is_floating_point), default=0.0)
    for index, one in enumerate(parameters):
        if one.is_floating_point() and one.layout is torch.strided and 0 not in one.stride():
            one.data.add_(one.data * _signs(one, index), alpha=by)


def _signs(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Ones and minus ones without a pattern, the same in every run."""
    counted = torch.arange(tensor.numel(), dtype=torch.int32, device=tensor.device)
    return (((counted + seed) * -1640531535 >> 16) & 1).mul_(2).sub_(1).view(tensor.shape)
