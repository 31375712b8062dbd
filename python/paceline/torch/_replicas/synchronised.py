"""Batch normalisation over the batch of all devices, forward and backward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from paceline import InvalidArgument
from paceline.torch._devices.meeting import MeetingPoint

_batch_norm = nn.functional.batch_norm


def merged(parts: list[torch.Tensor]) -> torch.Tensor:
    """The statistics of all parts together, by their counts (Chan, Golub, LeVeque 1979). Nothing cancels if the means are large.

    Statistics are one vector in double precision: over how many values of each channel, then the channels' means, then their mean squared
    deviations from these.
    """
    size = _total([part[:1] for part in parts])
    shares = [part[:1] / size.clamp(min=1) for part in parts]
    means, variances = zip(*(part[1:].chunk(2) for part in parts), strict=True)
    mean = _total([one * share for one, share in zip(means, shares, strict=True)])
    spread = [variance + (one - mean).square() for one, variance in zip(means, variances, strict=True)]
    return torch.cat([size, mean, _total([one * share for one, share in zip(spread, shares, strict=True)])])


@contextlib.contextmanager
def synchronised(norms: Iterable[tuple[str, nn.Module]], meeting: MeetingPoint) -> Iterator[None]:
    """Let these modules, which belong to the devices, normalise over the batch of all devices that come to the `meeting`.

    A module's own forward runs, and counts and averages as it always does. What it calls to normalise is another function.
    """
    before = []
    for name, norm in norms:
        ours = _Forward(norm.forward, meeting, name or "the module")
        before.append((vars(norm), vars(norm).get("forward"), ours))
        vars(norm)["forward"] = ours
    try:
        yield
    finally:
        for attributes, forward, ours in reversed(before):
            if attributes.get("forward") is not ours:  # somebody else has set it meanwhile
                continue
            if forward is None:
                del attributes["forward"]
            else:
                attributes["forward"] = forward


class _Forward:
    """Takes the place of a module's forward. Activation checkpointing calls it again in a backward pass, and the devices meet again."""

    def __init__(self, forward: Callable[..., Any], meeting: MeetingPoint, name: str) -> None:
        self._forward = forward
        self._meeting = meeting
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._meeting.is_here:  # a thread that loss_fn has started
            return self._forward(*args, **kwargs)
        meets = _Meets(self._meeting, self._name)
        with meets:
            output = self._forward(*args, **kwargs)
        if not meets.seen:
            raise InvalidArgument(
                f"batch_norm='synchronised': {self._name} normalises without torch.nn.functional.batch_norm, so it cannot be synchronised. Let its "
                "forward call that function, or use batch_norm='apart'."
            )
        return output


class _Meets(TorchFunctionMode):
    """Puts the normalisation over all devices in the place of ``torch.nn.functional.batch_norm``, inside of one module's forward."""

    def __init__(self, meeting: MeetingPoint, name: str) -> None:
        super().__init__()
        self.seen = False  # whether the module has called that function
        self._meeting = meeting
        self._name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _batch_norm:
            self.seen = True
            return self._normalised(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _normalised(
        self,
        values: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        if not training:
            return _batch_norm(values, running_mean, running_var, weight, bias, False, momentum, eps)
        with torch.no_grad():
            whole = self._meeting.meet(f"the forward of {self._name}", _statistics_of(values), merged)
            size, (mean, variance) = int(whole[0]), whole[1:].chunk(2)
            if size < 2:
                raise ValueError(  # the type that PyTorch raises
                    f"batch_norm='synchronised': {self._name}: more than 1 value per channel is needed, and all devices together have "
                    f"{size}. Leave such batches out."
                )
            # Through `data`, as PyTorch's own kernel does not count these writes as changes of the buffers.
            if running_mean is not None:
                running_mean.data.lerp_(mean.to(running_mean), momentum)
            if running_var is not None:
                unbiased = variance * (size / (size - 1))
                running_var.data.lerp_(unbiased.to(running_var), momentum)
        apply: Any = _Normalised.apply
        return apply(values, weight, bias, whole, eps, self._meeting, f"the backward of {self._name}")


class _Normalised(torch.autograd.Function):
    """Normalises by given statistics. Its backward knows that they depend on the values of all devices.

    Let g be the gradient of the output, n the number of values of a channel, and h the normalised values. The gradient of the values is
    ``weight * (g - sum(g) / n - h * sum(g * h) / n) / deviation``, with sums over the batch of all devices. Each device has the part of the
    gradients of weight and bias that comes from its own values. The step adds the parts up, as it does for all parameters.
    """

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        whole: torch.Tensor,
        eps: float,
        meeting: MeetingPoint,
        topic: str,
    ) -> torch.Tensor:
        wide = _wide(values)
        mean, variance = whole[1:].to(wide).chunk(2)
        ctx.save_for_backward(values, weight, mean, (variance + eps).rsqrt())
        ctx.count, ctx.meeting, ctx.topic = int(whole[0]), meeting, topic
        scale, shift = (None if one is None else one.to(wide) for one in (weight, bias))
        return _batch_norm(wide, mean, variance, scale, shift, False, 0.0, eps).to(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward: create_graph=True through batch normalisation over all devices, which has no second derivative. Use "
                "batch_norm='apart', or GroupNorm."
            )
        values, weight, mean, inverse = ctx.saved_tensors
        axes, gradient = _axes(values), _wide(gradients[0])
        of_values, of_weight, of_bias = ctx.needs_input_grad[:3]
        normal = (_wide(values) - _channels(mean, values)) * _channels(inverse, values)
        sums = torch.stack([gradient.sum(axes), (gradient * normal).sum(axes)])
        found: torch.Tensor | None = None
        if of_values:
            means = ctx.meeting.meet(ctx.topic, _on_host(sums), _total).to(sums) / ctx.count
            scale = inverse if weight is None else inverse * weight
            found = gradient - _channels(means[0], values) - normal * _channels(means[1], values)
            found = found * _channels(scale, values)
        return found, sums[1] if of_weight else None, sums[0] if of_bias else None, *[None] * 4


def _statistics_of(values: torch.Tensor) -> torch.Tensor:
    """The statistics of these values, as `merged` takes them."""
    if values.numel() == 0:
        return torch.zeros(1 + 2 * values.shape[1], dtype=torch.float64, device="cpu")
    variance, mean = torch.var_mean(_wide(values), _axes(values), correction=0)
    found = _on_host(torch.cat([mean, variance]))
    return torch.cat([found.new_full((1,), values.numel() // values.shape[1]), found])


def _total(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum, in the order of the parts. Element by element, so that processors of all kinds get the same bits."""
    return functools.reduce(torch.add, parts)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """In double precision, where every device can read it. The worker of a GPU waits here for what comes before."""
    return tensor.double().cpu()


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """In at least single precision, as PyTorch's own kernels compute."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _axes(values: torch.Tensor) -> list[int]:
    """All dimensions but the channels."""
    return [0, *range(2, values.dim())]


def _channels(vector: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One number per channel, in a shape that goes with the values."""
    return vector.view(-1, *[1] * (values.dim() - 2))
