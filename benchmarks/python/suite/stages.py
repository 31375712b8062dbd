"""The benchmarks in their order, and their time limits."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from runner.stage import Stage

PYTHON = Path(__file__).resolve().parents[1]

# Five repetitions give a median and a spread.
_MEASURE = ("--benchmark_repetitions=5", "--benchmark_min_time=0.05", "--benchmark_report_aggregates_only=true")
# Sizes from too small to split to best for every rival. Three rounds of them take about six minutes.
_RACE = ("--batch", "16,64,512,4096", "--steps", "24", "--rounds", "3", "--time-limit", "450", "--ratio-seconds", "30")
_TRY = ("--benchmark_min_time=0.001",)


def stages(programs: Path, picture: Path, *, quick: bool, gpu: bool) -> list[Stage]:
    """The programs of benchmarks/cpp in `programs`, then the scripts of benchmarks/python. `quick` only shows that they work."""
    return [
        *(_program(path, quick=quick) for path in sorted(programs.glob("benchmark_*")) if os.access(path, os.X_OK)),
        *_scripts(picture, quick=quick, gpu=gpu),
    ]


def _program(path: Path, *, quick: bool) -> Stage:
    options = _TRY if quick else _MEASURE
    return Stage(path.name, [str(path), "--benchmark_format=json", *options], 900, json_result=True)


def _scripts(picture: Path, *, quick: bool, gpu: bool) -> list[Stage]:
    tried = ("--steps", "2", "--rounds", "1", "--ratio-seconds", "2")
    race = (*tried, "--batch", "16,64") if quick else _RACE
    malloc = (*tried, "--batch", "64") if quick else ("--time-limit", "150")
    text = ("--steps", "2", "--rounds", "1", "--batch", "32") if quick else ("--rounds", "3")
    ranks = ("--steps", "2", "--rounds", "1", "--batch", "64", "--warm-up", "4") if quick else ()
    tiny = ("--warm-up", "3", "--width", "32", "--items", "1", "--steps", "1", "--rounds", "1")
    pipeline = tiny if quick else ("--steps", "6", "--rounds", "3")
    straggler = ("--steps", "12", "--batch", "64", "--onsets", "2") if quick else ()
    no_gpu = "" if gpu else "PyTorch sees no GPU"
    short = ("--short",) if quick else ()
    reduce = ("--short", "--rounds", "1", "--calls", "5") if quick else ()
    overhead = ("--steps", "20") if quick else ()
    pool = ("--rounds", "1", "--seconds", "0.5") if quick else ()
    trials = ("--rounds", "1", "--trials", "4") if quick else ()
    quiet = ("--batch", "64", "--seconds", "2") if quick else ()
    fixed_parts = ("--parts", "8,4", "--rounds", "1", "--block", "2") if quick else ()
    busy_core = ("--steps", "40", "--patience", "50") if quick else ()
    worth = ("--batch", "64", "--rounds", "1", "--block", "2", "--warm-up", "4") if quick else ()
    optimizer = ("--steps", "6") if quick else ()
    partition = ("--seeds", "3") if quick else ()
    profile = ("--steps", "20", "--batch", "64") if quick else ()
    on_host = () if gpu else ("--devices", "host:0")
    return [
        _script("race_ddp", *race, limit=1200),
        _script("race_ddp", "--busy", *race, limit=1200),
        _script("race_ddp", "--network", "transformer", *race, limit=1200),
        _script("race_ddp", "--network", "transformer", "--busy", *race, limit=1200),
        _script("race_ddp", "--busy", "--malloc", *malloc, limit=600),
        _script("race_ranks", *ranks, limit=600),
        _script("race_ranks", "--busy", *ranks, limit=600),
        _script("race_pool", *pool, limit=1500),
        _script("race_pool", "--busy", *pool, limit=1500),
        _script("race_trials", *trials, limit=900),
        _script("race_trials", "--busy", *trials, limit=900),
        _script("beside_training", *(("--seconds", "1", "--rounds", "1") if quick else ("--seconds", "10")), limit=300),
        _script("pool_overhead", *(("--jobs", "50") if quick else ()), limit=300),
        _script("soak_pool", "--requests", "2000" if quick else "200000", limit=900),
        _script("soak_versions", *(("--requests", "2000", "--width", "128") if quick else ()), limit=900),
        _script("race_text", *text, limit=900),
        _script("race_text", "--busy", *text, limit=900),
        _script("race_pipeline", *pipeline, limit=1200),
        _script("race_pipeline", "--busy", *pipeline, limit=1200),
        _script("all_reduce", *reduce, limit=900),
        _script("step_overhead", *overhead, limit=300),
        _script("step_profile", *profile, limit=300),
        _script("step_profile", "--network", "transformer", *profile, limit=300),
        _script("step_profile", "--busy", *profile, limit=300),
        _script("optimizer", *short, *optimizer, limit=300),
        _script("partition", *short, *partition, limit=300),
        _script("quiet", *quiet, limit=400),
        _script("busy_core", *busy_core, limit=300),
        _script("fixed_parts", *fixed_parts, limit=300),
        _script("fixed_parts", "--malloc", *fixed_parts, limit=300),
        _script("proofs", *(("--steps", "5", "--rounds", "1") if quick else ()), limit=600),
        _script("check_worth", *worth, limit=600),
        _script("straggler", "--plot", str(picture), *straggler, limit=300),
        _script("launch_scaling", *on_host, *short, limit=300),
        _script("race_gpu", *short, limit=900, why_not=no_gpu),
    ]


def _script(name: str, *options: str, limit: float, why_not: str = "") -> Stage:
    variants = [option for option in options if option in ("transformer", "--busy", "--malloc")]
    command = [sys.executable, str(PYTHON / f"{name}.py"), *options, "--json"]
    return Stage(" ".join([name, *variants]), command, limit, why_not=why_not, json_result=True)
