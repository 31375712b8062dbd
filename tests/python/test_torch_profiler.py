"""Spans of micro-batches in PyTorch's profiler."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.testing import faults
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


@pytest.mark.parametrize("around", ["a profiler", "faults"])
def test_nothing_surrounds_micro_batches_without_a_profiler_and_faults(around: str) -> None:
    module, batch = classifier(12)
    seen: list[int] = []
    with DataParallel(module, TWO, balance="even") as trainer:

        def loss_fn(replica: Any, part: Any) -> Any:
            running = trainer._execution.running
            assert running is not None
            seen.append(len(running.recipe.micro_batch))
            return classify(replica, part)

        trainer.step(loss_fn, batch)
        with profiled() if around == "a profiler" else faults.inject(trainer, faults.Slow("host:1", factor=1)):
            trainer.step(loss_fn, batch)
        trainer.step(loss_fn, batch)
    assert seen == [0, 0, 1, 1, 0, 0]


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """What a PyTorch with CUDA would have pushed and popped: thread and name, or an empty name for a pop."""
    seen: list[tuple[int, str]] = []
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: seen.append((threading.get_ident(), name)))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append((threading.get_ident(), "")))
    monkeypatch.delenv("NSYS_PROFILING_SESSION_ID", raising=False)
    return seen


@pytest.mark.parametrize("asks", ["nsys", "emit_nvtx", "torch.profiler", "nobody"])
def test_micro_batches_are_ranges_of_nvtx_where_something_reads_them(
    asks: str, ranges: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, batch = classifier(12)
    kind = torch._C._profiler.ActiveProfilerType
    if asks == "nsys":
        monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "7")
    if asks == "emit_nvtx":  # which itself needs CUDA
        monkeypatch.setattr(torch._C._autograd, "_profiler_type", lambda: kind.NVTX)
    _, wanted = plain(module, classify, batch)
    with DataParallel(module, TWO, balance="even", micro_batch=3) as trainer:
        if asks == "torch.profiler":
            with profiled():
                trainer.step(classify, batch)
        else:
            trainer.step(classify, batch)
    assert_same_gradients(module, wanted)
    if asks in ("torch.profiler", "nobody"):
        assert ranges == []
        return
    threads = {thread for thread, _ in ranges}
    assert len(threads) == 2
    for thread in threads:  # each range ends on the thread that began it, before the next one
        names = [name for one, name in ranges if one == thread]
        assert names == [names[0], ""] * 2
    assert {name for _, name in ranges} == {"", *(f"paceline.micro_batch {name}" for name in TWO)}


def test_a_range_of_nvtx_ends_if_the_micro_batch_fails(
    ranges: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "7")
    module, batch = classifier(4)

    def fails(replica: Any, part: Any) -> Any:
        raise RuntimeError("planned")

    with DataParallel(module, ["host:0"]) as trainer, pytest.raises(RuntimeError, match="planned"):
        trainer.step(fails, batch)
    assert [name for _, name in ranges] == ["paceline.micro_batch host:0", ""]
