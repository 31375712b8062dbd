"""Compiled modules train, and what others have captured in CUDA graphs is unharmed."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch

from gpu_support import Box, equal
from paceline.torch import DataParallel
from torch_support import classifier, classify, gradients, plain, worst_difference

pytestmark = pytest.mark.needs_cuda


@pytest.mark.boxes("one_gpu", "two_unequal_parts")
def test_a_compiled_module_trains_as_the_plain_one(box: Box) -> None:
    module, batch = classifier(64, dtype=torch.float32)
    module, batch = box.put(module), box.put(batch)
    _, wanted = plain(module, classify, batch)
    compiled: Any = torch.compile(module)
    with DataParallel(compiled, box.devices, micro_batch=16) as trainer:
        for _ in range(3):
            module.zero_grad()
            trainer.step(classify, batch)
            assert worst_difference(gradients(module), wanted) <= 1e-4
    torch.testing.assert_close(compiled(batch[0]), module(batch[0]), rtol=1e-4, atol=1e-5)


def capture(x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """A graph of the caller's own, and what it writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = (x * 2 + 1).tanh()
    return graph, out


def test_graphs_replay_and_are_captured_between_steps(box: Box) -> None:
    module, batch = classifier(32)
    module, batch = box.put(module), box.put(batch)
    x = torch.zeros(1000, device=box.torch_device)
    before, out = capture(x)
    with DataParallel(module, box.devices) as trainer:
        for step in range(5):
            x.fill_(step)
            trainer.step(classify, batch)
            before.replay()
            equal([out], [(x * 2 + 1).tanh()], 1e-6)
        between, out_between = capture(x)
        trainer.step(classify, batch)
        x.fill_(9)
        between.replay()
        equal([out_between], [(x * 2 + 1).tanh()], 1e-6)


def captured_step(module: torch.nn.Module, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Forward and backward in a graph as PyTorch's documentation makes one, and the loss; gradients go to `.grad`."""
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(3):
            module.zero_grad(set_to_none=True)
            module(x).square().mean().backward()
    torch.cuda.current_stream().wait_stream(warm)
    module.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = module(x).square().mean()
        loss.backward()
    return graph, loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_captured_module_with_products_of_matrices_replays_also_after_close(dtype: torch.dtype, box: Box) -> None:
    """cuBLAS keeps workspaces for each stream, and a graph has the addresses of those it was captured with."""
    torch.manual_seed(3)
    mine = box.put(torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)).to(dtype))
    eager = copy.deepcopy(mine)
    x = torch.zeros(128, 256, dtype=dtype, device=box.torch_device)
    graph, loss = captured_step(mine, x)
    module, batch = classifier(32)
    module, batch = box.put(module), box.put(batch)

    def replayed_is_right(seed: int) -> None:
        x.copy_(torch.randn(128, 256, dtype=dtype, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        eager.zero_grad()
        wanted = eager(x).square().mean()
        wanted.backward()
        tolerance = {torch.float32: 1e-4, torch.float64: 1e-12}[dtype]
        equal([loss], [wanted], tolerance)
        equal([p.grad for p in mine.parameters()], [p.grad for p in eager.parameters()], tolerance)

    replayed_is_right(0)
    with DataParallel(module, box.devices) as trainer:
        for step in range(3):
            trainer.step(classify, batch)
            replayed_is_right(1 + step)
    # What close() gave back may be somebody else's now.
    others = [torch.full((1 << 20,), float("nan"), device=box.torch_device) for _ in range(64)]
    for seed in range(3):
        replayed_is_right(10 + seed)
    assert all(bool(other.isnan().all()) for other in others), "the graph wrote into memory of others"


def test_a_capture_in_another_thread_does_not_break_steps_nor_they_it(box: Box) -> None:
    """Thread-local capture, as PyTorch asks of several threads: unsafe calls of others do not end it."""
    module, batch = classifier(32)
    module, batch = box.put(module), box.put(batch)
    _, wanted = plain(module, classify, batch)
    errors: list[BaseException] = []
    stop = threading.Event()

    def capture_again_and_again() -> None:
        try:
            x, stream = torch.zeros(100, device=box.torch_device), torch.cuda.Stream()
            while not stop.is_set():
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.stream(stream):
                    graph.capture_begin(capture_error_mode="thread_local")
                    y = x + 1
                    graph.capture_end()
                    graph.replay()
                stream.synchronize()
                assert float(y.sum()) == 100
        except BaseException as error:
            errors.append(error)

    with DataParallel(module, box.devices) as trainer:
        trainer.step(classify, batch)
        torch.cuda.synchronize()
        thread = threading.Thread(target=capture_again_and_again)
        thread.start()
        try:
            for _ in range(30):
                module.zero_grad()
                trainer.step(classify, batch)
                assert worst_difference(gradients(module), wanted) <= 1e-12
        finally:
            stop.set()
            thread.join(30)
    assert not errors, errors
