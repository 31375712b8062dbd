"""Gives memory to modules that were made without it, on the device "meta"."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch._pipeline.blocks import Block

Init = Callable[[str, nn.Module], object] | str | os.PathLike[str]


def materialise(module: nn.Module, blocks: Sequence[Block], init: Init | None) -> None:
    """Give memory to a module that was made on the device "meta", part by part, and let `init` fill it."""
    if not (init is None or callable(init) or isinstance(init, str | os.PathLike)):
        raise InvalidArgument(
            f"Pipeline: init is {init!r}; give a function init(name, part), or the path of a state_dict that torch.save has written."
        )
    named = [*module.named_parameters(), *module.named_buffers()]
    name = next((name for name, one in named if one.is_meta), None)
    if name is None:
        return
    if init is None:
        raise InvalidArgument(
            f"Pipeline: {name} is on the device 'meta', so it has no values. Give init=, a function init(name, part) that fills a part of the "
            "module once it has memory, or the path of a state_dict."
        )
    fill = init if callable(init) else _from_file(init)
    inside = {id(part) for block in blocks for part in block.module.modules()}
    outside = [(part_name, part) for part_name, part in module.named_modules() if id(part) not in inside]
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by identity, since several parts may share a tensor
    with torch.no_grad():
        unfilled = [pair for pair in outside if _allocate([pair[1]], made)]
        for part_name, part in unfilled:
            fill(part_name, part)
        for block in blocks:
            if _allocate(block.module.modules(), made):
                fill(block.name, block.module)
        new = {id(one) for _, one in made.values()}
        for name, one in [*module.named_parameters(), *module.named_buffers()]:
            if id(one) in new and one.is_floating_point() and bool(one.isnan().any()):
                raise InvalidArgument(
                    f"Pipeline: {name} was on the device 'meta', and init= has not filled it, or not all of it. A state_dict has no non-persistent "
                    "buffers; compute these in a function init(name, part)."
                )


def _from_file(path: str | os.PathLike[str]) -> Callable[[str, nn.Module], None]:
    """What fills parts from a state_dict on disk, of which it reads only these."""
    state: Mapping[str, torch.Tensor] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)

    def fill(name: str, part: nn.Module) -> None:
        before = f"{name}." if name else ""
        for key, one in [*part.named_parameters(), *part.named_buffers()]:
            if not one.is_meta and before + key in state:
                one.copy_(state[before + key])

    return fill


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
                    if empty.is_floating_point():
                        empty.fill_(math.nan)  # to see what is not filled
                    is_parameter = isinstance(one, nn.Parameter)
                    made[id(one)] = (one, nn.Parameter(empty, one.requires_grad) if is_parameter else empty)
                tensors[name] = made[id(one)][1]
    return found
