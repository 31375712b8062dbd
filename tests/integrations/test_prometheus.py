"""The collector for prometheus_client, and the dashboard that reads its metrics."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from torch import nn

from paceline import DeviceGroup, InvalidArgument, Rejected
from paceline.torch import DataParallel, Pool
from paceline.torch._trainer import exports
from torch_support import held

ROOT = Path(__file__).parents[2]
ALARMS = ROOT / "examples" / "grafana" / "alarms.yaml"


def trained(registry: CollectorRegistry, **labels: str) -> Any:
    trainer = DataParallel(nn.Linear(4, 2), ["host:0", "host:1"], balance=[1, 3], memory={"host:0": 2**30})
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


@pytest.mark.parametrize(("unit", "name"), [("items", "items"), ("units of work", "work")])
def test_rank_0_has_samples_of_all_ranks(unit: str, name: str) -> None:
    with trained(CollectorRegistry()) as trainer:
        rows = [{"name": f"rank {rank}", "share": 10 + rank, "per_item_seconds": 0.5} for rank in (0, 1)]
        ranks = [{"items": 10 + rank, "seconds": 2.0 + rank} for rank in (0, 1)]
        report = {**trainer.report(), "rank_shares": {"unit": unit, "devices": rows}, "ranks": ranks}
        collector = exports.Collector(lambda: report, DeviceGroup(["host:0", "host:1"]), {})
        found = {
            (family.name, one.labels.get("rank")): one.value for family in collector.collect() for one in family.samples
        }
    assert found[f"paceline_rank_share_{name}", "1"] == 11
    assert found[f"paceline_rank_{name}_per_second", "0"] == 2
    assert sum(rank == "0" for _, rank in found) == 3
    assert found["paceline_rank_step_seconds", "1"] == 3


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
        assert found["paceline_memory_byteslimit", "host:0"] == 2**30 - held(nn.Linear(4, 2), 2)  # of micro-batches
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


def dashboard() -> list[str]:
    """The queries of its panels."""
    panels = json.loads((ROOT / "examples" / "grafana" / "paceline.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def alarms() -> list[dict[str, Any]]:
    """The rules."""
    (group,) = yaml.safe_load(ALARMS.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def test_the_dashboard_and_the_alarms_ask_for_metrics_that_exist() -> None:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    with trained(registry), Pool(["host:0"]) as pool:
        batcher = pool.serve(nn.Identity().eval())
        batcher.publish(nn.Identity().eval(), weight=0.5)
        registry.register(pool.prometheus())
        known = {re.sub("bytes.*", "bytes", name) for name, _ in samples(registry)}
    # Of NVIDIA's dcgm-exporter, which is not here.
    known.add("DCGM_FI_DEV_GPU_TEMP")
    asked = [*dashboard(), *(rule["expr"] for rule in alarms())]
    names = {name for expression in asked for name in re.findall(r"(?:paceline|process|DCGM)_\w+", expression)}
    assert len(names) >= 20
    assert names <= known
    assert {name for name in known if re.search("_version_.*(total|bucket)", name)} <= names
    kinds = {kind for expression in asked for kind in re.findall(r'kind="(\w+)"', expression)}
    assert kinds == {"pool_peak"}  # of a GPU, which `report` of a trainer has


def test_rows_and_panels_of_the_dashboard_do_not_overlap() -> None:
    panels = json.loads((ROOT / "examples" / "grafana" / "paceline.json").read_text())["panels"]
    cells = [
        (place["x"] + x, place["y"] + y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["w"])
        for y in range(place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert len(panels) == len({panel["id"] for panel in panels})
    assert [panel["title"] for panel in panels if panel["type"] == "row"] == ["Training", "Pool"]


def test_labels_that_join_with_those_of_dcgm() -> None:
    assert exports._dcgm_bus_id("0000:1b:00.0") == "00000000:1B:00.0"
    assert exports._dcgm_bus_id("0001:53:00.0") == "00000001:53:00.0"


def test_labels_that_the_samples_have_are_refused() -> None:
    with trained(CollectorRegistry()) as trainer, pytest.raises(InvalidArgument, match="labels device, kind already"):
        trainer.prometheus(device="x", kind="y", run="z")


# A Prometheus server of Debian's package scrapes a training run.


_SECONDS = 60  # to wait for a program that is known to start within a few

PROMETHEUS = shutil.which("prometheus")

# As a user would write it. It trains until its input ends, and prints the port that it serves.
TRAINING = """
    import select, sys
    import torch
    from prometheus_client import REGISTRY, start_http_server
    from paceline.torch import DataParallel, Pool

    server, _ = start_http_server(0, addr="127.0.0.1")
    with DataParallel(torch.nn.Linear(4, 2), ["host:0", "host:1"], balance=[1, 3]) as trainer, Pool(trainer) as pool:
        REGISTRY.register(trainer.prometheus(run="scraped"))
        REGISTRY.register(pool.prometheus(service="embed"))
        batcher = pool.serve(torch.nn.Identity().eval())
        batcher.publish(torch.nn.Identity().eval(), weight=0.5)
        print(server.server_port, flush=True)
        while not select.select([sys.stdin], [], [], 0.01)[0]:
            trainer.step(lambda module, x: module(x).square().mean(), torch.randn(16, 4))
            pool.submit(lambda device: None).result()
            batcher(torch.ones(1)).result()
"""


class Server:
    """A running Prometheus."""

    def __init__(self, address: str, log: Path) -> None:
        self.address, self.log = address, log
        # Without a proxy, which the environment may name.
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def asked(self, query: str) -> list[dict[str, Any]]:
        """The samples that a query has now."""
        text = urllib.parse.urlencode({"query": query})
        with self.opener.open(f"{self.address}/api/v1/query?{text}", timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
        assert found["status"] == "success"
        result: list[dict[str, Any]] = found["data"]["result"]
        return result

    def waited_for(self, query: str) -> list[dict[str, Any]]:
        """The samples of a query, once there are any."""
        end = time.monotonic() + _SECONDS
        while time.monotonic() < end:
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                found = self.asked(query)
                if found and found[0]["value"][1] != "NaN":
                    return found
            time.sleep(0.1)
        raise AssertionError(f"no answer to {query}; the server says:\n{self.log.read_text()[-2000:]}")


@pytest.fixture(scope="module")
def training() -> Iterator[int]:
    """The port of a program that trains and serves its figures."""
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(TRAINING)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
            assert process.poll() is None, "the training ended before its end"
        finally:
            process.communicate(timeout=_SECONDS)
    assert process.returncode == 0


@pytest.fixture(scope="module")
def server(training: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Prometheus that reads the training every second."""
    if PROMETHEUS is None:
        pytest.skip("there is no prometheus on PATH (on Debian: apt-get install prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "prometheus.yml").write_text(
        json.dumps(  # JSON is YAML
            {
                "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(ALARMS)],
                "scrape_configs": [
                    {"job_name": "paceline", "static_configs": [{"targets": [f"127.0.0.1:{training}"]}]}
                ],
            }
        )
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        own = probe.getsockname()[1]
    arguments = [
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{own}",
    ]
    with (folder / "log").open("w") as log:
        with subprocess.Popen([PROMETHEUS, *arguments], stdout=log, stderr=log, cwd=folder) as process:
            try:
                yield Server(f"http://127.0.0.1:{own}", folder / "log")
            finally:
                process.terminate()
                process.wait(_SECONDS)


def test_a_server_scrapes_shares_and_the_histogram_of_steps(server: Server) -> None:
    # A rate needs two scrapes with steps between them.
    (median,) = server.waited_for("histogram_quantile(0.5, rate(paceline_step_seconds_bucket[10s]))")
    assert median["metric"]["run"] == "scraped"
    assert 0 < float(median["value"][1]) < 300
    shares = server.asked("paceline_device_share_items")
    assert {one["metric"]["device"]: one["value"][1] for one in shares} == {"host:0": "4", "host:1": "12"}
    (counted,) = server.asked('paceline_step_seconds_bucket{le="+Inf"} == ignoring(le) paceline_step_seconds_count')
    assert float(counted["value"][1]) > 0


def test_every_query_of_the_dashboard_and_of_the_autoscaler_has_an_answer(server: Server) -> None:
    parts = yaml.safe_load_all((ROOT / "examples" / "cluster" / "service.yaml").read_text())
    (scaled,) = (one for one in parts if one["kind"] == "ScaledObject")
    numbers = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    server.waited_for("rate(paceline_step_seconds_count[10s]) > 0")
    server.waited_for("rate(paceline_pool_device_runs_total[10s]) > 0")
    for query in [*dashboard(), *numbers]:
        silent = query == "paceline_memory_bytes"  # no limit was set, so there is none
        found = server.asked(re.sub(r"\$__rate_interval|2m", "10s", query))
        assert bool(found) != silent, query
        assert query not in numbers or len(found) == 1, query


def test_the_server_takes_the_alarms(server: Server) -> None:
    server.waited_for("paceline_pool_queued")
    with server.opener.open(f"{server.address}/api/v1/rules", timeout=5) as answer:
        (group,) = json.load(answer)["data"]["groups"]
    assert len(group["rules"]) == len(alarms())
    assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}  # unknown until it was evaluated


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool on PATH")
def test_promtool_finds_nothing_wrong_with_names_and_types(training: int) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{training}/metrics", timeout=5) as answer:
        text = answer.read()
    ours = b"\n".join(line for line in text.splitlines() if b"paceline_" in line) + b"\n"
    assert b"# TYPE paceline_step_seconds histogram" in ours
    checked = subprocess.run(["promtool", "check", "metrics"], input=ours, capture_output=True, timeout=_SECONDS)
    assert (checked.returncode, os.fsdecode(checked.stdout + checked.stderr)) == (0, "")


def test_a_pool_shows_what_waits_runs_and_ended() -> None:
    registry = CollectorRegistry()
    with Pool(["host:0", "host:1"]) as pool:
        registry.register(pool.prometheus(service="a"))
        jobs = [pool.submit(lambda _: 1, tenant="lab") for _ in range(5)]
        assert [job.result() for job in jobs] == [1] * 5
        with pytest.raises(Rejected):
            pool.submit(lambda _: 1, gang=3).result()
        pool.retire("host:1")
        found = samples(registry)
        with pytest.raises(InvalidArgument, match="labels outcome already"):
            pool.prometheus(outcome="x")
    for name in ("backlog_seconds", "queued", "running"):
        assert found[f"paceline_pool_{name}", ""] == 0
    assert 'paceline_pool_tenant_served_total{service="a",tenant="lab"} 5.0' in text_of(registry)
    assert 'paceline_pool_tenant_queued{service="a",tenant="lab"} 0.0' in text_of(registry)
    assert found["paceline_pool_active_devices", ""] == 1
    for priority, count in (("interactive", 0), ("normal", 5), ("batch", 0), ("background", 0)):
        assert f'paceline_pool_wait_seconds_count{{priority="{priority}",service="a"}} {count}.0' in text_of(registry)
    for name in ("jobs", "runs"):
        assert sum(found[f"paceline_pool_device_{name}_total", f"host:{k}"] for k in range(2)) == 5
    text = text_of(registry)
    assert 'paceline_pool_requests_total{outcome="completed",service="a"} 5.0' in text
    assert 'paceline_pool_requests_total{outcome="rejected",service="a"} 1.0' in text
