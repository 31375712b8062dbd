"""The types of what `report` returns."""

from __future__ import annotations

from typing import Any, TypedDict


class DeviceFigures(TypedDict, total=False):
    """Figures of one device. `cost` and `cost_per_second` are there after a step with costs, `planned` before it, and not of a `Pipeline`. `lent_part` is there where it is not 0."""

    share: int
    planned: int
    items: int
    busy_seconds: float
    idle_seconds: float
    items_per_second: float
    speed: float
    retired: bool
    cost: float
    cost_per_second: float
    lent_part: float


class _WithCosts(TypedDict, total=False):
    items: dict[str, Any]  # after calls with costs


class WorkFigures(_WithCosts):
    """Figures of one kind of work: steps, predictions, calls, or the runs of `batch` with one name."""

    devices: dict[str, DeviceFigures]
    steps: int
    proved: int
    moves: int
    taken_back: int
    recent_moves: list[dict[str, Any]]
    imbalance: float
    compute_seconds: float
    step_seconds: float
    step_counts: list[tuple[float, int]]


class _AfterSome(WorkFigures, total=False):
    """What is there only after calls of a kind, or of some trainers."""

    predictions: WorkFigures
    calls: WorkFigures
    ranks: list[dict[str, Any]]
    rank_shares: dict[str, Any]
    micro_batches: list[int]  # of a `Pipeline`, as `pipeline`
    pipeline: dict[str, Any]


class Report(_AfterSome):
    """What ``report()`` of a trainer returns. The docstring there says what each figure means."""

    out_of_memory: int
    sizes: dict[str, list[int]]
    memory: dict[str, dict[str, float]]
    runs: dict[str, WorkFigures]
