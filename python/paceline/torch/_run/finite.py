"""A loss that is not finite in one slice and finite in others: a mean over nothing, which one device does not meet."""

from __future__ import annotations

import math
import random as python_random
from typing import Any

import torch

from paceline import InvalidArgument
from paceline.torch._batch.extras import parted
from paceline.torch._devices.run_draws import RandomStates
from paceline.torch._replicas.buffers import KeptAttributes, KeptBuffers


def refuse_means_over_nothing(run: Any) -> None:
    """Raise if slices of a `TrainRun` on host devices have a loss that is not finite, others have one that is, and so has the whole batch.

    Where the loss of the whole batch is not finite either, the run has the result of one device. Where the whole batch would draw other numbers,
    or be compiled anew, nobody knows.
    """
    if sum(map(len, run.terms)) < 2 or any(run.places.on_gpu):  # reading a loss would wait for the GPU
        return
    found = [(begin, device, term.item()) for device, terms in enumerate(run.terms) for begin, term in terms]
    bad = [one for one in found if not math.isfinite(one[2])]
    if not 0 < len(bad) < len(found) or run.seen.compiled:
        return
    if _finite_as_a_whole(run, all(math.isnan(value) for *_, value in bad)):
        begin, device, _ = min(bad)
        raise InvalidArgument(
            f"step: on {run.places.names[device]} the loss of the slice that begins with item {begin} is not finite, and the loss of the whole batch is. "
            "loss_fn divides by something that this slice has none of, such as labels that count (0/0). Say how much each item counts, by weight=, "
            "such as weight=lambda batch: (batch[1] != -100).flatten(1).sum(1) for labels [items, words]; slices without weight are not run. Or let "
            "loss_fn return one loss per item. check() finds the weight."
        )


def _finite_as_a_whole(run: Any, nothing: bool) -> bool:
    """Run the forward of a copy of the whole batch on the first device, and put back what it draws and writes. What raises is no answer.

    Nor is a run that draws other numbers than the slices, which may not overflow where they did. `nothing`: they did not overflow, but are 0/0.
    """
    module, size = run.replicas[0].module, run.batch.size
    random, modules, python = RandomStates(run.places), run.replicas[0].modules, python_random.getstate()
    buffers, attributes = KeptBuffers(modules), KeptAttributes(modules)
    try:
        with torch.no_grad():
            loss, _ = parted(run.loss_fn(module, run.batch.slice(0, size, torch.clone)))
        return bool(run.objective.term(loss, 0, size).isfinite()) and (nothing or not random.moved)
    except Exception:  # loss_fn is the user's
        return False
    finally:
        buffers.restore()
        attributes.restore()
        random.restore()
        python_random.setstate(python)
