"""What an `Execution` has the devices run: each a share of the batch, or stages of the module (`_pipeline/source.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.torch._batch.items import Items
from paceline.torch._devices.places import Places
from paceline.torch._replicas.buffer_rules import BufferRules
from paceline.torch._replicas.replicas import Replicas
from paceline.torch._run.call import Asked, Call
from paceline.torch._run.executor import Executor
from paceline.torch._run.failing import Failing
from paceline.torch._run.feature import Feature, Features
from paceline.torch._run.pushing import Pushing
from paceline.torch._run.workload import Workload


class Source:
    """Where the work of an attempt comes from. `cure`: what to do about running statistics that depend on the split."""

    without_costs = ""  # why items cannot be balanced by their costs
    unfilled: Any = None  # what fills the module, as long as it has no memory

    def __init__(self, features: Sequence[Feature], pushing: Pushing, failing: Failing, cure: str) -> None:
        self.features, self.pushing, self.failing, self.cure = Features(features), pushing, failing, cure

    def begin(self, asked: Asked) -> None:
        """Called before the replicas follow the module."""

    def plan(self, call: Call) -> None:
        """Decide what the attempt runs. The replicas and the recipe are those of the module as it is now."""
        raise TypeError("Source.plan is for subclasses")

    def run(self, run: Executor) -> Any:
        """Let the devices run everything. Returns the outcome, also of a run that has failed."""
        raise TypeError("Source.run is for subclasses")

    def fill(self) -> None:
        """Give the module memory and values, if it has none yet."""

    def gather(self) -> None:
        """Bring the user's module to one device, until the next run."""

    def end(self) -> None:
        """Called when the workers have ended, or are left behind."""
        self.features.close()

    def release(self) -> None:
        """Drop what was kept for the devices to read. Requires: the devices have ended."""
        self.pushing.release()


class Shares(Source):
    """Each device runs a share of the batch, on a replica of its own."""

    def __init__(
        self, places: Places, replicas: Replicas, features: Sequence[Feature], rules: BufferRules | None = None
    ) -> None:
        # There is no device yet whose statistics count, where `check` has found out about norms over micro-batches.
        cure = "Use DataParallel(..., batch_norm='synchronised'), GroupNorm or LayerNorm, or evaluation mode for these."
        super().__init__(features, Pushing(replicas, places, rules), Failing(places.names), cure)
        self._places, self._replicas = places, replicas

    def plan(self, call: Call) -> None:
        asked, work, limits = call.asked, call.work, call.recipe.constraints
        work.constrain(limits, self._replicas)
        if asked.order is not None:
            call.items = Items(asked.order, call.whole, self._places.pin, asked.costs)
        elif asked.costs is not None:
            plan = work.step_loop.plan(asked.costs)
            call.items = Items(list(plan.order), call.whole, self._places.pin, asked.costs, plan)
        if call.items is not None:
            call.batch = call.items.batch
        may_divide = limits.least == 1 and not limits.undivided and work.writes_buffers is not True
        longest = 0.0 if work.beside is None else work.beside.longest
        call.searches = call.items is None and may_divide and self._varies(work) and bool(work.searches or longest)
        if work.beside is not None:
            work.shorten(longest if call.searches else 0.0)
        call.divides = may_divide and (work.corrects or call.searches)

    def _varies(self, work: Workload) -> bool:
        """Whether sizes may be tried, or short. Not if other sizes have to be compiled, or would draw other random numbers under fixed shares."""
        repeatable = work.fixed and self._places.any_host and work.seen.drawing.draws is not False
        return not work.seen.tunes and not repeatable

    def run(self, run: Executor) -> Any:
        work, queues = run.call.work, self._places.queues
        calls = (run.body, run.end, queues, None if queues is None else run.sums())
        plan = run.items.plan if run.items is not None else None
        if plan is None:
            shapes = run.batch.item_shapes
            speed = work.kind((shapes, run.seen.mode, self._replicas.generation)) if run.searches else 0
            plan = work.step_loop.plan(run.batch.size, work.kind(shapes), speed, run.searches)
        run.plan = plan
        with run.surrounded():
            return work.step_loop.run(plan, *calls, run.claims, run.pieces)
