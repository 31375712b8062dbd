"""Gives memory to modules that were made without it, on the device "meta"."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch._pipeline.blocks import Block

# `torch.utils.swap_tensors` swaps attributes, too, and refuses tensors that somebody refers to weakly, as recurrent networks do.
_swap_memory: Callable[[torch.Tensor, torch.Tensor], None] = torch._C._swap_tensor_impl

Init = Callable[[str, nn.Module], object] | str | os.PathLike[str]


class Unfilled:
    """A module of which something is on the device "meta", and what fills it."""

    def __init__(self, module: nn.Module, blocks: Sequence[Block], fill: Callable[[str, nn.Module], object]) -> None:
        self._module = module
        self._blocks = blocks
        self._fill = fill
        inside = {id(part) for block in blocks for part in block.module.modules()}
        self.outside = [(name, part) for name, part in module.named_modules() if id(part) not in inside]

    def fill(self) -> None:
        """Give memory to the module part by part, blocks in the order of the forward, and let `init` fill it.

        Parameters and buffers stay the same objects, as an optimizer and tied parts have them. If it raises, they are on "meta" again.
        """
        outside = [(name, part, on_meta([part])) for name, part in self.outside]
        blocks = [(name, part, on_meta(part.modules())) for name, part in self._blocks]
        made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by identity: a tensor, and what it was before
        try:
            with torch.no_grad():
                for _, _, tensors in outside:
                    _allocate(tensors, made)
                for name, part, tensors in [*outside, *blocks]:
                    if tensors:
                        _allocate(tensors, made)
                        self._fill(name, part)
                self._check(made)
        except BaseException:
            for one, before in made.values():
                _swap_memory(one, before)
            raise

    def _check(self, made: Mapping[int, object]) -> None:
        for name, one in [*self._module.named_parameters(), *self._module.named_buffers()]:
            if id(one) in made and one.is_floating_point() and bool(one.isnan().any()):
                raise InvalidArgument(
                    f"Pipeline: {name} was on the device 'meta', and init= has not filled it, or not all of it. A state_dict has no non-persistent "
                    "buffers; compute these in a function init(name, part)."
                )


def unfilled(module: nn.Module, blocks: Sequence[Block], init: Init | None) -> Unfilled | None:
    """What has to be filled by `init`. None if everything has memory."""
    if not (init is None or callable(init) or isinstance(init, str | os.PathLike)):
        raise InvalidArgument(
            f"Pipeline: init is {init!r}; give a function init(name, part), or the path of a state_dict that torch.save has written."
        )
    named = [*module.named_parameters(), *module.named_buffers()]
    name = next((name for name, one in named if one.is_meta), None)
    if name is None:
        return None
    if init is None:
        raise InvalidArgument(
            f"Pipeline: {name} is on the device 'meta', so it has no values. Give init=, a function init(name, part) that fills a part of the "
            "module once it has memory, or the path of a state_dict."
        )
    return Unfilled(module, blocks, init if callable(init) else _from_file(init))


def on_meta(parts: Iterable[nn.Module]) -> list[torch.Tensor]:
    """The parameters and buffers of these modules that have no memory, each once."""
    found = [one for part in parts for slots in (part._parameters, part._buffers) for one in slots.values()]
    return list({id(one): one for one in found if one is not None and one.is_meta}.values())


def _from_file(path: str | os.PathLike[str]) -> Callable[[str, nn.Module], None]:
    """What fills parts from a state_dict on disk, of which it reads only these."""
    state: Mapping[str, torch.Tensor] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)

    def fill(name: str, part: nn.Module) -> None:
        before = f"{name}." if name else ""
        for key, one in [*part.named_parameters(), *part.named_buffers()]:
            if not one.is_meta and before + key in state:
                one.copy_(state[before + key])

    return fill


def _allocate(tensors: Sequence[torch.Tensor], made: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Give memory to those of these tensors that have none."""
    for one in tensors:
        if one.is_meta:
            other = torch.empty_like(one, device="cpu", requires_grad=False)
            if other.is_floating_point():
                other.fill_(math.nan)  # to see what is not filled
            if isinstance(one, nn.Parameter):
                other = nn.Parameter(other, one.requires_grad)
            _swap_memory(one, other)
            made[id(one)] = one, other
