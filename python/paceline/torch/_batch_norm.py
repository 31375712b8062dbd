"""Batch normalisation, kept from looking at the batch for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn


def uses_batch_statistics(part: nn.Module) -> bool:
    """Whether its output for an item depends on the other items."""
    # Instance normalisation, of the same base, looks at one item at a time.
    return isinstance(part, nn.modules.batchnorm._BatchNorm) and (part.training or part.running_mean is None)


def has_batch_norm(module: nn.Module) -> bool:
    """Whether it normalises over the batch in some mode."""
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())


@contextlib.contextmanager
def standing_still(norms: Sequence[Any]) -> Iterator[None]:
    """With these normalising by what they have seen before, or by nothing if they have kept nothing."""
    before = [(part, part.training, part.running_mean, part.running_var) for part in norms]
    try:
        for part, _, mean, _ in before:
            part.training = False
            if mean is None:
                like = next(part.parameters(), torch.empty(0))
                part.running_mean = torch.zeros(part.num_features, dtype=like.dtype, device=like.device)
                part.running_var = torch.ones_like(part.running_mean)
        yield
    finally:
        for part, training, mean, variance in before:
            part.training, part.running_mean, part.running_var = training, mean, variance
