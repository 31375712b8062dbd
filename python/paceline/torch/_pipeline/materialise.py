"""Gives memory to modules that were made without it, on the device "meta"."""

from __future__ import annotations

import functools
import math
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline import InvalidArgument
from paceline._words import require
from paceline.torch._pipeline.blocks import Block

# `torch.utils.swap_tensors` swaps attributes, too, and refuses tensors that somebody refers to weakly, as recurrent networks do.
_swap_memory: Callable[[torch.Tensor, torch.Tensor], None] = torch._C._swap_tensor_impl

Init = Callable[[str, nn.Module], object] | str | os.PathLike[str]
# The tensors are those of the part that were on "meta".
Fill = Callable[[str, nn.Module, Sequence[torch.Tensor]], object]


class Unfilled:
    """A module of which something is on the device "meta", and what fills it."""

    def __init__(self, module: nn.Module, blocks: Sequence[Block], fill: Fill) -> None:
        self._module = module
        self._blocks = blocks
        self._fill = fill
        inside = {id(part) for block in blocks for part in block.module.modules()}
        self.outside = [(name, part) for name, part in module.named_modules() if id(part) not in inside]

    def fill(self) -> Callable[[], None]:
        """Give memory to the module part by part, blocks in the order of the forward, and let `init` fill it.

        Parameters and buffers stay the same objects, as an optimizer and tied parts have them. If it raises, they are on "meta" again.

        From then on each step of an optimizer is looked at. What is returned ends that, as does the end of all parameters.
        """
        outside = [(name, part, on_meta([part])) for name, part in self.outside]
        blocks = [(name, part, on_meta(part.modules())) for name, part in self._blocks]
        made: dict[int, _Made] = {}  # by identity
        try:
            with torch.inference_mode(False), torch.no_grad():
                for _, _, tensors in outside:
                    _allocate(tensors, made)
                for name, part, tensors in [*outside, *blocks]:
                    if tensors:
                        _allocate(tensors, made)
                        self._fill(name, part, tensors)
                self._check(made)
        except BaseException:
            for one in made.values():
                _swap(one.tensor, one.before)
            raise
        return _refuse_states_on_meta([one.tensor for one in made.values() if isinstance(one.tensor, nn.Parameter)])

    def _check(self, made: Mapping[int, _Made]) -> None:
        named = [*self._module.named_parameters(), *self._module.named_buffers()]
        there = {id(one) for _, one in named}
        for name, one in named:
            if one.is_meta or (id(one) in made and made[id(one)].is_unfilled()):
                raise InvalidArgument(
                    f"Pipeline: {name} was on the device 'meta', and init= has not filled it, or not all of it. A state_dict has no non-persistent "
                    "buffers; compute these in a function init(name, part)."
                )
        if any(key not in there and isinstance(one.tensor, nn.Parameter) for key, one in made.items()):
            raise InvalidArgument(
                "Pipeline: init= has put other parameters in the place of those that were on the device 'meta'. An optimizer and tied parts have "
                "these, so write into them: parameter.copy_(values), or load_state_dict without assign=True."
            )


class _Made(NamedTuple):
    """A tensor that got memory."""

    tensor: torch.Tensor
    before: torch.Tensor  # what it was
    version: int

    def is_unfilled(self) -> bool:
        """Whether a value of it is still the marker. For integers and booleans a marker may be meant, so all values must be, unwritten."""
        one = self.tensor
        if one.is_floating_point() or one.is_complex():
            return bool((one.float() if one.element_size() == 1 else one).isnan().any())
        return one.numel() > 0 and one._version == self.version and bool((one == _marker(one)).all())


def _marker(one: torch.Tensor) -> float:
    if one.is_floating_point() or one.is_complex():
        return math.nan
    return 0 if one.dtype == torch.bool else torch.iinfo(one.dtype).min


def _swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Swap memory and what autograd knows, but for hooks, which stay."""
    hooks, post = one._backward_hooks, getattr(one, "_post_accumulate_grad_hooks", None)
    _swap_memory(one, other)
    if hooks:
        one._backward_hooks = hooks
    if post:
        one._post_accumulate_grad_hooks = post


def _refuse_states_on_meta(parameters: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Raise in the first step of an optimizer whose states of these parameters have no memory. Returns what takes the hook away again."""
    if not parameters:
        return lambda: None
    ours: dict[int, weakref.ref[torch.Tensor]] = {}
    looks = True

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal looks
        mine = [
            one
            for group in (optimizer.param_groups if looks else ())
            for one in group["params"]
            if id(one) in ours and ours[id(one)]() is one
        ]
        if not mine:
            return
        looks = False  # the hook stays, since PyTorch goes through all hooks now
        states: Mapping[Any, Any] = optimizer.state
        values = [value for one in mine for value in states.get(one, {}).values()]
        if any(isinstance(value, torch.Tensor) and value.is_meta for value in values):
            raise InvalidArgument(
                f"Pipeline: {type(optimizer).__name__} has loaded its state while the parameters were on the device 'meta', where a state has no "
                "values. Make it with trainer.optimizer(...), or load its state after the first call of the trainer."
            )

    handle = register_optimizer_step_pre_hook(before_step)

    def gone(key: int, _: object) -> None:
        ours.pop(key, None)
        if not ours:
            handle.remove()

    ours.update((id(one), weakref.ref(one, functools.partial(gone, id(one)))) for one in parameters)
    return handle.remove


def unfilled(module: nn.Module, blocks: Sequence[Block], init: Init | None) -> Unfilled | None:
    """What has to be filled by `init`. None if everything has memory."""
    fits = init is None or callable(init) or isinstance(init, str | os.PathLike)
    wanted = "give a function init(name, part), or the path of a state_dict that torch.save has written"
    require(fits, "Pipeline", "init", init, wanted)
    named = [*module.named_parameters(), *module.named_buffers()]
    name = next((name for name, one in named if one.is_meta), None)
    if name is None:
        return None
    if init is None:
        raise InvalidArgument(
            f"Pipeline: {name} is on the device 'meta', so it has no values. Give init=, a function init(name, part) that fills a part of the "
            "module once it has memory, or the path of a state_dict."
        )
    if not callable(init):
        return Unfilled(module, blocks, _from_file(init, {name for name, _ in named}))
    function = init
    return Unfilled(module, blocks, lambda name, part, tensors: function(name, part))


def on_meta(parts: Iterable[nn.Module]) -> list[torch.Tensor]:
    """The parameters and buffers of these modules that have no memory, each once."""
    found = [one for part in parts for slots in (part._parameters, part._buffers) for one in slots.values()]
    return list({id(one): one for one in found if one is not None and one.is_meta}.values())


def _from_file(path: str | os.PathLike[str], names: set[str]) -> Fill:
    """What fills parts from a state_dict on disk, of which it reads only these."""
    state: Mapping[str, torch.Tensor] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if names.isdisjoint(state):
        raise InvalidArgument(
            f"Pipeline: init is {os.fspath(path)!r}, which has none of the module's names. It has {', '.join(map(repr, list(state)[:3]))}; the "
            f"module has {', '.join(map(repr, sorted(names)[:3]))}. Save module.state_dict() alone, under these names."
        )

    def fill(name: str, part: nn.Module, tensors: Sequence[torch.Tensor]) -> None:
        before = f"{name}." if name else ""
        ours = {id(one) for one in tensors}
        for key, one in [*part.named_parameters(), *part.named_buffers()]:
            value = state.get(before + key)
            if value is None or id(one) not in ours:
                continue
            if value.shape != one.shape:
                raise InvalidArgument(
                    f"Pipeline: {before}{key} has shape {tuple(one.shape)}, but shape {tuple(value.shape)} in {os.fspath(path)!r}. Give init= the "
                    "state_dict of such a module."
                )
            one.copy_(value)

    return fill


def _allocate(tensors: Sequence[torch.Tensor], made: dict[int, _Made]) -> None:
    """Give memory to those of these tensors that have none, and values that show what is not filled."""
    for one in tensors:
        if one.is_meta:
            other = torch.empty_like(one, device="cpu", requires_grad=False)
            other.fill_(_marker(other))
            if isinstance(one, nn.Parameter):
                other = nn.Parameter(other, one.requires_grad)
            _swap(one, other)
            made[id(one)] = _Made(one, other, one._version)
