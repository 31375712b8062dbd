"""What can be read about the steps of a pipeline."""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from paceline import InvalidArgument, OutOfMemory, Unavailable
from paceline._chrome_trace import ChromeTrace
from paceline._core.balance import usual_batch_size
from paceline._page.run import Move, Run, Table, milliseconds
from paceline._page.schedule import schedules
from paceline._plot_schedule import ScheduleRow, ScheduleSpan, draw_schedule
from paceline._worth import IMPOSSIBLE, Choice, Worth, asked, idle_notes, prices_of, unique
from paceline.torch._pipeline.loop import Outcome, PipelineLoop
from paceline.torch._pipeline.plans import Action
from paceline.torch._pipeline.subsets import added_to, pipelines_of, planned
from paceline.torch._trainer.arguments import check_count
from paceline.torch._trainer.figures import Report
from paceline.torch._trainer.recent_steps import Times
from paceline.torch._trainer.reports import Reports
from paceline.torch._trainer.tracing import Tracing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAMES = {"F": "forward", "B": "backward"}
_GAINS = "One more device like "  # of explain()


class PipelineReports(Reports):
    """The figures of a trainer whose devices are stages."""

    def report(self) -> Report:
        """Figures for a dashboard: those of `DataParallel.report`, where each device that has a stage runs all items, and those of the pipeline.

        Returns
        -------
        dict
            ``micro_batches``: the sizes of the micro-batches of the last step, in items and in order. Plain accumulation of these on one
            device gives the same gradient, bit for bit.

            ``pipeline``: ``stages``, a list of dictionaries: ``device``, ``first_block`` and ``last_block`` by name, ``blocks`` (how many),
            ``busy_seconds`` of the last step, ``bytes`` as planned, ``in_flight`` (the most micro-batches at once). ``schedule``: a text with a
            line for each stage. ``seconds``: of the last step, from its first action to its last. ``predicted_seconds``: the same as planned,
            with the noise that was measured; ``ideal_seconds``: if all devices worked all the time; both None while blocks are measured.
            ``bubble``: the part of the last step in which devices with a stage did not compute. ``measuring``: whether the next step measures
            blocks. ``blocks``: for each block ``name``, ``forward_seconds`` and ``backward_seconds`` of a micro-batch of one item on the fastest
            device beyond ``fixed_seconds``, ``parameter_bytes`` (with gradients and the optimizer's state), and ``saved_bytes`` and
            ``boundary_bytes`` per item.

            ``recent_moves``: the last 16 changes of plans, oldest first: ``kind`` (``"depth"``, ``"cuts"``, ``"memory"``, ``"devices"``),
            ``step``, ``from_cuts``, ``to_cuts``, ``from_order``, ``to_order``, ``seconds_before``, ``seconds_after``, ``moved_bytes``, ``reason``.
        """
        figures = super().report()
        loop, last = self._loop, self._loop.last
        figures["micro_batches"] = [] if last is None else list(last.plan.sizes)
        figures["pipeline"] = loop.pipeline()
        return figures

    @property
    def _loop(self) -> PipelineLoop:
        return cast(PipelineLoop, self._works.steps.step_loop)

    def _sizes(self) -> dict[str, list[int]]:
        ran = sorted(self._works.steps.seen.ever[0])
        last = self._loop.last
        in_use = set() if last is None else set(last.plan.order)
        return {name: ran if device in in_use else [] for device, name in enumerate(self._works.names)}

    def plot_schedule(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw the last step as it ran: a bar for each device, forward, backward and waits, the bubble in per cent, and the plan beside it.

        Parameters
        ----------
        path
            As for `plot`, which also says what this returns and raises.
        """
        last = self._loop.last
        if last is None:
            raise Unavailable("plot_schedule: no step has run yet, so there is nothing to draw.")
        planned = last.plan.actions()
        title = f"{type(self._module).__name__}: {len(last.plan.cuts)} stages, {len(last.plan.sizes)} micro-batches"
        return draw_schedule(
            path,
            self._rows(last, last.record),
            title=title,
            planned=None if planned is None else self._rows(last, planned),
        )

    def what_if(  # type: ignore[override]
        self,
        *,
        prices: Mapping[str, float] | None = None,
        add: Iterable[tuple[str, float]] = (),
        remove: Sequence[str] = (),
        batch_size: int | None = None,
    ) -> Worth:
        """What the devices are worth: seconds and cost of 1,000 items with each useful subset of them, with a plan of its own for each.

        It knows the costs of blocks, the present speeds and the memory. Cuts, order and micro-batches are planned anew, but for a fixed number of micro-batches. Seconds are
        from one step to the next: what the plan takes, and on host devices the trainer's own part of a call and the time between two steps. Of replicas of pipelines each device stays in its pipeline, and the batch is divided anew; a pipeline without devices gets
        no items.

        Parameters
        ----------
        prices
            What an hour of each device costs, in any currency, by name or for each one of a kind: ``{"cuda:0": 2.1, "host": 0.05}``. None: only seconds.
        add
            ``(like, speed)`` for each: one more device like the named one, so many times as fast, with as much memory, and in its pipeline.
        remove
            Devices that no subset has.
        batch_size
            Default: the size that most of the last 50 steps had.

        Returns
        -------
        paceline.balance.Worth
            Its shares are blocks. Its errors are those of the mean time of the steps that ran.

        Raises
        ------
        InvalidArgument
            While blocks are measured, and for arguments that cannot be used.
        """
        loop, names, run = self._loop, self._works.names, self._runs()[0]
        planner, last, sizes = loop.planner, loop.last, list(loop.batch_sizes)  # another thread may train
        if planner.measures or last is None or not sizes:
            raise InvalidArgument("what_if: nothing is measured yet; run a few steps first.")
        added = added_to(names, add)
        if unknown := sorted({*remove, *(like for like, _ in added)} - set(names)):
            raise InvalidArgument(f"what_if: there is no device {unknown[0]}; the devices are {', '.join(names)}.")
        if batch_size is not None:
            check_count("what_if", "batch_size", batch_size)
        plain = [*names, *(f"another {like}" for like, _ in added)]
        labels = [unique(plain, at) for at in range(len(plain))]
        hourly = None if prices is None else prices_of(prices, plain)
        items = batch_size or usual_batch_size(sizes)
        overhead, note = self._overhead()
        times = [row.seconds / row.steps for row in run.counted]
        error = statistics.stdev(times) / statistics.fmean(times) / len(times) ** 0.5 if len(times) > 1 else 0.0
        left = [name for at, name in enumerate(labels) if name not in remove and at not in planner.retired]
        micro_batches = None if planner.plans_micro_batches else len(last.plan.sizes)
        pipelines = pipelines_of(planner, names, micro_batches, dict(zip(labels[len(names) :], added, strict=True)))

        def of(kept: Sequence[int]) -> tuple[bool, Choice]:
            try:
                blocks, seconds = planned(pipelines, {left[number] for number in kept}, items)
            except OutOfMemory:
                return False, IMPOSSIBLE
            seconds += overhead
            whole = seconds * 1000 / items
            cost = None if hourly is None else whole / 3600 * hourly(map(labels.index, blocks))
            return len(blocks) == len(kept), Choice(blocks, seconds, whole, cost, error)

        choices = sorted(asked(len(left), of), key=lambda one: one.seconds) if left else []
        if not choices:
            raise InvalidArgument("what_if: no device is left that could run the blocks.")
        return Worth(choices, items, notes=[*idle_notes(run), note])

    def _run(self, history: Sequence[Mapping[str, Any]], report: Mapping[str, Any], explained: str) -> Run:
        run = super()._run(history, report, explained)
        if report["moves"] == len(report["recent_moves"]):
            run.moves = sorted([*run.moves, *_first_plans(run)], key=lambda move: move.step)
        last, steps = self._loop.last, list(self._lifetime.recent.steps)  # another thread may train
        if last is None or not all(last.record) or "stages" not in report["pipeline"]:
            return run
        planned = last.plan.actions()
        plan = None if planned is None else self._rows(last, planned)
        before = []
        for step in reversed(steps):
            step.settle()
            if step.times is not None and step.times.claims and step.times.started != last.started:
                before.append(
                    (f"{step.kind} {step.number + 1} as it ran", _rows_of(step.times.claims, self._works.names))
                )
        run.skipped = max(1, self._loop.measured)
        if run.skipped > 1:
            run.lacks.append(
                f"The first {run.skipped} steps measured blocks, one micro-batch at a time. They do not count in means."
            )
        title = "The last step as it ran" + ("" if plan else "; its plan was not the balancer's")
        run.schedules, lacks = schedules(title, self._rows(last, last.record), plan, before)
        run.lacks += [lacks] if lacks else []
        run.tables.insert(0, _stages(report["pipeline"]))
        return run

    def _advice(self, report: Mapping[str, Any], explained: str) -> str:
        gains = [line for line in explained.splitlines() if line.startswith(_GAINS)]
        said = gains[0] if len(gains) == 1 else ""
        if said and "shorter" not in said:
            said = f"No change is known that would shorten steps: {said[0].lower()}{said[1:]}"
        return super()._advice(report, explained) or said

    def _rows(self, last: Outcome, record: Sequence[Sequence[Action]]) -> list[ScheduleRow]:
        rows = []
        begin = min(actions[0][2] for actions in record)
        for stage, actions in enumerate(record):
            spans, free = [], begin
            for kind, micro_batch, start, finish in actions:
                if start > free:
                    spans.append(ScheduleSpan("wait", micro_batch, free, start))
                spans.append(ScheduleSpan("forward" if kind == "F" else "backward", micro_batch, start, finish))
                free = finish
            rows.append(ScheduleRow(self._works.names[last.plan.order[stage]], stage, spans))
        return rows


def _first_plans(run: Run) -> Iterator[Move]:
    """Changes of blocks that no move tells: what follows the steps that measure blocks."""
    told = {move.step for move in run.moves}
    for before, row in itertools.pairwise(run.rows):
        was, now = ([int(n) // one.steps for n in one.shares or ()] for one in (before, row))
        if was != now and told.isdisjoint(range(row.first_step, row.first_step + row.steps)):
            yield Move(
                row.first_step, f"blocks {was} to {now}", "planned by what the steps before it measured of blocks"
            )


def _rows_of(claims: Sequence[Any], names: Sequence[str]) -> list[ScheduleRow]:
    """A step by the claims that traces have, one row for each stage."""
    begins = sorted({claim[1] for claim in claims})
    rows = []
    for stage, device in sorted({(claim[5], claim[0]) for claim in claims}):
        spans = [
            ScheduleSpan("forward" if kind == "F" else "backward", begins.index(begin), start, finish)
            for on, begin, _, start, finish, at, kind in claims
            if (at, on) == (stage, device)
        ]
        rows.append(ScheduleRow(names[device], stage, spans))
    return rows


def _stages(pipeline: Mapping[str, Any]) -> Table:
    """The stages of the last step."""
    head = ("stage", "device", "blocks", "in flight", "computed", "memory as planned")
    rows = [
        (
            str(number),
            stage["device"],
            f"{stage['first_block']} to {stage['last_block']}",
            str(stage["in_flight"]),
            milliseconds(stage["busy_seconds"]),
            "–" if stage["bytes"] is None else f"{stage['bytes'] / 2**20:.4g} MiB",
        )
        for number, stage in enumerate(pipeline["stages"])
    ]
    seconds = {
        name: "unknown" if pipeline[f"{name}_seconds"] is None else milliseconds(pipeline[f"{name}_seconds"])
        for name in ("predicted", "ideal")
    }
    note = f"the last step took {milliseconds(pipeline['seconds'])}, predicted {seconds['predicted']}, ideal {seconds['ideal']}; bubble {pipeline['bubble']:.1%}"
    return Table("Stages", head, rows, note)


class PipelineTracing(Tracing):
    """Traces of steps whose devices are stages."""

    def _add_devices(self, trace: ChromeTrace, number: int, times: Times, free_at: list[float]) -> None:
        for device, begin, end, start, finish, stage, kind in times.claims:
            name = self._names[device]
            trace.span(
                name,
                f"{_NAMES[str(kind)]} {begin}-{end - 1}",
                times.started + start,
                times.started + finish,
                kind=_NAMES[str(kind)],
                step=number,
                stage=stage,
                begin=begin,
                end=end,
            )
            free_at[device] = times.started + finish
