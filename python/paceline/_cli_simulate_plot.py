"""The picture of `paceline simulate --plot`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from paceline._ledger import Ledger, read
from paceline._plot import finish, panels, save, show_range
from paceline.plan import CostModel, split_batch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from paceline.sim import SimulationResult


def plot(args: argparse.Namespace, results: Mapping[str, SimulationResult]) -> None:
    """Write the picture to `args.plot`; a file that cannot be written ends the program as a wrong argument does."""
    ledgers = {policy: read(result.ledger.splitlines())[0] for policy, result in results.items()}
    try:
        save(draw(args, ledgers), args.plot)
    except (OSError, ValueError) as error:  # no such folder, or a file ending that matplotlib does not support
        args.parser.error(f"argument --plot: {args.plot} cannot be written: {error}")


def draw(args: argparse.Namespace, ledgers: Mapping[str, Ledger]) -> Figure:
    """Draw the automatic shares over the steps and, below, the step times of each policy and of the ideal."""
    figure, (shares, times) = panels(2)
    edges = [step + 0.5 for step in range(args.steps + 1)]
    steps = range(1, args.steps + 1)
    decisions = ledgers["auto"].decisions
    for device, name in enumerate(ledgers["auto"].devices):
        shares.stairs([decision.shares[device] for decision in decisions], edges, baseline=None, label=name, lw=1.5)
    shares.set(ylabel="share (items), auto", title=_title(args))
    highest: list[float] = []
    for policy, ledger in ledgers.items():
        taken = [1e3 * (decision.measured_seconds or 0.0) for decision in ledger.decisions]
        times.plot(steps, taken, lw=1.0, label=policy)
        highest.append(sorted(taken)[int(0.99 * (len(taken) - 1))])
    times.plot(steps, [1e3 * seconds for seconds in ideal_seconds(args)], "k--", lw=1.0, label="ideal, no noise")
    times.set(ylabel="time of a step (ms)")
    show_range(times, highest)
    for axes in (shares, times):
        for _, _, first, last in args.throttle:
            axes.axvspan(first + 0.5, min(last, args.steps) + 0.5, color="tab:red", alpha=0.12, lw=0)
        for _, step in args.fail:
            axes.axvline(step + 1, color="tab:red", lw=1.0)
    return finish(figure, edges)


def ideal_seconds(args: argparse.Namespace) -> list[float]:
    """Per step, the noise-free time of the exact split by the true speeds."""
    known: dict[tuple[float, ...], float] = {}
    ideal = []
    for step in range(args.steps):
        slowness = [1 / speed for speed in args.speeds]
        for device, factor, first, last in args.throttle:
            if first <= step < last:
                slowness[device] *= factor
        for device, failed in args.fail:
            if failed <= step:
                slowness[device] = 0.0
        working = tuple(entry for entry in slowness if entry)
        if working not in known:
            models = [
                CostModel.affine(args.fixed_ms * entry / 1e3, args.per_item_ms * entry / 1e3) for entry in working
            ]
            known[working] = split_batch(args.batch, models).makespan_seconds
        ideal.append(known[working])
    return ideal


def _title(args: argparse.Namespace) -> str:
    speeds = ", ".join(f"{speed:g}" for speed in args.speeds[:8]) + (", ..." if len(args.speeds) > 8 else "")
    return f"Simulated: speeds {speeds}, batch {args.batch}, noise {args.noise:.1%}, seed {args.seed}"
