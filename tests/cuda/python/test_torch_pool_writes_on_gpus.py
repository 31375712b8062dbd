"""`Pool` on GPUs: what is written to a served module, or to the arguments of a job, while the GPU is still at it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gpu_cases import GPUS, home_of
from paceline.torch import Pool


def expect_answer(batcher: Any, net: nn.Module, x: torch.Tensor) -> None:
    found = batcher(x).result()
    with torch.inference_mode():
        wanted = net(x.unsqueeze(0).to(home_of(GPUS[:1])))[0].cpu()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_batch_follows_every_write_of_the_default_stream(streams: Any) -> None:
    net, x = nn.Linear(6, 3).eval().to(home_of(GPUS[:1])), torch.randn(6)
    with Pool(GPUS[:1]) as pool:
        batcher = pool.serve(net)
        expect_answer(batcher, net, x)
        net.weight.data = torch.randn(3, 6, device=net.weight.device) * 2
        expect_answer(batcher, net, x)
        net.weight.data.mul_(3)
        expect_answer(batcher, net, x)
        net.double()
        expect_answer(batcher, net, x.double())


def test_a_scripted_module_follows_writes_of_the_default_stream(streams: Any) -> None:
    place, x = home_of(GPUS[:1]), torch.randn(6)
    net = torch.jit.trace(nn.Linear(6, 3).eval().to(place), torch.ones(1, 6, device=place))
    with Pool(GPUS[:1]) as pool:
        batcher = pool.serve(net)
        with torch.no_grad():
            net.weight.copy_(torch.randn(3, 6, device=place))
        expect_answer(batcher, net, x)
