"""What a pool counts, and its collector for Prometheus."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from paceline import InvalidArgument
from paceline._page.pool import Run
from paceline._pool_figures import OUTCOMES, Seconds, outcome_of, up_to
from paceline._pool_question import PRIORITIES
from paceline.torch._pool.tracing import Runs

_RESERVED = {"device", "endpoint", "le", "outcome", "priority", "tenant", "version"}


class Figures:
    """What each device ran, how jobs ended, and how long they waited. Threads: any."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._lock = threading.RLock()  # finalizers and signal handlers may come in while it is held
        self._devices: dict[str, dict[str, float]] = {}
        self._open: dict[int, tuple[Sequence[str], float]] = {}  # runs by what leads them: devices, and when they began
        self._told: dict[str, float] = {}  # the most busy seconds that were ever read
        for name in devices:
            self.add(name)
        self._outcomes = dict.fromkeys(OUTCOMES, 0)
        self._waits = {one: Seconds() for one in PRIORITIES}
        self.runs = Runs()

    def add(self, device: str) -> None:
        """One more device."""
        with self._lock:
            self._devices[device] = {"jobs": 0, "runs": 0, "busy_seconds": 0.0}

    def remove(self, device: str) -> None:
        """A device that could not be added."""
        with self._lock:
            del self._devices[device]

    def begin_run(self, work: object, devices: Sequence[str], begun: float) -> None:
        """A run of `work` has begun, by the clock of `time.monotonic`."""
        with self._lock:
            self._open[id(work)] = devices, begun

    def end_run(self, work: object, run: Run | None = None) -> None:
        """What ran is over, if it was not yet. `run`: to be noted."""
        if run is None and id(work) not in self._open:
            return
        with self._lock:
            self._open.pop(id(work), None)
            if run is not None:
                self.runs.add(run)
                for name in run.devices:
                    self._devices[name]["busy_seconds"] += run.ended - run.begun

    def busy_since(self) -> dict[str, float]:
        """When the runs that devices are at have begun."""
        with self._lock:
            begun = sorted(self._open.values(), key=lambda one: -one[1])
        return {name: at for names, at in begun for name in names}  # the first to begin, if two overlap for a moment

    def count(self, outcome: str, priority: str, waited: float | None, device: str, *, leads: bool) -> None:
        """Count a job that has ended. `waited`: seconds from its submit to its start, None if it never ran. `leads`: whether its run counts for it, and for no other job."""
        with self._lock:
            self._outcomes[outcome_of(outcome)] += 1
            if waited is not None:
                self._waits[priority].add(waited)
            if outcome == "completed":
                figures = self._devices[device]
                figures["jobs"] += 1
                figures["runs"] += leads

    def devices(self) -> dict[str, dict[str, Any]]:
        """By name: ``jobs`` that completed, their ``runs`` alone or in batches, and ``busy_seconds`` of all runs, which never become less."""
        with self._lock:
            now, since = time.monotonic(), self.busy_since()
            for name, one in self._devices.items():
                busy = one["busy_seconds"] + now - since.get(name, now)
                self._told[name] = max(busy, self._told.get(name, 0.0))  # a GPU's clock may say less than ours
            return {name: {**one, "busy_seconds": self._told[name]} for name, one in self._devices.items()}

    def report(self) -> dict[str, Any]:
        """``outcomes`` by name; ``wait_counts``, how many jobs waited at most so many seconds; ``wait_seconds_sum``, for how many seconds all together; both by priority in ``waits``."""
        with self._lock:
            outcomes = dict(self._outcomes)
            waits = {name: (list(one.counts), one.sum) for name, one in self._waits.items()}
        total = up_to([sum(counts) for counts in zip(*(counts for counts, _ in waits.values()), strict=True)])
        seconds = sum(waited for _, waited in waits.values())
        by_priority = {
            name: {"wait_counts": up_to(counts), "wait_seconds_sum": waited} for name, (counts, waited) in waits.items()
        }
        return {"outcomes": outcomes, "wait_counts": total, "wait_seconds_sum": seconds, "waits": by_priority}


def _buckets(counts: Sequence[tuple[float, int]]) -> list[tuple[str, float]]:
    return [("+Inf" if bound == math.inf else str(bound), count) for bound, count in counts]


class Collector:
    """A collector for ``prometheus_client``, whose registry calls `collect` at each scrape. It starts no server and registers nothing."""

    def __init__(self, report: Callable[[], Mapping[str, Any]], labels: dict[str, str]) -> None:
        if taken := sorted(_RESERVED & set(labels)):
            raise InvalidArgument(
                f"prometheus: the samples have labels {', '.join(taken)} already. Give yours another name."
            )
        self._report, self._labels = report, labels

    def describe(self) -> list[Any]:
        """Nothing, so that registering reads no figures."""
        return []

    def collect(self) -> Iterator[Any]:
        """The present figures."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        report = self._report()
        names, values = list(self._labels), list(self._labels.values())
        devices = report["devices"]
        for name, help_text, value in (
            ("backlog_seconds", "Until what waits now would be served, by measured times.", report["backlog_seconds"]),
            ("queued", "Jobs that wait.", report["waiting"]),
            ("running", "Runs of jobs or batches on devices.", report["running"]),
            ("desired_devices", "How many devices the mean wait that is aimed at takes.", report["desired_devices"]),
            ("active_devices", "Devices that take jobs.", sum(not one["retired"] for one in devices.values())),
        ):
            gauge = GaugeMetricFamily(f"paceline_pool_{name}", help_text, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        requests = CounterMetricFamily("paceline_pool_requests", "Jobs that ended.", labels=[*names, "outcome"])
        for outcome, count in report["outcomes"].items():
            requests.add_metric([*values, outcome], count)
        yield requests
        wait = HistogramMetricFamily("paceline_pool_wait_seconds", "From submit to start.", labels=[*names, "priority"])
        for priority, waits in report["waits"].items():
            wait.add_metric([*values, priority], _buckets(waits["wait_counts"]), waits["wait_seconds_sum"])
        yield wait
        for key, help_text in (
            ("jobs", "Jobs that completed."),
            ("runs", "Their runs, each of a job or of a batch."),
            ("busy_seconds", "Time spent on runs, with those that failed or have not ended."),
        ):
            family = CounterMetricFamily(f"paceline_pool_device_{key}", help_text, labels=[*names, "device"])
            for name, device in devices.items():
                family.add_metric([*values, name], device[key])
            yield family
        if report["tenants"]:
            wait_of = GaugeMetricFamily("paceline_pool_tenant_queued", "Jobs that wait.", labels=[*names, "tenant"])
            served = CounterMetricFamily(
                "paceline_pool_tenant_served", "The costs of jobs that ran.", labels=[*names, "tenant"]
            )
            for name, tenant in report["tenants"].items():
                wait_of.add_metric([*values, name], tenant["waiting"])
                served.add_metric([*values, name], tenant["served"])
            yield from (wait_of, served)
        if report["versions"]:
            of = [*names, "endpoint", "version"]
            ends = CounterMetricFamily(
                "paceline_pool_version_requests", "Requests of a version that ended.", labels=[*of, "outcome"]
            )
            waited = HistogramMetricFamily("paceline_pool_version_wait_seconds", "From submit to start.", labels=of)
            ran = HistogramMetricFamily("paceline_pool_version_run_seconds", "Batches that completed.", labels=of)
            for name, versions in report["versions"].items():
                for version in versions:
                    labels = [*values, name, str(version["number"])]
                    for outcome, count in version["outcomes"].items():
                        ends.add_metric([*labels, outcome], count)
                    for times, one in ((waited, version["wait"]), (ran, version["run"])):
                        times.add_metric(labels, _buckets(one["counts"]), one["seconds_sum"])
            yield from (ends, waited, ran)
