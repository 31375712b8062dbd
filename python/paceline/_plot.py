"""Draw pictures of runs with matplotlib, if it is installed.

The figures do not use pyplot: no window, no global state, no choice of backend. Any thread may draw.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from paceline import Unavailable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_IN_A_LEGEND = 16
_MEDIAN_ROWS = 9  # wide enough to smooth single steps, narrow enough to keep a change sharp


def draw_run(history: Sequence[Mapping[str, Any]], *, title: str) -> Figure:
    """Draw shares, speeds and step times over the steps of a run. If all steps had costs, cost replaces items. A pipeline's shares are blocks.

    Where shares were planned, these are the lines, and what devices have run is faint: devices that end early take items over. `history`:
    consecutive rows from `paceline.torch.DataParallel.history`, of which there must be one (`Unavailable`).
    """
    if not history:
        raise Unavailable("plot: no step has run yet, so there is nothing to draw.")
    figure = figure_class()(figsize=(9, 7.8), layout="constrained")
    shares, speeds, times = figure.subplots(3, 1, sharex=True)
    edges = [row["first_step"] + 0.5 for row in history] + [history[-1]["first_step"] + history[-1]["steps"] + 0.5]
    by_cost = all(row.get("costs") for row in history)
    amounts = [row["costs" if by_cost else "items"] for row in history]
    sizes = [sum(amount.values()) / row["steps"] for amount, row in zip(amounts, history, strict=True)]
    fixed = min(sizes) == max(sizes) and not by_cost
    blocks = all("blocks" in row for row in history)
    planned = all(row.get("planned") for row in history)
    scale = [row["steps"] if fixed else size * row["steps"] / 100 for size, row in zip(sizes, history, strict=True)]
    for name, color in zip(history[0]["items"], itertools.cycle(f"C{number}" for number in range(10))):
        items = [amount[name] for amount in amounts]
        ran = [n / per for n, per in zip(items, scale, strict=True)]
        line = ran
        if blocks:
            line = [row["blocks"][name] for row in history]
        elif planned:
            line = [row["planned"][name] / per for row, per in zip(history, scale, strict=True)]
            shares.stairs(ran, edges, baseline=None, lw=1, color=color, alpha=0.35)
        shares.stairs(line, edges, baseline=None, label=name, lw=1.5, color=color)
        seconds = [row["busy_seconds"][name] for row in history]
        rate = [n / s if n and s > 0 else float("nan") for n, s in zip(items, seconds, strict=True)]
        speeds.plot(_middles(edges), running_median(rate), label=name, lw=1.5, color=color)
    moves = [(x, row["moves"]) for x, row in zip(_middles(edges), history, strict=True) if row["moves"]]
    if moves:
        count = sum(number for _, number in moves)
        label = f"{count} move{'s' if count > 1 else ''}"
        bottom = shares.get_xaxis_transform()  # x is the step, y goes from 0 to 1
        shares.plot([x for x, _ in moves], [0.03] * len(moves), "k^", ms=4, transform=bottom, label=label)
    share = "items of a step" if fixed else "% of a step's cost" if by_cost else "% of a step's items"
    shares.set(ylabel="blocks of a device" if blocks else f"share ({share})", title=title)
    whole = sum(history[-1]["blocks"].values()) if blocks else sizes[0] if fixed else 100
    shares.set_ylim(-0.02 * whole, 1.02 * whole)  # so that shares of 0 and of everything stay visible
    speeds.set(ylabel=f"speed while busy ({'cost' if by_cost else 'items'}/s)")
    speeds.set_ylim(bottom=0)
    _step_times(times, edges, history)
    for axes in figure.axes:
        axes.set_xlim(edges[0], edges[-1])
        axes.grid(alpha=0.3)
        labels = axes.get_legend_handles_labels()[1]
        if 0 < len(labels) <= _MOST_IN_A_LEGEND:
            axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    times.set_xlabel("step")
    return figure


def save(figure: Figure, path: str | os.PathLike[str] | None) -> Figure:
    """Write `figure` to `path`, if given, and return it. The ending of the name sets the format."""
    if path is not None:
        figure.savefig(os.fspath(path), dpi=150)
    return figure


def _step_times(axes: Axes, edges: Sequence[float], history: Sequence[Mapping[str, Any]]) -> None:
    mean = [1e3 * row["step_seconds"] / row["steps"] for row in history]
    together = history[0]["steps"]
    middles = _middles(edges)
    if together > 1:
        longest = [1e3 * row["longest_step_seconds"] for row in history]
        axes.plot(middles, longest, ".", color="0.85", ms=3, label=f"longest of {together} steps")
    axes.plot(middles, mean, ".", color="0.65", ms=4, label="each step" if together == 1 else "mean of them")
    label = f"median of {_MEDIAN_ROWS * together}"
    axes.plot(middles, running_median(mean), color="black", lw=1.2, label=label)
    axes.set(ylabel="time of a step (ms)")
    # The axis ends above all but the highest values. The first step starts threads and allocates, and would flatten the rest.
    axes.set_ylim(0, 1.15 * sorted(mean)[int(0.99 * (len(mean) - 1))])


def figure_class() -> Callable[..., Figure]:
    """`matplotlib.figure.Figure`, imported on first use."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "drawing needs matplotlib, which is not installed: pip install 'paceline[plot]'", name="matplotlib"
        ) from error
    return Figure


def _middles(edges: Sequence[float]) -> list[float]:
    return [(left + right) / 2 for left, right in pairwise(edges)]


def running_median(values: Sequence[float]) -> list[float]:
    """The median of the `_MEDIAN_ROWS` values around each value; NaN if most of them are NaN, as for a device without work."""
    half = _MEDIAN_ROWS // 2
    medians = []
    for i in range(len(values)):
        window = values[max(0, i - half) : i + half + 1]
        known = sorted(value for value in window if value == value)
        medians.append(known[len(known) // 2] if 2 * len(known) > len(window) else float("nan"))
    return medians
