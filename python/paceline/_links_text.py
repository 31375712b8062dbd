"""Text for people about the links between GPUs, which `measure_links` returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def rows(links: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Labels and texts: for each GPU the speeds to all others, then which pairs are linked how. Empty without links."""
    if not links:
        return []
    names = list(dict.fromkeys(link["from"] for link in links))
    speeds = {(link["from"], link["to"]): link["bytes_per_second"] / 1e9 for link in links}
    width = max(map(len, names)) + 2

    def cell(source: str, target: str) -> str:
        if source == target:
            return "-"
        speed = speeds[source, target]
        return f"{speed:.{0 if speed >= 100 else 1}f}" if speed > 0 else "?"

    table = [("GB/s to", "".join(f"{name:>{width}}" for name in names))]
    table += [(f"from {one}", "".join(f"{cell(one, other):>{width}}" for other in names)) for one in names]
    pairs: dict[str, list[str]] = {}
    for link in links:
        if names.index(link["from"]) < names.index(link["to"]):
            pairs.setdefault(link["kind"], []).append(f"{link['from']} and {link['to']}")
    return table + [(kind, "all pairs" if len(pairs) == 1 else ", ".join(of_kind)) for kind, of_kind in pairs.items()]


def text(links: Sequence[Mapping[str, Any]]) -> str:
    """The same as indented lines; empty without links."""
    table = rows(links)
    width = max((len(label) for label, _ in table), default=0)
    return "".join(f"  {label:<{width}}  {line}\n" for label, line in table)
