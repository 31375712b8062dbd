"""The service in examples/cluster: its manifests fit together, and its command answers everything that comes until it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import serve
from http_load import Client, Reply

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "examples" / "cluster"
TEXT = b"Down the Rabbit-Hole"


def manifests() -> dict[str, Any]:
    """By kind, what the files of the service hold."""
    texts = [(CLUSTER / name).read_text() for name in ("service.yaml", "hpa.yaml")]
    return {one["kind"]: one for text in texts for one in yaml.safe_load_all(text)}


def container() -> dict[str, Any]:
    (one,) = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = one
    return found


def option(name: str) -> str:
    """What the command of the container has for an option of serve_pod.py."""
    command = container()["command"]
    found: str = command[command.index(name) + 1]
    return found


def test_the_parts_of_the_service_name_each_other() -> None:
    parts = manifests()
    assert parts.keys() == {"Deployment", "Service", "ScaledObject", "HorizontalPodAutoscaler"}
    pod = parts["Deployment"]["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert parts["Deployment"]["spec"]["selector"]["matchLabels"] == parts["Service"]["spec"]["selector"] == labels
    (port,) = container()["ports"]
    assert option("--port") == str(port["containerPort"]) == pod["metadata"]["annotations"]["prometheus.io/port"]
    assert parts["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    assert {container()[f"{probe}Probe"]["httpGet"]["port"] for probe in ("startup", "readiness")} == {port["name"]}
    assert "httpGet" not in container()["livenessProbe"]  # /health says 503 while the pod drains
    for scaler in ("ScaledObject", "HorizontalPodAutoscaler"):
        assert parts[scaler]["spec"]["scaleTargetRef"]["name"] == parts["Deployment"]["metadata"]["name"]


def test_a_pod_has_more_time_to_end_than_it_drains() -> None:
    grace = manifests()["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    probe = container()["readinessProbe"]
    noticed = probe["periodSeconds"] * probe["failureThreshold"] + probe["timeoutSeconds"]
    assert noticed < float(option("--drain")) < grace / 2
    assert float(option("--drain")) + serve.GRACE < grace


def test_one_slow_answer_takes_no_pod_out_of_the_service() -> None:
    probe = container()["readinessProbe"]
    assert probe["failureThreshold"] >= 3
    assert probe["timeoutSeconds"] >= 2


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What came of a run of the command with SIGTERM in the middle of a load."""
    command = [sys.executable, str(ROOT / "examples" / "python" / "serve_pod.py"), *container()["command"][2:]]
    for name, value in (("--port", "0"), ("--drain", "3")):
        command[command.index(name) + 1] = value
    server = subprocess.Popen([*command, "--host", "127.0.0.1", "--batch", "2"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline().split()[-1])
        replies, metrics = asyncio.run(until_it_drains(port, server))
        said, _ = server.communicate(timeout=60)
    finally:
        server.kill()
        server.communicate()
    return server.returncode, replies, metrics, json.loads(said.splitlines()[-1])


async def until_it_drains(port: int, server: subprocess.Popen[str]) -> tuple[list[Reply], str]:
    """Send requests as a load balancer does: until /health says 503."""
    client, ready, last = (Client("127.0.0.1", port) for _ in range(3))
    sent: list[asyncio.Future[Reply]] = []

    async def send(count: int, pause: float) -> None:
        sent.extend(asyncio.ensure_future(client.request("POST", "/embed", TEXT)) for _ in range(count))
        await asyncio.sleep(pause)

    for _ in range(10):
        await send(4, pause=0.01)
    metrics = (await ready.request("GET", "/metrics")).body.decode()
    assert (await ready.request("POST", "/publish")).status == 404
    # However slow the machine is, the server has accepted these before it drains: it accepts in their order, and the last one has an answer.
    await client.open(200)
    await last.request("GET", "/health")
    # More at once than the queue of 16 for each device holds, so that some wait and some are refused, and SIGTERM right after them.
    await send(100, pause=0.0)
    server.send_signal(signal.SIGTERM)
    with contextlib.suppress(OSError, EOFError, ValueError):  # it has drained before this program came to look
        while (await ready.request("GET", "/health")).status == 200:
            await send(1, pause=0.002)
    replies = await asyncio.gather(*sent)
    for one in (client, ready, last):
        one.close()
    return replies, metrics


def test_every_request_is_answered_although_the_pod_ends_in_the_middle(load: Any) -> None:
    status, replies, _, outcomes = load
    counts = Counter(reply.status for reply in replies)
    assert status == 0
    assert counts.keys() <= {200, 503}
    assert counts[200] == outcomes["completed"] > 0
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in replies if reply.status == 503)
    assert any(reply.headers.get("connection") == "close" for reply in replies)


def test_the_autoscalers_ask_for_metrics_that_the_command_has(load: Any) -> None:
    parse: Any = text_string_to_metric_families
    known = {(one.name, one.labels.get("service")) for family in parse(load[2]) for one in family.samples}
    asked = [trigger["metadata"]["query"] for trigger in manifests()["ScaledObject"]["spec"]["triggers"]]
    found = {one for query in asked for one in re.findall(r'(paceline_\w+){service="(\w+)"}', query)}
    assert len(found) == sum(query.count("paceline_") for query in asked) == 3
    found |= set(re.findall(r'(paceline_\w+){service="(\w+)"}', (CLUSTER / "README.md").read_text()))
    assert ("paceline_pool_desired_devices", "embed") in found
    (pods,) = (
        one["pods"] for one in manifests()["HorizontalPodAutoscaler"]["spec"]["metrics"] if one["type"] == "Pods"
    )
    assert found | {(pods["metric"]["name"], "embed")} <= known
    assert "process_resident_memory_bytes" in {name for name, _ in known}
