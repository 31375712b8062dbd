"""The command behind benchmarks/run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import paceline
from paceline._core.runtime import build_facts
from race import host
from runner.stage import Running, Stage, skipped
from suite.report import markdown
from suite.stages import stages

ROOT = Path(__file__).resolve().parents[3]


def shareable(text: str) -> str:
    """Remove this host's name, and make paths relative to the checkout."""
    return text.replace(f"{ROOT}/", "").replace(json.dumps(platform.node()), '""')


def main() -> int:
    args = arguments()
    date = time.strftime("%Y-%m-%d")
    args.folder.mkdir(parents=True, exist_ok=True)
    picture = args.folder / f"straggler-{date}.svg"
    planned = stages(args.programs, picture, quick=args.quick, gpu=torch.cuda.is_available())
    record: dict[str, Any] = {
        "date": date,
        "command": shlex.join(["benchmarks/run", *sys.argv[3:]]),  # without --programs, which the script adds
        "quick": args.quick,
        "machine": machine(),
        "versions": {
            "paceline": paceline.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
            "compiler": build_facts()["compiler"],
        },
        "stages": [],
    }
    name = f"benchmarks-{date}"
    entries = earlier(args.folder / f"{name}.json", record) if args.only else {}
    made_at = revision()
    with (args.folder / f"{name}.log").open("a" if entries else "w") as log:
        for stage in planned:
            chosen = not args.only or any(stage.name.startswith(each) for each in args.only)
            if not chosen and stage.name in entries:
                continue
            entry, output = run(stage, chosen=chosen)
            entries[stage.name] = entry if entry["status"] == "skipped" else entry | {"revision": made_at}
            if picture.exists() and stage.name == "straggler":
                record["picture"] = picture.name
            log.write(f"\n######## {stage.name}: {entry['status']}, {entry['seconds']} s\n{output}")
            # Write after each stage, so that an interrupted run keeps its results.
            record["stages"] = [entries[each.name] for each in planned if each.name in entries]
            (args.folder / f"{name}.json").write_text(shareable(json.dumps(record, indent=1)) + "\n")
            (args.folder / f"{name}.md").write_text(markdown(record))
            print(
                f"{stage.name:<28}{entry['status']:<10}{entry['seconds']:>7.0f} s  {entry.get('why', '')}", flush=True
            )
    failed = [entry["stage"] for entry in record["stages"] if entry["status"] not in ("passed", "skipped")]
    print(f"\n{'failed: ' + ', '.join(failed) if failed else 'nothing failed'}; see {args.folder / name}.md")
    return 1 if failed else 0


def earlier(path: Path, record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By name, the stages measured on that day on the same machine with the same versions. Adds their picture and commands to `record`."""
    if not path.exists():
        return {}
    before = json.loads(path.read_text())
    same = ("quick", "versions")
    if any(before[key] != record[key] for key in same) or _hardware(before) != _hardware(record):
        sys.exit(f"benchmarks/run: {path} is of another machine, or of other versions. Give another folder.")
    if "picture" in before:
        record["picture"] = before["picture"]
    commands = before["command"].splitlines()
    record["command"] = "\n".join([*commands, *({record["command"]} - {*commands})])
    return {entry["stage"]: entry for entry in before["stages"] if entry["status"] != "skipped"}


def _hardware(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record["machine"].items() if key != "load_before"}


def revision() -> str | None:
    """The checkout's version according to git; None outside of a git checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def run(stage: Stage, *, chosen: bool) -> tuple[dict[str, Any], str]:
    if not chosen:
        stage.why_not = "not asked for"
    if stage.why_not:
        return skipped(stage, stage.why_not), ""
    running = Running(stage, os.environ)
    try:
        entry, output = running.finish(stage.limit)
    except KeyboardInterrupt:
        running.finish(0)
        raise
    if entry["status"] == "passed" and "result" not in entry:
        entry |= {"status": "failed", "why": "it ended without its JSON"}
    if entry["status"] == "timed out":
        entry["why"] = f"after {stage.limit:.0f} s"
    if entry["status"] != "passed":
        entry["tail"] = output[-3000:]
    return entry | {"command": list(stage.command)}, output


def machine() -> dict[str, Any]:
    devices = paceline.devices()
    facts = host.hardware(devices)
    return {
        "processor": facts["processor"],
        "system": facts["system"],
        "cores": len(devices),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_before": round(os.getloadavg()[0], 2),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/run", description="Runs all benchmarks; see benchmarks/run.")
    parser.add_argument("--programs", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        help="where benchmarks-DATE.md, .json and .log and straggler-DATE.svg go (default: benchmarks/results; with --quick build/benchmarks)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="only that they work: a short run of each, figures mean nothing"
    )
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        metavar="STAGE,...",
        help="those that begin so; what others measured that day stays",
    )
    args = parser.parse_args()
    if args.folder is None:
        args.folder = ROOT / "build" / "benchmarks" if args.quick else ROOT / "benchmarks" / "results"
    return args


if __name__ == "__main__":
    sys.exit(main())
