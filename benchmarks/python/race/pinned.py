"""Run one rival at a time on the cores of some devices, in pinned processes."""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import paceline
from race import host, processes
from race.job import Job

_PROCESS_SECONDS = 300.0  # longer means that a process hangs
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# glibc accepts thresholds up to 32 MiB on 64-bit machines.
_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
Answers = list[Any]  # of a process, one per job


class Pinned:
    """The devices of a race, the environment of its processes, and the time that the host gave to others."""

    def __init__(
        self,
        devices: Sequence[paceline.Device],
        folder: Path,
        *,
        busy: bool,
        malloc: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`malloc`: whether glibc keeps the memory that is freed. Otherwise steps pay for page faults, some processes more than others."""
        self.devices = list(devices)
        self.cores = [core for device in devices for core in device.cores]
        self.versions: dict[str, str] = {}
        self._folder = folder
        self._busy_cores = list(devices[-1].cores) if busy else []
        self._environment = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"), **(environment or {})}
        self._environment |= _MALLOC if malloc else {}
        self._meetings = 0
        self._passed: dict[str, float] = defaultdict(float)
        self._stolen: dict[str, float] = defaultdict(float)

    def one(self, jobs: Sequence[Job], environment: Mapping[str, str] | None = None) -> Answers:
        """One process on all cores."""
        names = [device.name for device in self.devices]
        placed = [dataclasses.replace(job, cores=self.cores, devices=names) for job in jobs]
        return self._run([placed], environment or {})[0]

    def ranks(self, jobs: Sequence[Job]) -> list[Answers]:
        """One process with one thread per device, each a rank of DDP. They meet once."""
        self._meetings += 1
        meeting = str(self._folder / f"rendezvous-{self._meetings}")
        places = [
            [dataclasses.replace(job, rank=rank, rendezvous=meeting) for job in jobs]
            for rank in range(len(self.devices))
        ]
        return self.together(places)

    def together(self, jobs: Sequence[Sequence[Job]]) -> list[Answers]:
        """One process with one thread per device, each with its own jobs, all at the same time."""
        placed = [self._at(device, mine) for device, mine in zip(self.devices, jobs, strict=True)]
        return self._run(placed, _ONE_THREAD)

    def alone(self, device: paceline.Device, jobs: Sequence[Job]) -> Answers:
        """One process with one thread on a device, while the other devices are idle."""
        return self._run([self._at(device, jobs)], _ONE_THREAD)[0]

    def stolen(self) -> dict[str, float]:
        """By rival, the fraction of the cores' time that the host gave to others; empty if unknown."""
        return {rival: self._stolen[rival] / passed for rival, passed in self._passed.items() if passed > 0}

    @staticmethod
    def _at(device: paceline.Device, jobs: Sequence[Job]) -> list[Job]:
        return [dataclasses.replace(job, cores=list(device.cores), devices=[device.name]) for job in jobs]

    def _run(self, placed: Sequence[Sequence[Job]], environment: Mapping[str, str]) -> list[Answers]:
        jobs = placed[0]
        deadline = sum(_PROCESS_SECONDS + job.seconds for job in jobs)
        before = host.core_seconds(self.cores)
        answers, versions = processes.run(placed, {**self._environment, **environment}, self._busy_cores, deadline)
        after = host.core_seconds(self.cores)
        if before is not None and after is not None:
            self._passed[jobs[0].rival] += after.passed - before.passed
            self._stolen[jobs[0].rival] += after.stolen - before.stolen
        self.versions |= versions
        return answers
