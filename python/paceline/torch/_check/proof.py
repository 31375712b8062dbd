"""What a proof of a step has found."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar

from paceline import Error, InvalidArgument
from paceline.torch._devices.failures import noted

EXTRAS_OF_SLICES = "extras_of_slices"  # an attribute of functions whose extras are not those of the batch
_thrown_away = ContextVar("paceline_thrown_away", default=False)  # workers run in copies of the caller's context


def proving() -> bool:
    """Whether a step runs that is only compared and then thrown away, so that a script may leave out its log."""
    return _thrown_away.get()


@contextlib.contextmanager
def thrown_away() -> Iterator[None]:
    """Around runs that leave nothing."""
    token = _thrown_away.set(True)
    try:
        yield
    finally:
        _thrown_away.reset(token)


@contextlib.contextmanager
def said_of_slices(call: str, cut_inside: str) -> Iterator[None]:
    """Add to what the user's code raises that the whole batch has just run without it. `cut_inside`: as `Batch` says it, which is then the error."""
    try:
        yield
    except Error:  # of this library: a device failed, or somebody has closed the trainer
        raise
    except Exception as error:
        if cut_inside:
            raise InvalidArgument(
                f"{call}: the function runs with the whole batch, and raises {type(error).__name__} with slices of it ({error}). The batch is a list or tuple, "
                f"{cut_inside}. split= says how to cut objects of another type."
            ) from error
        noted(
            error,
            "The whole batch has just run on one device without this error. The devices run slices of it, each on its own copy of the module. Does the "
            "code need the size of the batch, or read from the original module what a forward writes to the module that it is given?",
        )
        raise


@dataclasses.dataclass
class Proof:
    """What was compared, and what came of it. `differences` are in words; `unproved` says why nothing could be said."""

    function: str
    step: int
    items: int
    call: str = "step"
    # Two numbers of micro-batches that were compared, or None: the devices with one device.
    split: tuple[int, int] | None = None
    compared: str = ""
    largest: float = 0.0
    seconds: float = 0.0
    differences: list[str] = dataclasses.field(default_factory=list)
    unproved: list[str] = dataclasses.field(default_factory=list)
    cause: str = ""
    is_wrong: bool = False  # whether more differs than attributes of the module
    # Types of objects that the function reaches, and that were not put back.
    left_alone: list[str] = dataclasses.field(default_factory=list)
    reaches_batch: bool = False  # whether the function may use the whole batch instead of its slice

    @property
    def text(self) -> str:
        """One line."""
        what = f"{self.call} {self.step} of {self.function}, {self.items} items"
        against = "one device"
        if self.split is not None:
            what += f" in {self.split[1]} micro-batches"
            against = f"{self.split[0]} micro-batches"
        if self.differences:
            result = f"differs from {against}: {'; '.join(self.differences)}{f'. {self.cause}' if self.cause else ''}"
        elif self.unproved:
            result = f"not proved: {'; '.join(self.unproved)}"
        else:
            result = f"equal to {against} up to {self.largest:.0e} ({self.compared})"
        left = f"; not put back: {', '.join(self.left_alone[:5])}" if self.left_alone else ""
        return f"{what}: {result}{left}; {self.seconds * 1e3:.0f} ms"
