"""The objective of a step: a weighted sum over items, divided once by the total weight."""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Literal, NoReturn

import torch

from paceline import InvalidArgument
from paceline._words import plural

Reduction = Literal["mean", "sum"]
ItemWeight = torch.Tensor | Callable[[Any], torch.Tensor]
# A mapping has the weight of each term of a loss with several terms. None: every item counts 1.
Weight = ItemWeight | Mapping[str, ItemWeight | None]
Divisor = float | torch.Tensor
Total = Divisor | Mapping[str, Divisor]

Pin = Callable[[torch.Tensor], torch.Tensor]


def keep(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself. The default `Pin`, for tensors that no GPU copies from."""
    return tensor


Check = Callable[[torch.Tensor, str], None]


def accept(tensor: torch.Tensor, what: str) -> None:
    """Accept a tensor on any device. The default `Check`, for callers that need it nowhere in particular."""


_HALF = (torch.float16, torch.bfloat16)


class Objective:
    """Turns what ``loss_fn`` returns for a slice into the slice's term of the objective.

    With s a slice, and W the sum of the weights w_k over the whole batch (by default the number of items, all w_k = 1), or `total` in its place:

    ============ ========= =========================================
    `reduction`  loss      term
    ============ ========= =========================================
    mean         scalar    (sum of w_k over s) * l_s / W
    mean         1-D       (sum over k in s of w_k * l_k) / W
    sum          scalar    l_s / W
    sum          1-D       (sum over k in s of l_k) / W
    ============ ========= =========================================

    Raises
    ------
    InvalidArgument
        If the weights are not 1-D with one per item, not finite, or do not sum to more than zero, or if `check` refuses them. If `total` is
        not a positive number.

    A batch may be a `part` of a larger one, whose weight is not known yet. Its weights may sum to anything. Its terms are divided by some
    positive number, which is `divisor`. Whoever knows the whole weight multiplies by ``divisor / weight``.

    `term` names the term of the loss, in errors, if there are several.
    """

    def __init__(
        self,
        batch: Any,
        size: int,
        reduction: Reduction,
        weight: ItemWeight | None,
        pin: Pin = keep,
        check: Check = accept,
        total: Divisor | None = None,
        part: bool = False,
        term: str | None = None,
    ) -> None:
        self.reduction = reduction
        self._mean = reduction == "mean"
        self._of = "" if term is None else f"[{term!r}]"
        self._weights: torch.Tensor | None = None
        self.size = size
        self.weight: int | float = size  # of the whole batch
        self.magnitude: int | float = size  # the sum of the weights' absolute values
        if weight is not None and size:
            self._weigh(batch, size, weight, pin, check)
        counts = self.magnitude > 0 or total is None  # a batch without weight adds nothing to the caller's own total
        if not part and self.weight <= 0 and counts:
            raise InvalidArgument(
                f"weight{self._of}: the weights of the batch sum to {self.weight}; the objective is divided by that sum, so it must be positive and "
                "finite. Skip batches without weight."
            )
        self.total = None if total is None else _positive(total, check, self._of)  # the caller's own
        # What the sum is divided by.
        self.divisor = self.total or ((self.magnitude or 1) if part else self.weight)

    def _weigh(self, batch: Any, size: int, weight: ItemWeight, pin: Pin, check: Check) -> None:
        if not isinstance(weight, torch.Tensor) and not callable(weight):
            raise InvalidArgument(
                f"weight{self._of}: {type(weight).__name__}; a 1-D tensor with one weight per item, or a callable that makes one from the batch, "
                "is needed."
            )
        values = weight if isinstance(weight, torch.Tensor) else weight(batch)
        if not isinstance(values, torch.Tensor) or values.dim() != 1 or values.shape[0] != size:
            shape = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
            raise InvalidArgument(
                f"weight{self._of}: {shape} for a batch of {plural(size, 'item')}; a 1-D tensor with one weight per item is needed."
            )
        if values.is_complex():
            raise InvalidArgument(f"weight{self._of}: complex weights; real ones are needed.")
        check(values, f"weight{self._of}")
        # The sum is exact: integers stay integers. Everything else is summed in double precision, on the host.
        values = values.detach().to("cpu", torch.float64 if values.is_floating_point() else torch.int64)
        self._weights = pin(values)
        self.weight, self.magnitude = values.sum().item(), values.abs().sum().item()
        if not math.isfinite(self.magnitude):
            raise InvalidArgument(
                f"weight{self._of}: the weights of the batch sum to {self.weight}; the objective is divided by that sum, so it must be positive and "
                "finite. Skip batches without weight."
            )

    def ordered(self, order: torch.Tensor, pin: Pin = keep) -> Objective:
        """The same objective, with slices that are ranges of `order`."""
        if self._weights is None:
            return self
        there = copy.copy(self)
        there._weights = pin(self._weights[order])
        return there

    def part(self, begin: int, end: int) -> Objective:
        """The same objective, over the whole batch, with slices that count from `begin`."""
        there = copy.copy(self)
        there._weights = None if self._weights is None else self._weights[begin:end]
        return there

    @property
    def is_weighted(self) -> bool:
        """Whether items count by a weight."""
        return self._weights is not None

    @property
    def divides_sums(self) -> bool:
        """Whether ``loss_fn`` returns sums, and the objective divides them by what the caller has not said."""
        return not self._mean and self.total is None

    def idle(self, begin: int, end: int) -> bool:
        """Whether no item of the slice counts. Such a slice is not run: its mean may be 0/0."""
        return self._weights is not None and not bool(self._weights[begin:end].any())

    def share(self, begin: int, end: int) -> float:
        """The part of the total weight that a slice has. NaN if the weights cancel, which those of a part of a batch may."""
        return self._weight_of(begin, end) / self.weight if self.weight else math.nan

    def of_extra(self, path: str) -> Objective:
        """The objective by whose weights a 0-dimensional extra is put together."""
        return self

    def term(self, loss: Any, begin: int, end: int, *, all_run: bool = False) -> torch.Tensor:
        """The slice's term, 0-dimensional, with its graph. `all_run`: slices without weight run, too, so their loss has to be finite."""
        loss = self.of_slice(loss, end - begin)
        if loss.dtype in _HALF:
            loss = loss.float()  # the division by W must not round to half precision
        factor = self.factor(begin, end, loss.dim())
        if loss.dim():
            weights = self.weights_of(begin, end)
            if weights is not None:
                loss = loss * weights.to(loss.device, non_blocking=True).to(loss.dtype)
            loss = loss.sum()
        term: torch.Tensor = loss if factor == 1 else loss * factor
        if all_run and self.idle(begin, end) and not bool(term.isfinite()):
            raise InvalidArgument(
                "batch_norm='synchronised': no item of a slice has weight, and loss_fn returned a mean over nothing (0/0). Such items still count in "
                "the statistics of the batch, so they have to run. Return one loss per item, or divide by at least 1: .sum() / count.clamp(min=1)."
            )
        return term

    def static_term(self, loss: torch.Tensor, factor: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """Like `term`, with `factor` and `weights_of` as tensors on the loss's device, whose values may change between replays of a graph."""
        if loss.dtype in _HALF:
            loss = loss.float()
        if loss.dim():
            loss = (loss if weights is None else loss * weights.to(loss.dtype)).sum()
        term: torch.Tensor = loss * factor.to(loss.dtype)
        return term

    def factor(self, begin: int, end: int, dims: int) -> float:
        """What a loss with so many dimensions is multiplied by, after the sum over its items."""
        return (self._weight_of(begin, end) if self._mean and not dims else 1) / self.divisor

    def weights_of(self, begin: int, end: int) -> torch.Tensor | None:
        """What the losses of single items are multiplied by, on the host. None: nothing."""
        return self._weights[begin:end] if self._mean and self._weights is not None else None

    def of_slice(self, loss: Any, items: int) -> torch.Tensor:
        """The loss of a slice of so many items, 0-dimensional or with one entry for each.

        Raises
        ------
        InvalidArgument
            If `loss` is neither, nor can be seen as one of them.
        """
        if isinstance(loss, torch.Tensor) and loss.dim() and set(loss.shape[1:]) <= {1} and loss.shape[0] in (1, items):
            # [1] is what gather and squeeze(0) leave, [B, 1] what Linear(n, 1) does.
            return loss.reshape(items if loss.shape[0] == items else ())
        if not isinstance(loss, torch.Tensor) or loss.dim():
            got = (
                f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"{type(loss).__name__}"
            )
            raise InvalidArgument(
                f"loss_fn returned {got}{self._of and f' as {self._of}'} for a slice of {plural(items, 'item')}; a 0-dim tensor or a 1-D tensor with one loss per item is needed."
                f"{_cure(loss, self._of)}"
            )
        return loss

    def _weight_of(self, begin: int, end: int) -> int | float:
        if self._weights is None:
            return end - begin
        return self._weights[begin:end].sum().item()


def _cure(loss: Any, of: str) -> str:
    """Advice on a wrong return value of ``loss_fn``, or nothing."""
    pair = " To return more than the loss, return a pair (loss, extras): trainer.extras then has the extras of the whole batch."
    if isinstance(loss, Mapping) and not of:
        return f"{pair} For a loss of several terms name them in weight=, a mapping from each term to the weights of its items."
    if isinstance(loss, float):
        return " Return the tensor itself: backward needs its graph, which item() leaves behind."
    if isinstance(getattr(loss, "loss", None), torch.Tensor):
        return " Return its .loss."
    if isinstance(loss, (tuple, list)):
        return pair
    return ""


def _positive(total: Any, check: Check, of: str) -> float:
    """The caller's own denominator as a number."""
    if isinstance(total, torch.Tensor):
        check(total, f"total{of}")
        total = total.item() if total.dim() == 0 else math.nan
    if isinstance(total, bool) or not isinstance(total, numbers.Real) or not 0 < float(total) < math.inf:
        raise InvalidArgument(
            f"total{of}: {total!r}; a positive finite number, which the sum over the items is divided by, or a 0-dim tensor of it, is needed."
        )
    return float(total)


def already_backward(loss: torch.Tensor) -> torch.Tensor:
    """Give the loss of a run, which has called backward already, a ``backward`` that says so.

    Only this tensor object has that method. Tensors computed from it, and its saved or pickled copies, are ordinary.
    """
    loss.__dict__.update(backward=_refuse_backward, __getstate__=_nothing)
    return loss


def _refuse_backward(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(  # the type that plain PyTorch raises
        "backward: the trainer has already called it for this loss, on all devices, and added the gradients to .grad. Remove this call. For "
        "backward by hand use DataParallel.batch()."
    )


def _nothing() -> None:
    """Tell pickle that the tensor has no state besides its values. torch.load(weights_only=True) would refuse a function in the state."""
