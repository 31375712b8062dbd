"""The guide to clusters where it needs more than PyTorch: the manifest for Kubernetes and the program for Ray Train."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

CLUSTER = Path(__file__).resolve().parents[2] / "examples" / "cluster"


def test_the_job_of_kubernetes_fits_the_training_script() -> None:
    yaml = pytest.importorskip("yaml")
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


@pytest.mark.slow
def test_the_program_for_ray_trains_without_gpus_in_local_mode() -> None:
    pytest.importorskip("ray.train", reason="Ray is not among the frameworks of this suite: pip install 'ray[train]'")
    found = re.search(r"## Ray Train.*?```python\n(.*?)```", (CLUSTER / "README.md").read_text(), re.DOTALL)
    assert found is not None
    program = found[1]
    for gpus, none in (
        (r"ScalingConfig\(.*\)", "ScalingConfig(num_workers=0)"),
        (r"devices=ray.train.torch.get_devices\(\)", 'devices=["host:0"]'),
        (r"\n(ray.train.torch.TorchTrainer)", r"\nresult = \1"),
    ):
        program, count = re.subn(gpus, none, program)
        assert count == 1
    variables: dict[str, object] = {}
    exec(program, variables)
    assert variables["result"].metrics["loss"] < 8  # type: ignore[attr-defined]
