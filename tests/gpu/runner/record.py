"""gpu.json and gpu.log, or rehearsal.json and rehearsal.log: complete at every moment, whenever the run is killed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class Record:
    def __init__(self, folder: Path, *, rehearsal: bool = False, name: str = "gpu") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._rehearsal = rehearsal
        if rehearsal:
            name = "rehearsal" if name == "gpu" else f"{name}-rehearsal"
        self.path = folder / f"{name}.json"
        self._log = self.path.with_suffix(".log")
        self._log.write_text("")
        self._begin = time.monotonic()
        self.machine: dict[str, Any] = {}
        self.stages: list[dict[str, Any]] = []
        self.goals: list[dict[str, Any]] = []
        self.write("starting")

    def status_of(self, stage: str) -> str | None:
        return next((entry["status"] for entry in self.stages if entry["stage"] == stage), None)

    def why_of(self, stage: str) -> str:
        return next((entry.get("why", "") for entry in self.stages if entry["stage"] == stage), "")

    def add(self, entry: dict[str, Any], output: str = "") -> None:
        self.stages.append(entry)
        with self._log.open("a") as log:
            log.write(f"\n######## {entry['stage']}: {entry['status']}, {entry['seconds']} s\n{output}")
        self.write("between stages")

    @property
    def failed(self) -> list[str]:
        return [entry["stage"] for entry in self.stages if entry["status"] in ("failed", "timed out")]

    def write(self, state: str) -> None:
        """Replace the file at once: a reader, or a kill, never meets half of it."""
        whole = {
            "rehearsal": self._rehearsal,
            "state": state,
            "failed": self.failed,
            "seconds": round(time.monotonic() - self._begin, 1),
            "machine": self.machine,
            "goals": self.goals,
            "stages": self.stages,
        }
        beside = self.path.with_suffix(".json.new")
        beside.write_text(json.dumps(whole, indent=1))
        beside.replace(self.path)
