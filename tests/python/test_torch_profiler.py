"""Spans of micro-batches in PyTorch's profiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from paceline.torch import DataParallel
from torch_support import TWO, assert_same_gradients, classifier, classify, plain


def profiled() -> Any:
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=threads)


def test_a_profile_of_all_threads_has_a_span_for_each_micro_batch(tmp_path: Path) -> None:
    module, batch = classifier(12)
    _, wanted = plain(module, classify, batch)
    with DataParallel(module, TWO, balance="even", micro_batch=2) as trainer:
        trainer.step(classify, batch)
        module.zero_grad()
        with profiled() as profile:
            trainer.step(classify, batch)
        assert_same_gradients(module, wanted)
        path = tmp_path / "trace.json"
        profile.export_chrome_trace(str(path))
        counts = {event.key: event.count for event in profile.key_averages()}
        assert {name: counts.get(f"paceline.micro_batch {name}") for name in TWO} == {"host:0": 3, "host:1": 3}
    trace = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    spans = [event for event in trace if str(event.get("name")).startswith("paceline.micro_batch")]
    assert len({event["tid"] for event in spans}) == 2
    # The operators of a micro-batch lie inside of its span, on the same thread.
    inside = [
        event["name"]
        for event in trace
        if event.get("name") == "aten::linear"
        and any(span["tid"] == event["tid"] and span["ts"] <= event["ts"] <= span["ts"] + span["dur"] for span in spans)
    ]
    assert len(inside) == 12


def test_predictions_have_spans_too() -> None:
    module, batch = classifier(12)
    with DataParallel(module, TWO, balance="even") as trainer:
        with profiled() as profile:
            trainer.predict(batch[0])
    assert {f"paceline.micro_batch {name}" for name in TWO} <= {event.key for event in profile.key_averages()}


def test_without_a_profiler_there_are_none() -> None:
    module, batch = classifier(12)
    seen: list[int] = []
    with DataParallel(module, TWO, balance="even") as trainer:

        def loss_fn(replica: Any, part: Any) -> Any:
            running = trainer._execution.running
            assert running is not None
            seen.append(len(running.around))
            return classify(replica, part)

        trainer.step(loss_fn, batch)
        with profiled():
            trainer.step(loss_fn, batch)
        trainer.step(loss_fn, batch)
    assert seen == [0, 0, 1, 1, 0, 0]
