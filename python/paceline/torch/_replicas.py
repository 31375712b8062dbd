"""Replicas: modules of their own for every device, with the user's parameters inside."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch._buffers import Buffers
from paceline.torch._places import Places

Replicate = Callable[[nn.Module], nn.Module]

# Looked at before every step, of every parameter and module: through map(), without a line of Python for each.
_data_ptr: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_requires_grad = operator.attrgetter("requires_grad")
_hooks = operator.attrgetter("_backward_hooks")
_late_hooks = operator.attrgetter("_post_accumulate_grad_hooks")
_training = operator.attrgetter("training")
_contents = operator.attrgetter("_parameters", "_buffers", "_modules")


# What a device's module has in a parameter's place: made from the parameter and its storage in the device's memory space.
Alias = Callable[[nn.Parameter], nn.Parameter]


def alias_of(parameter: nn.Parameter, storage: torch.Tensor | None = None) -> nn.Parameter:
    """A leaf with the parameter's storage (or the given one) and its version counter, and a ``.grad`` of its own.

    ``detach`` shares the version counter, so a write in place during a step is noticed; assigning ``.data`` would not.
    """
    source = parameter if storage is None else storage
    alias = nn.Parameter(source.detach(), requires_grad=parameter.requires_grad)
    if type(parameter) is not nn.Parameter:
        alias.__class__ = type(parameter)
    return alias


def named_slots(module: nn.Module) -> list[tuple[str, dict[str, Any], str, nn.Parameter]]:
    """Every place that holds a parameter, tied ones included: (qualified name, the module's dict, the name in it, the parameter)."""
    slots = []
    for prefix, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                slots.append((f"{prefix}.{name}" if prefix else name, owner._parameters, name, parameter))
    return slots


def check_trainable(module: nn.Module, shared: bool) -> None:
    """Raise for modules and parameters that this library cannot train, with the reason."""
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise InvalidArgument(
                f"DataParallel: {f'submodule {name}' if name else 'the module'} is a torch.jit.ScriptModule, which keeps its parameters out of "
                "reach of Python, so replicas could not share them. Pass the module it was made from; torch.compile(module) is supported."
            )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise InvalidArgument(
                f"DataParallel: parameter {name} is not initialised yet (a lazy module). Run one forward pass first."
            )
        if shared:
            check_hooks(name, parameter)


def check_hooks(name: str, parameter: nn.Parameter) -> None:
    """Raise for a parameter with a gradient hook. Copies do not carry them, so they would be lost without a word."""
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise InvalidArgument(
            f"DataParallel: parameter {name} has a gradient hook. With two or more devices it would see the gradient of a slice, not of "
            "the batch, so it is refused. Remove it and work on .grad after step(), or use one device."
        )


def _copied(module: nn.Module, alias: Alias) -> nn.Module:
    memo: dict[int, Any] = {id(parameter): alias(parameter) for parameter in module.parameters()}
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise InvalidArgument(
            f"DataParallel: the module cannot be copied for a second device: {_culprit(module, error)}. Give replicate=, a callable that "
            "takes the module and returns a new one of the same structure; the user's parameters are put into it."
        ) from error


def _culprit(module: nn.Module, error: Exception) -> str:
    """Which attribute of which submodule refuses to be copied."""
    for prefix, owner in module.named_modules():
        memo: dict[int, Any] = {id(parameter): parameter for parameter in module.parameters()}
        memo.update({id(child): child for child in owner.children()})
        memo[id(owner)] = owner
        for name, value in vars(owner).items():
            if name in ("_parameters", "_modules"):
                continue
            entries = value.items() if name == "_buffers" else [(name, value)]
            for entry, content in entries:
                try:
                    copy.deepcopy(content, memo)
                except Exception as reason:
                    path = f"{prefix}.{entry}" if prefix else entry
                    return f"attribute '{path}' ({type(content).__name__}): {reason}"
    return str(error)


def _made_by(replicate: Replicate, module: nn.Module, alias: Alias) -> nn.Module:
    replica = replicate(module)
    if not isinstance(replica, nn.Module) or replica is module:
        raise InvalidArgument("DataParallel: replicate(module) must return a new nn.Module, not the module itself.")
    theirs = {name: (slots, key, parameter) for name, slots, key, parameter in named_slots(replica)}
    ours = named_slots(module)
    _check_same("parameter", {name for name, *_ in ours}, set(theirs))
    _check_same("buffer", _buffer_names(module), _buffer_names(replica))
    _check_same("submodule", _module_names(module), _module_names(replica))
    aliases: dict[int, nn.Parameter] = {}
    for name, _, _, parameter in ours:
        if theirs[name][2].shape != parameter.shape:
            raise InvalidArgument(
                f"DataParallel: what replicate(module) returned has no parameter {name} of shape {tuple(parameter.shape)}."
            )
        slots, key, _ = theirs[name]
        slots[key] = aliases.setdefault(id(parameter), alias(parameter))
    return replica


def _buffer_names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_buffers(remove_duplicate=False)}


def _module_names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_modules(remove_duplicate=False)}


def _check_same(kind: str, ours: set[str], theirs: set[str]) -> None:
    problems = [f"lacks {name}" for name in sorted(ours - theirs)] + [
        f"has {name}, which the module has not" for name in sorted(theirs - ours)
    ]
    if problems:
        raise InvalidArgument(
            f"DataParallel: what replicate(module) returned must have the same {kind}s as the module, by name; it {', '.join(problems[:3])}."
        )


def modules_by_name(source: nn.Module, replica: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """The submodules of both that belong together: replicate() may have registered them in another order."""
    theirs = dict(replica.named_modules(remove_duplicate=False))
    return [(module, theirs[name]) for name, module in source.named_modules()]


class Replica:
    """One device's module. `parameters` are in the order of the user's ``module.parameters()``."""

    def __init__(self, module: nn.Module, source: nn.Module, shared: bool) -> None:
        self.module = module
        self.shared = shared  # False: it is the user's module itself
        by_name = dict(module.named_parameters(remove_duplicate=False))
        self.parameters = [by_name[name] for name, _ in source.named_parameters()]
        pairs = modules_by_name(source, module)
        self.modules = [theirs for _, theirs in pairs]
        self.buffers = Buffers(pairs) if shared else None
        self._buffer_slots = [(one._buffers, name) for one in self.modules for name in one._buffers]

    def buffer_marks(self) -> list[tuple[int, int]]:
        """Other ones after a buffer was set or written to, by other means than ``.data`` or batch normalisation."""
        found = (slots.get(name) for slots, name in self._buffer_slots)
        return [(id(buffer), 0 if buffer is None or buffer.is_inference() else buffer._version) for buffer in found]

    def follow(self, requires_grad: list[bool], training: list[bool]) -> None:
        """Be as the user's parameters, modules and buffers are."""
        if list(map(_requires_grad, self.parameters)) != requires_grad:
            for parameter, wanted in zip(self.parameters, requires_grad, strict=True):
                parameter.requires_grad_(wanted)
        if list(map(_training, self.modules)) != training:
            for module, mode in zip(self.modules, training, strict=True):
                module.training = mode
        if self.buffers is not None:
            self.buffers.pull()

    def clear_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


class Replicas:
    """The replicas of one trainer, and whether they still fit the user's module."""

    def __init__(self, module: nn.Module, places: Places, replicate: Replicate | None) -> None:
        self._module = module
        self._places = places
        self._device_count = len(places)
        self.shared = len(places) > 1  # False: the user's module itself runs
        self._replicate = replicate
        self.list: list[Replica] = []
        self.generation = 0  # counts how often they were made
        with torch.inference_mode(False):
            self._build()

    def _build(self) -> None:
        shared = self._device_count > 1
        check_trainable(self._module, shared)
        # First what can fail: replicas that do not fit must not pass for the ones that do.
        if shared:
            copies = self._copies()
            made = [self._make(device, copies) for device in range(self._device_count)]
            self._send(copies)
        else:
            made = [Replica(self._module, self._module, False)]
        self.list = made
        self.generation += 1
        self.parameters = list(self._module.parameters())
        self.names = [name for name, _ in self._module.named_parameters()]
        self._modules = list(self._module.modules())
        self.norms = [module for module in self._modules if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        self._dicts = self._all_dicts()
        self._keys = list(map(list, self._dicts))
        self._entries = self._all_entries()
        self._storages = list(map(_data_ptr, self.parameters))

    def _copies(self) -> dict[int, dict[int, torch.Tensor]]:
        """Of each memory space that is not home, by the identity of the parameter: where its copy goes."""
        copies: dict[int, dict[int, torch.Tensor]] = {}
        for device, space in enumerate(self._places.spaces):
            if space == self._places.home_space or space in copies:
                continue
            copies[space] = {
                id(parameter): self._like(parameter, name, device)
                for name, parameter in self._module.named_parameters()
            }
        return copies

    def _like(self, parameter: nn.Parameter, name: str, device: int) -> torch.Tensor:
        place = self._places.devices[device]
        if place.type == "cpu" and self._places.home.type != "cpu":
            like = self._places.pinned(parameter.numel(), parameter.dtype).as_strided(
                parameter.shape, parameter.stride()
            )
        else:
            like = torch.empty_like(parameter, device=place, requires_grad=False)
        dense = parameter.is_contiguous() or torch.empty_like(parameter).stride() == parameter.stride()
        if not dense:
            raise InvalidArgument(
                f"DataParallel: parameter {name} of shape {tuple(parameter.shape)} has strides {parameter.stride()}, with gaps or overlaps; "
                f"such memory is not sent to {self._places.names[device]}. Make it contiguous, or use devices that share its memory."
            )
        return like

    def _make(self, device: int, copies: dict[int, dict[int, torch.Tensor]]) -> Replica:
        storages = copies.get(self._places.spaces[device], {})

        def alias(parameter: nn.Parameter) -> nn.Parameter:
            return alias_of(parameter, storages.get(id(parameter)))

        if self._replicate is None:
            made = _copied(self._module, alias)
        else:
            made = _made_by(self._replicate, self._module, alias)
        if storages:
            for owner in made.modules():
                for name, buffer in owner._buffers.items():
                    if buffer is not None:
                        owner._buffers[name] = buffer.to(self._places.devices[device])
        return Replica(made, self._module, True)

    def _send(self, copies: dict[int, dict[int, torch.Tensor]]) -> None:
        """From now on every step begins by bringing the parameters there."""
        if self._places.queues is None:
            return
        parameters = {id(parameter): parameter for parameter in self._module.parameters()}
        self._places.queues.set_copies(
            [
                (space, copy.data_ptr(), parameters[key].data_ptr(), copy.numel() * copy.element_size())
                for space, storages in copies.items()
                for key, copy in storages.items()
            ]
        )
        self._sent = copies  # the queues have their addresses only

    def release(self) -> None:
        """Let go of the modules of the devices; the user's own stays."""
        self.list = self.list if self._device_count == 1 else []
        self._sent = {}

    def refresh(self) -> None:
        """Before a step: follow what the user changed on the module. Costs a pass over cached lists.

        Not in inference mode, which the caller may be in for `predict`: what is made in it is of no use to a later step.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.refresh()
        with torch.no_grad():
            self._refresh()

    def _refresh(self) -> None:
        if not self._fits():
            self._places.drain()  # they may still be at what is about to go
            self._build()
        if self._device_count == 1:
            return
        if any(map(_hooks, self.parameters)) or any(map(_late_hooks, self.parameters)):
            for name, parameter in zip(self.names, self.parameters, strict=True):
                check_hooks(name, parameter)
        requires_grad, training = list(map(_requires_grad, self.parameters)), list(map(_training, self._modules))
        for replica in self.list:
            replica.follow(requires_grad, training)

    def _fits(self) -> bool:
        """Whether structure, identity and storage of the parameters are those that the replicas were made from."""
        return (
            all(map(operator.is_, self._all_dicts(), self._dicts))
            and list(map(list, self._dicts)) == self._keys
            and all(map(operator.is_, self._all_entries(), self._entries))
            and list(map(_data_ptr, self.parameters)) == self._storages
        )

    def _all_dicts(self) -> list[dict[str, Any]]:
        """Of each module the parameters, the buffers and the submodules, by name."""
        return list(chain.from_iterable(map(_contents, self._modules)))

    def _all_entries(self) -> list[Any]:
        """Every parameter (None where one may be set later) and every submodule, in the order of the modules."""
        parameters, modules = self._dicts[::3], self._dicts[2::3]
        return list(chain(*map(dict.values, parameters), *map(dict.values, modules)))


def is_compiled(module: nn.Module) -> bool:
    """Whether `module` or a part of it runs through ``torch.compile``."""
    return any(
        type(part).__name__ == "OptimizedModule" or getattr(part, "_compiled_call_impl", None) is not None
        for part in module.modules()
    )


def is_compiled_function(fn: Any) -> bool:
    """Whether `fn` is what ``torch.compile`` returned for a function."""
    return getattr(fn, "_torchdynamo_orig_callable", None) is not None
