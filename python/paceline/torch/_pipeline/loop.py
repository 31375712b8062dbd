"""The steps of a pipeline, one after the other: which plan each runs, and what was measured."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from paceline import DeviceGroup, InvalidArgument
from paceline._core.engine import step_bounds
from paceline.torch._pipeline.blocks import Block
from paceline.torch._pipeline.gates import Journey
from paceline.torch._pipeline.planner import Planner
from paceline.torch._pipeline.plans import Action, PipelinePlan

_BOUNDS = step_bounds()  # of the step counts, as trainers without stages have them
_RECENT = 32  # steps whose times make a speed
_MOST_EVENTS = 4096
_MOST_ROWS = 1024


class Outcome:
    """How one step ended, in the words of `Execution`."""

    divided = False
    reduce_seconds = 0.0  # gradients of micro-batches are added up on the way
    move = None
    pending: Callable[[], list[list[Action]]] | None = None  # waits for GPUs, and returns their times
    micro_batches = 1  # over which norms may warn. 1: the user has fixed their number

    def __init__(
        self,
        plan: PipelinePlan,
        step: Any,
        blocks: Sequence[Block],
        names: Sequence[str],
        begin: int | None,
        journey: Journey | None,
        *,
        evidence: bool,
        trains: bool,
        last_lane: int,
        first_item: int = 0,
    ) -> None:
        self.plan = plan
        self.bounds = [(begin + first_item, end + first_item) for begin, end in plan.bounds]
        self.evidence = evidence  # whether its times say how fast the devices are
        self.trains = trains
        self.last_lane = last_lane  # the one that carried the last micro-batch
        self.failed = step.failed
        self.take_cause: Callable[[], BaseException | None] = step.take_cause
        self.failed_device = None
        self.failed_begin = begin  # the first item of the micro-batch that failed
        self.failed_stage: int | None = None
        self.failed_where = "the pipeline"
        self._record: list[list[Action]] = step.record
        self.started: float = step.started
        whole = sum(plan.sizes)
        self.items = [whole if device in plan.order else 0 for device in range(len(names))]
        if step.failed_action is not None:
            self.failed_stage, kind, _ = step.failed_action
            first = plan.cuts[self.failed_stage]
            last = [*plan.cuts, len(blocks)][self.failed_stage + 1] - 1
            within = blocks[journey.block].name if journey is not None and kind == "F" and journey.block >= 0 else ""
            what = "the forward" if kind == "F" else "the backward"
            at = f"in or after block {within} " if within else ""
            self.failed_where = f"{names[plan.order[self.failed_stage]]} in {what} {at}(stage {self.failed_stage}, blocks {blocks[first].name} to {blocks[last].name})"

    @property
    def settled(self) -> bool:
        """Whether its times are known."""
        return self.pending is None

    @property
    def record(self) -> list[list[Action]]:
        """What each stage ran. The first call may wait for GPUs."""
        if self.pending is not None:
            self._record = self.pending()
            self.pending = None
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


class _Totals(NamedTuple):
    items: int = 0
    busy: float = 0.0
    idle: float = 0.0


class PipelineLoop:
    """What was measured in the steps of one kind, in the words of `StepLoop`."""

    items = None  # of steps with costs, which a pipeline has not

    def __init__(self, group: DeviceGroup, planner: Planner) -> None:
        self.planner = planner
        self.last: Outcome | None = None
        self.lanes: Any = None  # of the step that runs
        self.is_trial = False  # whether its runs are thrown away, so that the planner learns nothing from them
        self._names = [device.name for device in group.devices]
        self._totals = [_Totals() for _ in self._names]
        self._recent: list[deque[tuple[int, float]]] = [deque(maxlen=_RECENT) for _ in self._names]
        self._steps, self._seconds = 0, 0.0
        self._counts = [0] * (len(_BOUNDS) + 1)
        self._events: deque[dict[str, Any]] = deque(maxlen=_MOST_EVENTS)
        self._rows, self._per_row = list[dict[str, Any]](), 1

    def commit(self, outcome: Outcome) -> None:
        """Take note of a step that was committed. Its times are read when somebody asks for them, or when the next step begins."""
        self.settle()
        self.last = outcome
        if outcome.settled:
            self._add(outcome)
        else:
            self.planner.unsettled = partial(self._add, outcome)

    def settle(self) -> None:
        """Take note of the times of the last step of all kinds, if these are not known yet."""
        add, self.planner.unsettled = self.planner.unsettled, None
        if add is not None:
            add()

    def _add(self, outcome: Outcome) -> None:
        seconds, busy = outcome.seconds, outcome.busy()
        items = sum(outcome.plan.sizes)
        begun = self._seconds
        for stage, device in enumerate(outcome.plan.order):
            before = self._totals[device]
            self._totals[device] = _Totals(
                before.items + outcome.items[device],
                before.busy + busy[stage],
                before.idle + max(0.0, seconds - busy[stage]),
            )
            self._recent[device].append((outcome.items[device], busy[stage]))
            for kind, micro_batch, start, finish in outcome.record[stage]:
                begin, end = outcome.bounds[micro_batch]
                self._events.append(
                    {
                        "kind": "forward" if kind == "F" else "backward",
                        "device": self._names[device],
                        "step": self._steps,
                        "begin": begin,
                        "end": end,
                        "start_seconds": begun + start,
                        "duration_seconds": finish - start,
                    }
                )
        self._events.append(
            {
                "kind": "step",
                "device": None,
                "step": self._steps,
                "begin": 0,
                "end": items,
                "start_seconds": begun,
                "duration_seconds": seconds,
            }
        )
        self._steps += 1
        self._seconds += seconds
        self._counts[bisect.bisect_left(_BOUNDS, seconds)] += 1
        moves = self.planner.moves
        if outcome.trains:
            self.planner.record(outcome.plan, outcome.record, evidence=outcome.evidence)
        self._add_row(outcome, busy, seconds, self.planner.moves > moves)

    def _add_row(self, outcome: Outcome, busy: list[float], seconds: float, moved: bool) -> None:
        of_device = dict(zip(outcome.plan.order, busy, strict=True))
        row = {
            "first_step": self._steps - 1,
            "steps": 1,
            "items": dict(zip(self._names, outcome.items, strict=True)),
            "busy_seconds": {name: of_device.get(d, 0.0) for d, name in enumerate(self._names)},
            "costs": None,
            "planned": None,
            "blocks": self._blocks_of(outcome),
            "step_seconds": seconds,
            "longest_step_seconds": seconds,
            "moves": int(moved),
        }
        last = self._rows[-1] if self._rows else None
        if last is not None and last["steps"] < self._per_row:
            self._rows[-1] = _sum(last, row)
        else:
            self._rows.append(row)
        if len(self._rows) > _MOST_ROWS:
            self._per_row *= 2
            pairs = [self._rows[k : k + 2] for k in range(0, len(self._rows), 2)]
            self._rows = [_sum(*pair) if len(pair) == 2 else pair[0] for pair in pairs]

    def _blocks_of(self, outcome: Outcome) -> dict[str, int]:
        """By device, how many blocks its stage has."""
        plan = outcome.plan
        blocks = dict.fromkeys(self._names, 0)
        for device, first, end in zip(plan.order, plan.cuts, self._ends(plan), strict=True):
            blocks[self._names[device]] = end - first
        return blocks

    def _ends(self, plan: PipelinePlan) -> list[int]:
        """The block behind each stage. A stage behind the last one of a pipeline begins at 0."""
        return [cut or len(self.planner.blocks) for cut in (*plan.cuts[1:], 0)]

    @property
    def metrics(self) -> dict[str, Any]:
        """The figures of `Reports.report`."""
        self.settle()
        rates = [
            sum(n for n, _ in recent) / busy if (busy := sum(s for _, s in recent)) > 0 else 0.0
            for recent in self._recent
        ]
        in_use = set() if self.last is None else set(self.last.plan.order)
        recent = [sum(s for _, s in self._recent[d]) for d in sorted(in_use)]
        speeds = self.planner.speeds
        counts = 0
        step_counts = []
        for bound, count in zip(_BOUNDS, self._counts, strict=False):
            counts += count
            step_counts.append((bound, counts))
        return {
            "devices": {
                name: {
                    "share": 0 if self.last is None else self.last.items[d],
                    "items": self._totals[d].items,
                    "busy_seconds": self._totals[d].busy,
                    "idle_seconds": self._totals[d].idle,
                    "items_per_second": rates[d],
                    "speed": speeds[d],
                    "retired": d in self.planner.retired,
                }
                for d, name in enumerate(self._names)
            },
            "imbalance": max(recent) / (sum(recent) / len(recent)) - 1 if recent and sum(recent) else 0.0,
            "moves": self.planner.moves,
            "recent_moves": list(self.planner.recent_moves),
            "taken_back": 0,
            "steps": self._steps,
            "step_counts": step_counts,
            "compute_seconds": self._seconds,
            "step_seconds": self._seconds,
        }

    def pipeline(self) -> dict[str, Any]:
        """The last step as a pipeline, and what is known of the blocks."""
        self.settle()
        planner, last = self.planner, self.last
        costs = [
            {
                "name": block.name,
                "fixed_seconds": cost.forward_fixed + cost.backward_fixed,
                "forward_seconds": cost.forward_per_item,
                "backward_seconds": cost.backward_per_item,
                "parameter_bytes": cost.parameter_bytes,
                "saved_bytes": cost.saved_bytes_per_item,
                "boundary_bytes": cost.boundary_bytes_per_item,
            }
            for block, cost in zip(planner.blocks, planner.costs, strict=False)
        ]
        figures: dict[str, Any] = {"measuring": planner.balancer is None, "blocks": costs}
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
                "bytes": planned["bytes"][stage] if planned else None,
                "in_flight": last.plan.in_flight(stage),
            }
            for stage, (first, end) in enumerate(zip(last.plan.cuts, self._ends(last.plan), strict=True))
        ]
        figures["schedule"] = last.plan.schedule
        figures["seconds"] = seconds
        figures["predicted_seconds"] = planned.get("seconds")
        figures["ideal_seconds"] = planned.get("ideal_seconds")
        figures["bubble"] = 1 - sum(busy) / (seconds * len(busy)) if seconds > 0 else 0.0
        return figures

    def planned_actions(self) -> list[list[Action]] | None:
        """When the actions of the last step were planned to run. None if it was a step that measured."""
        return None if self.last is None else self.last.plan.actions()

    @property
    def memory(self) -> dict[str, dict[str, float]]:
        """What is known of each device with a limit."""
        return self.planner.memory(None if self.last is None else self.last.plan)

    @property
    def events(self) -> list[dict[str, Any]]:
        self.settle()
        return list(self._events)

    @property
    def history(self) -> list[dict[str, Any]]:
        self.settle()
        return list(self._rows)

    def explain(self) -> str:
        self.settle()
        return self.planner.explain()

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
            return self.planner.out_of_memory_predicting(outcome.plan)
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

    def set_least_items(self, items: int) -> None:
        self.planner.least_items = items

    def write_ledger(self, path: str) -> None:
        raise InvalidArgument("write_ledger: a pipeline has no ledger of shares. report()['pipeline'] has its plan.")


def _sum(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    def added(key: str) -> dict[str, Any]:
        return {name: value + second[key][name] for name, value in first[key].items()}

    return {
        **first,
        "blocks": second["blocks"],
        "steps": first["steps"] + second["steps"],
        "items": added("items"),
        "busy_seconds": added("busy_seconds"),
        "step_seconds": first["step_seconds"] + second["step_seconds"],
        "longest_step_seconds": max(first["longest_step_seconds"], second["longest_step_seconds"]),
        "moves": first["moves"] + second["moves"],
    }
