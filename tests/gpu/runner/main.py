"""Runs the stages."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from runner import plan
from runner.machine import Carried, describe
from runner.record import Record
from runner.stage import Running, Stage, skipped

LAST_STAGE_SECONDS = 45.0  # kept for it: the others may have taken all the rest


class Run:
    def __init__(self, record: Record, environment: dict[str, str], deadline: float) -> None:
        self.record = record
        self._environment = environment
        self._deadline = deadline

    def stage(self, stage: Stage, *, last: bool = False) -> None:
        why = stage.why_not or self._lacks(stage)
        left = self._deadline - time.monotonic() - (0 if last else LAST_STAGE_SECONDS)
        if not why and left < min(stage.limit, 10):
            why = "time is up"
        if why:
            self.done(skipped(stage, why))
            return
        self.record.write(f"running {stage.name}")
        self.done(*self.start(stage).finish(min(stage.limit, left)))

    def start(self, stage: Stage) -> Running:
        return Running(stage, self._environment)

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
    args = _arguments(text)
    deadline = time.monotonic() + 60 * args.minutes
    folder = Path(args.folder or os.environ.get("OUT") or plan.ROOT / "build" / "gpu-results")
    record = Record(folder)
    build_folder = Path(args.build).resolve() if args.build else plan.ROOT / "build" / "gpu"
    with tempfile.TemporaryDirectory(prefix="gpu") as scratch:
        carried = Carried.unpack(Path(args.carried), Path(scratch) / "carried")
        record.machine = describe(carried.environment) | {"carried_problems": carried.problems}
        gpu = bool(record.machine.get("gpus"))
        path = carried.environment.get("PYTHONPATH", "")
        run = Run(record, carried.environment, deadline)
        building = None
        build = plan.build(build_folder, carried.cmake, gpu=gpu, jobs=len(os.sched_getaffinity(0)))
        if args.build:
            run.done({"stage": "build", "status": "passed", "seconds": 0.0, "why": f"given: {args.build}"})
        else:
            building = run.start(build)
        try:
            for stage in plan.probes(Path(scratch), gpu=gpu):
                run.stage(stage)
        finally:  # also after Ctrl-C: what was started is ended
            if building is not None:
                record.write("waiting for the build")
                run.done(*building.finish(build.limit))
        stages = [stage for stage in plan.after_build(build_folder, path, gpu=gpu) if _chosen(stage.name, args.only)]
        for stage in stages:
            run.stage(stage, last=stage is stages[-1])
    record.write("complete")
    print(f"\n{'failed: ' + ', '.join(record.failed) if record.failed else 'nothing failed'}; see {folder}/gpu.json")
    return 1 if record.failed else 0


def _chosen(name: str, only: str | None) -> bool:
    return only is None or any(name.startswith(each) for each in only.split(","))


def _arguments(text: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tests/gpu/run", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", nargs="?", help="where gpu.json and gpu.log go (default: $OUT, else build/gpu-results)"
    )
    parser.add_argument(
        "--build", metavar="FOLDER", help="a finished build with PACELINE_GPU_TESTS, instead of a new one"
    )
    parser.add_argument(
        "--carried", default=str(plan.GPU_TESTS / "carried"), metavar="FOLDER", help="what tests/gpu/pack has fetched"
    )
    parser.add_argument("--minutes", type=float, default=8.8, help="for everything (default: 8.8)")
    parser.add_argument("--only", metavar="STAGE,...", help="of the stages after the build those that begin so")
    return parser.parse_args(sys.argv[1:])
