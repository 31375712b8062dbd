"""What makes `DataParallel` a `torch.nn.Module`, in place of `torch.nn.DataParallel`."""

from __future__ import annotations

import functools
import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from paceline import InvalidArgument
from paceline.torch._trainer.passes import Passes

_T = TypeVar("_T", bound="AsModule")
_STATE = frozenset(vars(nn.Module()))  # ``training``, the dictionaries of parameters, of hooks, and so on


class AsModule(nn.Module):
    """An `nn.Module` without a state of its own: it stands for `module`, whose parameters, mode, hooks and keys are also its own.

    `nn.Module.__init__` is not called. So what PyTorch keeps on each module is found on the wrapped one, by `__getattr__`.
    """

    module: nn.Module
    _passes: Passes
    _dim: int
    _output_device: torch.device | None
    _arguments: dict[str, Any]  # those of the constructor, but for the module
    _touched = False  # whether one of the trainer's methods was called
    _is_unused: Callable[[], bool]  # whether `devices` is "auto", and nothing has run
    predict: Callable[..., Any]
    close: Callable[[], None]

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)  # a property raised this error; it comes once more, unchanged
        module = vars(self).get("module")
        if module is not None:
            if name in _STATE or name in _registered(module):
                return getattr(module, name)
            if hasattr(module, name):
                raise AttributeError(
                    f"{type(self).__name__} has no attribute {name!r}, but its module has: use .module.{name}"
                )
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if "_passes" not in vars(self):  # under construction: the parts of the trainer
            object.__setattr__(self, name, value)
        elif name == "module":
            raise AttributeError(f"{type(self).__name__}: module cannot be replaced. Make a new {type(self).__name__}.")
        elif name in vars(self) or isinstance(value, AsModule):
            object.__setattr__(self, name, value)
        elif isinstance(value, (nn.Module, nn.Parameter)) or name in _STATE or name in _registered(self.module):
            setattr(self.module, name, value)
        else:
            object.__setattr__(self, name, value)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.forward(*arguments, **options)  # hooks are the module's, and the replicas run them

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Workers cannot be copied. A copy, also one on a disk, is of the plain module, and needs no paceline.
        return operator.getitem, ([self.module], 0)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """What ``module(*arguments, **options)`` returns for the whole batch. ``model(x)`` calls it.

        Tensors among the arguments are split along `dim`, and so are the outputs put together. The caller computes any loss from them. Its ``backward`` sends
        each device the gradients of its part, and gives parameters, and inputs that require it, the gradient of one device. So a loss may couple
        the items of the batch, as contrastive losses do.

        Each device runs its share as one micro-batch, since the graph of the whole batch stays alive until the backward, and all outputs come to one
        device. `step` and `loss` need neither. Where no gradients are wanted, as under ``torch.no_grad()``, the call is `predict`. ``backward`` may run once for each
        forward. With ``create_graph=True`` it raises.

        Raises
        ------
        InvalidArgument
            If no argument has items to split, or if an output has no row per item. The message says which. With `group` or `reducer`, since ranks meet in `step`
            and `loss` only.
        Exception
            What the module raised on a worker, with a note that names the device.
        """
        along = None if self._dim == 0 else self._dim
        batch, call = (arguments, options), _call if along is None else functools.partial(_call_along, along)
        batch = batch if along is None else _moved(batch, along, 0)
        outputs = self._passes.forward(call, batch) if torch.is_grad_enabled() else self.predict(call, batch)
        if along is not None:
            outputs = _moved(outputs, 0, along)
        target = self._output_device
        return outputs if target is None else tree_map_only(torch.Tensor, lambda one: one.to(target), outputs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights: a ``state_dict()`` of the plain module, or one whose keys begin with ``module.``, as `torch.nn.DataParallel` saves them."""
        if {"random", "steps", "version"} <= state_dict.keys():
            raise InvalidArgument(
                "load_state_dict: this is the state of a training run, which training_state() returns and earlier versions returned as state_dict(). "
                "Use load_training_state(state). load_state_dict is for the weights."
            )
        state: Any = OrderedDict(state_dict)
        metadata = getattr(state_dict, "_metadata", None)
        if _strip(self.module, state, "") and metadata is not None:
            metadata = {key.removeprefix("module").removeprefix("."): value for key, value in metadata.items()}
        if metadata is not None:
            state._metadata = OrderedDict(metadata)
        return self.module.load_state_dict(state, strict, assign)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any, **options: Any) -> None:
        """An outer module calls this, and then loads the children, from the same dictionary."""
        _strip(self.module, state_dict, prefix)
        self.module._load_from_state_dict(state_dict, prefix, *arguments, **options)

    def _apply(self: _T, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> _T:
        """``to``, ``cuda``, ``half`` and the like end here. What leaves device and type as they are is done."""
        module, kind = self.module, type(self).__name__
        for name, one in [*module.named_parameters(), *module.named_buffers()]:
            probe = one.detach().new_empty(0)
            became = fn(probe)
            if became.device == probe.device and became.dtype == probe.dtype:
                continue
            if not self._is_unused():
                raise InvalidArgument(
                    f"{kind}: {name} is {probe.dtype} on {probe.device}, and would become {became.dtype} on {became.device}, away from the devices that "
                    f"train it. Move the module before it is wrapped: {kind}(module.to(...)). Or close() this one, move the module, and make a new {kind}."
                )
            self.close()
            module._apply(fn, recurse)
            # Its parts are those of a new one: "auto" follows the module.
            vars(self).update(vars(type(self)(module, **self._arguments)))
            return self
        module._apply(fn, recurse)
        return self


def _of_module(name: str, *, chained: bool) -> Callable[..., Any]:
    """A method of `nn.Module` that is called on the wrapped module, which may have its own. `chained`: it returns its object."""

    @functools.wraps(getattr(nn.Module, name))
    def call(self: AsModule, /, *arguments: Any, **options: Any) -> Any:
        found = getattr(self.module, name)(*arguments, **options)
        return self if chained else found

    return call


_CHAINED = ("apply", "eval", "requires_grad_", "train")
_CALLED = (
    *("add_module", "compile", "get_buffer", "get_extra_state", "get_parameter", "get_submodule"),
    *("named_buffers", "named_modules", "named_parameters", "parameters", "set_extra_state", "set_submodule"),
    *("state_dict", "zero_grad", *(name for name in vars(nn.Module) if name.startswith("register_"))),
)
for _name in (*_CHAINED, *_CALLED):
    setattr(AsModule, _name, _of_module(_name, chained=_name in _CHAINED))


def _registered(module: nn.Module) -> set[str]:
    return {*module._parameters, *module._buffers, *module._modules}


def _call(module: nn.Module, part: Any) -> Any:
    arguments, options = part
    return module(*arguments, **options)


def _call_along(dim: int, module: nn.Module, part: Any) -> Any:
    return _moved(_call(module, _moved(part, 0, dim)), dim, 0)


def _moved(nest: Any, source: int, destination: int) -> Any:
    """With this dimension of each tensor at another place. Tensors that have too few stay as they are."""
    least = max(source, destination)
    return tree_map_only(torch.Tensor, lambda one: one.movedim(source, destination) if one.dim() > least else one, nest)


def _strip(module: nn.Module, state: Any, prefix: str) -> bool:
    """Take ``module.`` away behind `prefix`, if all keys there have it and the module's own have not. Whether it was."""
    keys = [key for key in state if key.startswith(prefix)]
    longer = f"{prefix}module."
    own = {name for name, _ in [*module.named_parameters(), *module.named_buffers()]}
    if not keys or not all(key.startswith(longer) for key in keys) or any(key[len(prefix) :] in own for key in keys):
        return False
    for key in list(state):  # all of them, so that the order stays
        value = state.pop(key)
        state[f"{prefix}{key[len(longer) :]}" if key.startswith(longer) else key] = value
    return True
