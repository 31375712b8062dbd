"""What the rounds measured, as a table and as JSON."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

from race.figures import median_interval, rate, spread
from race.host import CoreSeconds

Blocks = dict[str, list[list[float]]]

LABELS = {
    "ddp": "DDP, gloo, a pinned process per core",
    "threads": "one process, a thread per core",
    "even": "paceline, even",
    "auto": "paceline, auto",
}


class Results:
    def __init__(self, batch: int, busy: bool) -> None:
        self._batch = batch
        self._busy = busy
        self._rates: dict[str, list[float]] = defaultdict(list)
        self._alone: dict[str, dict[str, list[float]]] = {"whole": defaultdict(list), "parts": defaultdict(list)}
        self._together: list[float] = []
        self._ratios: list[float] = []
        self._passed: dict[str, float] = defaultdict(float)
        self._stolen: dict[str, float] = defaultdict(float)

    def add(self, blocks: Blocks) -> None:
        """One round of one or two rivals."""
        for name, seconds in blocks.items():
            self._rates[name].append(rate(self._batch, seconds))
        if "auto" in blocks:
            self._ratios += block_ratios(blocks)

    def add_alone(self, device: str, blocks: Blocks) -> None:
        for name, seconds in blocks.items():
            self._alone[name][device].append(rate(self._batch, seconds))

    def add_together(self, processes: list[Blocks]) -> None:
        self._together.append(sum(rate(self._batch, blocks["together"]) for blocks in processes))

    def add_host(self, rival: str, before: CoreSeconds | None, after: CoreSeconds | None) -> None:
        """What the host did with the cores while one rival ran."""
        if before is not None and after is not None:
            self._passed[rival] += after.passed - before.passed
            self._stolen[rival] += after.stolen - before.stolen

    def stolen(self) -> dict[str, float]:
        """The part of the cores' time that the host gave to others, by rival; empty where it is not known."""
        return {rival: self._stolen[rival] / passed for rival, passed in self._passed.items() if passed > 0}

    def replace_ratios(self, blocks: Blocks) -> None:
        """Ratios of auto to even from a longer measurement, instead of those of the rounds."""
        self._ratios = block_ratios(blocks)

    def ideals(self) -> dict[str, float]:
        """The sum of the devices' medians, for each way to run a batch."""
        return {name: sum(map(statistics.median, devices.values())) for name, devices in self._alone.items()}

    def summary(self) -> dict[str, Any]:
        medians = {name: statistics.median(self._rates[name]) for name in LABELS}
        ideals = self.ideals()
        ideal = ideals["whole"]
        interval = median_interval(self._ratios)
        return {
            "busy": self._busy,
            **{name: round(value, 1) for name, value in medians.items()},
            "ideal": round(ideal, 1),
            "auto_over_ddp": round(medians["auto"] / medians["ddp"], 4),
            "auto_over_ideal": round(medians["auto"] / ideal, 4),
            "auto_over_even": round(statistics.median(self._ratios), 4),
            "auto_over_even_interval": None if interval is None else [round(end, 4) for end in interval],
            "auto_over_even_blocks": len(self._ratios),
            "spread": {name: round(spread(self._rates[name]), 4) for name in LABELS},
            "ideal_in_micro_batches": round(ideals["parts"], 1),
            "cores_at_the_same_time": round(statistics.median(self._together), 1),
            "alone": {
                device: {name: round(statistics.median(self._alone[name][device]), 1) for name in self._alone}
                for device in self._alone["whole"]
            },
            "stolen": {rival: round(part, 4) for rival, part in self.stolen().items()},
            "rounds": len(self._rates["auto"]),
            "rates": {name: [round(value, 1) for value in self._rates[name]] for name in LABELS},
        }

    def table(self) -> str:
        summary = self.summary()
        ideal = summary["ideal"]
        lines = [f"{'':<40}{'samples/s':>10}  {'spread':>7}  {'/ DDP':>6}  {'/ ideal':>7}"]

        def line(label: str, value: float, spread_text: str) -> None:
            ratios = f"{value / summary['ddp']:>6.3f}  {value / ideal:>7.3f}"
            lines.append(f"{label:<40}{value:>10.0f}  {spread_text:>7}  {ratios}")

        for name, label in LABELS.items():
            line(label, summary[name], f"±{summary['spread'][name]:.1%}")
        line("ideal: each core alone, summed", ideal, "")
        for device, ways in summary["alone"].items():
            lines.append(f"  {device + ' alone':<38}{ways['whole']:>10.0f}")
        line("the same in micro-batches", summary["ideal_in_micro_batches"], "")
        line("all cores at once, nothing shared", summary["cores_at_the_same_time"], "")
        interval = summary["auto_over_even_interval"]
        known = f"95 % interval {interval[0]:.4f} to {interval[1]:.4f}" if interval else "too few for an interval"
        pairs = summary["auto_over_even_blocks"]
        lines.append(f"auto / even: {summary['auto_over_even']:.4f}, {known} ({pairs} pairs of blocks)")
        if stolen := summary["stolen"]:
            parts = ", ".join(f"{rival} {part:.1%}" for rival, part in stolen.items())
            lines.append(f"time of these cores that the host gave to others: {parts}")
        return "\n".join(lines)


def block_ratios(blocks: Blocks) -> list[float]:
    """How much faster auto was, for each pair of neighbouring blocks."""
    return [sum(even) / sum(auto) for even, auto in zip(blocks["even"], blocks["auto"], strict=True)]
