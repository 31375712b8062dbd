"""The figures of a trainer for other programs: Prometheus, and whatever logs numbers by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from paceline import DeviceGroup, InvalidArgument, __version__
from paceline._core.runtime import gpu_facts
from paceline.torch._devices import cuda

Report = Callable[[], Mapping[str, Any]]

_OF_DEVICES = ("device", "pci_bus_id", "uuid")
_RESERVED = {"kind", "le", "rank", "version", *_OF_DEVICES}
_SPEEDS = {"items": "items_per_second", "work": "work_per_second"}  # by what shares count


class Scalars:
    """The figures of reports by flat names. Names of devices have ``_`` in place of ``:`` and ``/``."""

    def __init__(self) -> None:
        self._before: Mapping[str, Any] = {}  # the last report

    def of(self, report: Mapping[str, Any], prefix: str) -> dict[str, float]:
        """Those of the steps since the report before, or of all steps if there were none since."""
        before = self._before if report["steps"] > self._before.get("steps", 0) else {}
        self._before = report
        steps = max(1, _since(report, before, "steps"))
        found = {
            "step_seconds": _since(report, before, "step_seconds") / steps,
            "compute_seconds": _since(report, before, "compute_seconds") / steps,
            "imbalance": report["imbalance"],
            "moves": report["moves"],
        }
        for name, device in report["devices"].items():
            plain = name.replace(":", "_").replace("/", "_")
            found[f"share/{plain}"] = device["share"]
            found[f"items_per_second/{plain}"] = device["items_per_second"]
            found[f"busy_ratio/{plain}"] = _busy(device, before.get("devices", {}).get(name, {}))
            found[f"retired/{plain}"] = device["retired"]
        for rank in ranks_of(report):
            plain = rank["name"].replace(" ", "_")
            found |= {f"{key}/{plain}": value for key, value in rank.items() if key != "name"}
        return {f"{prefix}{name}": float(value) for name, value in found.items()}


def ranks_of(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """On the rank that deals out global batches, by rank: ``name``, ``share``, its speed, and ``seconds`` of its own work in the last step."""
    dealt = report["rank_shares"]["devices"] if "rank_shares" in report else []
    return [
        {
            "name": one["name"],
            "share": one["share"],
            _SPEEDS[unit_of(report)]: 1 / one["per_item_seconds"] if one["per_item_seconds"] else 0.0,
            "seconds": last["seconds"],
        }
        for one, last in zip(dealt, report.get("ranks", []), strict=False)
    ]


def unit_of(report: Mapping[str, Any]) -> str:
    """What the shares of ranks count."""
    return "items" if report["rank_shares"]["unit"] == "items" else "work"


def _since(now: Mapping[str, Any], before: Mapping[str, Any], name: str) -> float:
    return float(now[name] - before.get(name, 0))


def _busy(device: Mapping[str, Any], before: Mapping[str, Any]) -> float:
    busy = _since(device, before, "busy_seconds")
    whole = busy + _since(device, before, "idle_seconds")
    return busy / whole if whole else 0.0


def _dcgm_bus_id(bus_id: str) -> str:
    """CUDA's ``0000:1B:00.0`` as DCGM writes it, with eight digits of the domain."""
    domain, rest = bus_id.split(":", 1)
    return f"{int(domain, 16):08X}:{rest.upper()}"


class Collector:
    """A collector for ``prometheus_client``, whose registry calls `collect` at each scrape. It starts no server and registers nothing.

    Samples of devices have the label ``device``, and for GPUs ``pci_bus_id`` and ``uuid`` as DCGM writes them, by which they join. All
    samples have the caller's own `labels`.
    """

    def __init__(self, report: Report, group: DeviceGroup, labels: dict[str, str]) -> None:
        if taken := sorted(_RESERVED & set(labels)):
            raise InvalidArgument(
                f"prometheus: the samples have labels {', '.join(taken)} already. Give yours another name."
            )
        self._report = report
        self._common = labels
        facts = gpu_facts()
        self._labels: dict[str, list[str]] = {}
        for device in group.devices:
            names = ["", ""]
            if device.kind == "cuda":
                names = [_dcgm_bus_id(str(facts[device.index]["pci_bus_id"])), f"GPU-{cuda.uuid(device.index)}"]
            self._labels[device.name] = [device.name, *names]

    def describe(self) -> list[Any]:
        """Nothing, so that registering reads no figures."""
        return []

    def collect(self) -> Iterator[Any]:
        """The present figures. Reading them waits for GPUs."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
            InfoMetricFamily,
        )

        report = self._report()
        common, values = list(self._common), list(self._common.values())
        info = InfoMetricFamily("paceline_build", "The version of paceline.", labels=common)
        info.add_metric(values, {"version": __version__})
        yield info
        seconds = HistogramMetricFamily(
            "paceline_step_seconds", "Time of training steps, with the reduction.", labels=common
        )
        buckets = [(str(bound), steps) for bound, steps in report["step_counts"]] + [
            ("+Inf", report["steps"] - report["proved"])
        ]
        seconds.add_metric(values, buckets, report["step_seconds"])
        yield seconds
        for kind, name, help_text, value in (
            (CounterMetricFamily, "paceline_moves", "Changes of the devices' shares.", report["moves"]),
            (CounterMetricFamily, "paceline_out_of_memory", "Steps that ran again in smaller pieces.", report["out_of_memory"]),
            (GaugeMetricFamily, "paceline_imbalance_ratio", "Busy time of the slowest device over the mean, minus 1.", report["imbalance"]),
        ):  # fmt: skip
            family = kind(name, help_text, labels=common)
            family.add_metric(values, value)
            yield family
        yield from self._of_devices(report, [*common, *_OF_DEVICES], values)
        ranks = ranks_of(report)
        unit = unit_of(report) if ranks else "items"
        share = "Items of the last global batch that were dealt out to a rank."
        if unit == "work":
            share = "Work that is planned for a rank, of which an average batch has 1,000,000."
        for key, name, help_text in (
            ("share", f"paceline_rank_share_{unit}", share),
            (_SPEEDS[unit], f"paceline_rank_{_SPEEDS[unit]}", "Recent speed of a rank while it works."),
            ("seconds", "paceline_rank_step_seconds", "Time of a rank's own work in the last step."),
        ):
            family = GaugeMetricFamily(name, help_text, labels=[*common, "rank"])
            for rank in ranks:
                family.add_metric([*values, rank["name"].removeprefix("rank ")], rank[key])
            if ranks:
                yield family

    def _of_devices(self, report: Mapping[str, Any], labels: list[str], values: list[str]) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        figures: tuple[tuple[Any, str, str, Callable[[Mapping[str, Any]], float]], ...] = (
            (GaugeMetricFamily, "paceline_device_share_items", "Items of the last step.", lambda one: one["share"]),
            (GaugeMetricFamily, "paceline_device_busy_ratio", "Part of the devices' common time since the start in which it computed.", lambda one: _busy(one, {})),
            (GaugeMetricFamily, "paceline_device_items_per_second", "Recent speed while computing.", lambda one: one["items_per_second"]),
            (GaugeMetricFamily, "paceline_device_retired", "1 while it gets no work by request.", lambda one: one["retired"]),
            (CounterMetricFamily, "paceline_device_items", "Items run.", lambda one: one["items"]),
            (CounterMetricFamily, "paceline_device_busy_seconds", "Time spent computing.", lambda one: one["busy_seconds"]),
        )  # fmt: skip
        for kind, name, help_text, read in figures:
            family = kind(name, help_text, labels=labels)
            for device, figures_of in report["devices"].items():
                family.add_metric([*values, *self._labels[device]], read(figures_of))
            yield family
        memory = GaugeMetricFamily("paceline_memory_bytes", "Memory by kind.", labels=[*labels, "kind"])
        for device, sizes in report["memory"].items():
            for kind, size in sizes.items():
                if kind.endswith("_bytes"):
                    where = self._labels.get(device, [device, "", ""])
                    memory.add_metric([*values, *where, kind.removesuffix("_bytes")], size)
        yield memory
