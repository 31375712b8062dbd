"""Findings over all batch sizes: from which step length on splitting pays, and whether the goals are met."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from race.job import Network

PAYS = 1.05  # times the rate of the fastest core alone; less is within the spread of a quiet machine
GOAL_MILLISECONDS = 40.0  # goals apply to steps of at least this length
# The smallest allowed auto / DDP, by network and by whether a core is busy, and the smallest allowed auto / ideal, for each ideal.
_OVER_DDP: dict[Network, dict[bool, float]] = {
    "convolution": {False: 1.05, True: 1.5},
    "transformer": {False: 1.02, True: 1.47},
}
_OF_IDEAL_BUSY = 0.97
_OF_IDEAL_IN_MICRO_BATCHES_BUSY = 0.93


def splitting(summaries: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The smallest batch from which on auto beats the fastest core alone at every measured size; None if there is none."""
    ratios = {batch: summaries[batch]["auto_over_best_alone"] for batch in sorted(summaries)}
    pays_from = None
    for batch in reversed(ratios):
        if ratios[batch] < PAYS:
            break
        pays_from = batch
    return {
        "pays_from_batch": pays_from,
        "pays_from_step_milliseconds": None if pays_from is None else summaries[pays_from]["milliseconds"]["auto"],
        "auto_over_best_alone": {f"batch {batch}": ratio for batch, ratio in ratios.items()},
    }


def splitting_text(found: Mapping[str, Any], smallest: int) -> str:
    ratios = ", ".join(f"{batch} {ratio:.2f} x" for batch, ratio in found["auto_over_best_alone"].items())
    measured = f"auto over the fastest core alone: {ratios}"
    batch = found["pays_from_batch"]
    if batch is None:
        return f"Splitting did not pay at any size measured ({measured})."
    step = f"batch {batch}, a step of {found['pays_from_step_milliseconds']:.1f} ms"
    if batch == smallest:
        return f"Splitting pays at every size measured, down to {step} ({measured})."
    return f"Below {step}, one should not split ({measured})."


def goals(network: Network, busy: bool, summaries: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each goal with the measured value, for steps that are long enough."""
    found = []
    for batch in sorted(summaries):
        summary = summaries[batch]
        if summary["milliseconds"]["auto"] < GOAL_MILLISECONDS:
            continue
        wanted = {"auto_over_ddp": _OVER_DDP[network][busy]}
        if busy:
            wanted["auto_over_ideal"] = _OF_IDEAL_BUSY
            wanted["auto_over_ideal_in_micro_batches"] = _OF_IDEAL_IN_MICRO_BATCHES_BUSY
        for figure, goal in wanted.items():
            value = summary[figure]
            found.append({"batch": batch, "figure": figure, "goal": goal, "found": value, "met": value >= goal})
    return found


def goals_text(found: list[dict[str, Any]]) -> str:
    if not found:
        return f"No step took {GOAL_MILLISECONDS:.0f} ms, from which on the goals count."
    return "\n".join(
        f"batch {each['batch']}: {each['figure'].replace('_', ' ')} {each['found']:.3f}, goal {each['goal']}: {'met' if each['met'] else 'missed'}"
        for each in found
    )
