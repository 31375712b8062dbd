"""The program for torchft in examples/cluster: one of two processes is killed, and the other goes on."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
import yaml
from torch import nn

from frameworks_support import within

GUIDE = (Path(__file__).resolve().parents[2] / "examples" / "cluster" / "README.md").read_text()

# Both processes wait for each other, and then the second one ends itself in step 5, before anything of that step is summed.
PRELUDE = """
import os, sys, time
from pathlib import Path

import torch
import torchft
import paceline.torch

name, step, start = sys.argv[1], paceline.torch.DataParallel.step, torchft.Manager.start_quorum

def begin(manager):
    torchft.Manager.start_quorum = start
    Path(name).touch()
    while not (Path("first").exists() and Path("second").exists()):
        time.sleep(0.01)
    start(manager)

def die(trainer, loss_fn, batch):
    log = open(f"{name}.log", "a")
    print(manager.current_step(), len(batch[0]), file=log, flush=True)
    if name == "second" and manager.current_step() == 5:
        return step(trainer, lambda module, part: os._exit(9), batch)
    return step(trainer, loss_fn, batch)

torchft.Manager.start_quorum, paceline.torch.DataParallel.step = begin, die
"""


def test_the_survivor_repeats_the_step_with_all_items(tmp_path: Path) -> None:
    lighthouse = importlib.import_module("torchft.coordination").LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=60000, heartbeat_timeout_ms=1000
    )
    found = re.search(r"## torchft\n.*?```python\n(.*?)```", GUIDE, re.DOTALL)
    assert found is not None
    (tmp_path / "train.py").write_text(PRELUDE + found[1])
    environment = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address(), "SAVE": str(tmp_path / "model.pt")}
    processes = [
        subprocess.Popen([sys.executable, "train.py", name], cwd=tmp_path, env=environment)
        for name in ("first", "second")
    ]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 9]
    finally:
        for process in processes:
            process.kill()
        lighthouse.shutdown()
    items = [tuple(map(int, line.split())) for line in (tmp_path / "first.log").read_text().splitlines()]
    assert items == [*((step, 32) for step in range(6)), *((step, 64) for step in range(5, 12))]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(12):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
    ours = torch.load(tmp_path / "model.pt")
    assert within(max((ours[name] - value).abs().max().item() for name, value in model.state_dict().items()), 1e-12)


# The guide to clusters where it needs more than PyTorch: the manifest for Kubernetes.


CLUSTER = Path(__file__).resolve().parents[2] / "examples" / "cluster"


def test_the_job_of_kubernetes_fits_the_training_script() -> None:
    job = yaml.safe_load((CLUSTER / "job.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    stopped, evicted = job["spec"]["podFailurePolicy"]["rules"]
    assert stopped["onExitCodes"] == {
        "containerName": container["name"],
        "operator": "In",
        "values": [os.EX_TEMPFAIL],
    }
    assert evicted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert stopped["action"] == evicted["action"] == "Ignore"
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] > 30
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert (CLUSTER.parent / "python" / container["command"][1]).exists()
    (mount,) = container["volumeMounts"]
    assert container["command"][-1].startswith(mount["mountPath"] + "/")
    assert [volume["name"] for volume in pod["volumes"]] == [mount["name"]]
