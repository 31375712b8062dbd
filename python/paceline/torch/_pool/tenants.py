"""Who shares a pool with others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline import InvalidArgument

OWN = "paceline"  # what a pool with tenants runs for itself: copies of requests in the shadow, and what warms versions


@dataclass(frozen=True)
class Tenant:
    """Who shares a pool with others: a group of users, a project, a service.

    Parameters
    ----------
    weight
        Tenants whose jobs wait are served in the ratio of their weights, in units of cost.
    devices
        How many devices its jobs may be on at once. None: all.
    memory
        Bytes that its jobs may use at once on all devices together, by their ``memory=``. None: no limit.

    Raises
    ------
    InvalidArgument
        For a weight or a quota that is not positive.
    """

    weight: float = 1.0
    devices: int | None = None
    memory: float | None = None

    def __post_init__(self) -> None:
        if not _positive(self.weight):
            raise InvalidArgument(f"Tenant: weight={self.weight!r} must be a number, finite and positive.")
        if self.devices is not None and not (_positive(self.devices) and isinstance(self.devices, int)):
            raise InvalidArgument(f"Tenant: devices={self.devices!r} must be a number of devices, at least 1.")
        if self.memory is not None and not _positive(self.memory):
            raise InvalidArgument(f"Tenant: memory={self.memory!r} must be a number of bytes, finite and positive.")


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def by_name(argument: str, given: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    """The pairs of an argument of `Pool` that is a dictionary by name."""
    if not isinstance(given, (Mapping, type(None))):
        raise InvalidArgument(f"Pool: {argument}={given!r} must be a dictionary by name.")
    return list((given or {}).items())


def add_tenants(jobs: Any, tenants: Mapping[str, float | Tenant] | None) -> None:
    """Tell the engine of `jobs`, a pool's, of tenants. Numbers are weights."""
    for name, tenant in by_name("tenants", tenants):
        one = tenant if isinstance(tenant, Tenant) else Tenant(tenant)
        jobs.engine.add_tenant(name_of("Pool", name), weight=one.weight, devices=one.devices, memory=one.memory)
        jobs.has_tenants = True


def name_of(call: str, tenant: Any) -> str:
    """The engine's name of a tenant."""
    if tenant is None:
        return ""
    if not (isinstance(tenant, str) and tenant):
        raise InvalidArgument(f"{call}: tenant={tenant!r} must be a name, or None for no tenant.")
    return tenant


def charge_of(call: str, cost: Any) -> float:
    """What a tenant is charged for a job."""
    if not (_positive(cost) and cost <= 1e12):
        raise InvalidArgument(f"{call}: cost={cost!r} must be a number above 0, at most 1e12.")
    return float(cost)


def report_of(engine: Any) -> dict[str, dict[str, Any]]:
    """The figures of tenants by name; none where nobody has one."""
    keys = ("weight", "served", "waiting", "devices", "memory")
    all_of_them = engine.tenants()
    return {} if len(all_of_them) == 1 else {name: dict(zip(keys, rest, strict=True)) for name, *rest in all_of_them}
