"""Writes what the last steps did as a trace, for a timeline that can be zoomed into."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from paceline import Unavailable
from paceline._chrome_trace import ChromeTrace
from paceline._words import plural
from paceline.torch._trainer.alarms import Alarms
from paceline.torch._trainer.recent_steps import RecentSteps, Step, Times
from paceline.torch._trainer.step_gaps import StepGaps
from paceline.torch._trainer.telemetry import Telemetry

_CALLER = "caller"
_LEAST_SECONDS = 1e-6  # shorter waits are the clock's own


class Tracing(Telemetry):
    """Makes traces of what is known of a trainer's last steps."""

    def __init__(
        self, module: nn.Module, names: Sequence[str], recent: RecentSteps, gaps: StepGaps, alarms: Alarms
    ) -> None:
        super().__init__(module, names, recent, alarms)
        self._gaps = gaps

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the last 8 steps, and runs of `batch`, as a trace for https://ui.perfetto.dev or chrome://tracing.

        Each device has a row with its micro-batches, by their number of items, its waits, and the reduction, which all workers take part in.
        The caller's row has the steps, the time between them, and in it the steps of what `optimizer` made and the waits for batches in a
        loop over `progress`. Moves of shares, failures and alarms are instants. A click shows the rest: ``begin`` and ``end`` of the
        items as in `events`, whether a micro-batch was a correction, and whether its time was excluded from what is measured.

        GPUs measure their own times. There a step's first micro-batch begins when the host enqueued it, or after the micro-batch before, and
        the reduction is not timed. Waits for GPUs. Works after `close`, too.

        Parameters
        ----------
        path
            The JSON file. An existing one is replaced when the new one is complete.

        Raises
        ------
        Unavailable
            Before the first step.
        OSError
            If the file cannot be written.

        Examples
        --------
        >>> trainer.trace("step.json")                                               # doctest: +SKIP
        """
        steps = list(self._recent.steps)
        if not steps:
            raise Unavailable("trace: no step has run yet, so there is nothing to write.")
        trace = ChromeTrace(self._title, [_CALLER, *self._names])
        free_at = [0.0] * len(self._names)  # when each device had done its part of the steps so far
        for step in steps:
            step.settle()
            _add_call(trace, step, self._names)
            if step.times is not None:
                self._add_devices(trace, step.number, step.times, free_at)
        self._add_between(trace, steps)
        trace.write(path)

    def _add_devices(self, trace: ChromeTrace, number: int, times: Times, free_at: list[float]) -> None:
        computed = times.started + max((claim[4] for claim in times.claims), default=0.0)
        for device, name in enumerate(self._names):
            claims = [claim for claim in times.claims if claim[0] == device]
            # A GPU may still be in the step before when the host enqueues this one. It keeps their order.
            late = max(0.0, free_at[device] - times.started - claims[0][3]) if claims else 0.0
            now = max(times.started, free_at[device])
            for _, begin, end, start_seconds, finish_seconds, excluded, correction in claims:
                start, finish = (times.started + late + seconds for seconds in (start_seconds, finish_seconds))
                _add_wait(trace, name, now, start, number)
                trace.span(
                    name,
                    plural(end - begin, "item") + (" (correction)" if correction else ""),
                    start,
                    finish,
                    kind="micro_batch",
                    step=number,
                    begin=begin,
                    end=end,
                    correction=correction,
                    excluded=excluded,
                )
                now = finish
            if times.reduce_seconds > 0.0:
                if claims:
                    _add_wait(trace, name, now, computed, number)
                now = computed + times.reduce_seconds
                trace.span(name, "reduction", computed, now, kind="reduction", step=number)
            free_at[device] = now

    def _add_between(self, trace: ChromeTrace, steps: Sequence[Step]) -> None:
        """The times between the steps, and what is known of them."""
        for before, after in pairwise(steps):
            trace.span(_CALLER, "between steps", before.ended, after.began, kind="gap")
        edges = [moment for step in steps for moment in (step.began, step.ended)]
        for kind, name, spans in (
            ("optimizer", "optimizer", self._recent.optimizer_times),
            ("batch", "next batch", self._gaps.waits),
        ):
            for start, finish in list(spans):
                # Another thread may do it during a step, and a loader may itself train. Neither has a place on this row.
                if start >= edges[0] and not any(start < edge < finish for edge in edges):
                    trace.span(_CALLER, name, start, finish, kind=kind)
        for seconds, alarm in list(self._alarms.recent):
            if seconds >= edges[0]:
                row = alarm.device if alarm.device in self._names else _CALLER
                trace.instant(row or _CALLER, f"alarm: {alarm.kind}", seconds, kind="alarm", text=str(alarm))


def _add_call(trace: ChromeTrace, step: Step, names: Sequence[str]) -> None:
    """The caller's side of a step, and its instants."""
    args = {"step": step.number, "attempts": step.attempts}
    name = f"{step.kind} {step.number}"
    trace.span(_CALLER, f"{name} (failed)" if step.error else name, step.began, step.ended, kind="step", **args)
    if step.error:
        row = step.failed_on if step.failed_on in names else _CALLER
        trace.instant(row or _CALLER, f"failed: {step.error}", step.ended, kind="failure", **args)
    if step.times is not None and step.times.move is not None:
        trace.instant(_CALLER, "shares moved", step.began, kind="move", step=step.number, reason=step.times.move)


def _add_wait(trace: ChromeTrace, name: str, start: float, finish: float, number: int) -> None:
    if finish - start >= _LEAST_SECONDS:
        trace.span(name, "wait", start, finish, kind="wait", step=number)
