"""Makes a device's own copy of the user's module, with the user's parameters inside."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch._replicas.attributes import align, align_hooks
from paceline.torch._replicas.compiled import carry_compiled
from paceline.torch._replicas.functions import Functions, Seen, detach
from paceline.torch._replicas.parametrized import give_own_cache
from paceline.torch._replicas.reach import Reach

Replicate = Callable[[nn.Module], nn.Module]

_ALIGNMENT = 256  # bytes, enough for all kernels

# Makes the tensor that a device's module has in the place of a parameter, with storage in the device's memory space.
Alias = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Copied:
    """A device's module. `counterparts` maps the identity of each of the user's modules, parameters and plain objects to the device's."""

    module: nn.Module
    counterparts: dict[int, Any]
    seen: list[Seen] | None = None  # of functions that were made again, if the module was copied


def alias_of(parameter: torch.Tensor, storage: torch.Tensor | None = None) -> torch.Tensor:
    """A leaf with the parameter's storage (or `storage`), its version counter, and a ``.grad`` of its own.

    ``detach`` shares the version counter, so a write in place during a step is noticed. Assigning ``.data`` would not share it.
    """
    source = parameter if storage is None else storage
    if not isinstance(parameter, nn.Parameter):  # a plain tensor that requires a gradient
        return source.detach().requires_grad_(parameter.requires_grad)
    alias = nn.Parameter(source.detach(), requires_grad=parameter.requires_grad)
    if type(parameter) is not nn.Parameter:
        alias.__class__ = type(parameter)
    return alias


def in_one_piece(parameters: Sequence[torch.Tensor], place: torch.device) -> list[torch.Tensor]:
    """Memory for a copy of each, one behind the other. Each has a version counter of its own: a write to it is no write to the others."""
    ends = list(itertools.accumulate(_ALIGNMENT * math.ceil(one.nbytes / _ALIGNMENT) for one in parameters))
    flat = torch.empty(ends[-1], dtype=torch.uint8, device=place)
    views = []
    for one, begin in zip(parameters, [0, *ends], strict=False):
        part = flat[begin : begin + one.nbytes].view(one.dtype)
        views.append(part.as_strided(one.shape, one.stride(), part.storage_offset()).data)
    return views


def named_slots(module: nn.Module) -> list[tuple[str, dict[str, Any], str, nn.Parameter]]:
    """Every place of a parameter, tied ones included: (qualified name, the module's dict, the name in it, the parameter)."""
    slots = []
    for prefix, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                slots.append((f"{prefix}.{name}" if prefix else name, owner._parameters, name, parameter))
    return slots


def check_trainable(module: nn.Module, reach: Reach, shared: bool) -> None:
    """Raise for modules and parameters that this library cannot train, with the reason."""
    for name, part in reach.modules:
        if isinstance(part, torch.jit.ScriptModule):
            raise InvalidArgument(
                f"paceline: {f'submodule {name}' if name else 'the module'} is a torch.jit.ScriptModule, which keeps its parameters out of "
                "reach of Python, so replicas could not share them. Pass the module it was made from; torch.compile(module) is supported."
            )
    for name, parameter in (*module.named_parameters(), *reach.unregistered.items()):
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise InvalidArgument(
                f"paceline: parameter {name} is not initialised yet (a lazy module). Run one forward pass first."
            )
    for name, buffer in module.named_buffers():
        if shared and buffer.requires_grad:
            raise InvalidArgument(
                f"paceline: buffer {name} requires a gradient. Every device has buffers of its own, so the gradient would be lost. Make it "
                "a parameter, or use one device."
            )


def check_hooks(name: str, parameter: torch.Tensor) -> None:
    """Raise for a parameter with a gradient hook. Copies of the parameter would silently lose it."""
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise InvalidArgument(
            f"paceline: parameter {name} has a gradient hook. With two or more devices it would see the gradient of a slice, not of "
            "the batch, so it is refused. loss = trainer.loss(...); loss.backward() calls it once, with the gradient of the batch. Or remove "
            "it and work on .grad after step(), or use one device."
        )


def check_sent(name: str, parameter: torch.Tensor, where: str) -> None:
    """Raise for a parameter that cannot be copied to this device as bytes."""
    if not parameter.is_contiguous() and torch.empty_like(parameter).stride() != parameter.stride():
        raise InvalidArgument(
            f"paceline: parameter {name} of shape {tuple(parameter.shape)} has strides {parameter.stride()}, with gaps or overlaps; "
            f"such memory is not sent to {where}. Make it contiguous, or use devices that share its memory."
        )


def copied(
    module: nn.Module, reach: Reach, alias: Alias, common: Mapping[int, Any], *, detaches: bool = False
) -> Copied:
    """A deep copy of the module. It shares the parameters, registered or found by `reach`, and has what `common` says in the place of other data.

    `detaches`: whether tensors with a graph are copied without it, which a proof has to see the effect of. Otherwise they are refused, but for those
    that old hooks of `torch.nn.utils` compute anew in each forward: weight_norm, spectral_norm and pruning.
    """
    parameters = [*module.parameters(), *reach.unregistered.values()]
    memo: dict[int, Any] = {**common, **{id(parameter): alias(parameter) for parameter in parameters}}
    for one in (*(part for _, part in reach.modules), *reach.objects.values()):
        # weight from weight_orig or weight_g
        computed = {key.rpartition("_")[0] for key in vars(one).get("_parameters") or ()}
        detach([value for name, value in vars(one).items() if detaches or name in computed], memo)
    wanted = [*parameters, *(part for _, part in reach.modules), *reach.objects.values()]
    try:
        made = copy.deepcopy(module, memo)
        counterparts = {id(one): memo[id(one)] for one in wanted if id(one) in memo}
        functions = Functions(counterparts)
        for one in (*(part for _, part in reach.modules), *reach.objects.values()):
            if id(one) in counterparts:
                functions.give(one, counterparts[id(one)])
    except Exception as error:
        raise InvalidArgument(
            f"paceline: the module cannot be copied for a second device: {_culprit(module, error)}. Give replicate=, a callable that "
            "takes the module and returns a new one of the same structure; the user's parameters are put into it."
        ) from error
    give_own_cache([counterparts[id(part)] for _, part in reach.modules if id(part) in counterparts])
    for _, part in reach.modules:
        if id(part) in counterparts:
            carry_compiled(part, counterparts[id(part)])
    return Copied(made, counterparts, functions.seen)  # nothing else holds parameters (`Arrivals` counts who does)


def _culprit(module: nn.Module, error: Exception) -> str:
    """Name the attribute of the submodule that cannot be copied."""
    for prefix, owner in module.named_modules():
        memo: dict[int, Any] = {id(parameter): parameter for parameter in module.parameters()}
        memo.update({id(child): child for child in owner.children()})
        memo[id(owner)] = owner
        elsewhere = ("_parameters", "_modules", "_buffers")
        contents = {name: value for name, value in vars(owner).items() if name not in elsewhere} | owner._buffers
        for name, content in contents.items():
            try:
                copy.deepcopy(content, memo)
            except Exception as reason:
                path = f"{prefix}.{name}" if prefix else name
                return f"attribute '{path}' ({type(content).__name__}): {reason}"
    return str(error)


def made_by(replicate: Replicate, module: nn.Module, reach: Reach, alias: Alias) -> Copied:
    """The module that the user's function returns, with the parameters put into it by name."""
    if reach.leads_out:
        unregistered = next(iter(reach.unregistered), None) or reach.modules[-1][0]
        raise InvalidArgument(
            f"paceline: {unregistered} is not registered with the module, so it has no name by which it could be found in what "
            "replicate(module) returns. Keep modules in nn.ModuleList or nn.ModuleDict, parameters in nn.ParameterList or as attributes."
        )
    replica = replicate(module)
    if not isinstance(replica, nn.Module) or replica is module:
        raise InvalidArgument("paceline: replicate(module) must return a new nn.Module, not the module itself.")
    _check_same_names(module, replica)
    parts = dict(replica.named_modules(remove_duplicate=False))  # which may have been registered in another order
    counterparts: dict[int, Any] = {id(part): parts[name] for name, part in module.named_modules()}
    slots_of = {name: (slots, key) for name, slots, key, _ in named_slots(replica)}
    for name, _, _, parameter in named_slots(module):
        slots, key = slots_of[name]
        if slots[key].shape != parameter.shape:
            raise InvalidArgument(
                f"paceline: what replicate(module) returned has no parameter {name} of shape {tuple(parameter.shape)}."
            )
        if id(parameter) not in counterparts:
            counterparts[id(parameter)] = alias(parameter)
        slots[key] = counterparts[id(parameter)]
    objects = Reach(replica).objects
    counterparts |= {
        id(one): objects[path] for path, one in reach.objects.items() if type(objects.get(path)) is type(one)
    }
    for one in (*(part for _, part in reach.modules), *reach.objects.values()):
        if id(one) in counterparts:
            align(one, counterparts[id(one)])
    for _, part in reach.modules:
        align_hooks(part, counterparts[id(part)], counterparts)
    give_own_cache(list(replica.modules()))
    return Copied(replica, counterparts)


def _check_same_names(module: nn.Module, replica: nn.Module) -> None:
    def names(module: nn.Module) -> dict[str, set[str]]:
        return {
            "parameter": {name for name, *_ in named_slots(module)},
            "buffer": {name for name, _ in module.named_buffers(remove_duplicate=False)},
            "submodule": {name for name, _ in module.named_modules(remove_duplicate=False)},
        }

    for (kind, ours), theirs in zip(names(module).items(), names(replica).values(), strict=True):
        problems = [f"lacks {name}" for name in sorted(ours - theirs)]
        problems += [f"has {name}, which the module has not" for name in sorted(theirs - ours)]
        if problems:
            raise InvalidArgument(
                f"paceline: what replicate(module) returned must have the same {kind}s as the module, by name; it {', '.join(problems[:3])}."
            )
