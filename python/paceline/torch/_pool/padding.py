"""Requests of different lengths in one batch: what they cost, their padding, and answers without it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from paceline import InvalidArgument
from paceline.torch._pool.seats import Seat

# How far an answer may be from that of the request alone, of the largest value, and how many of whole numbers may differ.
_TOLERANCES = {torch.float16: 2e-2, torch.bfloat16: 5e-2}
_TOLERANCE = 1e-3
_OTHER_NUMBERS = 0.05
_MORE = 2.0  # times the padding of the last comparison: then another one

Run = Callable[[Sequence[int]], tuple[list[torch.Tensor], Any]]  # answers some of the requests as a batch


class Rule(NamedTuple):
    """What a dimension of an answer is: of a fixed size, or the length of one of these tensors of the request."""

    size: int
    lengths: frozenset[int]


class Padding:
    """How requests are padded.

    Parameters
    ----------
    value
        What tensors are filled up with at their end: a number, or a nest of numbers like the request.
    dim
        The dimension of a request's tensors that is padded.
    cost
        Of a request. None: its length.
    """

    def __init__(
        self, name: str, value: Any, dim: int, cost: Callable[[Any], float] | None, *, tolerance: float = _TOLERANCE
    ) -> None:
        self._name, self._value, self._dim, self._cost, self._tolerance = name, value, dim, cost, tolerance
        self._rules: dict[Any, tuple[list[list[Rule]], float]] = {}  # with the most padding that they were learned with

    def dim_of(self, leaf: torch.Tensor) -> int | None:
        """The dimension of the tensor that may be padded."""
        dim = self._dim + (leaf.dim() if self._dim < 0 else 0)
        return dim if 0 <= dim < leaf.dim() else None

    def shape_of(self, leaf: torch.Tensor) -> tuple[int, ...]:
        """What tensors of a batch have in common."""
        dim = self.dim_of(leaf)
        return tuple(-1 if one == dim else size for one, size in enumerate(leaf.shape))

    def lengths(self, leaves: Sequence[torch.Tensor]) -> list[Any]:
        """The lengths of a request's tensors, None for those that are not padded."""
        dims = map(self.dim_of, leaves)
        return [None if dim is None else leaf.shape[dim] for leaf, dim in zip(leaves, dims, strict=True)]

    def cost_of(self, item: Any, leaves: Sequence[torch.Tensor]) -> float:
        """What a request costs."""
        longest = max((length for length in self.lengths(leaves) if length is not None), default=1)
        if self._cost is None:
            return float(max(1, longest))
        cost = self._cost(item)
        if isinstance(cost, bool) or not isinstance(cost, (int, float)) or not 0 < cost <= 1e12:
            raise InvalidArgument(
                f"{self._name}: cost= returned {cost!r} for a request. It must return a number above 0, at most 1e12."
            )
        return float(cost)

    def values(self, leaves: Sequence[torch.Tensor], spec: Any) -> list[Any]:
        """What each tensor is filled up with. Raises for what does not fit the tensor."""
        if isinstance(self._value, (int, float, complex)):
            found = [self._value] * len(leaves)
        else:
            found, own = pytree.tree_flatten(self._value)
            if own != spec:
                raise InvalidArgument(
                    f"{self._name}: pad= must be a number, or a nest of numbers with the structure of a request."
                )
        for value, leaf in zip(found, leaves, strict=True):
            if leaf.layout is not torch.strided:
                raise InvalidArgument(
                    f"{self._name}: a request has a tensor of layout {leaf.layout}, which cannot be padded."
                )
            if not (isinstance(value, (int, float, complex)) and _holds(leaf.dtype, value)):
                raise InvalidArgument(
                    f"{self._name}: pad={value!r} is no value of {leaf.dtype}, which a tensor of the request has."
                )
        return found

    def stack(self, seat: Seat, rows: Sequence[Sequence[torch.Tensor]], values: Sequence[Any]) -> list[torch.Tensor]:
        """The tensors of a batch on the device, padded to the longest request."""
        columns = zip(zip(*rows, strict=True), values, strict=True)
        return [self._stacked(seat, leaves, value) for leaves, value in columns]

    def _stacked(self, seat: Seat, leaves: Sequence[torch.Tensor], value: Any) -> torch.Tensor:
        dim = self.dim_of(leaves[0])
        if dim is None or len({leaf.shape[dim] for leaf in leaves}) == 1:
            return seat.stacked(leaves)
        shape = list(leaves[0].shape)
        shape[dim] = max(leaf.shape[dim] for leaf in leaves)
        batch = seat.room((len(leaves), *shape), leaves[0].dtype).fill_(value)
        for row, leaf in zip(batch, leaves, strict=True):
            row.narrow(dim, 0, leaf.shape[dim]).copy_(leaf)
        return seat.brought(batch)

    def cut(
        self,
        kind: str,
        answers: list[torch.Tensor],
        spec: Any,
        rows: Sequence[Sequence[torch.Tensor]],
        run: Run,
        fetched: Callable[[torch.Tensor], torch.Tensor],
    ) -> list[list[torch.Tensor]]:
        """What `fetched` returns for the answers, for each request without padding, by tensor.

        Which dimensions of an answer are lengths is learned, for each set of tensors that are padded: the shortest requests run alone, too. That also
        shows whether the model leaves padding out. Where padding is small its effect may be, too, so it is learned again when there is twice as much.
        """
        lengths = [self.lengths(row) for row in rows]
        most = [None if None in column else max(column) for column in zip(*lengths, strict=True)]
        padded = frozenset(at for at, column in enumerate(zip(*lengths, strict=True)) if len(set(column)) > 1)
        if not padded:
            return [list(fetched(leaf).unbind()) for leaf in answers]
        key = kind, padded, spec
        rules, least = self._rules.get(key, ([], 0.0))
        ratio = max(most[at] / max(1, min(row[at] for row in lengths)) for at in padded)
        if ratio < _MORE * least:
            return self._cut(rules, [fetched(leaf) for leaf in answers], lengths, most)
        rules, alone = self._learned(answers, spec, lengths, most, padded, run)
        found = self._cut(rules, answers, lengths, most)
        for index, leaves in alone.items():
            for row, leaf in zip(found, leaves, strict=True):
                self._compare(row[index], leaf[0])
        self._rules[key] = rules, ratio
        return self._cut(rules, [fetched(leaf) for leaf in answers], lengths, most)

    def _learned(
        self,
        answers: list[torch.Tensor],
        spec: Any,
        lengths: Sequence[Sequence[Any]],
        most: Sequence[Any],
        padded: frozenset[int],
        run: Run,
    ) -> tuple[list[list[Rule]], dict[int, list[torch.Tensor]]]:
        shortest = {min(range(len(lengths)), key=lambda row, at=at: lengths[row][at]) for at in padded}  # type: ignore[misc]
        alone: dict[int, list[torch.Tensor]] = {}
        for index in shortest:
            alone[index], own = run([index])
            if own != spec or [one.dim() for one in alone[index]] != [one.dim() for one in answers]:
                raise InvalidArgument(
                    f"{self._name}: the answer to a request has another structure when the request is padded."
                )
        rules: list[list[Rule]] = []
        for at, leaf in enumerate(answers):
            rules.append([])
            for dim, size in enumerate(leaf.shape[1:], 1):
                sizes = {index: one[at].shape[dim] for index, one in alone.items()}
                follows = frozenset(
                    k
                    for k in padded
                    if size == most[k] and all(own == lengths[index][k] for index, own in sizes.items())
                )
                if not follows and set(sizes.values()) != {size}:
                    raise InvalidArgument(
                        f"{self._name}: dimension {dim} of the answer, with the batch's as 0, has size {size} for requests that are padded to "
                        f"{sorted({most[k] for k in padded})}, and {sorted(set(sizes.values()))} for one alone. It must be the length of the request, or stay. "
                        "Otherwise the part that is padding is not known: serve without pad=."
                    )
                rules[-1].append(Rule(size, follows))
        return rules, alone

    def _cut(
        self,
        rules: list[list[Rule]],
        answers: list[torch.Tensor],
        lengths: Sequence[Sequence[Any]],
        most: Sequence[Any],
    ) -> list[list[torch.Tensor]]:
        rows = [list(leaf.unbind()) for leaf in answers]
        for leaf, of, own in zip(answers, rows, rules, strict=True):
            if leaf.dim() != len(own) + 1:
                raise InvalidArgument(
                    f"{self._name}: the answer has a tensor of {leaf.dim()} dimensions; to the requests before it had {len(own) + 1}."
                )
            for dim, (size, rule) in enumerate(zip(leaf.shape[1:], own, strict=True)):
                follows = [k for k in rule.lengths if most[k] == size]
                wanted = [{lengths[row][k] for k in follows} for row in range(len(of))]
                if (rule.lengths and any(len(one) != 1 for one in wanted)) or (not rule.lengths and size != rule.size):
                    raise InvalidArgument(
                        f"{self._name}: dimension {dim + 1} of the answer, with the batch's as 0, has size {size} for requests that are padded to {most}. "
                        f"{'Which of their lengths it is, is not clear' if follows else 'That is neither their length nor the size before'}: serve without pad=."
                    )
                if rule.lengths:
                    of[:] = [one.narrow(dim, 0, next(iter(length))) for one, length in zip(of, wanted, strict=True)]
        return rows

    def _compare(self, found: torch.Tensor, alone: torch.Tensor) -> None:
        if not found.numel():
            return
        if not (found.dtype.is_floating_point or found.dtype.is_complex):
            differ = float((found != alone).double().mean())
            if differ > _OTHER_NUMBERS:
                raise self._reads_padding(f"in {differ:.0%} of its numbers")
            return
        wide = torch.complex128 if found.dtype.is_complex else torch.float64
        ours, theirs = found.to(wide), alone.to(wide)
        scale = float(theirs.abs().nan_to_num(0.0, 0.0, 0.0).max())
        tolerance = _TOLERANCES.get(found.dtype, self._tolerance)
        if not torch.isclose(ours, theirs, rtol=0.0, atol=tolerance * scale + 1e-12, equal_nan=True).all():
            most = float((ours - theirs).abs().nan_to_num(math.inf).max())
            raise self._reads_padding(f"by up to {most:.3g}, where values go up to {scale:.3g}")

    def _reads_padding(self, how: str) -> InvalidArgument:
        return InvalidArgument(
            f"{self._name}: the answer to a request changes {how} when the request is padded. The model has to leave padding out: let it find what pad= has "
            "filled in, or put a mask of ones into the request, which is padded with zeros."
        )


def _holds(dtype: torch.dtype, value: Any) -> bool:
    """Whether a tensor of this type can hold the value, but for rounding."""
    if dtype.is_complex:
        return True
    if isinstance(value, complex) or dtype.is_floating_point:
        return not isinstance(value, complex)
    least, most = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return math.isfinite(value) and value == int(value) and least <= value <= most
