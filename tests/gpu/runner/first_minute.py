"""`tests/gpu/run --first-minute`: what several GPUs do when paceline first meets them, as one page for a report."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from runner import plan
from runner.stage import Stage

# The limits add up to a minute. What a part saves goes to those after it.
SECONDS = 60.0


def stages(setting: plan.Setting) -> list[Stage]:
    """Each part in a process of its own. What is most likely to go wrong comes first, and what may hang last."""
    python = plan.python_environment(setting)

    def part(name: str, limit: float, which: str = "") -> Stage:
        command = [sys.executable, str(plan.GPU_TESTS / "first_minute.py"), which or name, *setting.on_host]
        return Stage(name, command, limit, ("build",), environment=python, json_result=True)

    def exact(name: str, limit: float, **environment: str) -> Stage:
        stage = plan.cpp(setting, "trainer", limit, "--gtest_filter=*RandomSplits/TwoGpus:*RandomSplits/AllGpus")
        stage.name = name
        stage.environment = {**stage.environment, **environment}
        return stage

    truth = "tests/gpu/gpu_peer_truth" + ("_on_fake" if setting.rehearsal else "")
    return [
        part("topology", 2),
        plan.program(setting, "truth", truth, 4, json_result=True),
        part("truth_torch", 4, "truth"),
        exact("cpp_exact", 4),
        exact("cpp_through_host", 4, PACELINE_PEER_ACCESS="0"),
        part("exact", 12),
        part("timeline", 8),
        part("transformer", 15),
        part("nccl", 7),
    ]


def page(record: Mapping[str, Any]) -> str:
    """What a stranger can paste into a report: no host or user names."""
    machine = record["machine"]
    known = ("gpus", "gpu", "driver", "torch", "torch_cuda", "nccl", "cores", "python", "system")
    lines = [
        "# paceline's first minute on several GPUs"
        + (" (a rehearsal: it measured nothing)" if record["rehearsal"] else ""),
        ", ".join(f"{key} {machine[key]}" for key in known if machine.get(key) is not None),
    ]
    for stage in record["stages"]:
        if stage["stage"] in ("build", "programs") and stage["status"] in ("passed", "skipped"):
            continue
        lines += ["", f"## {stage['stage']}: {stage['status']}, {stage['seconds']} s {stage.get('why', '')}".rstrip()]
        result = stage.get("result")
        if isinstance(result, dict) and result.get("available"):
            lines += result.get("lines") or _truth(result)
        elif "tests" in stage:
            lines.append(", ".join(f"{count} {word}" for word, count in stage["tests"].items()))
        if stage["status"] in ("failed", "timed out") and "tail" in stage:
            lines += [f"    {line}" for line in stage["tail"].splitlines()[-12:]]
    return "\n".join(lines)


def _truth(result: Mapping[str, Any]) -> list[str]:
    """For each kind of copy the slowest and the fastest link, and every pair that is wrong or has no link."""
    copies: Sequence[Mapping[str, Any]] = result.get("copies", ())
    kinds: dict[tuple[str, str], list[float]] = {}
    for one in copies:
        kinds.setdefault((one["memory"], one["way"]), []).append(one["gigabytes_per_second"])
    lines = [
        f"{way}, {memory} memory: {min(rates):.1f} to {max(rates):.1f} GB/s over {len(rates)} ordered pairs"
        for (memory, way), rates in kinds.items()
    ]
    links: dict[str, list[str]] = {}
    for one in copies:
        pair = f"{one['from']} and {one['to']}"
        if one["from"] < one["to"] and pair not in links.setdefault(one["link"], []):
            links[one["link"]].append(pair)
    lines += [f"{link}: {', '.join(pairs)}" for link, pairs in links.items()]
    return lines + [
        f"WRONG BYTES from {one['from']} to {one['to']}, {one['memory']} memory, {one['way']}"
        for one in copies
        if not one["right"]
    ]
