"""A Prometheus server of Debian's package scrapes a training run."""

from __future__ import annotations

import contextlib
import json
import os
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

_SECONDS = 60  # to wait for a program that is known to start within a few

PROMETHEUS = shutil.which("prometheus")

# As a user would write it. It trains until its input ends, and prints the port that it serves.
TRAINING = """
    import select, sys
    import torch
    from prometheus_client import REGISTRY, start_http_server
    from paceline.torch import DataParallel

    server, _ = start_http_server(0, addr="127.0.0.1")
    with DataParallel(torch.nn.Linear(4, 2), ["host:0", "host:1"], balance=[1, 3]) as trainer:
        REGISTRY.register(trainer.prometheus(run="scraped"))
        print(server.server_port, flush=True)
        while not select.select([sys.stdin], [], [], 0.01)[0]:
            trainer.step(lambda module, x: module(x).square().mean(), torch.randn(16, 4))
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
                "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
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


def test_every_query_of_the_dashboard_has_an_answer(server: Server) -> None:
    dashboard = Path(__file__).parents[2] / "examples" / "grafana" / "paceline.json"
    panels = json.loads(dashboard.read_text())["panels"]
    server.waited_for("rate(paceline_step_seconds_count[10s]) > 0")
    for query in [target["expr"] for panel in panels for target in panel["targets"]]:
        silent = query == "paceline_memory_bytes"  # no limit was set, so there is none
        assert bool(server.asked(query.replace("$__rate_interval", "10s"))) != silent, query


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool on PATH")
def test_promtool_finds_nothing_wrong_with_names_and_types(training: int) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{training}/metrics", timeout=5) as answer:
        text = answer.read()
    ours = b"\n".join(line for line in text.splitlines() if b"paceline_" in line) + b"\n"
    assert b"# TYPE paceline_step_seconds histogram" in ours
    checked = subprocess.run(["promtool", "check", "metrics"], input=ours, capture_output=True, timeout=_SECONDS)
    assert (checked.returncode, os.fsdecode(checked.stdout + checked.stderr)) == (0, "")
