"""Decides which steps are proved, and says what the proofs have found."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from paceline import Error, InvalidArgument
from paceline.torch._batch.batch import Batch
from paceline.torch._batch.objective import Objective, Reduction
from paceline.torch._batch.terms import Terms
from paceline.torch._check.check import check
from paceline.torch._check.forward import ForwardProver
from paceline.torch._check.proof import Proof
from paceline.torch._check.prover import Prover
from paceline.torch._check.state import Result
from paceline.torch._devices.failures import warn_caller
from paceline.torch._features.faults import Faults
from paceline.torch._replicas.hooks import hooks_of
from paceline.torch._replicas.reach import closure_of, name_of
from paceline.torch._run.execution import Execution
from paceline.torch._run.journal import Done, Journal, Participant
from paceline.torch._run.memory import is_out_of_memory
from paceline.torch._run.outside import code_of
from paceline.torch._run.participants import of_part, refuse_outside_of_ranks
from paceline.torch._run.train_run import LossFunction
from paceline.torch._run.workload import Workload
from paceline.torch._trainer.works import Works

Proved = tuple[torch.Tensor, list[torch.Tensor | None], list[tuple[torch.Tensor, torch.Tensor]]]
Prove = Literal["warn", "raise"] | bool
VARIABLE = "PACELINE_PROVE"
_AGAIN = 1000  # the step of a kind that is proved next, and ten times as late each time after that
TRIES = 10  # of a step whose result is not finite
_MOST_KINDS = 64
_WHOLE_BATCH = (
    "step: {} refers to a tensor of the whole batch by a variable of its own. If it computes with that instead of its second argument, which is the slice, the "
    "result is right and every device does the work of all. Use the second argument."
)
_OFF = "prove=False turns the comparison off."


class ProofWarning(UserWarning):
    """A step gives another result on several devices than on one."""


def prove_of(value: Prove | None) -> Literal["warn", "raise"] | None:
    """How to take a difference, or None for no proofs. The environment says it where the caller does not.

    Raises
    ------
    InvalidArgument
        For another value.
    """
    named = {"warn": "warn", "raise": "raise", "1": "warn", "0": None, "off": None}
    given = os.environ.get(VARIABLE, "warn") if value is None else value
    if isinstance(given, bool):
        return "warn" if given else None
    if given not in named:
        where = f"{VARIABLE} is" if value is None else "prove is"
        raise InvalidArgument(
            f"{where} {given!r}; it must be 'warn', 'raise' or {'off' if value is None else 'False'}."
        )
    return named[given]  # type: ignore[return-value]


class Wanted(NamedTuple):
    """What a step that is proved is asked for, beside its function, batch and objective."""

    scale: torch.Tensor | None
    costs: list[float] | None
    carries: bool
    reduction: Reduction
    work: str  # the kind
    prover_of: Callable[..., Prover] = Prover


class Proofs:
    """The proofs of one trainer.

    A kind of work is a function with what it closes over, the structure of the batch, the module's structure and mode. Its first step is proved, and
    again its steps 1,000, 10,000 and so on: fixed numbers, so that runs repeat.
    """

    runs_step = True  # whether the step that is proved is the result of the proof
    _proves_one_device = False

    def __init__(self, prove: Literal["warn", "raise"] | None, works: Works, execution: Execution) -> None:
        self._prove = prove if len(execution.places) > 1 or self._proves_one_device else None
        self._works = works
        self._execution = execution
        self._steps: dict[Any, int] = {}  # by kind
        self._tries: dict[Any, int] = {}  # by kind, of steps whose result was not finite
        self._names: tuple[int, Any] = (-1, None)  # the module's structure, with the replicas' generation
        self._hooks: tuple[int, Any] = (-1, None)  # the codes of the hooks, with the number that the next hook gets
        self._warned: set[tuple[Any, str]] = set()  # kinds of work, and what was said of them
        self.differs = False  # whether one has found another result than that of one device

    def due(
        self, loss_fn: Callable[..., Any], batch: Batch, objective: Objective, *, carries: bool, run: Any = None
    ) -> bool:
        """Whether to prove the step that is about to run. `run`: what tells a run of `DataParallel.batch` from others of its function."""
        if self._prove is None or batch.size < 2 or not objective.magnitude or Faults in self._execution.features.kinds:
            return False
        weighted = tuple(objective.parts) if isinstance(objective, Terms) else objective.is_weighted
        return self._counts(self._kind(loss_fn, batch, weighted, carries, run))

    def forward(
        self, call: str, fn: Callable[..., Any], batch: Batch, *, graph: bool, pad: float | None = None
    ) -> tuple[Any] | None:
        """The outputs for the batch, as those of plain PyTorch, if this call is proved. `graph`: whether they lead to parameters and inputs.

        None, and all as before, if the devices run it.
        """
        execution = self._execution
        if self._prove is None or batch.size < 2 or not self._counts(self._kind(fn, batch, call, graph)):
            return None
        kind, number = self._now
        proof = Proof(name_of(fn), number, batch.size, call)
        began = time.perf_counter()
        try:
            with contextlib.ExitStack() as stack:
                if not graph:  # as the devices would: state that is made here has to serve in training
                    stack.enter_context(torch.inference_mode(False))
                    stack.enter_context(torch.no_grad())
                execution.places.begin(batch)
                execution.replicas.refresh(hooks=True)
                stack.enter_context(self._works.no_trace())
                prover = ForwardProver(execution, self._make_work, batch, fn, call=call, graph=graph, pad=pad)
                outputs = prover.run(proof)
                proof.seconds = time.perf_counter() - began
                if proof.is_wrong and self._prove == "raise":
                    prover.take_back()
                    raise Error(f"{words_of(proof)} Nothing was kept.")
        except BaseException as error:
            self._steps[kind] -= 1
            if not is_out_of_memory(error):
                raise
        else:
            self._tell(proof)
            if not graph:
                self._works.of(call).proved += 1
            return (outputs,)
        self._steps[kind] += 1
        proof.unproved = ["the whole batch does not fit on one device"]
        self._tell(proof)
        return None

    def _counts(self, kind: Any) -> bool:
        """Count a call of this kind. Whether it is one of those that are proved."""
        if kind not in self._steps and len(self._steps) >= _MOST_KINDS:
            self._execution.replicas.hold_all_apart()
            return False
        number = self._steps[kind] = self._steps.get(kind, 0) + 1
        self._now = kind, number
        return number == 1 or (number >= _AGAIN and _is_power_of_ten(number))

    def _kind(self, function: Callable[..., Any], batch: Batch, *more: Any) -> Any:
        replicas = self._execution.replicas
        if self._names[0] != replicas.generation:
            parts = tuple((name, type(part)) for name, part in replicas.named_modules)
            self._names = replicas.generation, hash((tuple(replicas.names), parts))
        if self._hooks[0] != RemovableHandle.next_id:
            self._hooks = RemovableHandle.next_id, tuple(code_of(one) for _, one in hooks_of(replicas.modules))
        mode = self._execution.module.training, torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
        return _signature(function), batch.structure, mode, self._names[1], self._hooks[1], *more

    def step(self, loss_fn: LossFunction, batch: Batch, objective: Objective, wanted: Wanted) -> Proved | None:
        """The objective, the gradients of the parameters, and outside tensors with theirs. Commits them, unless the caller's loss `carries` them.

        None, and all as before, in a run that was resumed: its devices run the step, as they would have without the interruption.
        """
        try:
            return self._step(loss_fn, batch, objective, wanted)
        except BaseException:
            self._steps[self._now[0]] -= 1  # the next step is proved
            raise

    def _step(self, loss_fn: LossFunction, batch: Batch, objective: Objective, wanted: Wanted) -> Proved | None:
        scale, costs, carries, reduction, work, prover_of = wanted
        execution, kind, of_kind = self._execution, self._now[0], self._works.of(work)
        execution.places.begin(batch)
        execution.replicas.refresh(hooks=carries)
        proof = Proof(name_of(loss_fn), execution.steps + 1, batch.size, "step" if prover_of is Prover else "run")
        began = time.perf_counter()
        micro_batch = self._works.options["micro_batch"] or None
        if micro_batch is None and any(self._works.limits):
            micro_batch = -(-batch.size // (4 * len(execution.places)))

        def explained() -> str:
            if prover_of is not Prover:
                return ""
            work = self._works.temporary(micro_batch=self._works.options["micro_batch"], balance="even")
            options: dict[str, Any] = {"micro_batch": micro_batch, "tolerance": None}
            report = check(execution, work, batch, objective, loss_fn, reduction=reduction, costs=costs, **options)
            draws = ("random draws", "shared draws", "running statistics")
            return " ".join(cause.text for cause in report.causes if cause.kind not in draws)

        options = {"scale": scale, "costs": costs, "carries": carries, "micro_batch": micro_batch}
        prover = prover_of(execution, self._make_work, batch, objective, loss_fn, explain=explained, **options)

        def attempt() -> Done:
            whole: Result = prover.run(proof)
            proof.seconds = time.perf_counter() - began
            if proof.is_wrong and self._prove == "raise":
                raise Error(f"{words_of(proof)} Nothing was committed.")
            home = execution.places.devices.index(execution.places.home)
            items = [batch.size if device == home else 0 for device in range(len(execution.places))]
            return Done(whole, None, whole.loss, whole.gradients, items, whole.extras, carries)

        def summed(done: Done) -> Any:
            """The result for the batch of all ranks, from that of this rank's part."""
            refuse_outside_of_ranks(
                next((leaf.shape for leaf, one in prover.reached(done.run) if one is not None), None)
            )
            assert execution.ranks is not None
            given = execution.replicas, objective, done.loss, done.totals
            return execution.ranks.sum(*given, scale=scale, steps=execution.steps)

        journal, keep = Journal(of_part(execution, _Proved(prover, of_kind))), not execution.resumed
        with self._works.no_trace():
            done = execution.settle(
                journal, prover, attempt, None if execution.ranks is None or not keep else summed, keep=keep
            )
        self._tell(proof)
        if not keep:  # the interrupted run has this step from its devices
            return None
        if proof.unproved and not done.run.finite and self._tries.setdefault(kind, 0) < TRIES:
            self._tries[kind] += 1
            self._steps[kind] -= 1  # the next step tries again
        outside = [(leaf, one) for leaf, one in prover.reached(done.run) if one is not None]
        return done.loss, done.totals, outside if carries else []

    def _make_work(self) -> Workload:
        """Work for a run that is thrown away."""
        return self._works.temporary(**self._works.options)

    def _tell(self, proof: Proof) -> None:
        self._execution.proofs.append(proof)
        self.differs |= proof.is_wrong
        said = (
            words_of(proof) if proof.differences else _WHOLE_BATCH.format(proof.function) if proof.reaches_batch else ""
        )
        if said and (self._now[0], said) not in self._warned:
            self._warned.add((self._now[0], said))
            warn_caller(said, ProofWarning)


class _Proved(Participant):
    """What a proof has kept: the state from before the step, and the gradients of tensors outside of the module."""

    def __init__(self, prover: Prover, work: Workload) -> None:
        self._prover, self._work = prover, work
        self._totals: list[tuple[torch.Tensor, torch.Tensor | None]] | None = None

    def commit(self, done: Done) -> None:
        self._prover.outside.restore()
        if self._totals is None:
            self._totals = [
                (leaf, one if one is None or leaf.grad is None else leaf.grad + one)
                for leaf, one in (() if done.carries else self._prover.reached(done.run))
            ]
            self._work.proved += 1
        for leaf, total in self._totals:
            if total is not None and leaf.grad is not None:
                leaf.grad.copy_(total)
            elif total is not None:
                leaf.grad = total

    def rollback(self) -> None:
        self._prover.take_back()
        self._prover.outside.restore()


def words_of(proof: Proof) -> str:
    """What an error or a warning says of a difference."""
    cause = f" {proof.cause}" if proof.cause else ""
    if proof.split is not None:
        return (
            f"{proof.call}: in {proof.split[1]} micro-batches this batch of {proof.items} items gives another result than in {proof.split[0]}: "
            f"{'; '.join(proof.differences)}.{cause} {_OFF} The function is {proof.function}."
        )
    call = proof.call if proof.call in ("step", "run") else "call"
    return (
        f"{proof.call}: split over the devices this batch of {proof.items} items gives another result than on one device: "
        f"{'; '.join(proof.differences)}.{cause} Where the first {call} is proved it has the result of one device, and those that follow do not. {_OFF} The function is "
        f"{proof.function}."
    )


def _is_power_of_ten(number: int) -> bool:
    while number % 10 == 0:
        number //= 10
    return number == 1


def _signature(function: Any) -> Any:
    """The code of a function and of the functions in its closure, defaults and partial arguments, and the types of all else there."""
    found = [code_of(function)]
    while hasattr(function, "func"):  # functools.partial
        found += [_kind_of(one) for one in (*function.args, *function.keywords.values())]
        function = function.func
    found += map(_kind_of, (getattr(function, "__defaults__", None) or ()))
    found += [_kind_of(one) for _, one in closure_of(function)] if hasattr(function, "__code__") else []
    found.append(type(getattr(function, "__self__", None)))
    return tuple(found)


def _kind_of(value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, str) and value.isalpha()):  # a choice, while numbers may count
        return value
    return code_of(value) if callable(value) else type(value)
