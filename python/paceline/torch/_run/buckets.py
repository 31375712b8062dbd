"""Flat gradients: those of each device in one stretch of memory per element type, and the sums over all devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from paceline import InvalidArgument
from paceline.torch._devices.places import Places
from paceline.torch._replicas.replicas import Replica
from paceline.torch._run.gradients import DTYPES, View

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


class Layout:
    """Which gradients lie where in the buckets, one bucket for each element type. Parameters that require none have no place."""

    def __init__(self, parameters: Sequence[torch.Tensor], names: list[str]) -> None:
        self.groups: dict[torch.dtype, list[_Piece]] = {}
        self._names = names
        self._ends: dict[torch.dtype, int] = {}
        for index, parameter in enumerate(parameters):
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
            unit = _ALIGNMENT // real.itemsize
            begin = self._ends.get(real, 0)
            self.groups.setdefault(real, []).append(_Piece(index, begin, shape, stride, parameter.is_complex()))
            self._ends[real] = begin + -(-elements // unit) * unit

    @property
    def sizes(self) -> list[tuple[torch.dtype, int]]:
        """Element type and elements of each bucket."""
        return list(self._ends.items())

    def fill(self, dtype: torch.dtype, flat: torch.Tensor, gradients: Sequence[torch.Tensor | None]) -> list[int]:
        """Copy gradients into their bucket, and zeros where there is none. Returns the indices of those that there are.

        Raises
        ------
        InvalidArgument
            For sparse gradients.
        """
        found, targets, sources, missing = [], [], [], []
        for piece in self.groups[dtype]:
            gradient = gradients[piece.index]
            if gradient is None:
                missing.append(piece.of(flat))
                continue
            if gradient.layout is not torch.strided:
                raise InvalidArgument(
                    f"step: the gradient of parameter {self._names[piece.index]} is sparse. Gradients of several devices are summed "
                    "densely; make the layer dense (sparse=False), or use one device."
                )
            found.append(piece.index)
            targets.append(piece.of(flat))
            sources.append(torch.view_as_real(gradient.resolve_conj()) if piece.is_complex else gradient)
        if targets:
            torch._foreach_copy_(targets, sources)
        if missing:
            torch._foreach_zero_(missing)
        return found

    def gradients(self, buckets: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """The parts of the buckets, by the index of the parameter."""
        pairs = zip(buckets, self.groups.values(), strict=True)
        return {piece.index: piece.gradient(flat) for flat, pieces in pairs for piece in pieces}


class Buckets:
    """The buckets of one step on devices with queues.

    When a device's last micro-batch is enqueued, its gradients are copied one after the other into a bucket. So one copy crosses memory
    spaces and one kernel sums, whatever the number of parameters. The sums become the user's gradients only when every device has
    finished.
    """

    def __init__(self, replicas: list[Replica], names: list[str], places: Places) -> None:
        self._replicas = replicas
        self._places = places
        self._layout = Layout(replicas[0].parameters, names)
        self._flat: list[list[torch.Tensor]] = [[] for _ in replicas]
        self._sums: list[torch.Tensor] = []
        self.has_gradient = [False] * len(replicas[0].parameters)

    def fill(self, device: int, terms: list[torch.Tensor]) -> list[View | None]:
        """Fill the buckets of a device with its gradients and its part of the loss, on its worker. Returns where the buckets are."""
        replica = self._replicas[device]
        place = self._places.devices[device]
        with torch.no_grad():
            flat = [self._laid_out(device, dtype, count) for dtype, count in self._layout.sizes]
            loss = torch.zeros(1, dtype=torch.float64, device=place)
            if terms:  # empty if no item of this device counts
                loss += torch.stack([term.to(place, torch.float64) for term in terms]).sum()
            flat.append(self._pinned(loss) if self._must_be_pinned(device) else loss)
        for tensor in flat:
            self._places.keep_for_reader(tensor, device)
        self._flat[device] = flat
        replica.clear_gradients()
        return [_view(tensor) for tensor in flat]

    def sums(self) -> list[View | None]:
        """Allocate the sums: fresh memory at home, of the caller's stream. Returns where they are."""
        with self._places.at_home():
            self._sums = [
                torch.empty(count, dtype=dtype, device=self._places.home)
                for dtype, count in [*self._layout.sizes, (torch.float64, 1)]  # the last one is the loss
            ]
        return [_view(tensor) for tensor in self._sums]

    def totals(self) -> list[torch.Tensor | None]:
        """The gradients of the batch, in the order of the parameters, as parts of the sums."""
        found = self._layout.gradients(self._sums[:-1])
        return [found[index] if there else None for index, there in enumerate(self.has_gradient)]

    def loss(self) -> torch.Tensor:
        """The objective, 0-dimensional."""
        return self._sums[-1][0]

    def take_pinned(self) -> list[torch.Tensor]:
        """Take out what host devices have delivered to GPUs, which read it later. Release the rest."""
        pinned = [tensor for device, flat in enumerate(self._flat) if self._must_be_pinned(device) for tensor in flat]
        self._flat = [[] for _ in self._replicas]
        return pinned

    def _laid_out(self, device: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        parameters = self._replicas[device].parameters
        if self._must_be_pinned(device):
            flat = self._places.pinned(count, dtype)
        else:
            flat = torch.empty(count, dtype=dtype, device=self._places.devices[device])
        gradients = [parameter.grad for parameter in parameters]
        for index in self._layout.fill(dtype, flat, gradients):
            self.has_gradient[index] = True
        return flat

    def _must_be_pinned(self, device: int) -> bool:
        """Whether a GPU copies this device's buckets from host memory, which has to be pinned for that."""
        return self._places.devices[device].type == "cpu" and self._places.home.type != "cpu"

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._places.pinned(tensor.numel(), tensor.dtype).copy_(tensor)


def _view(tensor: torch.Tensor) -> View:
    return (tensor.data_ptr(), tensor.numel(), DTYPES[tensor.dtype])
