"""Gauges of OpenTelemetry for what trainers and pools show, in the user's own SDK."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from paceline import InvalidArgument

# Names follow OpenTelemetry's conventions: dots, units in UCUM, "By" for bytes and "s" for seconds.
OF_TRAINER_DEVICES = (
    ("share", "share", "{item}", "Items of the last step."),
    ("speed", "items_per_second", "{item}/s", "Items in a second of computing, in the last steps."),
    ("busy", "busy", "1", "Part of the time from step to step in which the device computed."),
    ("retired", "retired", "1", "1 while it gets no work by request."),
    ("memory", "memory_bytes", "By", "What PyTorch has allocated on a GPU."),
)
OF_POOL_DEVICES = (
    ("jobs", "jobs_per_second", "{job}/s", "Jobs in a second, of the last ten."),
    ("busy", "busy", "1", "Part of the last ten seconds in which the device ran jobs."),
    ("retired", "retired", "1", "1 while it takes no jobs."),
    ("memory", "memory_bytes", "By", "What PyTorch has allocated on a GPU."),
)
OF_POOLS = (
    ("waiting", "waiting", "{job}", "Jobs that wait."),
    ("running", "running", "{run}", "Runs of jobs or batches on devices."),
    ("backlog", "backlog_seconds", "s", "Until what waits now would be served, by measured times."),
)


def check_meter(meter: Any, attributes: Mapping[str, Any]) -> None:
    """Refuse what is no meter, and attributes that gauges have already."""
    if not hasattr(meter, "create_observable_gauge"):
        raise InvalidArgument(
            f"opentelemetry: meter is a {type(meter).__name__}; give one of opentelemetry.metrics.get_meter(name)."
        )
    if taken := {"device"} & set(attributes):
        raise InvalidArgument(
            f"opentelemetry: the gauges have the attribute {taken.pop()} already. Give yours another name."
        )


def gauges(
    meter: Any,
    prefix: str,
    look: Callable[[], Mapping[str, Any]],
    of_devices: Iterable[tuple[str, str, str, str]],
    of_all: Iterable[tuple[str, str, str, str]],
    attributes: Mapping[str, Any],
) -> None:
    """Make gauges that read what `look` shows, as long as somebody else has `look`, and it shows something."""
    from opentelemetry.metrics import Observation

    known = weakref.ref(look)

    def shown() -> Mapping[str, Any]:
        found = known()
        return {} if found is None else found()

    def of_device(key: str) -> Callable[[Any], Iterator[Any]]:
        def read(_: Any) -> Iterator[Any]:
            for name, device in shown().get("devices", {}).items():
                if device[key] is not None:
                    yield Observation(float(device[key]), {**attributes, "device": name})

        return read

    def of_whole(key: str) -> Callable[[Any], Iterator[Any]]:
        def read(_: Any) -> Iterator[Any]:
            value = shown().get(key)
            if value is not None:
                yield Observation(float(value), dict(attributes))

        return read

    for of, kind, figures in ((of_device, "device.", of_devices), (of_whole, "", of_all)):
        for name, key, unit, text in figures:
            meter.create_observable_gauge(f"{prefix}.{kind}{name}", [of(key)], unit, text)
