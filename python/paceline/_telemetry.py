"""Gauges of OpenTelemetry for what trainers and pools show, in the user's own SDK."""

from __future__ import annotations

import contextlib
import threading
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


_Look = Callable[[], Mapping[str, Any]]
_Looks = list[tuple["weakref.ref[_Look]", Mapping[str, Any]]]
_made: weakref.WeakKeyDictionary[Any, dict[str, _Looks]] = weakref.WeakKeyDictionary()  # by meter and prefix
_making = threading.Lock()


def gauges(
    meter: Any,
    prefix: str,
    look: _Look,
    of_devices: Iterable[tuple[str, str, str, str]],
    of_all: Iterable[tuple[str, str, str, str]],
    attributes: Mapping[str, Any],
) -> None:
    """Make gauges that read what `look` shows, as long as somebody else has `look`, and it shows something.

    A meter makes an instrument of a name once, and ignores callbacks that come later. So there is one callback, which reads everything that is shown by it.
    """
    from opentelemetry.metrics import Observation

    looks: _Looks = [(weakref.ref(look), attributes)]

    def shown() -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        for one, mine in list(looks):
            with contextlib.suppress(Exception):  # the others are shown all the same
                if (found := one()) is not None:
                    yield found(), mine

    def of_device(key: str) -> Callable[[Any], Iterator[Any]]:
        def read(_: Any) -> Iterator[Any]:
            for found, mine in shown():
                for name, device in found.get("devices", {}).items():
                    if device[key] is not None:
                        yield Observation(float(device[key]), {**mine, "device": name})

        return read

    def of_whole(key: str) -> Callable[[Any], Iterator[Any]]:
        def read(_: Any) -> Iterator[Any]:
            for found, mine in shown():
                if found.get(key) is not None:
                    yield Observation(float(found[key]), dict(mine))

        return read

    with _making:
        known = next((made for one, made in _made.items() if _same(one, meter)), None)
        if known is None:
            known = _made[meter] = {}
        if prefix in known:
            known[prefix][:] = [one for one in known[prefix] if one[0]() is not None] + looks
            return
        for of, kind, figures in ((of_device, "device.", of_devices), (of_whole, "", of_all)):
            for name, key, unit, text in figures:
                meter.create_observable_gauge(f"{prefix}.{kind}{name}", [of(key)], unit, text)
        known[prefix] = looks


def _same(one: Any, other: Any) -> bool:
    """Whether two meters are one. Before the program has set a provider, each call of ``get_meter`` returns another stand-in for the meter of that name."""
    real, its_real = (getattr(meter, "_real_meter", meter) for meter in (one, other))
    if real is None and its_real is None:
        return all(getattr(one, name, "") == getattr(other, name, "") for name in ("name", "version", "schema_url"))
    return real is its_real
