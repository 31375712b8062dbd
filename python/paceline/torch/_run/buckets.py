"""Which gradients lie where in flat memory, bucket by bucket."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from paceline import InvalidArgument
from paceline.torch._run.gradients import DTYPES, is_sparse

_ALIGNMENT = 16  # bytes that a kernel loads at a time; no element type needs more


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Where the gradient of a parameter lies in its bucket, in elements. Its strides are those of the parameter."""

    index: int
    begin: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_complex: bool

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The part of a bucket. Complex numbers have a last dimension for real and imaginary part."""
        return flat.as_strided(self.shape, self.stride, self.begin)

    def gradient(self, flat: torch.Tensor) -> torch.Tensor:
        """The part of a bucket, with the type and shape of the gradient."""
        return torch.view_as_complex(self.of(flat)) if self.is_complex else self.of(flat)


@dataclasses.dataclass
class Bucket:
    """Gradients of one element type that lie in one stretch of memory."""

    dtype: torch.dtype
    count: int = 0  # elements
    pieces: list[_Piece] = dataclasses.field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


class Layout:
    """Which gradients lie where in the buckets. A bucket has one element type. Parameters that require no gradient have no place."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: list[str],
        order: Sequence[int] | None = None,
        most_bytes: int | None = None,
        first_bytes: int | None = None,
    ) -> None:
        """`order`: the parameters' indices, in which they fill the buckets. `most_bytes`: when a bucket is full; None: never.

        `first_bytes`: when the first one is full, if that is another number.
        """
        self._names = names
        self.buckets: list[Bucket] = []
        filling: dict[torch.dtype, Bucket] = {}
        for index in range(len(parameters)) if order is None else order:
            parameter = parameters[index]
            if not parameter.requires_grad:
                continue
            real = parameter.dtype.to_real() if parameter.is_complex() else parameter.dtype
            if real not in DTYPES:
                raise InvalidArgument(
                    f"step: parameter {names[index]} is of type {parameter.dtype}, whose gradients are not summed across devices. Use "
                    "float32, float64, float16 or bfloat16 parameters, or one device."
                )
            shape, stride = tuple(parameter.shape), torch.empty_like(parameter, device="meta").stride()
            elements = parameter.numel()
            if parameter.is_complex():
                shape, stride, elements = (*shape, 2), (*(2 * one for one in stride), 1), 2 * elements
            bucket = filling.setdefault(real, Bucket(real))
            bucket.pieces.append(_Piece(index, bucket.count, shape, stride, parameter.is_complex()))
            unit = _ALIGNMENT // real.itemsize
            bucket.count += -(-elements // unit) * unit
            full = first_bytes if first_bytes is not None and not self.buckets else most_bytes
            if full is not None and bucket.nbytes >= full:
                self.buckets.append(filling.pop(real))
        self.buckets += filling.values()

    def empty(self, device: torch.device) -> list[torch.Tensor]:
        """Memory for each bucket."""
        return [self.empty_bucket(k, device) for k in range(len(self.buckets))]

    def empty_bucket(self, k: int, device: torch.device) -> torch.Tensor:
        """Memory for the k-th bucket."""
        return torch.empty(self.buckets[k].count, dtype=self.buckets[k].dtype, device=device)

    def fill(self, k: int, flat: torch.Tensor, gradients: Sequence[torch.Tensor | None]) -> None:
        """Copy gradients into the k-th bucket, and zeros where there is none.

        Raises
        ------
        InvalidArgument
            For sparse gradients.
        """
        targets, sources, missing = [], [], []
        for piece in self.buckets[k].pieces:
            gradient = gradients[piece.index]
            if gradient is None:
                missing.append(piece.of(flat))
                continue
            if gradient.layout is not torch.strided:
                raise is_sparse(self._names[piece.index])
            targets.append(piece.of(flat))
            sources.append(torch.view_as_real(gradient.resolve_conj()) if piece.is_complex else gradient)
        if targets:
            torch._foreach_copy_(targets, sources)
        if missing:
            torch._foreach_zero_(missing)

    def gradients(self, flats: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """The parts of the buckets, by the index of the parameter."""
        pairs = zip(flats, self.buckets, strict=True)
        return {piece.index: piece.gradient(flat) for flat, bucket in pairs for piece in bucket.pieces}
