"""Compiled modules on several GPUs, for each of which the same code is compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

from gpu_cases import BOXES
from paceline.torch import DataParallel

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Squares(nn.Module):
    """The compiler leaves PyTorch's own modules alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).square()


@pytest.mark.own_gpus("its parts share what was compiled")
def test_each_gpu_may_recompile_as_often_as_one(far_gpus: Any) -> None:
    limit = torch._dynamo.config.recompile_limit
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    module = Squares().to("hpu:0")
    module.compile(backend=backend, dynamic=False)
    sizes = range(2, 2 + limit)
    with DataParallel(module, BOXES["four"], balance="even") as trainer:
        for size in sizes:
            trainer.step(lambda one, x: one(x).mean(), torch.randn(4 * size, 4))
    assert len(compiled) == 4 * len(sizes), "beyond the limit code runs uncompiled"
    assert torch._dynamo.config.recompile_limit == limit
