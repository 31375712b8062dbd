"""How long the runs of a pool take in a replay."""

from __future__ import annotations

import statistics
from typing import Any


class Seconds:
    """How long runs take, by what a ledger has measured."""

    def __init__(self, entries: list[dict[str, Any]]) -> None:
        # By kind and device: the last ones, scaled to the mean of the ledger.
        self.models: dict[tuple[int, int], list[float]] = {}
        self._classes: list[str] = []  # of the devices
        self._factors: dict[int, float] = {}  # of jobs
        for entry in entries:
            if "measure" in entry:
                self.models[entry["measure"]["kind"], entry["measure"]["device"]] = entry["measure"]["model"]
            elif "add_device" in entry:
                self._classes.append(entry["add_device"]["device_class"])
        runs: dict[int, dict[str, Any]] = {}
        took: list[tuple[dict[str, Any], float]] = []
        for entry in entries:
            runs.update({start["run"]: start for start in entry.get("decided", {}).get("starts", ())})
            finish = entry.get("finish", {})
            if finish.get("result") == "completed" and finish["run"] in runs:
                took.append((runs.pop(finish["run"]), finish["seconds"]))
        sums: dict[tuple[int, int], tuple[float, float]] = {}  # what runs took, and what the last model says of them
        for run, seconds in took:
            key = run["kind"], run["devices"][0]
            measured, said = sums.get(key, (0.0, 0.0))
            sums[key] = measured + seconds, said + self._usual(run)
        for key, (measured, said) in sums.items():  # the last model may be of a moment in which a device was slow
            if key in self.models and measured > 0.0 and said > 0.0:
                self.models[key] = [value * measured / said for value in self.models[key]]
        for run, seconds in took:
            usual = self._usual(run)
            if usual > 0.0:
                self._factors.update(dict.fromkeys(run["jobs"], seconds / usual))

    def of(self, start: dict[str, Any], first_job: int | None) -> float:
        """The seconds of a run whose first job had this number in the ledger."""
        return self._usual(start) * self._factors.get(first_job or 0, 1.0)

    def _usual(self, start: dict[str, Any]) -> float:
        fixed, per_item = self._model(start["kind"], start["devices"][0])
        return fixed + per_item * float(start["cost"])

    def _model(self, kind: int, device: int) -> list[float]:
        """That of a device of its class, or else the mean of all, where it has none."""
        known = {on: model for (of, on), model in self.models.items() if of == kind}
        if device in known or not known:
            return known.get(device, [0.0, 0.0])
        alike = [model for on, model in known.items() if self._classes[on] == self._classes[device]]
        return [statistics.fmean(values) for values in zip(*(alike or known.values()), strict=True)]
