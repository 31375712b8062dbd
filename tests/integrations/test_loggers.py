"""The samples for TensorBoard, W&B and MLflow in python/guide/reports.md run as they stand there, offline, and log the figures of the trainer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.torch import DataParallel

GUIDE = (Path(__file__).resolve().parents[2] / "python" / "guide" / "reports.md").read_text()
PART = re.search(r"\n## TensorBoard, W&B, MLflow\n(.*?)\n## ", GUIDE, re.DOTALL)
SAMPLES = re.findall(r"```python\n(.*?)```", PART[1], re.DOTALL) if PART is not None else []


def of_tensorboard(_: Mapping[str, Any]) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator("runs").Reload()
    return {name: [(one.step, one.value) for one in found.Scalars(name)] for name in found.Tags()["scalars"]}


def of_wandb(_: Mapping[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """The file of an offline run has records of protobuf: a name, then the tag 0x82 0x01, the length, and the value as JSON."""
    (path,) = Path("wandb").glob("offline-run-*/*.wandb")
    data = path.read_bytes()

    def values(name: str) -> list[float]:
        found = re.finditer(re.escape(name.encode()) + rb"\x82\x01(.)", data, re.DOTALL)
        return [json.loads(data[one.end() : one.end() + one[1][0]]) for one in found]

    names = set(re.findall(rb"paceline/[a-z0-9_]+(?:/[a-z0-9_]+)?", data))
    return {name.decode(): [(int(values("_step")[-1]), one) for one in values(name.decode())] for name in names}


def of_mlflow(names: Mapping[str, Any]) -> dict[str, list[tuple[int, float]]]:
    client = names["mlflow"].MlflowClient()
    (run,) = client.search_runs(["0"])
    return {
        name: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }


@pytest.mark.parametrize(
    ("library", "read"), [("tensorboard", of_tensorboard), ("wandb", of_wandb), ("mlflow", of_mlflow)]
)
def test_the_sample_logs_the_figures_of_the_trainer(
    library: str,
    read: Callable[[Any], dict[str, list[tuple[int, float]]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_DIR", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # others need the whole of MLflow
    (sample,) = [sample for sample in SAMPLES if f"import {library}" in sample or f".{library} import" in sample]
    with DataParallel(nn.Linear(4, 2), ["host:0", "host:1"], balance=[1, 3], prove=False) as trainer:
        names: dict[str, Any] = {
            "trainer": trainer,
            "loader": [torch.randn(16, 4) for _ in range(11)],
            "loss_fn": lambda module, batch: module(batch).square().mean(),
        }
        exec(compile(sample, f"the sample for {library}", "exec"), names)
    found = read(names)
    last = {name: points[-1] for name, points in found.items()}
    assert [last[f"paceline/share/host_{number}"] for number in (0, 1)] == [(10, 4.0), (10, 12.0)]
    assert last["paceline/step_seconds"][1] > 0
    if library != "wandb":  # whose file also has a summary after each
        assert [step for step, _ in found["paceline/share/host_0"]] == [0, 10]
