"""Compares what two runs made of a batch, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from paceline.torch._check.probe import OutsideLeaves, Probed, distances, loss_distance
from paceline.torch._check.proof import EXTRAS_OF_SLICES
from paceline.torch._check.result import Result
from paceline.torch._check.state import DEVICES, State, close, same_nest
from paceline.torch._replicas.buffer_rules import BufferRule
from paceline.torch._replicas.replicas import Replicas

_ROUNDINGS = 10  # a split may differ by so many times what another rounding of the parameters does


class Comparison:
    """Compares results of one step."""

    def __init__(self, replicas: Replicas, outside: OutsideLeaves, loss_fn: Any, tolerance: float) -> None:
        self.tolerance = tolerance
        self.words = DEVICES
        self.rules: dict[str, BufferRule] = {}  # that give buffers the values of one device
        self._replicas, self._outside, self._loss_fn = replicas, outside, loss_fn

    def distances(self, own: Result, got: Result) -> dict[str, float]:
        """How far a result is from the wanted one: the loss, under an empty name, and the gradients."""
        mine, theirs = (
            Probed(one.loss.item(), [*one.gradients, *self._outside.lasting(one.outside)], {}) for one in (own, got)
        )
        # A gradient that is nothing but rounding is no larger than what rounding does to the others.
        floor = max(1e-3, self.tolerance)
        by_name = distances(mine.gradients, theirs.gradients, self._replicas.names, floor)
        return {"": loss_distance(mine, theirs), **by_name}

    def differences(
        self, start: State, own: Result, got: Result, rounding: Mapping[str, float] = MappingProxyType({})
    ) -> dict[str, str]:
        """What the second result has otherwise, by name. `rounding`: how far rounding alone brings the loss and the gradients."""
        kept = own.found.differences(got.found, self.tolerance, self.words)
        for rule, values in got.joined.items():
            for name, value in values.items():
                if name in kept and close(own.found.buffers[name], value, self.tolerance):
                    self.rules.setdefault(name, rule)
        return self._of_the_loss(own, got, rounding) | self._of_parameters(start, own, got) | kept

    def _of_the_loss(self, own: Result, got: Result, rounding: Mapping[str, float]) -> dict[str, str]:
        said = {}
        by_name = self.distances(own, got)
        limits = {name: max(self.tolerance, _ROUNDINGS * rounding.get(name, 0.0)) for name in by_name}
        if by_name[""] > limits[""]:
            said["loss"] = f"the loss is {got.loss.item():.6g} instead of {own.loss.item():.6g}"
        wrong = [name for name, far in by_name.items() if name and far > limits[name]]
        if wrong:
            worst = max(wrong, key=lambda name: by_name[name])
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            name = worst if worst in self._replicas.names else "a tensor outside of the module"
            said["gradient"] = f"the gradient of {name}{more} differs by {_percent(by_name[worst])}"
        of_slices = getattr(self._loss_fn, EXTRAS_OF_SLICES, False)
        if not of_slices and not same_nest(own.extras, got.extras, self.tolerance):
            said["extras"] = "what loss_fn returns beside the loss differs"
        return said

    def _of_parameters(self, start: State, own: Result, got: Result) -> dict[str, str]:
        said = {}
        for index in {**own.written, **got.written}:
            mine, theirs, name = own.written.get(index), got.written.get(index), self._replicas.names[index]
            if mine is None or theirs is None or not close(mine, theirs, self.tolerance):
                moved = [start.parameters.distance(index, one) for one in (mine, theirs)]
                said[f"parameter {name}"] = (
                    f"the forward writes parameter {name}, and moves it by {moved[0]:.3g} {self.words[0]} and {moved[1]:.3g} {self.words[1]}"
                )
        return said


def _percent(value: float) -> str:
    if not math.isfinite(value):
        return "something that is no number"
    return f"{value:.0%}" if value >= 0.01 else f"{value:.0e}"
