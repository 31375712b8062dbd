"""One process of the race (``python -m race.worker JOB``): gets ready, waits for the word, measures, answers."""

from __future__ import annotations

import json
import os
import sys

from race.job import Job

MARK = "race:"  # libraries print to standard output too


def say(what: object) -> None:
    print(MARK, json.dumps(what), flush=True)


def main() -> None:
    job = Job.from_text(sys.argv[1])
    os.sched_setaffinity(0, job.cores)  # before torch is there: it counts cores when it is loaded
    import torch

    if job.rival.startswith("text-"):
        from race import text_rivals

        measure = text_rivals.RIVALS[job.rival]
        ours = measure is text_rivals.paceline
    elif job.rival.startswith("all-reduce-"):
        from race import reduce_rivals

        measure = reduce_rivals.RIVALS[job.rival]
        ours = measure is reduce_rivals.paceline
    else:
        from race import rivals

        measure = {
            "ddp": rivals.ddp,
            "threads": rivals.threads,
            "alone": rivals.alone,
            "together": rivals.together,
            "paceline": rivals.paceline,
            "ratio": rivals.paceline,
        }[job.rival]
        ours = measure is rivals.paceline
    if ours:
        import paceline.torch  # noqa: F401
    say({"torch": torch.__version__})
    sys.stdin.readline()
    blocks, losses = measure(job)
    say({"blocks": blocks, "losses": losses})


if __name__ == "__main__":
    main()
