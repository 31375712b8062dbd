"""The collector for prometheus_client, and the dashboard that reads its metrics."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from torch import nn

from paceline import InvalidArgument
from paceline.torch import DataParallel
from paceline.torch._trainer import exports

ROOT = Path(__file__).parents[2]


def trained(registry: CollectorRegistry, **labels: str) -> Any:
    module = nn.Linear(4, 2)
    trainer = DataParallel(module, ["host:0", "host:1"], balance=[1, 3], memory={"host:0": 2**30})
    registry.register(trainer.prometheus(**labels))
    for _ in range(3):
        trainer.step(lambda m, b: m(b).square().mean(), torch.randn(16, 4))
    return trainer


def text_of(registry: CollectorRegistry) -> str:
    generate: Any = generate_latest
    return str(generate(registry).decode())


def samples(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    parse: Any = text_string_to_metric_families
    found = {}
    for family in parse(text_of(registry)):
        for one in family.samples:
            found[one.name + one.labels.get("kind", ""), one.labels.get("device", "")] = one.value
    return found


def buckets(registry: CollectorRegistry) -> list[tuple[str, float]]:
    parse: Any = text_string_to_metric_families
    families = {family.name: family for family in parse(text_of(registry))}
    found = families["paceline_step_seconds"].samples
    return [(one.labels["le"], one.value) for one in found if one.name.endswith("_bucket")]


def test_samples_are_those_of_the_report() -> None:
    registry = CollectorRegistry()
    with trained(registry, run="a") as trainer:
        found = samples(registry)
        assert found["paceline_step_seconds_count", ""] == 3
        assert found["paceline_step_seconds_sum", ""] == trainer.report()["step_seconds"]
        assert buckets(registry) == [*((str(bound), n) for bound, n in trainer.report()["step_counts"]), ("+Inf", 3)]
        assert found["paceline_device_share_items", "host:1"] == 12
        assert found["paceline_device_items_total", "host:0"] == 12
        assert 0 < found["paceline_device_busy_ratio", "host:1"] <= 1
        assert found["paceline_memory_byteslimit", "host:0"] == 2**30
        trainer.retire("host:0")
        assert samples(registry)["paceline_device_retired", "host:0"] == 1
        text = text_of(registry)
        assert 'paceline_moves_total{run="a"} 0.0' in text


def test_two_trainers_share_a_registry_by_their_labels() -> None:
    registry = CollectorRegistry()
    with trained(registry, run="a"), trained(registry, run="b"):
        text = text_of(registry)
    assert 'run="a"' in text
    assert 'run="b"' in text


def test_a_server_of_the_users_serves_them() -> None:
    registry = CollectorRegistry()
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        with trained(registry), urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
            assert b"paceline_device_items_total" in answer.read()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    registry = CollectorRegistry()
    with trained(registry):
        known = {re.sub("bytes.*", "bytes", name) for name, _ in samples(registry)}
    dashboard = json.loads((ROOT / "examples" / "grafana" / "paceline.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(asked) >= 6
    for name in {name for expression in asked for name in re.findall(r"paceline_\w+", expression)}:
        assert name in known


def test_labels_that_join_with_those_of_dcgm() -> None:
    assert exports._dcgm_bus_id("0000:1b:00.0") == "00000000:1B:00.0"
    assert exports._dcgm_bus_id("0001:53:00.0") == "00000001:53:00.0"


def test_labels_that_the_samples_have_are_refused() -> None:
    with trained(CollectorRegistry()) as trainer, pytest.raises(InvalidArgument, match="labels device, kind already"):
        trainer.prometheus(device="x", kind="y", run="z")
