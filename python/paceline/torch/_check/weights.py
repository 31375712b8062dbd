"""Makes weights from the batch, as a user would write them. `check` tries whether the loss is a mean over one of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from paceline.torch._replicas.reach import closure_of

_F = nn.functional
_IGNORED = -100  # PyTorch's label for entries that do not count
_MOST_PADDINGS = 4

Tensors = list[tuple[str, torch.Tensor]]


class LossWatch(TorchFunctionMode):
    """Notes the class weights and ignored labels that classification losses are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[torch.Tensor] = []
        self.ignored: dict[int, None] = {_IGNORED: None}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (_F.cross_entropy, _F.nll_loss):
            given = inspect.signature(func).bind(*args, **kwargs).arguments
            weight = given.get("weight")
            if weight is not None and not any(weight is known for known in self.weights):
                self.weights.append(weight)
            self.ignored[given.get("ignore_index", _IGNORED)] = None
        return func(*args, **kwargs)


def known_tensors(loss_fn: Any, module: nn.Module) -> Tensors:
    """The tensors that `loss_fn` refers to, directly or in modules, with a name that the user knows."""
    found: list[tuple[str, Any]] = [("model", module)]
    waiting = [loss_fn]
    while waiting:
        function = waiting.pop()
        if isinstance(function, functools.partial):
            waiting.append(function.func)
            found += [("", value) for value in function.args] + list(function.keywords.items())
        elif inspect.ismethod(function):
            waiting.append(function.__func__)
            found += [(f"self.{name}", value) for name, value in _attributes(function.__self__)]
        elif inspect.isfunction(function):
            names = set(function.__code__.co_names)
            found += closure_of(function)
            found += [(name, value) for name, value in function.__globals__.items() if name in names]
        elif callable(function) and hasattr(function, "__dict__"):
            found += list(_attributes(function))
    tensors: Tensors = []
    for name, value in found:
        if isinstance(value, torch.Tensor):
            tensors.append((name, value))
        elif isinstance(value, nn.Module):
            inside = [*value.named_parameters(), *value.named_buffers()]
            tensors += [(f"{name}.{key}", tensor) for key, tensor in inside]
    return tensors


def _attributes(owner: Any) -> list[tuple[str, Any]]:
    return [*vars(owner).items(), *getattr(owner, "_modules", {}).items(), *getattr(owner, "_buffers", {}).items()]


def weights_of(tensors: Tensors, watch: LossWatch, known: Tensors) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Candidates: (an expression of `batch`, what it is in words, one number for each item)."""
    seen: list[torch.Tensor] = []
    for expression, described, values in _all(tensors, watch, known):
        values = values.detach().cpu()
        values = values.long() if values.dtype is torch.bool else values
        usable = bool(values.isfinite().all()) and bool((values >= 0).all()) and bool(values.any())
        # Equal weights are like no weights. Weights that were tried already are left out.
        if usable and bool((values != values[0]).any()) and not any(torch.equal(values, other) for other in seen):
            seen.append(values)
            yield expression, described, values


def _all(tensors: Tensors, watch: LossWatch, known: Tensors) -> Iterator[tuple[str, str, torch.Tensor]]:
    # Tensors with ignored labels come first, since in one batch other tensors may happen to give the same weights.
    def lacks_labels(entry: tuple[str, torch.Tensor]) -> bool:
        return not any(bool((entry[1] == label).any()) for label in watch.ignored)

    for path, tensor in sorted(tensors, key=lacks_labels):
        if tensor.is_complex():
            continue
        whole = not tensor.is_floating_point() and tensor.dtype is not torch.bool
        for inside, values in _shifted(path, tensor):
            add, end = _adding(values)
            if whole:
                for label in _paddings(values, watch):
                    yield f"({inside} != {label}){end}", f"the entries other than {label}", add(values != label)
                for name, weights in _class_weights(watch, known):
                    for taken, table in _looked_up(inside, values, name, weights, watch):
                        yield f"{taken}{end}", "the class weights of its labels", add(table)
            if tensor.dim() == 1 and tensor.dtype is not torch.bool:
                yield inside, "what it says of each item", values
                if whole:
                    yield f"({inside} - 1)", "what it says of each item, less one", values - 1
            else:
                yield f"{inside}{end}", "the sum of a mask", add(values)


def _looked_up(
    path: str, labels: torch.Tensor, name: str, weights: torch.Tensor, watch: LossWatch
) -> Iterator[tuple[str, torch.Tensor]]:
    """The class weights of the labels, of all labels or without ignored ones."""
    for label in (None, *watch.ignored):
        kept = torch.ones_like(labels, dtype=torch.bool) if label is None else labels != label
        valid = labels * kept
        if bool(kept.any()) and int(valid.min()) >= 0 and int(valid.max()) < len(weights):
            plain = f"{name}[{path}]"
            without = f"({name}[{path}.where({path} != {label}, 0)] * ({path} != {label}))"
            yield plain if label is None else without, weights.detach().cpu()[valid.cpu()] * kept.cpu()
            return


def _shifted(path: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The tensor, and the tensor without its first or last column: models that predict the next token drop one."""
    found = [(path, tensor)]
    if tensor.dim() > 1 and tensor.shape[1] > 1:
        found += [(f"{path}[:, 1:]", tensor[:, 1:]), (f"{path}[:, :-1]", tensor[:, :-1])]
    return found


def _adding(tensor: torch.Tensor) -> tuple[Callable[[torch.Tensor], torch.Tensor], str]:
    if tensor.dim() == 1:
        return lambda values: values, ""
    return lambda values: values.flatten(1).sum(1), ".sum(1)" if tensor.dim() == 2 else ".flatten(1).sum(1)"


def _paddings(values: torch.Tensor, watch: LossWatch) -> list[int]:
    """Labels that may mean "does not count": those of the losses, zero, and the first and last entries of rows."""
    edges = values.flatten(1)[:, [0, -1]].unique().tolist() if values.dim() > 1 and values.numel() else []
    return list(dict.fromkeys([*watch.ignored, 0, *edges[:_MOST_PADDINGS]]))


def _class_weights(watch: LossWatch, known: Tensors) -> list[tuple[str, torch.Tensor]]:
    named = [
        (name, one)
        for name, one in known
        if one.dim() == 1 and len(one) > 1 and one.is_floating_point() and not one.requires_grad
    ]
    used = [(next((name for name, one in named if one is weight), "class_weights"), weight) for weight in watch.weights]
    return used + [(name, one) for name, one in named if not any(one is weight for weight in watch.weights)]
