"""The programs for Ray Train in the guides: in local mode, which runs the function in this process, and on real workers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from frameworks_support import difference, within
from test_guides_to_frameworks import before_and_after, reference, run

GUIDE = (Path(__file__).resolve().parents[2] / "examples" / "cluster" / "README.md").read_text()
LOCAL = "ScalingConfig(num_workers=0)"
# In a run that goes on from a checkpoint: without the checkpoint it would end elsewhere.
OTHER = (r"torch.manual_seed\(0\)", "torch.manual_seed(7)")


def edited(program: str, **edits: tuple[str, str]) -> str:
    """The program with other lines. Each edit must apply once."""
    for wanted, other in edits.values():
        program, count = re.subn(wanted, other.replace("\\", r"\\"), program)
        assert count == 1, wanted
    return program


def guide(scaling: str, folder: Path, **edits: tuple[str, str]) -> str:
    """The program of the guide, on hosts. `result` is what it returns."""
    found = re.search(r"## Ray Train.*?```python\n(.*?)```", GUIDE, re.DOTALL)
    assert found is not None
    hosts: dict[str, tuple[str, str]] = {
        "scaling": (r"ScalingConfig\(.*\)", scaling),
        "place": ('"/shared/runs"', repr(str(folder))),
        "devices": (r"devices=ray.train.torch.get_devices\(\)", 'devices=["host:0"]'),
        "result": (r"\n(?=ray.train.torch.TorchTrainer)", "\nresult = "),
    }
    return edited(found[1], **{**hosts, **edits})


def losses(program: str) -> float:
    variables: dict[str, Any] = {}
    exec(program, variables)
    return float(variables["result"].metrics["loss"])


def last_loss(steps: int) -> float:
    """Of the guide's training on one device, in plain PyTorch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(step))
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def test_the_sample_in_local_mode() -> None:
    before, after = before_and_after("Ray Train")
    compile(before, "Ray Train", "exec")
    sample = edited(
        after,
        scaling=(r"ScalingConfig\(.*\)", LOCAL),
        devices=(r"devices=ray.train.torch.get_devices\(\)", 'devices=["host:0", "host:1"]'),
    )
    assert within(difference(run(sample)["model"], reference()), 1e-12)


def test_the_program_of_the_guide_resumes_in_local_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    # Local mode leaves checkpoints where the function wrote them, and starts without one.
    kept = (r"with tempfile.TemporaryDirectory\(\) as folder:", f"for folder in [{str(saved)!r}]:")
    half = guide(LOCAL, tmp_path, kept=kept, steps=('"steps": 20', '"steps": 10'))
    assert losses(half) == pytest.approx(last_loss(10), rel=1e-4)
    given = (r"ray.train.get_checkpoint\(\)", f"ray.train.Checkpoint.from_directory({str(saved)!r})")
    resumed = guide(LOCAL, tmp_path, kept=kept, given=given, seed=OTHER)
    assert losses(resumed) == pytest.approx(last_loss(20), rel=1e-4)


@pytest.mark.slow
def test_real_workers_resume_and_two_of_them_train_as_one(tmp_path: Path) -> None:
    workers = "ScalingConfig(num_workers=1)"
    losses(guide(workers, tmp_path, steps=('"steps": 20', '"steps": 10')))
    assert losses(guide(workers, tmp_path, seed=OTHER)) == pytest.approx(last_loss(20), rel=1e-4)
    two = guide(
        "ScalingConfig(num_workers=2)",
        tmp_path,
        name=('name="digits"', 'name="two"'),
        devices=(
            r"devices=ray.train.torch.get_devices\(\)",
            'devices=[f"host:{rank}"], group=torch.distributed.group.WORLD',
        ),
        rank=(
            r"    torch.manual_seed\(0\)",
            "    torch.manual_seed(0)\n    rank = ray.train.get_context().get_world_rank()",
        ),
        part=(
            r"(?<=generator=torch.Generator\(\).manual_seed\(step\)\))",
            "[slice(0, 44) if rank == 0 else slice(44, 64)]",
        ),
        report=(
            r"checkpoint=ray.train.Checkpoint.from_directory\(folder\)",
            "checkpoint=ray.train.Checkpoint.from_directory(folder) if rank == 0 else None",
        ),
    )
    assert losses(two) == pytest.approx(last_loss(20), rel=1e-4)
