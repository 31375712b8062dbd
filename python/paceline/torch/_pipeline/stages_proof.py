"""Proves a step of a pipeline: the batch passes through the stages in two numbers of micro-batches, and the results are compared.

A module that is cut may fit on no single device, so there is no whole batch to compare with. Both runs are thrown away.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch

from paceline import Cancelled, DeviceLost, Error, Timeout, Unavailable
from paceline.torch._batch.batch import Batch
from paceline.torch._batch.objective import Objective
from paceline.torch._check.base import BaseProver, Found
from paceline.torch._check.check import TrialRun, check
from paceline.torch._check.forward import ForwardProver
from paceline.torch._check.probe import LEAST_OF_PROOFS
from paceline.torch._check.proof import Proof, thrown_away
from paceline.torch._check.prover import Prover
from paceline.torch._check.state import Result, Snapshot, State, close
from paceline.torch._devices.noise import SliceNoise
from paceline.torch._pipeline.carried import watched
from paceline.torch._pipeline.loop import PipelineWork
from paceline.torch._replicas.batch_norm import using_batch_statistics
from paceline.torch._replicas.reach import name_of
from paceline.torch._run.call import Asked, Call
from paceline.torch._run.executor import Executor
from paceline.torch._run.memory import is_out_of_memory
from paceline.torch._run.train_run import LossFunction
from paceline.torch._run.workload import Workload
from paceline.torch._trainer.proofs import TRIES, Proofs, Wanted, words_of

_PLANNED = (
    "The number of micro-batches is planned by measured times, so the result depends on these. micro_batches= fixes it."
)
_FIXED = "micro_batches= fixes their number, so runs repeat; one device that takes the whole batch at once has another result."
_CHECK = "check(), on devices that can run the whole batch, says why."
_ENDS = (Cancelled, DeviceLost, Timeout, Unavailable)  # of a call, whatever it runs


class _TwoNumbers(BaseProver):
    """What both provers have in common: runs in fewer and in more micro-batches. Nothing is left of them."""

    counts: list[int]  # of the two runs
    plans = True  # whether the number of micro-batches is planned
    _fewer = True

    def run(self, proof: Proof) -> Any:
        self.counts, self._reads = [0, 0], dict[str, None]()
        self._normalises = bool(using_batch_statistics(self._execution.replicas.norms))
        if any(self._execution.places.on_gpu):  # so that parameters are on their devices when their state is kept
            self._execution.rehearse(Asked(self._new_work(), self._batch, self._function, Executor, hooks=self.hooks))
        try:
            with thrown_away():
                return super().run(proof)
        finally:
            self.take_back()

    def _noise(self, *, counts: bool = False) -> Any:
        self._slices = SliceNoise(self._execution.places, LEAST_OF_PROOFS)
        return self._slices

    def _said(self) -> contextlib.AbstractContextManager[None]:
        """Around a run. No run is one of the whole batch, so there is nothing to say of its errors."""
        return contextlib.nullcontext()

    def _new_work(self, *, normalises: bool = False) -> Workload:
        """Lets runs have the number of micro-batches that is due."""
        work = cast(PipelineWork, self._make_work())
        work.normalises, work.step_loop.is_trial = self._normalises, True
        self.plans = work.planner.plans_micro_batches
        resized = fewer if self._fewer else more
        work.resizes = lambda sizes: resized(sizes, 2 if work.normalises else 1)
        return work

    def _count(self, call: Call) -> None:
        """At the beginning of each try to run."""
        passage: Any = call.passage
        self.counts[0 if self._fewer else 1] = len(passage.plan.sizes)
        if self._slices.records:
            self._slices.clear()

    def _whole(self, start: State, noise: Any) -> Any:
        """The batch in fewer micro-batches."""
        self._fewer = True
        result = self._split(start, noise, normalises=False)
        self._fewer = noise.records = False
        noise.lose(start.others.moved)
        return result

    def _split(self, start: State, noise: Any, *, normalises: bool) -> Any:
        with self._watching():
            return super()._split(start, noise, normalises=normalises)

    def _compared(self, start: State, noise: Any, own: Any, proof: Proof) -> Found:
        """More micro-batches than planned may be more than the user's code can do."""
        try:
            found = super()._compared(start, noise, own, proof)
        except _ENDS:
            raise
        except Exception as error:
            if self._fewer or is_out_of_memory(error):
                raise
            proof.unproved = [f"in {self.counts[1]} micro-batches it raises {type(error).__name__}: {error}"]
            return {}
        if self._reads:
            names = ", ".join(list(self._reads)[:3])
            found["loss"] = (
                f"the function reads {names} from the original module, which has what an earlier call has left there: forwards write it to the module "
                "that the function is given"
            )
        return found

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Note reads from the user's module of what the forwards of lanes have written to theirs. Both runs would read the same."""
        replicas = self._execution.replicas
        named = replicas.named_modules

        def note(index: int, name: str) -> None:
            if any(one.written is not None and one.written.has(index, name) for one in replicas.list):
                path = named[index][0]
                self._reads[f"'{path}.{name}'" if path else f"'{name}'"] = None

        with watched([part for _, part in named], note) if replicas.shared else contextlib.nullcontext():
            yield


class StagesProver(_TwoNumbers, Prover):
    """Runs a step of one batch in fewer and in more micro-batches."""

    _left_buffers: list[dict[str, torch.Tensor]]  # those that the two runs left
    _knows_rules = False

    def _about_state(self) -> str:
        kept = "What a forward keeps for the next one depends on the number of micro-batches, as in plain accumulation."
        return f"{kept} {_PLANNED if self.plans else _FIXED}"

    def run(self, proof: Proof) -> Result:
        self._left_buffers = [{}, {}]
        try:
            result: Result = super().run(proof)
            return result
        finally:
            self.outside.restore()

    def _fitting(self, before: State, noise: Any) -> Result:
        result: Result = self._whole(before, noise)
        return result

    def _split(self, start: State, noise: Any, *, normalises: bool) -> Result:
        result: Result = super()._split(start, noise, normalises=normalises)
        self._left_buffers[0 if self._fewer else 1] = result.found.buffers
        return result

    def _compared(self, start: State, noise: Any, own: Any, proof: Proof) -> Found:
        """As in plain accumulation attributes have what some micro-batch has left, and counts of calls are those of its micro-batches."""
        found = super()._compared(start, noise, own, proof)
        proof.compared = proof.compared.rpartition(", ")[0]
        left = {name: text for name, text in found.items() if not text.startswith("attribute")}
        if any(text.startswith("buffer") for text in left.values()):
            counters = self._counters(start, left)
            left = {name: text for name, text in left.items() if name not in counters}
        return left

    def _counters(self, start: State, names: Iterable[str]) -> set[str]:
        """Those of the buffers that each micro-batch raises by the same."""
        start.restore()
        before = Snapshot(self._replicas).buffers
        (fewer, ours), (more, theirs) = zip(self.counts, self._left_buffers, strict=True)
        found = set()
        for name in names:
            values = [buffers.get(name) for buffers in (before, ours, theirs)]
            if any(one is None or one.dtype is torch.bool or one.shape != values[0].shape for one in values):  # type: ignore[union-attr]
                continue
            then, left, other = cast(list[torch.Tensor], values)
            if close((left - then) * more, (other - then) * fewer, 0.0):
                found.add(name)
        return found

    def _trial(self, call: Call, **options: Any) -> TrialRun:
        self._count(call)
        self._words = f"in {self.counts[0]} micro-batches", f"in {self.counts[1]}"
        return _StagesTrial(call, loss_fn=self._function, carries=self.hooks, **options)


class StagesForwardProver(_TwoNumbers, ForwardProver):
    """Runs the forward of one batch in fewer and in more micro-batches. Only outputs are compared."""

    def run(self, proof: Proof) -> None:
        super().run(proof)

    def _compared(self, start: State, noise: Any, own: Any, proof: Proof) -> Found:
        found = super()._compared(start, noise, own, proof)
        return {name: text for name, text in found.items() if name in ("outputs", "loss")}

    def _new_work(self, *, normalises: bool = False) -> Workload:
        work = cast(PipelineWork, super()._new_work())
        work.predicts = True
        return work

    def _run_of(self, call: Call) -> Any:
        self._count(call)
        return super()._run_of(call)


class _StagesTrial(TrialRun):
    def check(self) -> None:
        if self.outside is not None:
            self._leaves.note(self.outside.set_aside)
        super().check()


def fewer(sizes: tuple[int, ...], least: int) -> tuple[int, ...]:
    """The planned micro-batches. If these cannot be halved into at least so many items: pairs of them."""
    if min(sizes) >= 2 * least:
        return sizes
    return tuple(sum(sizes[first : first + 2]) for first in range(0, len(sizes), 2))


def more(sizes: tuple[int, ...], least: int) -> tuple[int, ...]:
    """The same slices, each in two halves if it can be halved: an item then draws what it drew in its slice."""
    found: list[int] = []
    for size in fewer(sizes, least):
        found += [size - size // 2, size // 2] if size >= 2 * least else [size]
    return tuple(found)


class StageProofs(Proofs):
    """The proofs of a trainer with stages. Its steps run as planned, also those that are proved."""

    runs_step = False
    _proves_one_device = True

    def due(self, loss_fn: Any, batch: Batch, objective: Objective, **options: Any) -> bool:
        # Blocks are measured before there is memory.
        return self._execution.source.unfilled is None and super().due(loss_fn, batch, objective, **options)

    def forward(self, call: str, fn: Any, batch: Batch, *, graph: bool, pad: float | None = None) -> None:
        """Prove a prediction, if that is due. The devices run it in any case."""
        execution = self._execution
        skipped = self._prove is None or batch.size < 2 or execution.source.unfilled is not None
        if skipped or not self._counts(self._kind(fn, batch, call)):
            return
        kind, number = self._now
        try:
            with torch.inference_mode(False), torch.no_grad(), self._works.no_trace():
                execution.places.begin(batch)
                execution.replicas.refresh(hooks=True)
                proof = Proof(name_of(fn), number, batch.size, call)
                self._finish(
                    StagesForwardProver(execution, self._make_work, batch, fn, call=call, graph=False, pad=pad), proof
                )
        except BaseException:
            self._steps[kind] -= 1
            raise

    def _finish(self, prover: Any, proof: Proof) -> None:
        """Run a prover, and say what it has found."""
        began, result = time.perf_counter(), None
        try:
            result = prover.run(proof)
        except BaseException as error:
            if not is_out_of_memory(error):
                raise
            proof.unproved = ["memory ran out"]
        first, second = prover.counts
        if first and second:
            proof.split = first, second
            if first == second and not proof.unproved:
                proof.unproved = ["a micro-batch cannot be cut"]
        proof.seconds = time.perf_counter() - began
        if proof.is_wrong and self._prove == "raise":
            raise Error(f"{words_of(proof)} Nothing was committed.")
        self._tell(proof)
        kind = self._now[0]
        if result is not None and not result.finite and self._tries.setdefault(kind, 0) < TRIES:
            self._tries[kind] += 1
            self._steps[kind] -= 1  # the next step tries again

    def _step(self, loss_fn: LossFunction, batch: Batch, objective: Objective, wanted: Wanted) -> None:
        execution, (scale, costs, carries, reduction, *_) = self._execution, wanted
        execution.places.begin(batch)
        execution.replicas.refresh(hooks=carries)

        def explained() -> str:
            planned = _PLANNED if prover.plans else _FIXED
            if any(execution.places.on_gpu):
                return f"{planned} {_CHECK}"
            options: dict[str, Any] = {"micro_batch": None, "tolerance": None, "costs": None}
            report = check(execution, self._make_work(), batch, objective, loss_fn, reduction=reduction, **options)
            texts = [cause.text for cause in report.causes if "draws" not in cause.kind]
            return " ".join([*texts, planned])

        with self._works.no_trace():
            options: dict[str, Any] = {"scale": scale, "costs": costs, "carries": carries, "micro_batch": None}
            prover = StagesProver(execution, self._make_work, batch, objective, loss_fn, explain=explained, **options)
            self._finish(prover, Proof(name_of(loss_fn), execution.steps + 1, batch.size))
