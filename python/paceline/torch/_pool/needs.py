"""Which devices a job may run on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from paceline import Device, InvalidArgument
from paceline._core.runtime import gpu_facts


class Facts(NamedTuple):
    """What a predicate of ``needs=`` is asked about.

    Attributes
    ----------
    name, kind, device_class
        As of `paceline.Device`.
    cores
        How many cores its worker has.
    memory
        Bytes: what the pool's ``memory=`` says, otherwise the memory of the GPU or of the machine.
    """

    name: str
    kind: str
    device_class: str
    cores: int
    memory: float


Need = str | Callable[[Facts], bool]
Needs = Need | Sequence[Need]


class Place(NamedTuple):
    """Labels that a device must have, and the names of those that may run a job, if not all may."""

    labels: list[str]
    names: list[str]


ANY = Place([], [])


def place_of(needs: Needs, devices: Iterable[Device], memory: Mapping[str, float]) -> Place:
    """What fulfils all needs. If no device fulfils a predicate, its name stands in the place of theirs."""
    several = isinstance(needs, Iterable) and not isinstance(needs, str) and not callable(needs)
    given: Sequence[Any] = list(cast(Iterable[Any], needs)) if several else [needs]
    labels: list[str] = []
    names: list[str] | None = None
    for one in given:
        if isinstance(one, str):
            labels.append(one)
        elif callable(one):
            facts = [_facts_of(device, memory) for device in devices if names is None or device.name in names]
            names = [fact.name for fact in facts if one(fact)]
            if not names:
                return Place(labels, [f"those that {getattr(one, '__qualname__', one)!s} of needs= accepts"])
        else:
            raise InvalidArgument(
                f"submit: needs= has a {type(one).__name__}. It must be a label, such as 'host' or the name of a device, a function of a device's facts "
                "that returns whether it will do, or a list of these."
            )
    return Place(labels, names or [])


def _facts_of(device: Device, memory: Mapping[str, float]) -> Facts:
    cap = memory.get(device.name)
    return Facts(
        device.name,
        device.kind,
        device.device_class,
        len(device.cores),
        _memory_of(device) if cap is None else cap,
    )


def _memory_of(device: Device) -> float:
    if device.kind == "host":
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return float(str(gpu_facts()[device.index]["memory_bytes"]))
