"""What a pool shows to `paceline top`."""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from typing import Any

from paceline._observe import resident_bytes
from paceline._telemetry import OF_POOL_DEVICES, OF_POOLS, check_meter, gauges
from paceline.torch._devices import cuda
from paceline.torch._pool.tracing import FEW
from paceline.torch._replicas.reach import Handle

_SECONDS = 10.0  # of which rates and busy times are means


class Shown(Handle):
    """A pool that gives its figures to OpenTelemetry."""

    def opentelemetry(self, meter: Any, /, **attributes: str) -> None:
        """Make gauges of OpenTelemetry in your own SDK, until `close`. It sets up no provider and no exporter.

        ``paceline.pool.waiting``, ``.running``, ``.backlog``, and with the attribute ``device`` ``paceline.pool.device.jobs``, ``.busy``, ``.retired`` and for GPUs
        ``.memory``. Rates and busy times are of the last ten seconds. Several pools on one meter need different attributes.

        Parameters
        ----------
        meter
            As ``opentelemetry.metrics.get_meter("serving")`` returns it.
        **attributes
            Of your own, for all gauges: ``service="a"``.

        Raises
        ------
        InvalidArgument
            For what is no meter, and for the attribute ``device``.
        ImportError
            If the package ``opentelemetry-api`` is not installed.
        """
        check_meter(meter, attributes)
        pool: Any = self
        gauges(meter, "paceline.pool", pool._jobs.look, OF_POOL_DEVICES, OF_POOLS, attributes)


class Look:
    """Reads the figures. Threads: any."""

    def __init__(self, jobs: Any) -> None:
        self._jobs = weakref.ref(jobs)
        self._begun = time.monotonic()

    def __call__(self) -> dict[str, Any]:
        jobs, now = self._jobs(), time.monotonic()
        if jobs is None or jobs.closed:
            return {}
        since = max(self._begun, now - _SECONDS)
        runs = jobs.figures.runs.since(since)
        if len(runs) == FEW:
            since = runs.pop().ended
        seconds = max(now - since, 1e-9)
        ran, busy = defaultdict[str, float](float), defaultdict[str, float](float)
        for run in runs:
            for name in run.devices:
                ran[name] += run.jobs if run.outcome == "completed" else 0
                busy[name] += max(0.0, run.ended - max(run.begun, since))
        for name, begun in jobs.figures.busy_since().items():
            busy[name] += max(0.0, now - max(begun, since))
        devices = {}
        for name, one in jobs.devices_now().items():
            seat = jobs.seats[name]
            devices[name] = {
                "jobs": one["jobs"],
                "jobs_per_second": ran[name] / seconds,
                "busy": min(1.0, busy[name] / seconds),
                "retired": one["retired"],
                "memory_bytes": None if seat.gpu is None else cuda.memory_in_use(seat.gpu),
                "limit_bytes": jobs.memory.get(name),
            }
        return {
            "kind": "Pool",
            "name": f"on {', '.join(devices)}",
            "waiting": jobs.engine.waiting,
            "running": jobs.engine.running,
            "backlog_seconds": jobs.engine.backlog_seconds,
            "outcomes": jobs.figures.report()["outcomes"],
            "devices": devices,
            "host_bytes": resident_bytes(),
        }
