"""The result of `DataParallel.check`, as numbers and as text."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from typing import Literal

Kind = Literal[
    "random draws",
    "shared draws",
    "unknown draws",
    "running statistics",
    "coupled items",
    "batch size",
    "reduction",
    "weight",
    "order",
    "not repeatable",
    "error",
    "devices",
    "unknown",
]

# Causes that leave a loss valid if nothing else is found.
_DRAWS = {
    "shared draws": "valid in expectation: every micro-batch draws its own random numbers for all of its items",
    "random draws": "valid: another split draws other random numbers",
}


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why a split changes the result, and what to do."""

    kind: Kind
    text: str
    modules: tuple[str, ...] = ()  # the submodules that cause it, if known


@dataclasses.dataclass(frozen=True)
class SplitResult:
    """One split, compared with the whole batch."""

    name: str  # "12 + 4 items"
    loss: float  # relative difference of the objective
    differences: dict[str, float]  # for each parameter's gradient the norm of the difference, relative to its norm
    buffers: tuple[str, ...]  # names of buffers that end up with other values
    error: str | None  # what loss_fn raised

    @property
    def largest(self) -> float:
        """The largest relative difference, of the loss or of a gradient. Infinite if `loss_fn` raised."""
        return math.inf if self.error is not None else max([self.loss, *self.differences.values()])


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """What a split changes in the training of one module, loss and batch. ``print(report)`` shows it as text.

    Attributes
    ----------
    items
        The number of items of the batch that was used.
    splits
        Each split that was tried, with its differences from the whole batch.
    causes
        Why results change, the most certain cause first. Empty if nothing changes.
    tolerance
        Up to this relative difference two results count as equal: the order of floating-point sums explains it.
    notes
        What is right for every split and may not be what is meant.
    """

    items: int
    splits: tuple[SplitResult, ...]
    causes: tuple[Cause, ...]
    tolerance: float
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether no split changed anything, random draws included."""
        return not self.causes and self.largest <= self.tolerance

    @property
    def largest(self) -> float:
        """The largest relative difference of all splits."""
        return max((split.largest for split in self.splits), default=0.0)

    @property
    def differences(self) -> dict[str, float]:
        """The largest relative difference of each parameter's gradient over all splits, by name."""
        names = dict.fromkeys(name for split in self.splits for name in split.differences)
        return {name: max(split.differences.get(name, 0.0) for split in self.splits) for name in names}

    @property
    def verdict(self) -> str:
        """The result in one line."""
        if self.exact:
            return "exact: loss and gradients do not depend on the split"
        kinds = dict.fromkeys(cause.kind for cause in self.causes)
        if "unknown draws" in kinds:
            return "cannot tell: another split draws other random numbers, and these could not be repeated"
        if "not repeatable" in kinds:
            return "cannot tell: the same batch gave two results"
        harmless = self.largest <= self.tolerance and kinds.keys() <= {*_DRAWS, "running statistics"}
        if not harmless:
            causes = ", ".join(kind for kind in kinds if kind not in _DRAWS)
            return f"not exact: {causes} ({_size(self.largest)})"
        drawn = next((text for kind, text in _DRAWS.items() if kind in kinds), "")
        if "running statistics" not in kinds:
            return f"{drawn}, and apart from that nothing changes"
        return f"{drawn or 'exact gradients'}; buffers end up with other values for another split"

    def __str__(self) -> str:
        lines = [f"{self.verdict} ({self.items} items)"]
        for cause in self.causes:
            text = f"{cause.kind}: {cause.text}"
            lines += textwrap.wrap(text, 110, initial_indent="  ", subsequent_indent="    ")
        for note in self.notes:
            lines += textwrap.wrap(f"note: {note}", 110, initial_indent="  ", subsequent_indent="    ")
        if self.splits:
            width = max(len(split.name) for split in self.splits)
            lines.append(f"  {'split':<{width}}  {'loss':>7}  {'gradient':>8}  of parameter")
            lines += [f"  {split.name:<{width}}  {_row(split)}" for split in self.splits]
            lines.append(f"  (relative differences from the whole batch; equal up to {self.tolerance:.0e})")
        return "\n".join(lines)


def _size(largest: float) -> str:
    """A relative difference in words."""
    if not math.isfinite(largest):
        return "a slice raised, or gave no number"
    return f"loss or gradients differ by up to {f'{largest:.0%}' if largest >= 0.01 else f'{largest:.0e}'}"


def _row(split: SplitResult) -> str:
    if split.error is not None:
        return f"raised {split.error}"
    name, value = max(split.differences.items(), key=lambda entry: entry[1], default=("-", 0.0))
    return f"{split.loss:7.0e}  {value:8.0e}  {name}"
