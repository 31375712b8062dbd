"""Runs the stages."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from runner import as_several, first_minute, goals, plan
from runner.machine import Carried, describe
from runner.record import Record
from runner.stage import Running, Stage, skipped

# What earlier stages have saved goes to a stage that needs more than its limit. One that hangs must not take all of it.
MOST_OF_ITS_LIMIT = 2.0
LEAST_SECONDS = 5.0  # in less, no stage gets anywhere
REHEARSAL_SLACK = 5.0  # the limits are for sixteen idle cores; a rehearsal may share two


class Run:
    def __init__(self, record: Record, environment: dict[str, str], deadline: float) -> None:
        self.record = record
        self._environment = environment
        self.deadline = deadline

    def stages(self, stages: Sequence[Stage]) -> None:
        """One after the other. The limits of those to come are kept for them."""
        for index, stage in enumerate(stages):
            self.stage(stage, kept=sum(later.limit for later in stages[index + 1 :] if not later.why_not))

    def stage(self, stage: Stage, *, kept: float = 0.0) -> None:
        why = stage.why_not or self._lacks(stage)
        left = self.deadline - time.monotonic() - kept
        if not why and left < min(stage.limit, LEAST_SECONDS):
            why = "time is up"
        if why:
            self.done(skipped(stage, why))
            return
        self.record.write(f"running {stage.name}")
        self.done(*Running(stage, self._environment).finish(min(MOST_OF_ITS_LIMIT * stage.limit, left)))

    def done(self, entry: dict[str, object], output: str = "") -> None:
        self.record.add(entry, output)
        print(f"{entry['stage']:<22}{entry['status']:<11}{entry['seconds']:>6} s  {entry.get('why', '')}", flush=True)

    def _lacks(self, stage: Stage) -> str:
        # One that --only left out is taken on trust.
        missing = [name for name in stage.needs if self.record.status_of(name) not in ("passed", None)]
        return "; ".join(f"{name} did not pass{self._because(name)}" for name in missing)

    def _because(self, name: str) -> str:
        why = self.record.why_of(name)
        return f" ({why})" if why else ""


def main(text: str | None) -> int:
    parser = _parser(text)
    args = parser.parse_args(sys.argv[1:])
    slack = REHEARSAL_SLACK if args.rehearse else 1.0
    deadline = time.monotonic() + 60 * args.minutes * slack
    build_dir = Path(os.environ.get("PACELINE_BUILD_DIR") or plan.ROOT / "build")
    folder = Path(args.folder or os.environ.get("OUT") or build_dir / ("rehearsal" if args.rehearse else "gpu-results"))
    if args.rehearse and (plan.ROOT / "benchmarks") in folder.resolve().parents:
        parser.error(
            f"{folder}: a rehearsal measures nothing, and benchmarks/ holds what was measured. Name another folder"
        )
    built = Path(args.build).resolve() if args.build else build_dir / "dev" if args.rehearse else None
    if built is not None and not (built / "python_package").is_dir():
        parser.error(
            f"{built} is no build of paceline with its tests and its binding: run tests/run first, or name one with --build"
        )
    name = "first-minute" if args.first_minute else "as-several" if args.as_several else "gpu"
    record = Record(folder, rehearsal=args.rehearse, name=name)
    with tempfile.TemporaryDirectory(prefix="gpu") as scratch:
        carried = Carried.unpack(Path(args.carried), Path(scratch) / "carried")
        record.machine = describe(carried.environment) | {"carried_problems": carried.problems}
        setting = plan.Setting(
            scratch=Path(scratch),
            build=built or build_dir / "gpu",
            path=carried.environment["PATH"],
            python_path=carried.environment.get("PYTHONPATH", ""),
            cmake=carried.cmake,
            gpu=bool(record.machine.get("gpus")) and not args.rehearse,
            rehearsal=args.rehearse,
            given=built is not None,
        )
        build, after = plan.build(setting), plan.after_build(setting)
        if args.first_minute:
            after = [plan.programs(setting), *first_minute.stages(setting)]
        if args.as_several:
            after = [plan.programs(setting), *as_several.stages(setting)]
        for stage in (build, *after):
            stage.limit *= slack
        chosen = _chosen(parser, [stage.name for stage in (build, *after)], args.only)
        run = Run(record, carried.environment, deadline)
        if any(stage.name in chosen for stage in after if stage.name != "programs"):
            chosen.add("programs")  # they may be what a chosen stage runs
        later = [stage for stage in after if stage.name in chosen]
        kept = sum(stage.limit for stage in later if not stage.why_not)
        if built is not None and not args.rehearse:
            run.done({"stage": "build", "status": "passed", "seconds": 0.0, "why": f"given: {args.build}"})
        elif "build" in chosen or later:
            run.stage(build, kept=kept)
        if args.first_minute:  # the build does not count
            run.deadline = time.monotonic() + first_minute.SECONDS * slack
        run.stages(later)
    record.goals = goals.goals(record.stages, rehearsal=args.rehearse)
    record.write("complete")
    if args.first_minute:
        print("\n" + first_minute.page(json.loads(record.path.read_text())))
        return 1 if record.failed else 0
    if not args.as_several:  # which measures nothing
        print("\n" + goals.table(record.goals, rehearsal=args.rehearse))
    for entry in record.stages:
        if entry["stage"] in record.failed:
            print(f"\n######## what {entry['stage']} said last\n{entry.get('tail', '')}")
    print(f"{'failed: ' + ', '.join(record.failed) if record.failed else 'nothing failed'}; see {record.path}")
    return 1 if record.failed else 0


def _chosen(parser: argparse.ArgumentParser, names: list[str], only: str | None) -> set[str]:
    if only is None:
        return set(names)
    begins = only.split(",")
    unknown = [begin for begin in begins if not begin or not any(name.startswith(begin) for name in names)]
    if unknown:
        parser.error(f"--only: no stage begins with {', '.join(map(repr, unknown))}; there are {', '.join(names)}")
    return {name for name in names if name.startswith(tuple(begins))}


def _parser(text: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tests/gpu/run", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", help="where the results go (default: $OUT, else build/gpu-results)")
    parser.add_argument(
        "--build", metavar="FOLDER", help="a finished build with PACELINE_GPU_TESTS, instead of a new one"
    )
    parser.add_argument(
        "--carried", default=str(plan.GPU_TESTS / "carried"), metavar="FOLDER", help="what tests/gpu/pack has fetched"
    )
    parser.add_argument(
        "--first-minute",
        action="store_true",
        help="for several GPUs: after the build one minute, whose page is for a report. Whether links deliver the right bytes comes first",
    )
    parser.add_argument(
        "--as-several",
        action="store_true",
        help="for one GPU: what several do, on four parts of it as if these were GPUs, and two processes that share it as ranks, with gloo and NCCL",
    )
    parser.add_argument(
        "--minutes", type=float, default=plan.MINUTES, help=f"for everything (default: {plan.MINUTES:g})"
    )
    parser.add_argument(
        "--only", metavar="STAGE,...", help="only stages whose names begin so, and what they need of the build"
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="without a GPU: every stage on fakes and host devices, with the programs of a dev build (default: build/dev)",
    )
    return parser
