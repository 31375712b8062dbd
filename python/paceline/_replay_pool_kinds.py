"""Ledgers of pools for other decisions: kinds that were forgotten, and jobs that then have no purpose."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def with_kinds_kept(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of a ledger as if no kind took the number of one that is forgotten, which otherwise placed jobs may still wait for. So do models."""
    numbers: dict[int, int] = {}  # in the ledger, and here
    free: list[int] = []
    models: dict[int, str] = {}  # of the kinds that are there
    lives: dict[str, int] = {}  # how often all kinds of a model were forgotten
    found, count = [], 0
    for entry in entries:
        made = dict(entry)
        if "forget" in made:
            free.append(made["forget"]["kind"])
            model = models.pop(free[-1], "")
            if model and model not in models.values():
                lives[model] = lives.get(model, 0) + 1
        elif "add_kind" in made:
            number = min(free, default=len(numbers))
            if free:
                free.remove(number)
            numbers[number], count = count, count + 1
            model = made["add_kind"].get("model", "")
            if model:
                models[number] = model
                made["add_kind"] = {**made["add_kind"], "model": f"{model}, {lives.get(model, 0)}"}
        for name in ("submit", "measure", "loaded"):
            if name in made:
                made[name] = {**made[name], "kind": numbers[made[name]["kind"]]}
        if "starts" in made.get("decided", {}):
            starts = [{**start, "kind": numbers[start["kind"]]} for start in made["decided"]["starts"]]
            made["decided"] = {**made["decided"], "starts": starts}
        found.append(made)
    return found


def without_own_of(entries: list[dict[str, Any]], remove: Collection[str]) -> list[dict[str, Any]]:
    """The entries without the pool's own jobs that may run on removed devices only, such as what warms a version there. They would wait for ever."""
    needs: list[list[bool]] = []  # by device, whether it accepts them
    stays: list[bool] = []
    gone: set[int] = set()
    found = []
    for entry in entries:
        match entry:
            case {"add_need": {"accepted": accepted}}:
                needs.append(list(accepted))
            case {"add_device": {"name": name, "accepted": accepted}}:
                stays.append(name not in remove)
                for need, accepts in zip(needs, accepted, strict=False):
                    need.append(accepts)
            case {"submit": {"own": True, "need": need}, "job": job}:
                if not any(map(min, needs[need - 1], stays)):
                    gone.add(job)
        left_out = entry.get("job", entry.get("cancel", {}).get("job")) in gone
        found.append({"tick": {}, "at": entry["at"]} if left_out else entry)
    return found
