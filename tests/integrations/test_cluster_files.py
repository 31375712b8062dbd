"""The guide to clusters where it needs more than PyTorch: the manifest for Kubernetes."""

from __future__ import annotations

import os
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
