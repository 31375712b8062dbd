"""`opentelemetry` of trainers and pools, read back by the SDK's in-memory reader and exporter."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from torch import nn

from paceline import InvalidArgument
from paceline.torch import DataParallel, Pipeline, Pool
from pool_support import Held

TWO = ["host:0", "host:1"]


class Sdk:
    """A user's SDK, which keeps everything in memory."""

    def __init__(self) -> None:
        self._reader, self.spans = InMemoryMetricReader(), InMemorySpanExporter()
        self.meter = MeterProvider([self._reader]).get_meter("test")
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        self.tracer = provider.get_tracer("test")

    def metrics(self) -> dict[str, list[Any]]:
        """The points of each metric."""
        data = self._reader.get_metrics_data()
        scopes = [scope for one in data.resource_metrics for scope in one.scope_metrics] if data is not None else []
        return {metric.name: list(metric.data.data_points) for scope in scopes for metric in scope.metrics}

    def values(self, name: str) -> dict[str, float]:
        return {point.attributes["device"]: point.value for point in self.metrics().get(name, ())}


@pytest.fixture
def sdk() -> Sdk:
    return Sdk()


def squares(module: Any, batch: Any) -> Any:
    return module(batch).square().mean()


def test_gauges_are_the_figures_of_the_last_steps(sdk: Sdk) -> None:
    with DataParallel(nn.Linear(4, 2), TWO, balance=[1, 3], prove=False) as trainer:
        trainer.opentelemetry(sdk.meter, run="a")
        assert sdk.values("paceline.device.share") == {"host:0": 0, "host:1": 0}
        for _ in range(3):
            trainer.step(squares, torch.randn(16, 4))
        trainer.retire("host:0")
        assert sdk.values("paceline.device.share") == {"host:0": 4, "host:1": 12}
        assert sdk.values("paceline.device.retired") == {"host:0": 1, "host:1": 0}
        assert all(value > 0 for value in sdk.values("paceline.device.speed").values())
        assert all(0 < value <= 1 for value in sdk.values("paceline.device.busy").values())
        found = sdk.metrics()
        assert all(point.attributes["run"] == "a" for points in found.values() for point in points)
        (duration,) = found["paceline.step.duration"]
        assert duration.count == 3
        assert duration.explicit_bounds[0] == 0.001
        assert 0 < duration.sum < 60
        assert "paceline.device.memory" not in found  # of GPUs
        assert sdk.spans.get_finished_spans() == ()
    assert sdk.values("paceline.device.share") == {}


def test_each_step_is_a_span_below_the_present_one(sdk: Sdk) -> None:
    with DataParallel(nn.Linear(4, 2), TWO, balance=[1, 3], prove=False) as trainer:
        trainer.step(squares, torch.randn(16, 4))  # before it was asked for
        handle = trainer.opentelemetry(sdk.meter, sdk.tracer, run="a")
        with sdk.tracer.start_as_current_span("epoch") as epoch:
            trainer.step(squares, torch.randn(16, 4))
            with pytest.raises(ZeroDivisionError):
                trainer.step(lambda module, batch: 1 / 0, torch.randn(16, 4))  # type: ignore[arg-type,return-value]
            trainer.step(squares, torch.randn(8, 4))
        handle.remove()
        trainer.step(squares, torch.randn(16, 4))
    first, failed, last, _ = sdk.spans.get_finished_spans()
    for span in (first, failed, last):
        assert span.name == "paceline.step"
        assert span.parent.span_id == epoch.get_span_context().span_id
        assert epoch.start_time <= span.start_time < span.end_time <= epoch.end_time
        assert span.attributes["run"] == "a"
    assert [span.attributes["paceline.step"] for span in (first, failed, last)] == [1, 2, 2]
    assert (first.attributes["paceline.items.host:0"], first.attributes["paceline.items.host:1"]) == (4, 12)
    assert (last.attributes["paceline.items.host:0"], last.attributes["paceline.items.host:1"]) == (2, 6)
    assert (failed.attributes["error.type"], failed.status.is_ok) == ("ZeroDivisionError", False)
    assert first.status.is_ok
    assert sdk.values("paceline.device.share") == {}  # the handle was removed
    assert sdk.metrics()["paceline.step.duration"][0].count == 2  # the one that failed does not count


def test_a_step_whose_end_is_known_later_is_below_the_span_in_which_it_began(
    sdk: Sdk, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims_of = "paceline.torch._trainer.telemetry.claims_of"
    with DataParallel(nn.Linear(4, 2), TWO, balance=[1, 3], prove=False) as trainer:
        trainer.opentelemetry(sdk.meter, sdk.tracer)
        with sdk.tracer.start_as_current_span("first"):
            monkeypatch.setattr(claims_of, lambda _: ())  # as while a GPU runs it
            trainer.step(squares, torch.randn(16, 4))
            with pytest.raises(ZeroDivisionError):
                trainer.step(lambda module, batch: 1 / 0, torch.randn(16, 4))  # type: ignore[arg-type,return-value]
        monkeypatch.undo()
        with sdk.tracer.start_as_current_span("second"):
            trainer.step(squares, torch.randn(16, 4))
    spans = sdk.spans.get_finished_spans()
    names = {span.context.span_id: span.name for span in spans}
    steps = [span for span in spans if span.name == "paceline.step"]
    assert [(names[span.parent.span_id], span.status.is_ok) for span in steps] == [
        ("first", True),
        ("first", False),
        ("second", True),
    ]


def test_runs_of_a_batch_are_steps(sdk: Sdk) -> None:
    def run(module: nn.Module, part: Any) -> None:
        part.backward(squares(module, part.data))

    with DataParallel(nn.Linear(4, 2), TWO, balance=[1, 3], prove=False) as trainer:
        trainer.opentelemetry(sdk.meter, sdk.tracer)
        with sdk.tracer.start_as_current_span("epoch") as epoch, trainer.batch(torch.randn(16, 4)) as batch:
            for _ in range(10):  # more than a trainer remembers
                batch.run(run, name="generate")
        assert sdk.values("paceline.device.share") == {"host:0": 4, "host:1": 12}
        assert sdk.metrics()["paceline.step.duration"][0].count == 10
    spans = [span for span in sdk.spans.get_finished_spans() if span.name == "paceline.step"]
    assert len(spans) == 10
    assert {span.parent.span_id for span in spans} == {epoch.get_span_context().span_id}


@pytest.mark.usefixtures("proved")
def test_proofs_are_no_spans_and_a_dropped_trainer_shows_nothing(sdk: Sdk) -> None:
    trainer = DataParallel(nn.Linear(4, 2), TWO)
    trainer.opentelemetry(sdk.meter, sdk.tracer)
    for _ in range(2):
        trainer.step(squares, torch.randn(16, 4))
    assert len(sdk.spans.get_finished_spans()) == 1
    del trainer
    gc.collect()
    assert sdk.values("paceline.device.share") == {}


def test_a_pipeline_counts_its_items_once(sdk: Sdk) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with Pipeline(module, TWO, blocks=list(module), cuts=[0, 1], prove=False) as trainer:
        trainer.opentelemetry(sdk.meter, sdk.tracer)
        for _ in range(4):
            trainer.step(squares, torch.randn(12, 4))
        assert sdk.values("paceline.device.share") == {"host:0": 12, "host:1": 12}
    assert [span.attributes["paceline.items.host:1"] for span in sdk.spans.get_finished_spans()] == [12] * 4


def test_a_pool_has_gauges_until_it_is_closed(sdk: Sdk) -> None:
    with Pool(TWO) as pool:
        pool.opentelemetry(sdk.meter, service="a")
        with Held(pool, 2):
            job = pool.submit(lambda _: None)
            found = sdk.metrics()
            (waiting,), (running,) = found["paceline.pool.waiting"], found["paceline.pool.running"]
            assert (waiting.value, running.value) == (1, 2)
            assert dict(waiting.attributes) == {"service": "a"}
        job.result()
        assert set(sdk.values("paceline.pool.device.busy")) == set(TWO)
        assert sum(sdk.values("paceline.pool.device.jobs").values()) > 0
    assert sdk.metrics() == {}


def test_all_that_one_meter_gets_are_shown(sdk: Sdk) -> None:
    trainers = [DataParallel(nn.Linear(4, 2), TWO, balance=[1, 3], prove=False) for _ in range(3)]
    pools = [Pool(TWO) for _ in range(3)]

    def all_of(name: str) -> list[str]:
        return sorted(point.attributes["run"] for point in sdk.metrics().get(name, ()))

    for at, run in enumerate("ab"):
        trainers[at].opentelemetry(sdk.meter, run=run)
        pools[at].opentelemetry(sdk.meter, run=run)
    for trainer in trainers[:2]:
        trainer.step(squares, torch.randn(16, 4))
    assert all_of("paceline.device.share") == ["a", "a", "b", "b"]
    assert all_of("paceline.pool.waiting") == ["a", "b"]
    for one in (trainers[0], trainers[1], pools[0], pools[1]):
        one.close()
    assert all_of("paceline.device.share") == all_of("paceline.pool.waiting") == []
    trainers[2].opentelemetry(sdk.meter, run="c")
    pools[2].opentelemetry(sdk.meter, run="c")
    assert all_of("paceline.device.share") == ["c", "c"]
    assert all_of("paceline.pool.waiting") == ["c"]
    other = Sdk()
    assert other.metrics() == {}  # another provider has a meter of its own
    trainers[2].close()
    pools[2].close()


def test_a_look_that_fails_hides_no_other(sdk: Sdk, monkeypatch: pytest.MonkeyPatch) -> None:
    with Pool(TWO) as first, Pool(TWO) as second:
        first.opentelemetry(sdk.meter, run="a")
        second.opentelemetry(sdk.meter, run="b")
        monkeypatch.setattr(first._jobs, "devices_now", lambda: 1 / 0)
        assert [point.attributes["run"] for point in sdk.metrics()["paceline.pool.waiting"]] == ["b"]


BEFORE_THE_PROVIDER = """
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from paceline.torch import Pool

    pools, reader = [Pool("host") for _ in range(3)], InMemoryMetricReader()
    pools[0].opentelemetry(metrics.get_meter("serving"), run="a")
    pools[1].opentelemetry(metrics.get_meter("serving"), run="b")
    metrics.set_meter_provider(MeterProvider([reader]))
    pools[2].opentelemetry(metrics.get_meter("serving"), run="c")
    found = [metric for one in reader.get_metrics_data().resource_metrics for scope in one.scope_metrics for metric in scope.metrics]
    (waiting,) = [metric for metric in found if metric.name == "paceline.pool.waiting"]
    print(*sorted(point.attributes["run"] for point in waiting.data.data_points))
"""


def test_meters_from_before_the_provider_are_one() -> None:
    program = textwrap.dedent(BEFORE_THE_PROVIDER)
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (made.stdout, made.returncode) == ("a b c\n", 0), made.stderr


@pytest.mark.parametrize(
    ("arguments", "attributes", "what"),
    [
        (["meter"], {}, "meter is a str; give one of opentelemetry.metrics.get_meter"),
        ([Sdk().meter, "tracer"], {}, "tracer is a str; give one of get_tracer"),
        ([Sdk().meter], {"device": "x"}, "have the attribute device already"),
    ],
)
def test_what_is_no_instrument_is_refused(arguments: list[Any], attributes: dict[str, str], what: str) -> None:
    with DataParallel(nn.Linear(4, 2), TWO) as trainer, pytest.raises(InvalidArgument, match=what):
        trainer.opentelemetry(*arguments, **attributes)
