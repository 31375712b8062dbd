"""One process of the race (``python -m race.worker JOBS``): gets ready, waits for the signal, measures one job after the other, answers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from race.job import Job, Rival, from_text

MARK = "race:"  # marks answers, because libraries print to standard output, too
Measure = Callable[[Job], tuple[dict[str, list[list[float]]], list[float]]]


def say(what: object) -> None:
    print(MARK, json.dumps(what), flush=True)


def main() -> None:
    jobs = from_text(sys.argv[1])
    os.sched_setaffinity(0, jobs[0].cores)  # before libraries are loaded, because they count cores then
    measure, versions = load(jobs[0].rival)
    say(versions)
    sys.stdin.readline()
    for job in jobs:
        blocks, losses = measure(job)
        say({"blocks": blocks, "losses": losses})


def load(rival: Rival) -> tuple[Measure, dict[str, Any]]:
    """The function that measures a rival, and the versions of its software. Everything it needs is imported before the measurement."""
    import torch

    versions = {"torch": torch.__version__}
    measure: Measure
    if rival == "jax":
        from race import jax_rival

        return jax_rival.measure, versions | {"jax": jax_rival.VERSION}
    if rival.startswith("text-"):
        from race import text_rivals

        measure = text_rivals.RIVALS[rival]
        ours = measure is text_rivals.paceline
    elif rival.startswith("all-reduce-"):
        from race import reduce_rivals

        measure = reduce_rivals.RIVALS[rival]
        ours = measure is reduce_rivals.paceline
    elif rival.startswith("pipeline-"):
        from race import pipeline_rivals

        measure = pipeline_rivals.RIVALS[rival]
        ours = measure in (pipeline_rivals.pipeline, pipeline_rivals.data_parallel)
    else:
        from race import rivals

        measure = rivals.RIVALS[rival]
        ours = measure in (rivals.paceline, rivals.in_ranks)
    if ours:
        import paceline.torch  # noqa: F401
    return measure, versions


if __name__ == "__main__":
    main()
