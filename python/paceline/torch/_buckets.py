"""Flat gradients: each device's in one stretch of memory per element type, and the sums of all devices."""

from __future__ import annotations

import torch

from paceline import InvalidArgument
from paceline.torch._gradients import DTYPES, View
from paceline.torch._places import Places
from paceline.torch._replicas import Replica


class _Layout:
    """Which parameters lie where in the buckets."""

    def __init__(self, replica: Replica, names: list[str]) -> None:
        self.groups: dict[torch.dtype, list[tuple[int, int]]] = {}  # (index of the parameter, elements)
        for index, parameter in enumerate(replica.parameters):
            if not parameter.requires_grad:
                continue
            real = parameter.dtype.to_real() if parameter.is_complex() else parameter.dtype
            if real not in DTYPES:
                raise InvalidArgument(
                    f"step: parameter {names[index]} is of type {parameter.dtype}, whose gradients are not summed across devices. Use "
                    "float32, float64, float16 or bfloat16 parameters, or one device."
                )
            elements = parameter.numel() * (2 if parameter.is_complex() else 1)
            self.groups.setdefault(real, []).append((index, elements))

    def sizes(self) -> list[tuple[torch.dtype, int]]:
        """Of each bucket; the last one is the loss."""
        return [(dtype, sum(elements for _, elements in group)) for dtype, group in self.groups.items()] + [
            (torch.float64, 1)
        ]


class Buckets:
    """The buckets of one step on devices with queues.

    Each device's gradients are laid one after the other when its last micro-batch is enqueued, so that what crosses memory spaces is
    one copy, and what is summed one kernel, whatever the number of parameters. The sums become the user's gradients only when every
    device has come to its end.
    """

    def __init__(self, replicas: list[Replica], names: list[str], places: Places) -> None:
        self._replicas = replicas
        self._names = names
        self._places = places
        self._layout = _Layout(replicas[0], names)
        self._flat: list[list[torch.Tensor]] = [[] for _ in replicas]
        self._sums: list[torch.Tensor] = []
        self.has_gradient = [False] * len(replicas[0].parameters)

    def fill(self, device: int, terms: list[torch.Tensor]) -> list[View | None]:
        """On a device's worker, after its last micro-batch: its gradients and its part of the loss, and where they lie."""
        replica = self._replicas[device]
        with torch.no_grad():
            flat = [
                self._laid_out(device, dtype, [(replica.parameters[index].grad, index, n) for index, n in group])
                for dtype, group in self._layout.groups.items()
            ]
            loss = torch.stack([term.to(torch.float64) for term in terms]).sum().reshape(1)
            flat.append(self._own(device, loss))
        self._flat[device] = flat
        replica.clear_gradients()
        return [_view(tensor) for tensor in flat]

    def sums(self) -> list[View | None]:
        """Where the sums go: fresh memory at home, of the caller's stream."""
        with self._places.at_home():
            self._sums = [
                torch.empty(count, dtype=dtype, device=self._places.home) for dtype, count in self._layout.sizes()
            ]
        return [_view(tensor) for tensor in self._sums]

    def totals(self) -> list[torch.Tensor | None]:
        """The gradients of the batch, in the order of the parameters, as parts of the sums."""
        totals: list[torch.Tensor | None] = [None] * len(self.has_gradient)
        for total, group in zip(self._sums, self._layout.groups.values(), strict=False):
            offset = 0
            for index, elements in group:
                if self.has_gradient[index]:
                    parameter = self._replicas[0].parameters[index]
                    piece = total[offset : offset + elements]
                    if parameter.is_complex():
                        piece = torch.view_as_complex(piece.view(-1, 2))
                    totals[index] = piece.view(parameter.shape)
                offset += elements
        return totals

    def loss(self) -> torch.Tensor:
        """The objective, 0-dimensional."""
        return self._sums[-1][0]

    def drop(self) -> None:
        """Let go of what the devices gave: every later work of theirs waits for the step's end."""
        self._flat = [[] for _ in self._replicas]

    def _laid_out(
        self, device: int, dtype: torch.dtype, gradients: list[tuple[torch.Tensor | None, int, int]]
    ) -> torch.Tensor:
        place = self._places.devices[device]
        pieces = []
        for gradient, index, elements in gradients:
            if gradient is None:
                pieces.append(torch.zeros(elements, dtype=dtype, device=place))
                continue
            if gradient.layout is not torch.strided:
                raise InvalidArgument(
                    f"step: the gradient of parameter {self._names[index]} is sparse. Gradients of several devices are summed densely; "
                    "make the layer dense (sparse=False), or use one device."
                )
            self.has_gradient[index] = True
            real = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
            pieces.append(real.reshape(-1).to(dtype))
        return self._own(device, torch.cat(pieces) if len(pieces) != 1 else pieces[0])

    def _own(self, device: int, flat: torch.Tensor) -> torch.Tensor:
        """Host memory that a GPU shall copy has to be pinned."""
        if self._places.devices[device].type != "cpu" or self._places.home.type == "cpu":
            return flat
        pinned = self._places.pinned(flat.numel(), flat.dtype)
        return pinned.copy_(flat)


def _view(tensor: torch.Tensor) -> View:
    return (tensor.data_ptr(), tensor.numel(), DTYPES[tensor.dtype])
