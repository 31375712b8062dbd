"""Nests of tensors and plain values, as JSON beside a list of named tensors."""

from __future__ import annotations

import math
import numbers
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from paceline import InvalidArgument

# JSON has no tensors, tuples and infinities, and its keys are strings. An object with one of these keys stands for what has none in JSON.
_TENSOR, _DICT, _COUNTER, _TUPLE, _FLOAT = "$tensor", "$dict", "$counter", "$tuple", "$float"
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_RESERVED = "__metadata__"  # a safetensors file has other things under this name


class Packed:
    """A nest, taken apart.

    `json` is what ``json.dumps`` takes, with names in the place of tensors. `tensors` by name, each once. A name is the path in the nest:
    ``state.0.exp_avg``. `aliases`: names of tensors that are the same memory as another one, with that one's name, as tied parameters are.
    """

    def __init__(self, nest: Any, call: str, what: str) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.aliases: dict[str, str] = {}
        self._call = call
        self._what = what
        self._names: dict[Any, str] = {}
        self.json = self._packed(nest, ())

    def _packed(self, value: Any, path: tuple[str, ...]) -> Any:
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, numbers.Integral):
            return int(value)
        if isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational):
            number = float(value)
            return number if math.isfinite(number) else {_FLOAT: repr(number)}
        if isinstance(value, Mapping):
            entries = [(key, self._packed(one, (*path, str(key)))) for key, one in value.items()]
            tag = _COUNTER if isinstance(value, Counter) else _DICT
            if tag is _DICT and all(type(key) is str and not key.startswith("$") for key, _ in entries):
                return dict(entries)
            return {tag: [[self._packed(key, path), one] for key, one in entries]}
        if isinstance(value, (list, tuple)):
            items = [self._packed(one, (*path, str(index))) for index, one in enumerate(value)]
            return {_TUPLE: items} if isinstance(value, tuple) else items
        raise self._refused(path, f"is a {type(value).__name__}. Tensors, numbers, strings, None, lists, tuples and ")

    def _tensor(self, tensor: torch.Tensor, path: tuple[str, ...]) -> dict[str, Any]:
        # A subclass may be without memory of its own, or mean something else by its values.
        if type(tensor) not in _PLAIN:
            raise self._refused(path, f"is a {type(tensor).__name__}. Plain tensors and ")
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise self._refused(path, f"is a {tensor.device.type} tensor of layout {tensor.layout}. Dense tensors and ")
        name = ".".join(filter(None, path)) or "value"
        while name in self.tensors or name == _RESERVED:
            name += "_"
        memory = (
            tensor.device,
            tensor.dtype,
            tensor.data_ptr(),
            tensor.shape,
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        known = self._names.setdefault(memory, name) if tensor.numel() else name
        if known != name:
            self.aliases[name] = known
        else:  # not every reader of such files knows complex numbers
            self.tensors[name] = (
                torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
            )
        return {_TENSOR: known, "complex": True} if tensor.is_complex() else {_TENSOR: known}

    def _refused(self, path: tuple[str, ...], why: str) -> InvalidArgument:
        where = ".".join((self._what, *path))
        return InvalidArgument(
            f"{self._call}: {where} {why}dictionaries of them can be saved, so that a load runs no code. Leave it out, or save what it is made "
            "of, such as its state_dict()."
        )


def unpacked(packed: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The nest whose `Packed.json` and `Packed.tensors` these are."""
    if isinstance(packed, list):
        return [unpacked(one, tensors) for one in packed]
    if not isinstance(packed, dict):
        return packed
    if _TENSOR in packed:
        tensor = tensors[packed[_TENSOR]]
        return torch.view_as_complex(tensor) if packed.get("complex") else tensor
    if _FLOAT in packed:
        return float(packed[_FLOAT])
    if _TUPLE in packed:
        return tuple(unpacked(packed[_TUPLE], tensors))
    for tag, made in ((_DICT, dict), (_COUNTER, Counter)):
        if tag in packed:
            return made({unpacked(key, tensors): unpacked(one, tensors) for key, one in packed[tag]})
    return {key: unpacked(one, tensors) for key, one in packed.items()}
