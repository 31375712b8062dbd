"""Files of named tensors in the safetensors format, and memory that is laid out like them.

The format: 8 bytes with the length of the header (little-endian), the header (JSON), then the bytes of the tensors without gaps.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paceline import InvalidArgument
from paceline.torch._devices import cuda

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_ALIGNMENT = 16  # of a file's tensors in memory; no element is larger
_CHUNK = (
    1 << 24
)  # bytes; the checksum and the copy into the page cache each read a chunk, the second time from the processor's cache


class Image(NamedTuple):
    """All bytes of a file: the header with its length, and the tensors."""

    header: bytes
    body: torch.Tensor


class Stamp(NamedTuple):
    """By what a damaged file is recognised."""

    bytes: int
    crc32: int


class Staging:
    """Memory for copies of tensors, which is kept from save to save: fresh memory costs a page fault for every 4 KiB."""

    def __init__(self) -> None:
        self._block = _host_memory(0)

    def copied(
        self, files: Mapping[str, Mapping[str, torch.Tensor]], aliases: Mapping[str, Mapping[str, str]]
    ) -> dict[str, Image]:
        """Copies of the tensors of some files, by file. They are complete on return, and valid until the next call."""
        placed: dict[
            str, tuple[bytes, int, int]
        ] = {}  # by file: the header, and begin and end of the tensors in the block
        copies: list[tuple[torch.Tensor, int]] = []
        total = 0
        for file, tensors in files.items():
            header, offsets, size = _header(file, tensors, aliases[file])
            copies += [(tensors[name], total + offset) for name, offset in offsets.items()]
            placed[file] = (header, total, total + size)
            total += -(-size // _ALIGNMENT) * _ALIGNMENT
        with torch.inference_mode(False), torch.no_grad():
            gpus = {tensor.device.index for tensor, _ in copies if tensor.device.type != "cpu"}
            if total > self._block.numel():
                self._block = cuda.pinned(total, torch.uint8) if gpus else _host_memory(total)
            for tensor, offset in copies:
                end = offset + tensor.numel() * tensor.element_size()
                there = self._block[offset:end].view(tensor.dtype).view(tensor.shape)
                there.copy_(tensor, non_blocking=True)
            for gpu in gpus:
                cuda.wait_for_stream(gpu)
            return {file: Image(header, self._block[begin:end]) for file, (header, begin, end) in placed.items()}


def _host_memory(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device="cpu")


def _header(
    file: str, tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str]
) -> tuple[bytes, dict[str, int], int]:
    """The header with its length, the offset of each tensor in the body, and the length of the body in bytes."""
    # The safetensors package reads and writes metadata of this form, too: it leaves out all but one of several names of the same memory.
    entries: dict[str, Any] = {"__metadata__": {**aliases, "format": "pt"}}
    offsets, end = {}, 0
    # Large elements first, so that all of them are aligned.
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise InvalidArgument(
                f"save_async: {name} in {file} has the type {tensor.dtype}, which the safetensors format does not have. Save another view of it."
            )
        offsets[name], end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets, end


def write(path: Path, parts: Iterable[Any]) -> Stamp:
    """Write a new file and bring it to the disk. `parts` have the buffer protocol. Python's lock is only held between chunks."""
    size, crc = 0, 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for part in parts:
            for begin in range(0, len(part), _CHUNK):
                chunk = memoryview(part)[begin : begin + _CHUNK]
                size, crc = size + len(chunk), zlib.crc32(chunk, crc)
                while len(chunk):
                    chunk = chunk[os.write(descriptor, chunk) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Stamp(size, crc)


def write_image(path: Path, image: Image) -> Stamp:
    """Write a file of tensors and bring it to the disk."""
    return write(path, [image.header, memory_of(image.body)])


def read(path: Path, stamp: Stamp) -> dict[str, torch.Tensor]:
    """The tensors of a file, each with memory of its own.

    Raises
    ------
    ValueError
        If the file is not the one with this stamp.
    OSError
        If it cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size != stamp.bytes:
            raise ValueError(f"{path.name} has {os.fstat(file.fileno()).st_size} bytes instead of {stamp.bytes}")
        reader = _Reader(file)
        length = int.from_bytes(reader.take(8), "little")
        if not 0 < length <= stamp.bytes - 8:
            raise ValueError(f"{path.name} has no header")
        entries: dict[str, Any] = json.loads(reader.take(length))
        entries.pop("__metadata__", None)
        tensors, end = {}, 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
            first, end = end, end + math.prod(shape) * dtype.itemsize
            if min(shape, default=0) < 0 or entry["data_offsets"] != [first, end] or 8 + length + end > stamp.bytes:
                raise ValueError(f"{path.name} has no place for {name}")
            tensors[name] = torch.empty(shape, dtype=dtype, device="cpu")
            reader.fill(memory_of(tensors[name]))
        if reader.crc != stamp.crc32:
            raise ValueError(f"{path.name} is damaged: its checksum is another one")
    return tensors


class _Reader:
    """Reads a file from its beginning, and adds up its checksum."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.crc = 0

    def take(self, count: int) -> bytes:
        taken = bytearray(count)
        self.fill(memoryview(taken))
        return bytes(taken)

    def fill(self, memory: memoryview) -> None:
        while len(memory):
            count = self._file.readinto(memory[:_CHUNK])
            if not count:
                raise ValueError("the file ends too early")
            self.crc = zlib.crc32(memory[:count], self.crc)
            memory = memory[count:]


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in the host's memory, which the caller keeps alive. PyTorch alone has no such view without NumPy."""
    count = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * count).from_address(tensor.data_ptr())) if count else memoryview(b"")
