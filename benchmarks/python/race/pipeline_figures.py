"""The figures of the race of pipelines, computed from the measurements of all rounds."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from race.figures import rate, spread

Blocks = Mapping[str, Sequence[Sequence[float]]]

LABELS = {
    "torch_gpipe": "torch pipelining, gloo, GPipe",
    "torch_1f1b": "torch pipelining, gloo, 1F1B",
    "even": "paceline, the even cut",
    "auto": "paceline, planned",
    "single": "the fastest core alone",
    "data_parallel": "paceline, DataParallel",
}
HEAD = ("", "samples/s", "spread", "ms/step", "/ torch", "of ideal")
LEAST_BLOCK_MILLISECONDS = 5.0  # of a forward; goals apply to blocks of at least this length
# The smallest allowed speed of auto over the better of torch's two schedules, by whether a core is busy and the number of micro-batches.
_OVER_TORCH = {(False, 8): 0.97, (True, 8): 1.30, (True, 16): 1.38}
_OVER_1F1B = {(False, 8): 1.3}
_OFF_PREDICTION = 0.05  # the largest allowed difference between the measured and the predicted step


def figure_name(rival: str) -> str:
    """What a rival's speed is called in the result."""
    return rival.removeprefix("pipeline-").replace("-", "_")


class Rounds:
    """The measurements of all rounds."""

    def __init__(self, batch: int, micro_batches: int, *, busy: bool) -> None:
        self._batch = batch
        self._micro_batches = micro_batches
        self._busy = busy
        self._rates: dict[str, list[float]] = defaultdict(list)
        self._alone: dict[str, list[float]] = defaultdict(list)  # by device
        self._block_seconds: list[float] = []  # medians of a core without a busy loop
        self._predicted: list[float] = []  # samples/s
        self._over_predicted: list[float] = []
        self._placed: list[list[int]] = []

    def add(self, name: str, blocks: Blocks) -> None:
        """A round of one rival. Only that of "auto" adds to what was predicted."""
        self._rates[name].append(rate(self._batch, blocks[name]))
        if name == "auto":
            (inside,), (predicted,) = blocks["inside"], blocks["predicted"]
            self._predicted.append(self._batch / statistics.median(predicted))
            self._over_predicted.append(statistics.median(inside) / statistics.median(predicted))
            self._placed.append([int(count) for count in blocks["placed"][0]])

    def add_alone(self, cores: Mapping[str, Blocks]) -> None:
        """A round of every core alone, by device."""
        for device, blocks in cores.items():
            self._alone[device].append(rate(self._batch, blocks["single"]))
        self._rates["single"].append(max(rates[-1] for rates in self._alone.values()))
        self._block_seconds.append(min(statistics.median(blocks["block"][0]) for blocks in cores.values()))

    def summary(self) -> dict[str, Any]:
        """Speeds in samples per second, and their ratios. Ratios are medians over the ratios of the rounds."""
        speeds = {name: statistics.median(self._rates[name]) for name in LABELS}
        alone = {device: statistics.median(rates) for device, rates in self._alone.items()}
        efficiency = self._micro_batches / (self._micro_batches + len(alone) - 1)  # of stages that take equally long
        ideal = sum(alone.values()) * efficiency
        better = max(("torch_gpipe", "torch_1f1b"), key=lambda name: speeds[name])
        found: dict[str, Any] = {
            "busy": self._busy,
            **{name: round(speed, 2) for name, speed in speeds.items()},
            "predicted": round(statistics.median(self._predicted), 2),
            "auto_over_torch": round(self._ratio("auto", better), 4),
            "measured_over_predicted": round(statistics.median(self._over_predicted), 4),
            "ideal": round(ideal, 2),
            "better_of_torch": better,
            "auto_over_1f1b": round(self._ratio("auto", "torch_1f1b"), 4),
            "auto_over_even": round(self._ratio("auto", "even"), 4),
            "auto_of_ideal": round(speeds["auto"] / ideal, 4),
            "block_milliseconds": round(1e3 * statistics.median(self._block_seconds), 2),
            "spread": {name: round(spread(self._rates[name]), 4) for name in LABELS},
            "alone": {device: round(speed, 2) for device, speed in alone.items()},
            "blocks_of_devices": self._placed,
            "rates": {name: [round(speed, 2) for speed in self._rates[name]] for name in LABELS},
        }
        return found | {"goals": goals(found, self._micro_batches)}

    def rows(self) -> list[tuple[str, ...]]:
        """The rows of the table below `HEAD`."""
        found = self.summary()
        better = found[found["better_of_torch"]]

        def row(label: str, speed: float, spread_text: str = "") -> tuple[str, ...]:
            return (
                label,
                f"{speed:.1f}",
                spread_text,
                f"{1e3 * self._batch / speed:.0f}",
                f"{speed / better:.2f}",
                f"{speed / found['ideal']:.2f}",
            )

        return [
            *(row(label, found[name], f"±{found['spread'][name]:.1%}") for name, label in LABELS.items()),
            row("predicted for paceline's plan", found["predicted"]),
            row("ideal: each core alone, summed, less the bubble", found["ideal"]),
            *(row(f"  {device} alone", speed) for device, speed in found["alone"].items()),
        ]

    def text(self) -> str:
        """The table, and whether the goals are met."""
        found = self.summary()
        lines = ["{:<48}{:>10}  {:>7}  {:>8}  {:>8}  {:>9}".format(*row) for row in (HEAD, *self.rows())]
        lines.append(
            f"planned blocks of the devices, by round: {found['blocks_of_devices']}; a block takes {found['block_milliseconds']} ms"
        )
        lines.append(f"measured / predicted step: {found['measured_over_predicted']:.3f}")
        if not found["goals"]:
            lines.append(f"Goals count from {LEAST_BLOCK_MILLISECONDS:.0f} ms a block on.")
        lines += [
            f"{goal['figure'].replace('_', ' ')} {goal['found']:.3f}, goal {goal['goal']}: {'met' if goal['met'] else 'missed'}"
            for goal in found["goals"]
        ]
        return "\n".join(lines)

    def _ratio(self, name: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(self._rates[name], self._rates[other], strict=True))


def goals(found: Mapping[str, Any], micro_batches: int) -> list[dict[str, Any]]:
    """Each goal that applies to this setting, with the value found."""
    if found["block_milliseconds"] < LEAST_BLOCK_MILLISECONDS:
        return []
    at = found["busy"], micro_batches
    least = {"auto_over_torch": _OVER_TORCH.get(at), "auto_over_1f1b": _OVER_1F1B.get(at)}
    judged = [
        {"figure": figure, "goal": f"{goal}", "found": found[figure], "met": found[figure] >= goal}
        for figure, goal in least.items()
        if goal is not None
    ]
    off = found["measured_over_predicted"]
    return [
        *judged,
        {
            "figure": "measured_over_predicted",
            "goal": f"1 ± {_OFF_PREDICTION}",
            "found": off,
            "met": abs(off - 1) <= _OFF_PREDICTION,
        },
    ]
