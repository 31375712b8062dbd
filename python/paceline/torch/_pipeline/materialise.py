"""Gives memory to modules that were made without it, on the device "meta"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch._pipeline.blocks import Block

Init = Callable[[str, nn.Module], object]


def materialise(module: nn.Module, blocks: Sequence[Block], init: Init | None) -> None:
    """Give memory to a module that was made on the device "meta", part by part, and let `init` fill it."""
    named = [*module.named_parameters(), *module.named_buffers()]
    name = next((name for name, one in named if one.is_meta), None)
    if name is None:
        return
    if init is None:
        raise InvalidArgument(
            f"Pipeline: {name} is on the device 'meta', so it has no values. Give init=, a function init(name, part) that fills a part of the "
            "module once it has memory, for example from a file."
        )
    inside = {id(part) for block in blocks for part in block.module.modules()}
    outside = [(part_name, part) for part_name, part in module.named_modules() if id(part) not in inside]
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by identity, since several parts may share a tensor
    with torch.no_grad():
        unfilled = [pair for pair in outside if _allocate([pair[1]], made)]
        for part_name, part in unfilled:
            init(part_name, part)
        for block in blocks:
            if _allocate(block.module.modules(), made):
                init(block.name, block.module)


def _allocate(parts: Iterable[nn.Module], made: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Give memory to the tensors of these parts that have none. Returns whether there were any."""
    found = False
    for part in parts:
        slots: list[dict[str, Any]] = [part._parameters, part._buffers]
        for tensors in slots:
            for name, one in tensors.items():
                if one is None or not one.is_meta:
                    continue
                found = True
                if id(one) not in made:
                    empty = torch.empty_like(one, device="cpu", requires_grad=False)
                    is_parameter = isinstance(one, nn.Parameter)
                    made[id(one)] = (one, nn.Parameter(empty, one.requires_grad) if is_parameter else empty)
                tensors[name] = made[id(one)][1]
    return found
