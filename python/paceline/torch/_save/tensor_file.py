"""Files of named tensors, which the safetensors package writes and reads, and memory for copies of tensors."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paceline import InvalidArgument
from paceline.torch._devices import cuda

_ALIGNMENT = 16  # of tensors in memory; no element is larger
_CHUNK = 1 << 24  # bytes of which a checksum is made at once


class Image(NamedTuple):
    """What a file will hold. `memory` is that of the tensors."""

    tensors: dict[str, Any]
    metadata: dict[str, str]
    memory: torch.Tensor


class Stamp(NamedTuple):
    """By what a damaged file is recognised."""

    bytes: int
    crc32: int


def _safetensors() -> Any:
    """The package, which is imported when it is needed."""
    try:
        import safetensors.torch
        from safetensors import TensorSpec  # noqa: F401  of version 0.8 on
    except ImportError as error:
        raise ImportError(
            'save_async and load need the package safetensors, of version 0.8 at least: pip install "paceline[torch]"'
        ) from error
    return safetensors


class Staging:
    """Memory for copies of tensors, which is kept from save to save: fresh memory costs a page fault for every 4 KiB."""

    def __init__(self) -> None:
        self._block = _host_memory(0)

    def copied(
        self, files: Mapping[str, Mapping[str, torch.Tensor]], aliases: Mapping[str, Mapping[str, str]]
    ) -> dict[str, Image]:
        """Copies of the tensors of some files, by file. They are complete on return, and valid until the next call."""
        spec_of = _safetensors().TensorSpec
        placed, total = [], 0
        for file, tensors in files.items():
            for name, tensor in tensors.items():
                placed.append((file, name, tensor, total))
                total += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        # The package reads metadata of this form, too: it leaves out all but one of several names of the same memory.
        found = {file: Image({}, {**aliases[file], "format": "pt"}, self._block) for file in files}
        with torch.inference_mode(False), torch.no_grad():
            gpus = {tensor.device.index for _, _, tensor, _ in placed if tensor.device.type != "cpu"}
            if total > self._block.numel():
                self._block = cuda.pinned(total, torch.uint8) if gpus else _host_memory(total)
            for file, name, tensor, begin in placed:
                there = self._block[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                there.copy_(tensor, non_blocking=True)
                kind, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
                try:
                    spec = spec_of(dtype=kind, shape=shape, data_ptr=there.data_ptr(), data_len=tensor.nbytes)
                except Exception as error:
                    raise InvalidArgument(
                        f"save_async: {name} in {file} has the type {tensor.dtype}, which the safetensors format does not have. Save another view of it."
                    ) from error
                found[file].tensors[name] = spec
            for gpu in gpus:
                cuda.wait_for_stream(gpu)
        return {file: image._replace(memory=self._block) for file, image in found.items()}


def _host_memory(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device="cpu")


def write(path: Path, data: bytes) -> Stamp:
    """Write a new file and bring it to the disk."""
    with path.open("xb") as file:
        file.write(data)
    return _stamp_of(path, on_disk=True)


def write_image(path: Path, image: Image) -> Stamp:
    """Write a file of tensors and bring it to the disk. Python's lock is not held meanwhile."""
    safetensors = _safetensors()
    try:
        safetensors.serialize_file(image.tensors, path, image.metadata)
    except safetensors.SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise (
            OSError(int(number[1]), os.strerror(int(number[1])), str(path)) if number else OSError(str(error))
        ) from error
    return _stamp_of(path, on_disk=True)


def read(path: Path, stamp: Stamp) -> dict[str, torch.Tensor]:
    """The tensors of a file, each with memory of its own. ValueError: it is not the file with this stamp."""
    found = _stamp_of(path)
    if found != stamp:
        raise ValueError(f"{path.name} is damaged: its size or checksum is another one")
    return {name: tensor.clone() for name, tensor in _safetensors().torch.load_file(path).items()}


def _stamp_of(path: Path, *, on_disk: bool = False) -> Stamp:
    """The size and the checksum of a file. `on_disk`: bring it to the disk first."""
    size = crc = 0
    with path.open("rb", buffering=0) as file:
        if on_disk:
            os.fsync(file.fileno())
        while chunk := file.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return Stamp(size, crc)
