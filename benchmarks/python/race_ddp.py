"""Race paceline against DistributedDataParallel, JAX, and one process with many threads.

    python race_ddp.py                                    run it alone on the machine
    python race_ddp.py --busy                             with a busy loop on the last core
    python race_ddp.py --network transformer --batch 64,512,4096

All rivals train the same network from the same weights on the same data, with the same global batch and optimizer. Each runs in its own
processes while the others wait, and after some steps all must have the same loss. DDP: one pinned process with one thread per core, over
gloo. Threads: one process with a thread per core. JAX, if installed (pip install 'jax[cpu]'): one process with a device per core and the
batch sharded over them. paceline: even and balanced shares, in turns in one process. Each round runs the rivals in another order. In a
round each rival runs all batch sizes, the smallest first, with fewer steps for batches above 512.

The ideal is the sum of what each core does alone under the same load, one core after the other. Two more sums explain it. The first sums
the cores alone with micro-batches, which fit caches better: each core takes the fastest of a device's part, its half and its quarter. The
second sums all cores computing at the same time in separate processes. It is less than the ideal if cores share caches, memory or a
physical core. Figures are medians over rounds, ± half of their range. A virtual machine also reports how much of its cores' time the host
gave to others (steal in /proc/stat). Above a few percent, the rivals did not have equal conditions.

With several sizes it prints from which step length on splitting pays: where balanced shares beat the fastest core alone.

Environment: OMP_NUM_THREADS and everything else that places threads is removed. Then OMP_NUM_THREADS is set to 1 for DDP and for a core
alone, and to the number of cores for the process with threads. DDP gets GLOO_SOCKET_IFNAME=lo unless it is set. --malloc sets
MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_ and MALLOC_TOP_PAD_ for every rival, so that glibc keeps freed memory. Otherwise glibc
returns it, and each step pays for page faults.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

from race import command, data, findings
from race.command import Command
from race.job import CHECKED_STEPS, Job, Network, steps_for
from race.pinned import Answers, Pinned
from race.results import HEAD, Blocks, Results

SEARCHED_STEPS = 48  # paceline has chosen the size of micro-batches by then
NO_JAX = "JAX is not installed (pip install 'jax[cpu]')"


class Race:
    """The rivals on some devices of this machine, with batches of some sizes."""

    def __init__(self, args: argparse.Namespace, pinned: Pinned, folder: Path) -> None:
        self._pinned = pinned
        self._args = args
        self._parts = len(pinned.devices)
        self._losses: dict[int, float] = {}
        self.results = {batch: Results(batch) for batch in args.batch}
        self.skipped = {} if importlib.util.find_spec("jax") else {"jax": NO_JAX}
        self._jobs = [
            Job(
                rival="paceline",
                folder=str(folder),
                network=args.network,
                batch=batch,
                steps=steps_for(batch, args.steps),
                warm_up=steps_for(batch, Job.warm_up),
                parts=self._parts,
            )
            for batch in args.batch
        ]

    def round(self, number: int) -> None:
        rivals: list[Callable[[], None]] = [self.ddp, self.threads, self.jax, self.paceline, self.alone, self.together]
        if "jax" in self.skipped:
            rivals.remove(self.jax)
        command.in_turn(rivals, number)

    def ddp(self) -> None:
        jobs = self._told(rival="ddp")
        self._add(jobs, self._pinned.ranks(jobs)[0])

    def threads(self) -> None:
        jobs = self._told(rival="threads", parts=len(self._pinned.cores))
        self._add(jobs, self._pinned.one(jobs, {"OMP_NUM_THREADS": str(len(self._pinned.cores))}))

    def jax(self) -> None:
        jobs = self._told(rival="jax")
        devices = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={self._parts}"}
        self._add(jobs, self._pinned.one(jobs, devices))

    def paceline(self) -> None:
        jobs = [dataclasses.replace(job, warm_up=SEARCHED_STEPS) for job in self._jobs]
        self._add(jobs, self._pinned.one(jobs))

    def alone(self) -> None:
        jobs = self._short(rival="alone")
        for device in self._pinned.devices:
            for batch, blocks in self._checked(jobs, self._pinned.alone(device, jobs)):
                self.results[batch].add_alone(device.name, blocks)

    def together(self) -> None:
        jobs = self._short(rival="together")
        # Half of the time is for a slow core's warm-up, half for measuring.
        jobs = [dataclasses.replace(job, seconds=2.0 + 0.1 * job.steps + 1e-3 * job.batch) for job in jobs]
        processes = self._pinned.together([jobs] * self._parts)
        checked = [self._checked(jobs, answers) for answers in processes]
        for batch, *blocks in ((same[0][0], *(each for _, each in same)) for same in zip(*checked, strict=True)):
            self.results[batch].add_together(blocks)

    def ratio(self, seconds: float, tolerance: float) -> None:
        """Measure only auto against even, for longer, with the middle batch size."""
        middle = self._jobs[len(self._jobs) // 2]
        job = dataclasses.replace(middle, rival="ratio", seconds=seconds, tolerance=tolerance, warm_up=SEARCHED_STEPS)
        for batch, blocks in self._checked([job], self._pinned.one([job])):
            self.results[batch].replace_ratios(blocks)

    def _told(self, **changes: Any) -> list[Job]:
        return [dataclasses.replace(job, **changes) for job in self._jobs]

    def _short(self, **changes: Any) -> list[Job]:
        """One core alone has nothing to learn, so it runs fewer steps and leaves time to the others."""
        return [
            dataclasses.replace(job, steps=-(-job.steps // 2), warm_up=CHECKED_STEPS, **changes) for job in self._jobs
        ]

    def _add(self, jobs: Sequence[Job], answers: Answers) -> None:
        for batch, blocks in self._checked(jobs, answers):
            self.results[batch].add(blocks)

    def _checked(self, jobs: Sequence[Job], answers: Answers) -> list[tuple[int, Blocks]]:
        """Record the blocks of each batch size, and check that the process computed the same losses as all before it."""
        for job, answer in zip(jobs, answers, strict=True):
            for loss in answer["losses"]:
                expected = self._losses.setdefault(job.batch, loss)
                # Float32 sums in another order differ in the sixth digit.
                if abs(loss - expected) > 1e-3 * expected:
                    raise RuntimeError(
                        f"{job.rival} does other work: at batch {job.batch} its loss after the first steps is {loss}, not {expected}"
                    )
        return [(job.batch, answer["blocks"]) for job, answer in zip(jobs, answers, strict=True)]


def main() -> int:
    args = arguments()
    run = Command(args)
    with tempfile.TemporaryDirectory(prefix="race") as name:
        data.save(Path(name), args.network)
        pinned = Pinned(run.devices, Path(name), busy=args.busy, malloc=args.malloc)
        race = Race(args, pinned, Path(name))
        ratio_seconds = 0.0 if args.busy else args.ratio_seconds
        run.rounds(race.round, reserved_seconds=ratio_seconds)
        if ratio_seconds > 0:
            race.ratio(ratio_seconds, args.tolerance)
    summaries = {batch: results.summary() for batch, results in race.results.items()}
    splitting, goals = findings.splitting(summaries), findings.goals(args.network, args.busy, summaries)
    for batch, results in race.results.items():
        print(f"\n{args.network}, batch {batch}, {run.place()}\n\n{results.text()}")
    print(f"\n{findings.splitting_text(splitting, min(summaries))}\n{findings.goals_text(goals)}")
    if stolen := pinned.stolen():
        parts = ", ".join(f"{rival} {part:.1%}" for rival, part in stolen.items())
        print(f"time of these cores that the host gave to others: {parts}")
    for why in race.skipped.values():
        print(f"{why}: skipped")
    if args.json:
        result = {
            "network": args.network,
            "tables": {f"batch {batch}": [HEAD, *results.rows()] for batch, results in race.results.items()},
            "goals": goals,
            "splitting": splitting,
            "auto_over_even": {
                f"batch {batch}": [each["auto_over_even"], *(each["auto_over_even_interval"] or [])]
                for batch, each in summaries.items()
            },
            "batches": summaries,
            "stolen": {rival: round(part, 4) for rival, part in pinned.stolen().items()},
            "skipped": race.skipped,
            "malloc": args.malloc,
        }
        print(json.dumps(result | run.record(pinned.versions)))
    return 0


def arguments() -> argparse.Namespace:
    steps = (40, "measured in each round, after 15 to warm up, of batches up to 512")
    parser = command.parser(__doc__, steps=steps, time_limit=240.0)
    parser.add_argument("--network", choices=get_args(Network), default="convolution", help="(default: convolution)")
    parser.add_argument("--batch", default="512", metavar="SIZE,...", help="global batches (default: 512)")
    parser.add_argument("--malloc", action="store_true", help="set MALLOC_* for every rival, see above")
    parser.add_argument(
        "--ratio-seconds",
        type=float,
        default=60.0,
        help="at most, without --busy, on auto against even alone, with the batch in the middle (default: 60)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.003,
        help="half width of its 95 %% interval that ends that sooner (default: 0.003)",
    )
    args = parser.parse_args()
    try:
        args.batch = sorted({int(size) for size in args.batch.split(",")})
    except ValueError:
        parser.error(f"--batch takes numbers with commas between them, not {args.batch}")
    if min(args.steps, args.rounds, args.cores, *args.batch) < 1:
        parser.error("--steps, --rounds, --batch and --cores must be at least 1")
    if any(size % args.cores for size in args.batch):
        parser.error(
            "--batch must be multiples of --cores: JAX shards evenly, and DDP's mean over ranks then is that of the batch"
        )
    return args


if __name__ == "__main__":
    command.finish("race_ddp", main)
