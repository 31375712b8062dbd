"""How evenly `paceline.plan.split_items` splits items of unequal length over equal devices, compared with Karmarkar and Karp's differencing.

    python partition.py                 uses PyPI's numberpartitioning, if installed, for the differencing (pip install numberpartitioning)

Lengths are lognormal whole tokens (median 148, sigma 1: in text, a few pieces are ten times as long as most). Both methods get the same
lengths. A device's load is the sum of its lengths, and the largest load is the makespan. The lower bound is the larger of the mean load and
the longest item. The ratio is paceline's makespan divided by the other's, per batch; the goal is at most 1 in every batch. The ratio is
given twice: for a plain call of `split_items`, which stops searching within 0.01 % of its bound, and with `tolerance=0`, which searches on.

The same seeds give the same figures on every machine, except the times of a call. Those compare little: one method is pure Python, the other
is compiled.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import paceline
from paceline.plan import split_items
from race import script

Parts = Sequence[Sequence[int]]  # per device, the indices of its items
Method = Callable[[list[int], int], Parts]

SIZES = tuple((items, devices) for items in (64, 256, 1024) for devices in (2, 4, 8))
GOAL = 1.0  # the largest allowed ratio of paceline's makespan to the other's, in any batch
MU, SIGMA = 5.0, 1.0  # of the logarithm of a length
NO_RIVAL = "numberpartitioning is not installed (pip install numberpartitioning)"
HEAD = [
    "items × devices",
    "paceline / bound",
    "tolerance=0 / bound",
    "Karmarkar-Karp / bound",
    "paceline / Karmarkar-Karp",
    "tolerance=0 / Karmarkar-Karp",
    "ms a call of each",
]


def ours(lengths: list[int], devices: int) -> Parts:
    return split_items(lengths, [(0.0, 1.0)] * devices).items


def ours_exact(lengths: list[int], devices: int) -> Parts:
    return split_items(lengths, [(0.0, 1.0)] * devices, tolerance=0.0).items


def rival() -> Method | None:
    """Karmarkar and Karp's largest differencing method for any number of parts; None if it is not installed."""
    try:
        from numberpartitioning import karmarkar_karp
    except ImportError:
        return None

    def method(lengths: list[int], devices: int) -> Parts:
        parts: Parts = karmarkar_karp(lengths, num_parts=devices, return_indices=True).partition
        return parts

    return method


def lengths_of(items: int, seed: int) -> list[int]:
    """The number of tokens of each item, at least one."""
    source = random.Random(seed)
    return [max(1, round(source.lognormvariate(MU, SIGMA))) for _ in range(items)]


def lower_bound(lengths: Sequence[int], devices: int) -> float:
    return max(sum(lengths) / devices, max(lengths))


def makespan(lengths: Sequence[int], parts: Parts) -> int:
    """The largest load. Loads are whole numbers, so equal splits compare equal.

    Raises
    ------
    RuntimeError
        If not every item is in exactly one part.
    """
    if sorted(index for part in parts for index in part) != list(range(len(lengths))):
        raise RuntimeError("a split does not have every item exactly once")
    return max(sum(lengths[index] for index in part) for part in parts)


def compared(methods: Mapping[str, Method], items: int, devices: int, seeds: Iterable[int]) -> dict[str, Any]:
    """Measure one size. Returns per method the makespan over the bound, paceline's makespan over the other's, and the milliseconds of a
    call."""
    over_bound: dict[str, list[float]] = defaultdict(list)
    over_last: dict[str, list[float]] = defaultdict(list)
    milliseconds: dict[str, list[float]] = defaultdict(list)
    *_, last = methods
    for seed in seeds:
        lengths = lengths_of(items, seed)
        found = {}
        for name, method in methods.items():
            start = time.perf_counter()
            parts = method(lengths, devices)
            milliseconds[name].append(1e3 * (time.perf_counter() - start))
            found[name] = makespan(lengths, parts)
        for name, value in found.items():
            over_bound[name].append(value / lower_bound(lengths, devices))
            over_last[name].append(value / found[last])
    return {
        "items": items,
        "devices": devices,
        "over_bound": {name: median_and_worst(values) for name, values in over_bound.items()},
        "over_karmarkar_karp": {name: median_and_worst(values) for name, values in over_last.items() if name != last},
        "above_karmarkar_karp": {name: sum(v > GOAL for v in values) for name, values in over_last.items()},
        "milliseconds": {name: round(statistics.median(values), 4) for name, values in milliseconds.items()},
    }


def median_and_worst(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "worst": max(values)}


def row(size: Mapping[str, Any]) -> list[str]:
    """The cells of a row below HEAD."""
    pairs = [*size["over_bound"].values(), *size["over_karmarkar_karp"].values()]
    cells = [f"{pair['median']:.6f}, {pair['worst']:.6f}" for pair in pairs]
    times = ", ".join(f"{value:.3f}" for value in size["milliseconds"].values())
    return [f"{size['items']} × {size['devices']}", *cells, times]


def goals(sizes: Sequence[Mapping[str, Any]], seeds: int) -> list[dict[str, Any]]:
    """For each way to call paceline, the worst ratio of all batches and the goal."""
    found = []
    for name in sizes[0]["over_karmarkar_karp"]:
        worst = max(size["over_karmarkar_karp"][name]["worst"] for size in sizes)
        above = sum(size["above_karmarkar_karp"][name] for size in sizes)
        verdict = {"goal": GOAL, "worst": worst, "batches_above": above, "of_batches": seeds * len(sizes)}
        found.append({"figure": f"{name} / Karmarkar-Karp", **verdict, "met": worst <= GOAL})
    return found


def main() -> int:
    args = arguments()
    karmarkar_karp = rival()
    if karmarkar_karp is None:
        print(f"skipped: {NO_RIVAL}", file=sys.stderr)
        if args.json:
            print(json.dumps({"available": False, "why": NO_RIVAL}))
        return 0
    methods = {"paceline": ours, "tolerance=0": ours_exact, "Karmarkar-Karp": karmarkar_karp}
    sizes = [compared(methods, items, devices, range(1, args.seeds + 1)) for items, devices in args.sizes]
    rows = [row(size) for size in sizes]
    title = f"makespans of {args.seeds} batches of each size, median and worst"
    print(title)
    for cells in (HEAD, *rows):
        print(" | ".join(cells))
    found = goals(sizes, args.seeds)
    for each in found:
        print(
            f"{each['figure']}: at worst {each['worst']:.6f}, above 1 in {each['batches_above']} of {each['of_batches']} batches; "
            f"goal: never, {'met' if each['met'] else 'missed'}"
        )
    if args.json:
        facts = script.facts(paceline.devices(), numberpartitioning=importlib.metadata.version("numberpartitioning"))
        tables = {title: [HEAD, *rows]}
        batches = {f"{size['items']} x {size['devices']}": size for size in sizes}
        result = {"available": True, "goals": found, "tables": tables, "batches": batches, "seeds": args.seeds}
        print(json.dumps(result | facts))
    return 0


def arguments() -> argparse.Namespace:
    parser = script.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="batches of each size (default: 100)")
    parser.add_argument("--short", action="store_true", help="the smallest size only")
    args = parser.parse_args()
    if args.seeds < 1:
        parser.error("--seeds must be at least 1")
    args.sizes = SIZES[:1] if args.short else SIZES
    return args


if __name__ == "__main__":
    sys.exit(main())
