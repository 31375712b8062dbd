"""Run the processes of the race, one rival at a time, and the busy loop beside them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from race.job import Job, to_text
from race.worker import MARK

FOLDER = Path(__file__).resolve().parents[1]  # contains the package `race`

# Pinned to one core, never sleeps. Ends when its parent is gone for any reason.
BUSY_LOOP = """
import os, sys
parent = os.getppid()
os.sched_setaffinity(0, [int(sys.argv[1])])
print("running", flush=True)
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


@contextlib.contextmanager
def busy_loop(cores: list[int]) -> Iterator[None]:
    """Run one busy loop on each of `cores` during the ``with`` block."""
    with contextlib.ExitStack() as stack:
        for core in cores:
            process = subprocess.Popen([sys.executable, "-c", BUSY_LOOP, str(core)], stdout=subprocess.PIPE, text=True)
            stack.callback(end, process)
            assert process.stdout is not None
            if process.stdout.readline() != "running\n":
                raise RuntimeError(f"the busy loop on core {core} did not start")
        yield


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


class Worker:
    """One process that runs jobs."""

    def __init__(self, jobs: Sequence[Job], environment: dict[str, str]) -> None:
        self.jobs = jobs
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by end())
        self._process = subprocess.Popen(
            [sys.executable, "-m", "race.worker", to_text(jobs)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def answer(self) -> Any:
        """Read the next answer of the process."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        self._errors.seek(0)
        tail = self._errors.read()[-4000:]
        raise RuntimeError(
            f"{self.jobs[0].rival}: its process ended without a result (or ran out of time). It said:\n{tail}"
        )

    def go(self) -> None:
        assert self._process.stdin is not None
        # answer() notices a process that has ended, and reports its last output.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("go\n")
            self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            end(self._process)
        self._errors.close()


def run(
    processes: Sequence[Sequence[Job]], environment: dict[str, str], busy_cores: list[int], deadline_seconds: float
) -> tuple[list[list[Any]], dict[str, str]]:
    """Run processes that belong together: start all, wait until all are ready, and run the busy loop while they measure.

    Returns
    -------
    tuple
        Per process, its answers, one per job; and the versions of the software.
    """
    # Remove variables that affect threads or their placement. Only the race sets them.
    unset = (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OMP_PROC_BIND",
        "OMP_PLACES",
        "OMP_WAIT_POLICY",
        "GOMP_CPU_AFFINITY",
        "KMP_AFFINITY",
    )
    merged = {name: value for name, value in os.environ.items() if name not in unset} | environment
    merged["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    with contextlib.ExitStack() as stack:
        workers: list[Worker] = []
        for jobs in processes:
            workers.append(Worker(jobs, merged))
            stack.callback(workers[-1].end)

        def out_of_time() -> None:
            for worker in workers:
                worker.kill()

        watchdog = threading.Timer(deadline_seconds, out_of_time)
        watchdog.start()
        stack.callback(watchdog.cancel)
        versions = [worker.answer() for worker in workers]
        with busy_loop(busy_cores):
            for worker in workers:
                worker.go()
            return [[worker.answer() for _ in worker.jobs] for worker in workers], versions[0]
