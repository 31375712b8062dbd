"""Which PyTorch functions draw random numbers, and a function mode that makes them draw from another generator than the global one.

`DrawMode` is pushed on a thread. It turns each call that draws into a `Draw` and asks its `Source` for the result. The source calls the draw
with a generator. Functions that draw but take no generator run as they are, after `Source.unreached` got their name.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_F = nn.functional
_Tensor = torch.Tensor

Draw = Callable[[torch.Generator], Any]  # one call that draws, with a generator to draw from


class Source(Protocol):
    """Where a `DrawMode` gets random numbers from."""

    def draw(self, draw: Draw) -> Any:
        """The result of the call."""

    def unreached(self, name: str) -> None:
        """Note that a function of that name is about to draw from the global generator, which no mode can change."""

    def given(self, generator: torch.Generator) -> None:
        """Note that a call is about to draw from a generator of the caller."""


def _with_generator(func: Any, args: Any, kwargs: Any) -> Draw:
    return lambda generator: func(*args, **kwargs, generator=generator)


def _factory(func: Any, args: Any, kwargs: Any) -> Draw | None:
    """Handle calls that make a tensor of a size."""
    on_host = torch.device(kwargs.get("device") or "cpu").type == "cpu"
    return _with_generator(func, args, kwargs) if on_host else None


def _like(func: Any, args: Any, kwargs: Any) -> Draw | None:
    """Handle the calls in `_FILLS`, which make a tensor of random numbers in the shape of their first argument."""
    others = dict(kwargs)
    like = args[0] if args else others.pop("input")
    bounds = [*args[1:], *(others.pop(name) for name in ("low", "high") if name in others)]
    if not _is_plain(like) or torch.device(others.get("device") or "cpu").type != "cpu":
        return None
    fill, make = _FILLS[func]
    if fill is _Tensor.random_ and len(bounds) == 1:
        bounds = [0, *bounds]
    if _transformed():
        sized = {"dtype": like.dtype, **others}
        sized.pop("memory_format", None)
        return lambda generator: make(*bounds, like.shape, **sized, generator=generator)
    return lambda generator: fill(torch.empty_like(like, **others), *bounds, generator=generator)


def _in_place(func: Any, args: Any, kwargs: Any) -> Draw | None:
    """Handle methods that fill their tensor."""
    return _with_generator(func, args, kwargs) if _is_plain(args[0]) else None


def _by_tensor(func: Any, args: Any, kwargs: Any) -> Draw | None:
    """Handle calls whose numbers depend on the entries of a tensor."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, _Tensor)]
    return _with_generator(func, args, kwargs) if all(map(_is_plain, tensors)) else None


def _is_plain(tensor: Any) -> bool:
    return isinstance(tensor, _Tensor) and tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested


def _transformed() -> bool:
    """Whether this is inside of `torch.func.vmap` or its like. There, each item draws its own numbers only in calls that are not in place."""
    return torch._C._functorch.maybe_current_level() is not None


def _dropping(feature: bool, alpha: bool, in_place: bool) -> Callable[[Any, Any, Any], Draw | None]:
    """Handle PyTorch's dropout operators, which take no generator, by the arithmetic and operators of ATen/native/Dropout.cpp."""

    def drop(func: Any, args: Any, kwargs: Any) -> Draw | None:
        tensor, p, train = _named(args, kwargs, ("input", "p", "train"))
        if not train or not 0 < p < 1 or not _is_plain(tensor) or tensor.numel() == 0:
            return None
        shape = (*tensor.shape[:2], *(1 for _ in tensor.shape[2:]))

        def draw(generator: torch.Generator) -> Any:
            if _transformed():
                size = shape if feature else tensor.shape
                kept = torch.bernoulli(
                    torch.empty(size, dtype=tensor.dtype, device=tensor.device), 1 - p, generator=generator
                )
            else:
                empty = tensor.new_empty(shape) if feature else torch.empty_like(tensor)
                kept = empty.detach().bernoulli_(1 - p, generator=generator)
            times = tensor.mul_ if in_place else tensor.mul
            if not alpha:
                return times(kept.div_(1 - p))
            slope = 1.7580993408473766  # of SELU for very negative numbers
            scale = 1 / math.sqrt((slope * slope * p + 1) * (1 - p))
            shift = kept.add(-1).mul_(slope * scale).add_(slope * scale * p)
            return times(kept.mul_(scale)).add_(shift)

        return draw

    return drop


def _attention(func: Any, args: Any, kwargs: Any) -> Draw | None:
    """Handle attention with dropout, which takes no generator, by the host's arithmetic in ATen/native/transformers/attention.cpp."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    query, key, value, mask, p, causal = _named(args, kwargs, names, dropout_p=0.0, is_causal=False)
    refused = causal and mask is not None
    if refused or not 0 < p < 1 or not all(_is_plain(one) and one.numel() for one in (query, key, value)):
        return None
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (one.to(torch.get_autocast_dtype("cpu")) for one in (query, key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if kwargs.get("scale") is None else kwargs["scale"]
    root = math.sqrt(abs(scale))  # scales both factors, so that no product is too large

    def draw(generator: torch.Generator) -> Any:
        low = query.dtype in (torch.half, torch.bfloat16)
        q, k, v = (one.float() if low else one for one in (query, key, value))
        if kwargs.get("enable_gqa"):
            k, v = (one.repeat_interleave(q.shape[-3] // one.shape[-3], -3) for one in (k, v))
        with torch.autocast("cpu", enabled=False):
            scores = (q * math.copysign(root, scale)) @ (k.mT * root)
            allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril() if causal else mask
            if allowed is not None and allowed.dtype == torch.bool:
                scores = scores.masked_fill(allowed.logical_not(), -math.inf)
            elif allowed is not None:
                scores = scores + allowed
            weights = torch._safe_softmax(scores, -1)
            drop: Any = _dropping(False, False, False)(torch.dropout, (weights, p, True), {})
            return (drop(generator) @ v).to(query.dtype)

    return draw


def _named(args: Any, kwargs: Any, names: Sequence[str], **defaults: Any) -> list[Any]:
    given = {**defaults, **kwargs, **dict(zip(names, args, strict=False))}
    return [given.get(name) for name in names]


_FILLS: dict[Any, tuple[Any, Any]] = {  # the method that works in place, and the function of a size
    torch.rand_like: (_Tensor.uniform_, torch.rand),
    torch.randn_like: (_Tensor.normal_, torch.randn),
    torch.randint_like: (_Tensor.random_, torch.randint),
}
# Names of methods and functions, by how their calls are handled.
_IN_PLACE = "normal_ uniform_ random_ exponential_ cauchy_ geometric_ log_normal_ bernoulli_"
_BY_TENSOR = "bernoulli multinomial poisson binomial _standard_gamma _sample_dirichlet rrelu rrelu_"
_CALLS: dict[Any, Callable[[Any, Any, Any], Draw | None]] = {
    **dict.fromkeys((torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal), _factory),
    **dict.fromkeys(_FILLS, _like),
    **{getattr(_Tensor, name): _in_place for name in _IN_PLACE.split()},
    **{getattr(torch, name): _by_tensor for name in _BY_TENSOR.split()},
    **dict.fromkeys((_Tensor.bernoulli, _Tensor.multinomial), _by_tensor),
    **dict.fromkeys((nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_), _by_tensor),
    **{
        getattr(torch, f"{feature}{alpha}dropout{in_place}"): _dropping(bool(feature), bool(alpha), bool(in_place))
        for feature in ("", "feature_")
        for alpha in ("", "alpha_")
        for in_place in ("", "_")
    },
    _F.scaled_dot_product_attention: _attention,
}


def _opened(func: Any) -> Any:
    """A copy of `func`, a PyTorch function in Python, that does not ask whether a mode wants the call.

    A mode is off while it handles a call, so it does not see the calls inside. This copy is called with the mode on.
    """
    unasked = {name: lambda *_: False for name in func.__globals__ if name.startswith("has_torch_function")}
    copy = types.FunctionType(
        func.__code__, {**func.__globals__, **unasked}, func.__name__, func.__defaults__, func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


_DROPOUTS = "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout"
_OPENED = {
    func: _opened(func)
    for func in (
        *(getattr(_F, name) for name in _DROPOUTS.split()),
        *(_F.rrelu, _F.gumbel_softmax, _F.multi_head_attention_forward),
        # Checkpointing runs forward again inside these.
        *(torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad),
    )
}


def _recurrent(args: Any, kwargs: Any) -> bool:
    """Whether these arguments of a recurrent network ask for dropout between its layers."""
    dropout, train = args[5:7] if isinstance(args[3], bool) else args[6:8]
    return bool(dropout and train)


# Their names, and when they draw (None: always). PyTorch offers no way to give them a generator.
_UNREACHED: dict[Any, tuple[str, Callable[[Any, Any], bool] | None]] = {
    torch.lstm: ("the dropout of nn.LSTM", _recurrent),
    torch.gru: ("the dropout of nn.GRU", _recurrent),
    torch.rnn_tanh: ("the dropout of nn.RNN", _recurrent),
    torch.rnn_relu: ("the dropout of nn.RNN", _recurrent),
    torch.native_dropout: ("torch.native_dropout", None),
    _F.fractional_max_pool2d: ("fractional_max_pool2d", None),
    _F.fractional_max_pool3d: ("fractional_max_pool3d", None),
    _F.fractional_max_pool2d_with_indices: ("fractional_max_pool2d", None),
    _F.fractional_max_pool3d_with_indices: ("fractional_max_pool3d", None),
}
_KNOWN = _CALLS.keys() | _OPENED.keys() | _UNREACHED.keys()


class DrawMode(TorchFunctionMode):
    """Asks a source for all draws of this thread, but for those that have a generator, and of tensors that are not plain ones on the host."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Nearly all calls end here, so this has to be quick. A compiler would put the generator of this thread into its code.
        if func not in _KNOWN or torch.compiler.is_compiling():
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if func in _OPENED:
            with self:
                return _OPENED[func](*args, **kwargs)
        if func in _UNREACHED:
            name, draws = _UNREACHED[func]
            if draws is None or draws(args, kwargs):
                self._source.unreached(name)
            return func(*args, **kwargs)
        generator = kwargs.get("generator")
        if generator is not None:
            self._source.given(generator)
            return func(*args, **kwargs)
        draw = _CALLS[func](func, args, {key: value for key, value in kwargs.items() if key != "generator"})
        return func(*args, **kwargs) if draw is None else self._source.draw(draw)
