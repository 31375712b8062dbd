"""A trainer's figures and steps for OpenTelemetry, in the user's own SDK."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline import InvalidArgument
from paceline._telemetry import OF_TRAINER_DEVICES, check_meter, gauges
from paceline.torch._trainer.alarms import Alarms
from paceline.torch._trainer.observed import Look, claims_of
from paceline.torch._trainer.recent_steps import RecentSteps, Step

# Seconds. The default buckets of OpenTelemetry are for milliseconds.
_BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


# Of the offset of two clocks, in nanoseconds; a reading takes less than 0.1 us, and a switch of threads in between at least 5 us.
_BOUND, _TRIES = 2_000, 8


def clock_offset() -> int:
    """What to add to `time.perf_counter_ns` for `time.time_ns`. The second clock is read between two readings of the first.

    Half of the time between these bounds the error. If a thread was switched in between, the clocks are read again, at most eight times, and the shortest time counts.
    """
    reads: list[tuple[int, int]] = []
    while not reads or (len(reads) < _TRIES and reads[-1][0] > 2 * _BOUND):
        before, now, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        reads.append((after - before, now - (before + after) // 2))
    return min(reads)[1]


class Telemetry:
    """What a trainer gives to OpenTelemetry."""

    def __init__(self, module: nn.Module, names: Sequence[str], recent: RecentSteps, alarms: Alarms) -> None:
        self._title = f"{type(module).__name__} on {', '.join(names)}"
        self._names, self._recent, self._alarms = names, recent, alarms

    def opentelemetry(self, meter: Any, tracer: Any = None, /, **attributes: str) -> RemovableHandle:
        """Fill OpenTelemetry's instruments of your own SDK. It sets up no provider and no exporter.

        Gauges: ``paceline.device.share``, ``.speed``, ``.busy``, ``.retired`` and for GPUs ``.memory``, with the attribute ``device``. They are of the last steps, at
        most eight, and reading them waits for nothing. A histogram ``paceline.step.duration`` in seconds, of steps and runs of `batch`. Several trainers on one meter
        need different attributes.

        Parameters
        ----------
        meter
            As ``opentelemetry.metrics.get_meter("training")`` returns it.
        tracer
            As ``opentelemetry.trace.get_tracer("training")`` returns it: each step, and each run of `batch`, becomes a span ``paceline.step`` below the one in which it
            began, with its number, the items of each device, and why shares moved before it. A step that raised is there with the next one that did not, and has the status of an error. None: no spans.
        **attributes
            Of your own, for all gauges, the histogram and all spans: ``run="a"``.

        Returns
        -------
        torch.utils.hooks.RemovableHandle
            ``remove()`` ends it, as `close` does.

        Raises
        ------
        InvalidArgument
            For what is no meter or tracer, and for the attribute ``device``.
        ImportError
            If the package ``opentelemetry-api`` is not installed. It must be 1.30 or newer.

        Notes
        -----
        On GPUs a step is recorded when it has ended there, while a later one is enqueued. The last ones before `close` are not.

        Examples
        --------
        >>> trainer.opentelemetry(metrics.get_meter("training"), trace.get_tracer("training"))   # doctest: +SKIP
        """
        check_meter(meter, attributes)
        if tracer is not None and not hasattr(tracer, "start_span"):
            raise InvalidArgument(f"opentelemetry: tracer is a {type(tracer).__name__}; give one of get_tracer(name).")
        look = Look("", self._title, self._alarms.devices, self._alarms.works, self._recent)
        steps = _Steps(look, meter, tracer, self._recent, self._names, attributes)
        if tracer is not None:
            from opentelemetry import context

            self._recent.context = context.get_current
        gauges(meter, "paceline", look, OF_TRAINER_DEVICES, (), attributes)
        return self._alarms.also(steps)


class _Steps:
    """Notes each step. It keeps what the gauges read, so they end with it."""

    def __init__(
        self,
        look: Look,
        meter: Any,
        tracer: Any,
        recent: RecentSteps,
        names: Sequence[str],
        attributes: Mapping[str, str],
    ) -> None:
        self._look, self._tracer, self._recent, self._names = look, tracer, recent, names
        self._attributes = dict(attributes)
        self._histogram = meter.create_histogram(
            "paceline.step.duration", "s", "Time of a step.", explicit_bucket_boundaries_advisory=_BOUNDS
        )
        self._noted = list(recent.steps)  # those before are not asked for

    def after_step(self, _: Callable[..., Any]) -> None:
        """Note the steps whose times are known."""
        steps = list(self._recent.steps)
        for step in steps:
            if not any(step is one for one in self._noted) and self._note(step):
                self._noted.append(step)
        self._noted = [one for one in self._noted if any(one is step for step in steps)]

    def _note(self, step: Step) -> bool:
        known = step.known
        claims = claims_of(known)
        if not step.error and not claims:
            return known is None or known is step.times  # a proof, or a step that a device still runs
        # On GPUs the call ends before the step does. There `started` is when the host enqueued it.
        ended = step.ended
        if known is not None and claims:
            ended = max(ended, known.started + max(claim[4] for claim in claims))
        attributes = {**self._attributes, "paceline.kind": step.kind}
        if not step.error:
            self._histogram.record(ended - step.began, attributes)
        if self._tracer is not None:
            self._trace(step, ended, claims, getattr(known, "move", None), attributes)
        return True

    def _trace(
        self, step: Step, ended: float, claims: Sequence[Any], move: str | None, attributes: Mapping[str, Any]
    ) -> None:
        zero = clock_offset()
        began, end = (zero + int(1e9 * seconds) for seconds in (step.began, ended))
        more: dict[str, Any] = {"paceline.step": step.number, "paceline.attempts": step.attempts}
        for device, name in enumerate(self._names):
            items = sum(claim[2] - claim[1] for claim in claims if claim[0] == device and claim[-1] != "B")
            more[f"paceline.items.{name}"] = items
        if move is not None:
            more["paceline.move"] = move
        span = self._tracer.start_span(
            "paceline.step", step.context, start_time=began, attributes={**attributes, **more}
        )
        if step.error:
            from opentelemetry.trace import Status, StatusCode

            span.set_attribute("error.type", step.error)
            span.set_status(Status(StatusCode.ERROR))
        span.end(end)
