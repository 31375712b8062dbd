"""Batch normalisation, which couples the items of a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from paceline.torch._devices.failures import warn_caller

Named = tuple[str, nn.Module]  # a module, with its name in the user's module


def using_batch_statistics(modules: Sequence[Named]) -> list[Named]:
    """The modules whose output for an item depends on the other items."""
    # Instance normalisation has the same base as batch normalisation, but looks at one item at a time.
    norms = [(name, part) for name, part in modules if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    return [(name, part) for name, part in norms if part.training or part.running_mean is None]


CURE = (
    "Running statistics come from the device with the largest share. DataParallel(..., batch_norm='synchronised') normalises over the batch. Or use "
    "GroupNorm or LayerNorm, evaluation mode for these modules, larger batches, or one device."
)


def normalised_apart(norms: Sequence[Named], cure: str) -> str:
    """What these modules do if a batch runs in several micro-batches. An empty list stands for code that calls ``batch_norm`` itself."""
    named = [f"{name or 'the module'} ({type(part).__name__})" for name, part in norms]
    named = named or ["loss_fn, or a module of its own kind, calls batch_norm"]
    more = f" and {len(named) - 2} more" if len(named) > 2 else ""
    return (
        f"{', '.join(named[:2])}{more}: each micro-batch is normalised by its own mean and variance instead of the batch's, so gradients differ from "
        f"those of one device that takes the batch at once. {cure}"
    )


def warn_of_normalised_apart(norms: Sequence[Named], cure: str) -> None:
    """Warn, at the line that called this package, that each micro-batch is normalised by itself."""
    warn_caller(f"paceline: {normalised_apart(norms, cure)}", UserWarning)


def fails_over_one_item(error: BaseException) -> bool:
    """Whether PyTorch's ``batch_norm`` has refused to normalise a single item."""
    return isinstance(error, ValueError) and str(error).startswith("Expected more than 1 value per channel")


@contextlib.contextmanager
def standing_still(norms: Sequence[Any], like: torch.Tensor) -> Iterator[None]:
    """Let these modules normalise by their running statistics, or not at all if they keep none. `like`: some parameter of the module."""
    before = [(part, part.training, part.running_mean, part.running_var) for part in norms]
    try:
        for part, _, mean, _ in before:
            part.training = False
            if mean is None:
                own = next(part.parameters(), like)
                part.running_mean = torch.zeros(part.num_features, dtype=own.dtype, device=own.device)
                part.running_var = torch.ones_like(part.running_mean)
        yield
    finally:
        for part, training, mean, variance in before:
            part.training, part.running_mean, part.running_var = training, mean, variance
