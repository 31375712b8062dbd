"""`opentelemetry` of trainers and pools, read back by the SDK's in-memory reader and exporter."""

from __future__ import annotations

import gc
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
