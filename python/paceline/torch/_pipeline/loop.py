"""The steps of a pipeline, one after the other: which plan each runs, and what was measured."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from paceline import DeviceGroup
from paceline._core.engine import StageLog
from paceline.torch._batch.batch import Batch
from paceline.torch._devices.places import Places
from paceline.torch._pipeline.planner import Planner
from paceline.torch._pipeline.plans import Action, PipelinePlan
from paceline.torch._run.workload import Workload


class Outcome:
    """How one step ended, in the words of `Execution`."""

    divided = False
    reduce_seconds = 0.0  # gradients of micro-batches are added up on the way
    move = None
    pending: Callable[[], list[list[Action]]] | None = None  # waits for GPUs, and returns their times
    micro_batches = 1  # over which norms may warn. 1: the user has fixed their number

    def __init__(
        self, passage: Any, step: Any, devices: int, begin: int | None, block: int, *, evidence: bool, trains: bool, lane: int
    ) -> None:  # fmt: skip
        """`passage`: the `Passage` that has run. `begin`: the first item of the micro-batch that failed. `block`: the last one that its forward called."""
        self._waits = threading.RLock()  # for GPUs: any thread may read figures, and a signal handler may come in
        self.plan = plan = passage.plan
        self.bounds = passage.bounds
        self.evidence = evidence  # whether its times say how fast the devices are
        self.trains = trains
        self.largest = 0, lane  # the pipeline that ran most items, and its lane that carried the last micro-batch
        self.failed = step.failed
        self.take_cause: Callable[[], BaseException | None] = step.take_cause
        self.failed_device = None
        self.failed_begin = begin
        self.failed_stage: int | None = None
        self.failed_where = "the pipeline"
        self._record: list[list[Action]] = step.record
        self.started: float = step.started
        self.items = [sum(plan.sizes) if device in plan.order else 0 for device in range(devices)]
        if step.failed_action is not None:
            stage, kind, _ = step.failed_action
            blocks = [block.name for block in passage.blocks]
            at = f"in or after block {blocks[block]} " if kind == "F" and block >= 0 else ""
            first, end = [*plan.cuts, len(blocks)][stage : stage + 2]
            self.failed_stage, what = stage, "the forward" if kind == "F" else "the backward"
            self.failed_where = (
                f"{passage.names[stage]} in {what} {at}(stage {stage}, blocks {blocks[first]} to {blocks[end - 1]})"
            )

    @property
    def settled(self) -> bool:
        """Whether its times are known."""
        return self.pending is None

    @property
    def record(self) -> list[list[Action]]:
        """What each stage ran. The first call may wait for GPUs."""
        if self.pending is not None:
            with self._waits:
                if self.pending is not None:  # another thread has not waited meanwhile
                    self._record, self.pending = self.pending(), None
        return self._record

    @property
    def claims(self) -> list[Any]:
        """What ran, for traces: (device, begin, end, start seconds, finish seconds, stage, "F" or "B") each."""
        return [
            (self.plan.order[stage], *self.bounds[micro_batch], start, finish, stage, kind)
            for stage, actions in enumerate(self.record)
            for kind, micro_batch, start, finish in actions
        ]

    @property
    def seconds(self) -> float:
        """From the first action to the last."""
        return max((actions[-1][3] for actions in self.record if actions), default=0.0) - min(
            (actions[0][2] for actions in self.record if actions), default=0.0
        )

    def busy(self) -> list[float]:
        """Seconds that each stage computed."""
        return [sum(finish - start for _, _, start, finish in actions) for actions in self.record]


class PipelineLoop:
    """What was measured in the steps of one kind, in the words of `StepLoop`."""

    items = None  # of steps with costs, which a pipeline has not

    def __init__(self, group: DeviceGroup, planner: Planner) -> None:
        self.planner = planner
        self.last: Outcome | None = None
        self.batch_sizes: deque[int] = deque(maxlen=50)  # of recent steps
        self.lanes: Any = None  # of the step that runs
        self.is_trial = False  # whether its runs are thrown away, so that the planner learns nothing from them
        self._names = [device.name for device in group.devices]
        self._log = StageLog(group)
        self._noted = 0  # steps in the log
        self.measured = 0  # of these, those before the first plan by what blocks take
        self._moves = planner.moves  # when the last step was noted

    def begin(self, lanes: Any) -> None:
        """Have what may be cancelled."""
        self.lanes = lanes

    def commit(self, outcome: Outcome) -> None:
        """Take note of a step that was committed. Its times are read when somebody asks for them, or when the next step begins."""
        self.settle(steps=True)
        self.last = outcome
        if outcome.settled:
            self._add(outcome)
        else:
            self.planner.unsettled, self.planner.stepping = (self, outcome), threading.get_ident()

    def settle(self, *, steps: bool = False) -> None:
        """Take note of the times of the last step of all kinds, if these are not known yet. Any thread: a step waits for one that takes note already.

        After an error that step is dropped. If another thread than the one that steps finds the error, the next step (`steps`) raises it, too, once.
        """
        planner = self.planner
        with planner.settling:
            failure = planner.failure
            if steps and failure is not None:
                planner.failure = None
                raise failure
            waiting = planner.unsettled
            if waiting is None:
                return
            loop, outcome = waiting
            try:
                _ = outcome.record  # An interrupt leaves the step to whoever asks next.
            except Exception as error:
                planner.unsettled = None
                if loop.last is outcome:
                    loop.last = None  # reports would ask for its times again
                if threading.get_ident() != planner.stepping:
                    planner.failure = error
                raise
            if planner.unsettled is waiting:  # no signal handler has taken note meanwhile
                planner.unsettled = None
                loop._add(outcome)

    def _add(self, outcome: Outcome) -> None:
        before, self._moves = self._moves, self.planner.moves
        stages = [
            (device, end - first, outcome.items[device])
            for device, first, end in zip(outcome.plan.order, outcome.plan.cuts, self._ends(outcome.plan), strict=True)
        ]
        self.batch_sizes.append(sum(outcome.plan.sizes))
        self._log.add(stages, outcome.bounds, outcome.record, outcome.started, self._moves > before)
        if self.planner.measures and self.measured == self._noted:
            self.measured += 1
        self._noted += 1
        if outcome.trains:
            self.planner.note(outcome.plan, outcome.record, evidence=outcome.evidence)

    def _ends(self, plan: PipelinePlan) -> list[int]:
        """The block behind each stage. A stage behind the last one of a pipeline begins at 0."""
        return [cut or len(self.planner.blocks) for cut in (*plan.cuts[1:], 0)]

    @property
    def metrics(self) -> dict[str, Any]:
        """The figures of `Reports.report`."""
        self.settle()
        figures, planner = self._log.metrics, self.planner
        speeds = planner.speeds
        for device, (figure, speed) in enumerate(zip(figures["devices"].values(), speeds, strict=True)):
            figure |= {"speed": speed / max(speeds), "retired": device in planner.retired}
        return {**figures, "moves": planner.moves, "recent_moves": planner.recent_moves, "taken_back": 0}

    def pipeline(self) -> dict[str, Any]:
        """The last step as a pipeline, and what is known of the blocks."""
        self.settle()
        planner, last = self.planner, self.last
        fastest = max(planner.known[1], default=1.0)
        costs = [
            {
                "name": block.name,
                "fixed_seconds": (cost.forward_fixed + cost.backward_fixed) / fastest,
                "forward_seconds": cost.forward_per_item / fastest,
                "backward_seconds": cost.backward_per_item / fastest,
                "parameter_bytes": cost.parameter_bytes,
                "saved_bytes": cost.saved_bytes_per_item,
                "boundary_bytes": cost.boundary_bytes_per_item,
            }
            for block, cost in zip(planner.blocks, planner.costs, strict=False)
        ]
        figures: dict[str, Any] = {"measuring": planner.measures, "blocks": costs}
        if last is None:
            return figures
        planned = last.plan.figures
        busy, seconds = last.busy(), last.seconds
        figures["stages"] = [
            {
                "device": self._names[last.plan.order[stage]],
                "first_block": planner.blocks[first].name,
                "last_block": planner.blocks[end - 1].name,
                "blocks": end - first,
                "busy_seconds": busy[stage],
                "bytes": None if planned is None else planned.bytes[stage],
                "in_flight": last.plan.in_flight(stage),
            }
            for stage, (first, end) in enumerate(zip(last.plan.cuts, self._ends(last.plan), strict=True))
        ]
        figures["schedule"] = last.plan.schedule
        figures["seconds"] = seconds
        figures["predicted_seconds"] = None if planned is None else planned.seconds
        figures["ideal_seconds"] = None if planned is None else planned.ideal_seconds
        figures["bubble"] = 1 - sum(busy) / (seconds * len(busy)) if seconds > 0 else 0.0
        return figures

    @property
    def memory(self) -> dict[str, dict[str, float]]:
        """What is known of each device with a limit."""
        last = self.last
        return self.planner.memory(None if last is None else last.plan)

    @property
    def events(self) -> list[dict[str, Any]]:
        self.settle()
        return self._log.events

    @property
    def history(self) -> list[dict[str, Any]]:
        self.settle()
        return self._log.history

    @property
    def committed(self) -> int:
        """How many steps `history` has, or will have once all times are known."""
        with self.planner.settling:
            waiting = self.planner.unsettled
            return self._noted + (waiting is not None and waiting[0] is self)

    def explain(self) -> str:
        self.settle()
        return f"{self.planner.explain().rstrip()}\n"

    def cancel(self) -> None:
        """End the step that runs, if any."""
        lanes = self.lanes
        if lanes is not None:
            lanes.cancel()

    def shrink(self, outcome: Outcome, limited: bool) -> bool:
        """After a step that ran out of memory: whether there is another plan that takes less."""
        self.settle()
        if outcome.failed_stage is None or self.is_trial:
            return False
        if not outcome.trains:
            return self.planner.smaller_predictions(outcome.plan)
        return self.planner.out_of_memory(outcome.failed_stage)

    def retire(self, device: int) -> None:
        self.settle()
        self.planner.retire(device)

    def restore(self, device: int) -> None:
        self.settle()
        self.planner.restore(device)

    def speeds(self, by_cost: bool = False) -> list[tuple[float, float] | None]:
        """Nothing that another trainer could begin with: the times are those of blocks."""
        return [None] * len(self._names)

    def hint(self, speeds: Sequence[tuple[float, float] | None], by_cost: bool = False) -> None:
        """Ignore what another trainer has measured, since blocks are measured anew."""


class PipelineWork(Workload):
    """One kind of work of a pipeline."""

    step_loop: Any  # a PipelineLoop

    def __init__(self, group: DeviceGroup, places: Places, planner: Planner) -> None:
        super().__init__(PipelineLoop(group, planner), [None], [False])
        self.planner = planner
        self.predicts = self.writes_buffers = False
        self.resizes: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None  # micro-batches, for a trial

    def follow(self, whole: Batch, least: int) -> None:
        """Fit what is planned to the batch of the next step. `least`: the fewest items of a micro-batch."""
        self.planner.follow(sum(shape.numel() * dtype.itemsize for shape, dtype in whole.item_shapes), least)

    def plan_for(self, whole: Batch, least: int) -> Any:
        """What the next step runs."""
        self.step_loop.settle(steps=True)
        least = 2 if self.normalises else least
        if self.predicts:
            plan = self.planner.plan_prediction(whole.size, least)
        else:
            self.follow(whole, least)
            plan = self.planner.plan_step(whole.size)
        return plan if self.resizes is None else plan.resized(self.resizes)
