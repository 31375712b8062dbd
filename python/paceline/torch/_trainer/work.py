"""What a trainer needs for every call that runs something: the batch, its weights and costs, the kind of work, and an attempt at it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from paceline import Device, InvalidArgument
from paceline._core.engine import Stepper
from paceline.torch._batch.batch import Batch
from paceline.torch._batch.items import Cost, costs_of
from paceline.torch._batch.objective import Objective, Reduction, Weight, already_backward
from paceline.torch._run.alone import AloneTrials
from paceline.torch._run.execution import Workload
from paceline.torch._run.run import Frame, TrainRun
from paceline.torch._trainer.claims import ClaimScript, ReplayedCaps
from paceline.torch._trainer.lifetime import Lifetime
from paceline.torch._trainer.step_gaps import StepGaps

_RUN = "run "


def kind_of(run: str | None) -> str:
    """The kind of work of a run of `batch` by its name; of `step` without one."""
    return "step" if run is None else _RUN + run


class Work(Lifetime):
    """The kinds of work that a trainer has. Each has its own times and shares."""

    _names: list[str]  # of the devices
    _options: dict[str, Any]  # of every Stepper
    _limits: list[int | None]
    _reduction: Reduction
    _works: dict[str, Workload]  # as `kind_of` names them, and others
    _scripts: dict[str, ClaimScript]  # that are replayed, by kind
    _temporary: list[Workload]  # of calls that leave no trace
    _gaps: StepGaps  # between calls of `step`

    def _prepared(self, batch: Any, weight: Weight | None) -> tuple[Batch, Objective]:
        whole = Batch(batch)
        places = self._places
        return whole, Objective(batch, whole.size, self._reduction, weight, places.pin, places.check_values)

    def _scale_of(self, scaler: Any) -> torch.Tensor | None:
        if scaler is None or not scaler.is_enabled():
            return None
        scale: torch.Tensor = scaler.scale(torch.ones((), device=self._places.home))
        return scale

    def _costs(self, cost: Cost | None, batch: Any, size: int) -> list[float] | None:
        costs = costs_of(cost, batch, size, self._places.check_values)
        if costs is not None and self._options["granularity"] > 1:
            raise InvalidArgument(
                "cost= together with granularity=, which counts items: by cost, devices get other numbers of them. Make the trainer without "
                "it, or with micro_batch= or memory=, which limit batches with costs, too."
            )
        return costs

    @property
    def _steps(self) -> Workload:
        return self._works[kind_of(None)]

    def _runs(self) -> dict[str, Workload]:
        """Of `batch`, by name."""
        return {kind.removeprefix(_RUN): work for kind, work in self._works.items() if kind.startswith(_RUN)}

    @contextlib.contextmanager
    def _beside(self, call: str) -> Iterator[None]:
        """`_alone`, for what the devices run between two steps: they do not wait meanwhile."""
        with self._alone(call):
            self._gaps.interrupted()
            yield

    def _workloads(self) -> list[Workload]:
        return [*self._works.values(), *self._temporary]

    def _temporarily(self, **options: Any) -> Workload:
        """For the current call only; `close` in another thread ends it, too."""
        work = self._workload(options)
        self._temporary.append(work)
        return work

    def _workload(self, options: dict[str, Any]) -> Workload:
        work = Workload(self.group, self._places, self._limits, **options)
        for index in self._retired:
            work.stepper.retire(index)
        return work

    def retire(self, device: str | Device) -> None:
        """From the next call on the device gets no work, and nothing waits for it. Its share goes to the others; no item is lost.

        It stays in the group, with its replica and its worker, until `restore` brings it back: for a GPU that somebody else needs for a while,
        a core that a data loader shall have, or a device that one does not trust.

        Parameters
        ----------
        device
            One of the trainer's, or its name: ``"host:1"``. One that is retired already stays so.

        Raises
        ------
        InvalidArgument
            If the trainer has no such device, or no other one works.
        """
        with self._alone("retire"):
            self._for_steppers(device, Stepper.retire, self._retired.add)

    def restore(self, device: str | Device) -> None:
        """Give a device work again that `retire` has taken it from. What was known of its speed counts; a change is noticed as ever.

        Parameters
        ----------
        device
            As for `retire`. One that works stays as it is.

        Raises
        ------
        InvalidArgument
            If the trainer has no such device.
        """
        with self._alone("restore"):
            self._for_steppers(device, Stepper.restore, self._retired.discard)

    def _for_steppers(
        self, device: str | Device, change: Callable[[Stepper, int], None], note: Callable[[int], None]
    ) -> None:
        index = self._index_of(device)
        for work in self._workloads():
            change(work.stepper, index)
        note(index)
        for work in self._workloads():
            if work.alone is not None:
                work.alone = AloneTrials(self._retired)

    def _index_of(self, device: str | Device) -> int:
        name = device if isinstance(device, str) else device.name
        if name not in self._names:
            raise InvalidArgument(
                f"DataParallel: there is no device {name} in this trainer; it has {', '.join(self._names)}."
            )
        return self._names.index(name)

    def _work(self, kind: str) -> Workload:
        """Made when it is first needed."""
        if kind not in self._works:
            self._works[kind] = self._workload(self._options)
        return self._works[kind]

    def _train(
        self,
        kind: str,
        whole: Batch,
        objective: Objective,
        costs: list[float] | None,
        fn: Callable[..., Any],
        run_of: Callable[[Frame, Objective], TrainRun],
    ) -> torch.Tensor:
        """A run over the batch as the balancer of its kind plans it, or as the claims that are replayed for its kind say."""
        self._places.begin(whole)

        def attempt() -> torch.Tensor:
            began = time.perf_counter()
            work, script = self._work(kind), self._scripts.get(kind)
            claims = None
            if script is not None:
                work, claims = self._work(f"replay {kind}"), script.peek(whole.size, by_cost=costs is not None)
                work.caps = ReplayedCaps(self._places, claims)
            frame = self._execution.frame(work, whole, fn, costs, claims.order if claims is not None else None)
            run = run_of(frame, objective if frame.items is None else frame.items.objective(objective))
            run.claims = claims.lanes if claims is not None else None
            # One device runs the whole batch as one micro-batch, so norms and buffers do as on one device. A new size may be compiled, though.
            trials = work.alone if claims is None and run.items is None and not run.seen.tunes else None
            of_kind = (whole.size, whole.item_shapes)
            alone = None if trials is None else trials.device(of_kind, self._execution.items)
            if alone is not None:
                run.run_alone(alone)
            before = self._execution.committed
            try:
                loss = already_backward(self._execution.train(work, run)[0])
                if trials is not None:
                    _note(trials, run, of_kind, time.perf_counter() - began)
                return loss
            finally:  # an interrupt that comes while gradients are written leaves a run that is done
                if script is not None and self._execution.committed is not before:
                    script.advance()

        return self._execution.repeated(attempt)


def _note(trials: AloneTrials, run: TrainRun, kind: tuple[int, Any], seconds: float) -> None:
    """A step that was committed, which took so long."""
    if run.alone:
        trials.add_alone(seconds, sum(time for claims in run.timed for pieces in claims for _, time in pieces))
    else:
        trials.add(kind, kind[0], seconds)
