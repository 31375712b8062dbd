"""Ranges of parameters in the memory of the GPUs that update them, and what can be divided into such ranges."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch

_KINDS = (torch.Tensor, torch.nn.Parameter)  # PyTorch runs other code for subclasses
# Bytes of state for each byte of a parameter where nothing is known yet, and of the update's intermediate results.
_STATE_SIZES, _WORKING_SIZES = 2, 1


@dataclasses.dataclass
class Piece:
    """A range of a parameter, in the memory of the GPU that updates it."""

    parameter: torch.Tensor
    begin: int
    end: int
    whole: bool
    # Without data: how the parameter lay in memory when it was cut, which says what the range contains.
    layout: torch.Tensor
    tensor: torch.Tensor  # at home a part of the parameter itself, elsewhere of the replica's
    gradient: torch.Tensor | None  # where the gradient is copied to; None at home

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same range of a tensor like the parameter."""
        if self.whole:
            return tensor
        return tensor.as_strided((self.end - self.begin,), (1,), tensor.storage_offset() + self.begin)

    @property
    def byte_count(self) -> int:
        return (self.end - self.begin) * self.parameter.element_size()

    def address(self, tensor: torch.Tensor) -> int:
        """Where the same range of a tensor like the parameter begins."""
        return tensor.data_ptr() + self.begin * tensor.element_size()


@dataclasses.dataclass
class Owner:
    """A GPU with the ranges that it updates in one round."""

    device: int
    round: int
    at_home: bool
    groups: list[list[torch.Tensor]]  # the pieces of each group of parameters
    state: defaultdict[torch.Tensor, Any] = dataclasses.field(default_factory=lambda: defaultdict(dict))
    options: dict[Any, torch.Tensor] = dataclasses.field(default_factory=dict)  # tensors among the options


def bytes_each(groups: list[dict[str, Any]]) -> int:
    """What an owner needs for each element of its range."""
    size: int = max(one.element_size() for group in groups for one in group["params"])
    amsgrad = any(group.get("amsgrad") for group in groups)
    return size * (_STATE_SIZES + amsgrad + _WORKING_SIZES + 1)  # 1: the gradient


def bytes_of(values: dict[str, Any]) -> int:
    return sum(
        value.numel() * value.element_size() for value in values.copy().values() if isinstance(value, torch.Tensor)
    )


def has_plain_gradient(parameter: torch.Tensor) -> bool:
    """Whether the gradient, if there is one, is like the parameter in memory."""
    gradient = parameter.grad
    return gradient is None or (
        gradient.layout is torch.strided
        and (gradient.dtype, gradient.device) == (parameter.dtype, parameter.device)
        and (gradient.stride() == parameter.stride() or (gradient.is_contiguous() and parameter.is_contiguous()))
    )


def why_uncut(parameters: list[torch.Tensor]) -> str:
    """Why they cannot be cut. Empty: each is a plain tensor without gaps, in memory of its own."""
    for one in parameters:
        if type(one) not in _KINDS:
            return f"a parameter is a {type(one).__name__}, a subclass of Tensor that may do anything"
        if torch.empty_like(one, device="meta").stride() != one.stride():
            return f"a parameter of shape {tuple(one.shape)} has strides {one.stride()}, with gaps or overlaps"
    spans = sorted((one.data_ptr(), one.data_ptr() + one.numel() * one.element_size()) for one in parameters)
    return "" if all(end <= begin for (_, end), (begin, _) in pairwise(spans)) else "parameters overlap in memory"
