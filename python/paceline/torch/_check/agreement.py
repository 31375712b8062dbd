"""Finds out whether the devices of a trainer have the same parameters, and compute the same."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from paceline.torch._batch.batch import Batch
from paceline.torch._batch.objective import Objective
from paceline.torch._check.check import Trials
from paceline.torch._check.probe import Probed, Span, distances, loss_distance, tolerance_for
from paceline.torch._devices.places import Places
from paceline.torch._replicas.buffers import same_bits
from paceline.torch._replicas.replicas import Replicas
from paceline.torch._run.execution import Execution
from paceline.torch._run.train_run import LossFunction
from paceline.torch._run.workload import Workload


@dataclasses.dataclass(frozen=True)
class ReplicaReport:
    """Whether the devices agree. ``print(report)`` shows it as text.

    Attributes
    ----------
    items
        The micro-batch that every device ran: items ``[begin, end)`` of the batch.
    differences
        For each device the largest relative difference of the loss or of a parameter's gradient from what the module itself gave on the
        caller's thread. Empty if that could not be told.
    tolerance
        Up to this difference results count as equal: rounding explains it.
    copies
        For each memory space with a copy of the parameters the names of those whose bits differ. Empty if there is one space.
    unknown
        Why results could not be compared. Empty if they could.
    """

    items: tuple[int, int]
    differences: dict[str, float]
    tolerance: float
    copies: dict[str, tuple[str, ...]]
    unknown: str = ""

    @property
    def differing(self) -> tuple[str, ...]:
        """The devices whose results differ by more than rounding."""
        return tuple(name for name, value in self.differences.items() if not value <= self.tolerance)

    @property
    def agree(self) -> bool:
        """Whether nothing was found to differ."""
        return not self.differing and not any(self.copies.values())

    @property
    def verdict(self) -> str:
        """The result in one line."""
        found = [f"{space} has other bits in {', '.join(names[:3])}" for space, names in self.copies.items() if names]
        if self.differing:
            values = ", ".join(f"{name} by {self.differences[name]:.0e}" for name in self.differing)
            found.append(f"the loss or a gradient differs from the module's own: {values}")
        if found:
            return f"the devices differ: {'; '.join(found)}"
        return f"cannot tell: {self.unknown}" if self.unknown else "the devices agree"

    def __str__(self) -> str:
        begin, end = self.items
        lines = [f"{self.verdict} (items {begin} to {end - 1} on each device)"]
        lines += [f"  {name}: {value:.0e}" for name, value in self.differences.items()]
        if self.differences:
            lines.append(f"  (largest relative difference from the module itself; equal up to {self.tolerance:.0e})")
        if not self.differences:
            return "\n".join(lines)
        if self.copies:
            equal = sum(not names for names in self.copies.values())
            lines.append(f"  parameters: {equal} of {len(self.copies)} copies in other memory spaces have equal bits")
        else:
            lines.append("  parameters: one memory space, so all devices use the same ones")
        return "\n".join(lines)


def verify(
    execution: Execution,
    work: Workload,
    batch: Batch,
    objective: Objective,
    loss_fn: LossFunction,
    *,
    devices: Sequence[int],
    tolerance: float | None = None,
) -> ReplicaReport:
    """Run one micro-batch on the module itself, and on each of the `devices` alone. Commits nothing. `work` is for this call alone."""
    execution.replicas.refresh(hooks=True)
    places, replicas = execution.places, execution.replicas
    tolerance = tolerance_for(execution.module, places) if tolerance is None else tolerance
    span = _micro_batch(batch, objective, len(devices))
    if span is None:
        return ReplicaReport((0, 0), {}, tolerance, {}, "no item of the batch has weight")
    if any(one._backward_hooks or getattr(one, "_post_accumulate_grad_hooks", None) for one in replicas.parameters):
        why = "parameters have gradient hooks, which would run for a trial, too"
        return ReplicaReport(span, {}, tolerance, {}, why)
    part, term = batch.part(*span), objective.part(*span)
    trials = Trials(execution, work, part, term, loss_fn, tolerance)
    noise = trials.probe.noise

    def on(device: int) -> Probed:
        done = trials.on_devices(alone=device, hooks=True)
        return Probed(done.loss.item(), done.totals, {})

    def distance(wanted: Probed, got: Probed) -> float:
        found = distances(wanted.gradients[: len(replicas.names)], got.gradients[: len(replicas.names)])
        return max([loss_distance(wanted, got), *found.values()])

    with trials.leaving_no_trace():
        # The first run records what is drawn, and the second draws it again, like the devices.
        own, again = (trials.probe.split([(0, part.size)]) for _ in range(2))
        trials.probe.outside.settle()
        unknown = _unknown(own, distance(own, again), tolerance)
        if unknown and not noise.lost:
            return ReplicaReport(span, {}, tolerance, {}, unknown)
        found = {places.names[device]: distance(own, on(device)) for device in devices}
        places.drain()
        copies = differing_copies(replicas, places, devices)
        if noise.lost:
            found, unknown = {}, f"random draws could not be repeated ({', '.join(noise.lost)})"
        return ReplicaReport(span, found, tolerance, copies, unknown)


def _micro_batch(batch: Batch, objective: Objective, devices: int) -> Span | None:
    """A device's share of the batch, the first one in which an item counts, or None. It has at least two items, for batch normalisation."""
    size = min(batch.size, max(2, -(-batch.size // devices)))
    begins = [*range(0, batch.size - size + 1, size), batch.size - size]
    return next(((begin, begin + size) for begin in begins if not objective.idle(begin, begin + size)), None)


def _unknown(own: Probed, repeated: float, tolerance: float) -> str:
    """Why the module's own result is nothing to compare with, if it is not."""
    gradients = (gradient for gradient in own.gradients if gradient is not None)
    if not math.isfinite(own.loss) or not all(bool(gradient.isfinite().all()) for gradient in gradients):
        return "the loss or a gradient of the module itself is not a finite number"
    if repeated > tolerance:
        return "the module itself gave two results for the same micro-batch, so loss_fn or the module keeps state in Python"
    return ""


def differing_copies(replicas: Replicas, places: Places, devices: Iterable[int]) -> dict[str, tuple[str, ...]]:
    """For each memory space of these devices but home: the names of the parameters whose copy has other bits. Every step begins by copying them."""
    found: dict[str, tuple[str, ...]] = {}
    for device in devices:
        space = places.spaces[device]
        if space != places.home_space and places.space_names[device] not in found:
            pairs = zip(replicas.names, replicas.parameters, replicas.list[device].parameters, strict=True)
            found[places.space_names[device]] = tuple(name for name, ours, copy in pairs if not same_bits(ours, copy))
    return found
