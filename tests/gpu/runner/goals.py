"""What a GPU is expected to show, beside what the stages measured. A goal that is missed is a finding, not a failed test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

STEP_MILLISECONDS = 10.0  # the overhead counts for steps that are at least so long
Result = Mapping[str, Any]
Found = Iterator[tuple[str, float | None]]


def goals(stages: Sequence[Mapping[str, Any]], *, rehearsal: bool = False) -> list[dict[str, Any]]:
    """For each goal what was measured, the limit, and whether it was met; None where it was not measured, or does not count."""
    results = {entry["stage"]: entry["result"] for entry in stages if isinstance(entry.get("result"), dict)}
    found = []
    for what, stage, least, read in GOALS:
        measured = list(read(results[stage])) if stage in results else []
        for name, value in measured or [("not measured", None)]:
            met = None if value is None or rehearsal else bool(value >= least)
            found.append({"goal": what, "of": name, "least": least, "measured": value, "met": met})
    return found


def table(found: Sequence[Mapping[str, Any]], *, rehearsal: bool) -> str:
    """One line for each goal."""
    words = {True: "met", False: "MISSED", None: "-"}
    lines = ["goals" + (" (a rehearsal: these numbers mean nothing)" if rehearsal else "")]
    for each in found:
        value = "" if each["measured"] is None else f"{each['measured']:.3f}"
        lines.append(f"{each['goal']:<44}{each['of']:<34}{value:>8} >= {each['least']:<6}{words[each['met']]}")
    return "\n".join(lines)


def _races(part: str) -> Callable[[Result], Found]:
    def read(result: Result) -> Found:
        for race in result.get("races", ()):
            if race["part"].startswith(part):
                counts = "failed" not in race and race["counts"]
                yield f"{race['part']} {race['network'] or ''}".strip(), race["fraction_of_ideal"] if counts else None

    return read


def _overheads(result: Result) -> Found:
    for name, each in result.get("overheads", {}).items():
        yield name, each["plain_over_paceline"] if each["plain_milliseconds"] >= STEP_MILLISECONDS else None


def _sums(result: Result) -> Found:
    for each in result.get("sums", ()):
        yield f"{each['inputs']} x {each['dtype']}", each["of_copy"]


def _hidden(result: Result) -> Found:
    if "overlap" in result:
        yield "two parts", result["overlap"].get("hidden")


# (goal, stage, least value, how to find it in the stage's result)
GOALS: list[tuple[str, str, float, Callable[[Result], Found]]] = [
    ("one GPU: plain PyTorch's time / ours", "measure", 0.99, _overheads),
    ("one GPU: plain PyTorch's time / ours", "race_gpu", 0.99, _races("a:")),
    ("parts: of what they do together by hand", "race_gpu", 0.95, _races("b:")),
    ("sum in one memory: of the copy's bandwidth", "sum_bandwidth", 0.85, _sums),
    ("all-reduce in one memory: of the copy's", "race_gpu", 0.85, _races("d:")),
    ("reduction hidden behind backward", "measure", 0.80, _hidden),
]
