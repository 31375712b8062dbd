"""The alarms and the autoscaler's query, evaluated by promtool on series of our own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from test_prometheus import ALARMS, ROOT, alarms

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool on PATH")


def series(instance: str, values: dict[str, str], service: str = "a") -> list[dict[str, str]]:
    """Of promtool: a value each minute, of one process."""
    found = []
    for name, value in values.items():
        labels = f'job="a",instance="{instance}"'
        if service and name.startswith("paceline_pool"):
            labels += f',service="{service}"'
        joint = "," if "{" in name else "{"
        found.append({"series": f"{name.removesuffix('}')}{joint}{labels}}}", "values": value})
    return found


def promtool(folder: Path, **test: Any) -> None:
    """Compare what expressions and alarms have, for series of our own."""
    file = folder / "test.yaml"
    file.write_text(
        json.dumps({"rule_files": [str(ALARMS)], "evaluation_interval": "1m", "tests": [{"interval": "1m", **test}]})
    )
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def waits(priority: str, up_to: dict[str, str]) -> dict[str, str]:
    """How many jobs of a priority have waited at most so many seconds."""
    return {
        f'paceline_pool_wait_seconds_bucket{{priority="{priority}",le="{le}"}}': count for le, count in up_to.items()
    }


# The most that waits in a pool whose batches take 0.1 s: eight full ones for each device.
FULL = {
    "paceline_pool_backlog_seconds": "0.8x100",
    'paceline_pool_device_runs_total{device="host:0"}': "0+300x100",
    'paceline_pool_device_busy_seconds_total{device="host:0"}': "0+30x100",
}


def test_each_alarm_comes_when_it_should_and_only_then(tmp_path: Path) -> None:
    bad = {
        **FULL,
        **waits("batch", {"0.3": "0+1x100", "1.0": "0+2x100", "+Inf": "0+2x100"}),
        **waits("interactive", {"0.3": "0+58x100", "1.0": "0+60x100", "+Inf": "0+60x100"}),
        "paceline_pool_queued": "5x100",
        'paceline_pool_requests_total{outcome="completed"}': "0+60x100",
        'paceline_pool_requests_total{outcome="expired"}': "0+1x100",
        'paceline_device_busy_seconds_total{device="host:0",uuid="",pci_bus_id=""}': "0+30x100",
        "paceline_step_seconds_sum": "0+54x100",
        "process_resident_memory_bytes": "1000+10x100",
        'paceline_memory_bytes{kind="pool_peak",device="cuda:0"}': "1000+10x100",
        "DCGM_FI_DEV_GPU_TEMP": "90x100",
    }
    good = bad | {
        "paceline_pool_backlog_seconds": "0.3x100",  # fewer than two batches
        'paceline_pool_requests_total{outcome="expired"}': "0x100",
        **waits("batch", {"0.3": "0+2x100"}),
        **waits("interactive", {"0.3": "0+60x100"}),
        'paceline_pool_device_busy_seconds_total{device="host:0"}': "0+54x100",
        'paceline_device_busy_seconds_total{device="host:0",uuid="",pci_bus_id=""}': "0+50x100",
        "process_resident_memory_bytes": "1000x100",
        'paceline_memory_bytes{kind="pool_peak",device="cuda:0"}': "1000+1x100",
        'paceline_memory_bytes{kind="limit",device="cuda:0"}': "1000+10x100",
        "DCGM_FI_DEV_GPU_TEMP": "60x100",
    }
    idle = {
        "paceline_pool_queued": "0x100",
        'paceline_pool_device_busy_seconds_total{device="host:0"}': "0+1x100",
        'paceline_pool_requests_total{outcome="expired"}': "0x100",
        **waits("interactive", {"+Inf": "0x100"}),
    }
    long_jobs = {
        **good,
        "paceline_pool_backlog_seconds": "3600x100",
        **waits("interactive", {"0.3": "0x100"}),
    }
    promtool(
        tmp_path,
        input_series=[
            *series("bad", bad),
            *series("good", good),
            *series("idle", idle),
            *series("long jobs", long_jobs, service=""),
            *series("not ours", {"process_resident_memory_bytes": "1000+10x100"}),
        ],
        promql_expr_test=[
            {
                "expr": 'count by (alertname, instance) (ALERTS{alertstate="firing"})',
                "eval_time": "95m",
                "exp_samples": [
                    {"labels": f'{{alertname="{rule["alert"]}",instance="bad"}}', "value": 1} for rule in alarms()
                ],
            }
        ],
    )


def test_full_queues_ask_for_more_pods(tmp_path: Path) -> None:
    text = (ROOT / "examples" / "cluster" / "service.yaml").read_text()
    (scaled,) = (one for one in yaml.safe_load_all(text) if one["kind"] == "ScaledObject")
    trigger = scaled["spec"]["triggers"][0]["metadata"]
    hpa = yaml.safe_load((ROOT / "examples" / "cluster" / "hpa.yaml").read_text())
    (pods,) = (one["pods"] for one in hpa["spec"]["metrics"] if one["type"] == "Pods")
    assert int(pods["target"]["averageValue"].removesuffix("m")) == 1000 * float(trigger["threshold"])
    # What the service of examples/cluster can have at most, by the time of a batch that the comment names.
    (batch,) = re.findall(r"here 8 x ([\d.]+) s", text)
    full = {"paceline_pool_backlog_seconds": f"{8 * float(batch)}x100"}
    promtool(
        tmp_path,
        input_series=[*series("a", full, "embed"), *series("b", full, "embed")],
        promql_expr_test=[
            {
                "expr": f"({trigger['query']}) / {trigger['threshold']} > bool 2",
                "eval_time": "95m",
                "exp_samples": [{"labels": "{}", "value": 1}],
            }
        ],
    )
