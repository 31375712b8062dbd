"""The measurements of all rounds with one batch size, as a table and as JSON."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

from race.figures import median_interval, rate, spread

Blocks = dict[str, list[list[float]]]

LABELS = {
    "ddp": "DDP, gloo, a pinned process per core",
    "threads": "one process, a thread per core",
    "jax": "JAX, sharded over a device per core",
    "even": "paceline, even",
    "auto": "paceline, auto",
}
HEAD = ("", "of ideal", "spread", "/ DDP", "samples/s", "ms/step")


class Results:
    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._rates: dict[str, list[float]] = defaultdict(list)
        # By device, then by "whole" or the size of micro-batches.
        self._alone: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._together: list[float] = []
        self._ratios: list[float] = []

    def add(self, blocks: Blocks) -> None:
        """Add a round of one or two rivals."""
        for name, seconds in blocks.items():
            self._rates[name].append(rate(self._batch, seconds))
        if "auto" in blocks:
            self._ratios += block_ratios(blocks)

    def add_alone(self, device: str, blocks: Blocks) -> None:
        for name, seconds in blocks.items():
            self._alone[device][name].append(rate(self._batch, seconds))

    def add_together(self, processes: list[Blocks]) -> None:
        self._together.append(sum(rate(self._batch, blocks["together"]) for blocks in processes))

    def replace_ratios(self, blocks: Blocks) -> None:
        """Replace the rounds' ratios of auto to even by those of a longer measurement."""
        self._ratios = block_ratios(blocks)

    def summary(self) -> dict[str, Any]:
        """Rates in samples per second, by rival. Rivals that did not run are missing."""
        names = [name for name in LABELS if self._rates[name]]
        medians = {name: statistics.median(self._rates[name]) for name in names}
        alone = {
            device: {name: round(statistics.median(rates), 1) for name, rates in ways.items()}
            for device, ways in self._alone.items()
        }
        ideal = sum(ways["whole"] for ways in alone.values())
        in_micro_batches = sum(max(ways.values()) for ways in alone.values())
        interval = median_interval(self._ratios)
        return {
            **{name: round(value, 1) for name, value in medians.items()},
            "ideal": round(ideal, 1),
            "of_ideal": {name: round(value / ideal, 4) for name, value in medians.items()},
            "over_ddp": {name: round(value / medians["ddp"], 4) for name, value in medians.items()},
            "milliseconds": {name: round(1e3 * self._batch / value, 2) for name, value in medians.items()},
            "spread": {name: round(spread(self._rates[name]), 4) for name in names},
            "auto_over_ddp": round(medians["auto"] / medians["ddp"], 4),
            "auto_over_ideal": round(medians["auto"] / ideal, 4),
            "auto_over_ideal_in_micro_batches": round(medians["auto"] / in_micro_batches, 4),
            "auto_over_best_alone": round(medians["auto"] / max(ways["whole"] for ways in alone.values()), 4),
            "auto_over_even": round(statistics.median(self._ratios), 4),
            "auto_over_even_interval": None if interval is None else [round(end, 4) for end in interval],
            "auto_over_even_blocks": len(self._ratios),
            "ideal_in_micro_batches": round(in_micro_batches, 1),
            "cores_at_the_same_time": round(statistics.median(self._together), 1),
            "alone": alone,
            "rounds": len(self._rates["auto"]),
            "rates": {name: [round(value, 1) for value in self._rates[name]] for name in names},
        }

    def rows(self) -> list[tuple[str, ...]]:
        """The rows of the table below `HEAD`."""
        summary = self.summary()

        def row(label: str, value: float, spread_text: str = "") -> tuple[str, ...]:
            return (
                label,
                f"{value / summary['ideal']:.3f}",
                spread_text,
                f"{value / summary['ddp']:.3f}",
                f"{value:.0f}",
                f"{1e3 * self._batch / value:.2f}",
            )

        return [
            *(row(LABELS[name], summary[name], f"±{part:.1%}") for name, part in summary["spread"].items()),
            row("ideal: each core alone, summed", summary["ideal"]),
            *(row(f"  {device} alone", ways["whole"]) for device, ways in summary["alone"].items()),
            row("ideal in micro-batches", summary["ideal_in_micro_batches"]),
            *(
                row(f"  {device} alone, {_fastest(ways)}", max(ways.values()))
                for device, ways in summary["alone"].items()
            ),
            row("all cores at once, nothing shared", summary["cores_at_the_same_time"]),
        ]

    def text(self) -> str:
        """The table, and how auto compares with even."""
        lines = ["{:<38}{:>9}  {:>7}  {:>6}  {:>10}  {:>9}".format(*row) for row in (HEAD, *self.rows())]
        summary = self.summary()
        interval = summary["auto_over_even_interval"]
        known = f"95 % interval {interval[0]:.4f} to {interval[1]:.4f}" if interval else "too few for an interval"
        pairs = summary["auto_over_even_blocks"]
        lines.append(f"auto / even: {summary['auto_over_even']:.4f}, {known} ({pairs} pairs of blocks)")
        return "\n".join(lines)


def _fastest(ways: dict[str, float]) -> str:
    size = max(ways, key=lambda name: ways[name])
    return "whole" if size == "whole" else f"in {size}"


def block_ratios(blocks: Blocks) -> list[float]:
    """Auto's speed relative to even's, per pair of neighbouring blocks."""
    return [sum(even) / sum(auto) for even, auto in zip(blocks["even"], blocks["auto"], strict=True)]
