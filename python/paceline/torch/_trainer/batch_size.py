"""Finds how many items a batch needs to use the devices well: the knee of the throughput over the batch size."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping

from paceline import InvalidArgument
from paceline._plot import figure_class, save
from paceline._words import plural, require
from paceline.torch._run.memory import is_out_of_memory
from paceline.torch._trainer.arguments import is_number, is_whole

_WORTH = 1.05  # least gain: of doubling the batch, to go on; of smaller micro-batches, to recommend them

# Takes a batch size and a micro-batch (None: the trainer's own), returns seconds per step.
Measure = Callable[[int, int | None], float]


@dataclasses.dataclass(frozen=True)
class BatchSizeSearch:
    """What `DataParallel.find_batch_size` measured. ``print`` shows it as a table, `plot` draws it.

    Attributes
    ----------
    batch_size
        The knee: the smallest size measured with at least `efficiency` of the highest throughput.
    seconds
        Seconds per step, by batch size. A step is split, forward, backward and reduction on all devices, without an optimizer.
    micro_batches
        Seconds per step at the knee, by micro-batch. None stands for the trainer's own.
    micro_batch
        The fastest of these, or None if none is clearly faster than the trainer's own.
    stopped
        Why no larger batch was measured.
    """

    batch_size: int
    efficiency: float
    seconds: Mapping[int, float]
    micro_batches: Mapping[int | None, float]
    micro_batch: int | None
    stopped: str

    @property
    def throughput(self) -> dict[int, float]:
        """Items per second, by batch size."""
        return {size: size / seconds for size, seconds in self.seconds.items()}

    def __str__(self) -> str:
        best = max(self.throughput.values())
        lines = [f"{'batch':>8} {'ms/step':>9} {'items/s':>9}"]
        for size, rate in self.throughput.items():
            mark = "  <- knee" if size == self.batch_size else ""
            lines.append(
                f"{size:>8} {1e3 * self.seconds[size]:>9.2f} {rate:>9.0f}  {'#' * round(30 * rate / best):<30}{mark}"
            )
        lines.append(
            f"{self.batch_size} is the smallest batch with {self.efficiency:.0%} of the highest throughput; {self.stopped}."
        )
        if self.micro_batch is not None:
            gain = self.micro_batches[None] / self.micro_batches[self.micro_batch] - 1
            lines.append(
                f"With micro_batch={self.micro_batch} it is {gain:.0%} faster: smaller pieces fit the caches better."
            )
        return "\n".join(lines)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw throughput over the batch size, as .png, .svg or .pdf.

        Raises
        ------
        ImportError
            If matplotlib is not installed. The message names the extra that brings it.
        """
        figure = figure_class()(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot(list(self.throughput), list(self.throughput.values()), "o-", color="tab:blue")
        axes.axvline(self.batch_size, color="tab:red", linestyle="--", label=f"knee: {self.batch_size}")
        axes.set(xlabel="batch (items)", ylabel="items per second", xscale="log", ylim=(0, None))
        axes.set_xticks(list(self.throughput), [str(size) for size in self.throughput])
        axes.minorticks_off()
        axes.legend(frameon=False)
        axes.grid(alpha=0.3)
        save(figure, path)


def check_arguments(make_batch: object, weight: object, seconds: float) -> None:
    """Raise if `make_batch` is not a function, `weight` fits one size only, or `seconds` is not a time."""
    if not callable(make_batch):
        raise InvalidArgument(
            f"find_batch_size: make_batch is a {type(make_batch).__name__}, not a function. It is find_batch_size(loss_fn, make_batch), "
            "with make_batch(items), which returns a batch of so many items."
        )
    weights = weight.values() if isinstance(weight, Mapping) else [weight]
    fixed = [one for one in weights if one is not None and not callable(one)]
    if fixed:
        raise InvalidArgument(
            f"find_batch_size: weight is a {type(fixed[0]).__name__}, which fits one size of batches only; give a function that makes the "
            "weights from a batch."
        )
    wanted = "a number of at least 0 is needed: how long to time each size for"
    require(is_number(seconds) and 0 <= seconds < math.inf, "find_batch_size", "seconds", seconds, wanted)


def check_size(got: int, wanted: int) -> None:
    """Raise if ``make_batch`` made a batch of another size than it was asked for."""
    if got != wanted:
        raise InvalidArgument(f"find_batch_size: make_batch({wanted}) returned a batch of {plural(got, 'item')}.")


def search(
    measure: Measure, smallest: int, largest: int, efficiency: float, *, micro_batches: bool, devices: int
) -> BatchSizeSearch:
    """Double the batch until that brings little. `measure` raises for a batch that does not fit into memory."""
    if not (is_whole(smallest) and is_whole(largest) and 1 <= smallest <= largest):
        raise InvalidArgument(
            f"find_batch_size: smallest is {smallest!r} and largest {largest!r}; integers of at least 1 in this order are needed."
        )
    wanted = "a number between 0 and 1 is needed: the part of the highest throughput that is enough"
    require(is_number(efficiency) and 0 < efficiency < 1, "find_batch_size", "efficiency", efficiency, wanted)
    seconds: dict[int, float] = {}
    size, largest = int(smallest), int(largest)
    stopped = f"{largest} is the largest that was to be measured"
    while True:
        try:
            seconds[size] = measure(size, None)
        except Exception as error:
            if not seconds or not is_out_of_memory(error):
                raise
            stopped = f"a batch of {size} does not fit into memory"
            break
        # Two doublings have to bring little, since one may be an accident.
        before = list(seconds)[-3:-1]
        if size == largest:
            break
        if len(before) == 2 and size / seconds[size] < _WORTH * max(half / seconds[half] for half in before):
            stopped = "doubling it once more brings little"
            break
        size = min(2 * size, largest)
    best = max(size / spent for size, spent in seconds.items())
    knee = min(size for size, spent in seconds.items() if size / spent >= efficiency * best)
    tried: dict[int | None, float] = {None: seconds[knee]}
    if micro_batches:
        share = knee // devices
        for piece in (share // 2, share // 4, share // 8):
            if piece >= 4:
                tried[piece] = measure(knee, piece)
    fastest = min(tried, key=lambda piece: tried[piece])
    if tried[None] < _WORTH * tried[fastest]:
        fastest = None
    return BatchSizeSearch(knee, efficiency, seconds, tried, fastest, stopped)
