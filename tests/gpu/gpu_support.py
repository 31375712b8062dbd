"""What the tests on GPUs share: sets of devices, a delay on a stream, programs for fresh interpreters."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

import paceline
from paceline import Device
from paceline._core.runtime import why_no_devices

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-4,
}  # algorithms, and with them roundings, differ with a batch's size
PARTS_AS_GPUS = "PACELINE_PARTS_AS_GPUS"  # each part is then a memory space of its own
DELAY_LIBRARY = "PACELINE_GPU_DELAY"  # names the library that PACELINE_GPU_TESTS=ON builds


def no_gpu() -> str:
    """Why nothing can run on a GPU here; empty if it can."""
    if not torch.cuda.is_available():
        return "PyTorch sees none"
    return why_no_devices().get("cuda", "this build of paceline has no CUDA backend")


@dataclass
class Box:
    """The first GPU whole or in parts, perhaps with a host device beside it; or devices by name. `as_gpus`: the parts stand for GPUs."""

    name: str
    names: tuple[str, ...] = ("cuda:0",)
    ratios: tuple[float, ...] = ()
    as_gpus: bool = False
    devices: list[Device] = field(default_factory=list)

    def open(self) -> None:
        if not self.ratios:
            self.devices = [paceline.find_device(name) for name in self.names]
            return
        os.environ[PARTS_AS_GPUS] = "1" if self.as_gpus else "0"
        try:
            self.devices = paceline.partition(self.names[0], list(self.ratios))
        except paceline.Unavailable as error:
            pytest.skip(str(error))

    def close(self) -> None:
        """Fails if something still holds a part: a trainer that was not closed, a stream that was not dropped."""
        forget_streams()
        os.environ.pop(PARTS_AS_GPUS, None)
        if self.ratios and self.devices:
            paceline.release_partitions(self.names[0])

    @property
    def torch_device(self) -> torch.device:
        """Where the module lives."""
        cuda = [device for device in self.devices if device.kind == "cuda"]
        return torch.device("cuda", cuda[0].index) if cuda else torch.device("cpu")

    @property
    def is_cuda(self) -> bool:
        return self.torch_device.type == "cuda"

    def __len__(self) -> int:
        return len(self.devices)

    def put(self, value: Any) -> Any:
        """A nest of tensors, or a module, on the box's GPU."""
        if isinstance(value, torch.nn.Module):
            return value.to(self.torch_device)
        return tree_map(lambda leaf: leaf.to(self.torch_device) if isinstance(leaf, torch.Tensor) else leaf, value)

    @property
    def program(self) -> str:
        """Python that makes `devices` and `home` of this box in a fresh interpreter."""
        if self.ratios:
            made = f"paceline.partition({self.names[0]!r}, {list(self.ratios)!r})"
        else:
            made = repr(list(self.names))
        told = f"import os\nos.environ[{PARTS_AS_GPUS!r}] = '1'\n" if self.as_gpus else ""
        return f"{told}import paceline\ndevices = {made}\nhome = {str(self.torch_device)!r}\n"


BOXES = [
    Box("one_gpu"),
    Box("two_equal_parts", ratios=(0.5, 0.5)),
    Box("two_unequal_parts", ratios=(0.75, 0.25)),
    Box("four_parts", ratios=(0.25, 0.25, 0.25, 0.25)),
    Box("two_as_gpus", ratios=(0.75, 0.25), as_gpus=True),
    Box("four_as_gpus", ratios=(0.25, 0.25, 0.25, 0.25), as_gpus=True),
    Box("gpu_and_host", names=("cuda:0", "host:0")),
]


def forget_streams() -> None:
    """Drop what PyTorch keeps for streams that are about to end: cuBLAS workspaces and cached memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def delay(box: Box, seconds: float, near: torch.Tensor | None = None) -> None:
    """Keep the current stream busy for so long by the GPU's own clock; where `near` lies on the host, or all does, the thread."""
    if not (box.is_cuda if near is None else near.is_cuda):
        time.sleep(seconds)
        return
    delay_stream(torch.cuda.current_stream().cuda_stream, seconds)


def delay_stream(handle: int, seconds: float) -> None:
    """Keep this stream of the calling thread's GPU busy, whosever it is."""
    error = _delay_library().paceline_test_delay_on(ctypes.c_void_p(handle), ctypes.c_ulonglong(int(seconds * 1e9)))
    assert error == 0, f"launching the delay: CUDA error {error}"


@functools.cache
def _delay_library() -> ctypes.CDLL:
    path = os.environ.get(DELAY_LIBRARY)
    if not path:
        pytest.skip(f"{DELAY_LIBRARY} does not name the library with the delay; tests/gpu/run builds it")
    return ctypes.CDLL(path)


class LateBackward(torch.autograd.Function):
    """The identity, whose backward is preceded by a delay on the stream that it runs on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, box: Box, seconds: float) -> torch.Tensor:
        ctx.box, ctx.seconds = box, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        delay(ctx.box, ctx.seconds, gradient)
        return gradient, None, None


def synchronize(box: Box) -> None:
    if box.is_cuda:
        torch.cuda.synchronize(box.torch_device)


def equal(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], tolerance: float) -> None:
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
