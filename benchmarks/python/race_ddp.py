"""Races paceline against PyTorch's DistributedDataParallel, and against one process with many threads.

    python race_ddp.py                 nobody else on the machine, which must be true
    python race_ddp.py --busy          with a busy loop on the last core

All train the same network on the same data with the same global batch and optimizer, each in processes of its own,
while nobody else runs: DDP as one process per core, pinned, one thread each, over gloo; one process with a thread per
core; paceline with even and with balanced shares, in turns in one process. The ideal is the sum of what each core does
alone under the same load, one core after the other. Two more figures say what it is made of: the same sum in
micro-batches of a device's size, which fit caches better, and the sum while all cores compute at the same time, in
processes that share nothing: less than the ideal where cores share caches, memory or a core of the host. Figures are
samples per second: medians over rounds, ± half of their range. A virtual machine also says how much of its cores' time
the host gave to others meanwhile (steal in /proc/stat): above a few percent rivals did not meet the same machine.

Environment: OMP_NUM_THREADS and all that places threads is taken away, then OMP_NUM_THREADS is 1 for DDP and for a core
alone, and the number of cores for the process with threads. DDP gets GLOO_SOCKET_IFNAME=lo unless it is set. --malloc
sets MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_ and MALLOC_TOP_PAD_ for every rival, so that glibc keeps freed
memory instead of returning it and taking page faults at every step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

import paceline
from race import data, host, processes
from race.job import Job
from race.results import Blocks, Results

# The largest threshold that glibc takes on 64-bit machines is 32 MiB.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
PROCESS_SECONDS = 120  # after which a process counts as hung


class Race:
    """The rivals on some devices of this machine."""

    def __init__(self, args: argparse.Namespace, devices: list[paceline.Device], folder: Path) -> None:
        self._devices = devices
        self._environment = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")} | (
            MALLOC if args.malloc else {}
        )
        self._busy_cores = list(devices[-1].cores) if args.busy else []
        self._folder = folder
        self._count = 0
        self._loss: float | None = None
        self.torch_version = ""
        self.results = Results(args.batch, args.busy)
        self._job = Job(
            rival="paceline",
            folder=str(folder),
            cores=[core for device in devices for core in device.cores],
            devices=[device.name for device in devices],
            batch=args.batch,
            steps=args.steps,
            parts=len(devices),
        )

    def round(self, number: int) -> None:
        """Every rival once, each round in another order."""
        rivals = [self.ddp, self.threads, self.paceline, self.alone, self.together]
        first = number % len(rivals)
        for rival in rivals[first:] + rivals[:first]:
            rival()

    def ddp(self) -> None:
        self._count += 1
        rendezvous = str(self._folder / f"rendezvous-{self._count}")
        jobs = [
            dataclasses.replace(self._job, rival="ddp", cores=list(device.cores), rank=rank, rendezvous=rendezvous)
            for rank, device in enumerate(self._devices)
        ]
        self.results.add(self._run(jobs, {"OMP_NUM_THREADS": "1"}))

    def threads(self) -> None:
        job = dataclasses.replace(self._job, rival="threads", parts=len(self._job.cores))
        self.results.add(self._run([job], {"OMP_NUM_THREADS": str(job.parts)}))

    def paceline(self) -> None:
        self.results.add(self._run([self._job], {}))

    def alone(self) -> None:
        for device in self._devices:
            job = dataclasses.replace(self._job, rival="alone", cores=list(device.cores))
            self.results.add_alone(device.name, self._run([job], {"OMP_NUM_THREADS": "1"}))

    def together(self) -> None:
        # Half of the time for a slow core's warm-up, half to measure.
        job = dataclasses.replace(self._job, rival="together", seconds=3.0 + 0.1 * self._job.steps)
        jobs = [dataclasses.replace(job, cores=list(device.cores)) for device in self._devices]
        self.results.add_together(self._run_all(jobs, {"OMP_NUM_THREADS": "1"}))

    def ratio(self, seconds: float, tolerance: float) -> None:
        """Only auto against even, for longer."""
        job = dataclasses.replace(self._job, rival="ratio", seconds=seconds, tolerance=tolerance)
        self.results.replace_ratios(self._run([job], {}, seconds))

    def _run(self, jobs: list[Job], environment: dict[str, str], seconds: float = 0.0) -> Blocks:
        return self._run_all(jobs, environment, seconds)[0]

    def _run_all(self, jobs: list[Job], environment: dict[str, str], seconds: float = 0.0) -> list[Blocks]:
        deadline = PROCESS_SECONDS + seconds
        before = host.core_seconds(self._job.cores)
        answers, self.torch_version = processes.run(jobs, self._environment | environment, self._busy_cores, deadline)
        self.results.add_host(jobs[0].rival, before, host.core_seconds(self._job.cores))
        for loss in answers[0]["losses"]:
            if self._loss is None:
                self._loss = loss
            # Float32 sums in another order differ in the sixth digit.
            if abs(loss - self._loss) > 1e-3 * self._loss:
                raise RuntimeError(
                    f"{jobs[0].rival} does other work: its loss after the first steps is {loss}, not {self._loss}"
                )
        return [answer["blocks"] for answer in answers]


def main() -> int:
    args = arguments()
    begin = time.monotonic()
    devices = paceline.devices()[: args.cores]
    if len(devices) < 2 or not all(device.cores for device in devices):
        print("The race needs two cores or more that processes can be pinned to.", file=sys.stderr)
        return 2
    load = os.getloadavg()[0]
    if load > 0.2:
        print(
            f"note: the load average is {load:.1f} before the race: somebody else computes here, or did a minute ago",
            file=sys.stderr,
        )
    with tempfile.TemporaryDirectory(prefix="race") as name:
        data.save(Path(name))
        race = Race(args, devices, Path(name))
        reserved = 0.0 if args.busy else args.ratio_seconds
        longest = 0.0
        for number in range(args.rounds):
            left = args.time_limit - reserved - (time.monotonic() - begin)
            if number > 0 and longest > left:
                print(f"time is up after {number} rounds of {args.rounds}", file=sys.stderr)
                break
            start = time.monotonic()
            race.round(number)
            longest = max(longest, time.monotonic() - start)
            print(f"round {number + 1} of {args.rounds}: {time.monotonic() - start:.0f} s", file=sys.stderr)
        if not args.busy and args.ratio_seconds > 0:
            race.ratio(args.ratio_seconds, args.tolerance)
    names = ", ".join(device.name for device in devices)
    neighbour = f"a busy loop on {devices[-1].name}" if args.busy else "quiet"
    print(f"\ndigits, batch {args.batch}, {names}, {neighbour}; medians of rounds of {args.steps} steps\n")
    print(race.results.table())
    if args.json:
        versions = {"paceline": paceline.__version__, "torch": race.torch_version, "python": platform.python_version()}
        settings = {
            "batch": args.batch,
            "steps": args.steps,
            "environment": MALLOC if args.malloc else {},
            "load_before": round(load, 2),
            "seconds": round(time.monotonic() - begin, 1),
            "hardware": host.hardware(devices),
            "versions": versions,
        }
        print(json.dumps(race.results.summary() | settings))
    return 0


def arguments() -> argparse.Namespace:
    text = __doc__ or ""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--busy", action="store_true", help="hold a busy loop on the last core while anything is measured"
    )
    parser.add_argument(
        "--steps", type=int, default=40, help="measured in each round, after 15 to warm up (default: 40)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of every rival, in fresh processes (default: 5)")
    parser.add_argument("--batch", type=int, default=512, help="global batch (default: 512)")
    parser.add_argument("--cores", type=int, default=2, help="how many devices to race on (default: 2)")
    parser.add_argument("--malloc", action="store_true", help="set MALLOC_* for every rival, see above")
    parser.add_argument(
        "--time-limit", type=float, default=240.0, help="seconds after which no further round starts (default: 240)"
    )
    parser.add_argument(
        "--ratio-seconds",
        type=float,
        default=60.0,
        help="at most, without --busy, on auto against even alone (default: 60)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.003,
        help="half width of its 95 %% interval that ends that sooner (default: 0.003)",
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    if min(args.steps, args.rounds, args.batch, args.cores) < 1:
        parser.error("--steps, --rounds, --batch and --cores must be at least 1")
    return args


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RuntimeError as error:
        sys.exit(f"race_ddp: {error}")
