"""Parts of a GPU by the driver alone (green contexts), through ctypes: what the probe measures must not depend on paceline."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_SM = 1  # CU_DEV_RESOURCE_TYPE_SM
_DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM, which creation requires
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class DriverError(RuntimeError):
    """A call of the driver failed."""


class DevResource(ctypes.Structure):
    """CUdevResource of CUDA 12.4 to 13.0, and as long as that of later ones, whose field for it begins at the same place."""

    _fields_ = (
        ("type", ctypes.c_uint),
        ("padding", ctypes.c_ubyte * 92),
        ("sm_count", ctypes.c_uint),
        ("rest", ctypes.c_ubyte * 44),
    )


class Driver:
    """libcuda.so.1, which is there because PyTorch has loaded it."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise DriverError(f"{name}: this driver has none") from None
        result = function(*arguments)
        if result != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(result, ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'').decode()} ({result})")


@dataclass
class Part:
    """Some SMs of a GPU, and a stream whose work runs on them alone."""

    context: ctypes.c_void_p
    stream: int
    sms: int


@contextlib.contextmanager
def split(ratios: Sequence[float], ordinal: int = 0) -> Iterator[list[Part]]:
    """Cut a GPU whose primary context exists into parts of about these ratios; they end with the ``with`` block.

    One split into the smallest groups there are, then several groups to a part: the only way to unequal parts before CUDA 13.1.
    """
    driver = Driver()
    whole, rest, count = DevResource(), DevResource(), ctypes.c_uint(0)
    driver.call("cuDeviceGetDevResource", ordinal, ctypes.byref(whole), _SM)
    driver.call("cuDevSmResourceSplitByCount", None, ctypes.byref(count), ctypes.byref(whole), None, 0, 1)
    groups = (DevResource * count.value)()
    driver.call(
        "cuDevSmResourceSplitByCount", groups, ctypes.byref(count), ctypes.byref(whole), ctypes.byref(rest), 0, 1
    )
    parts: list[Part] = []
    try:
        for begin, end in _cuts(ratios, count.value):
            parts.append(_part(driver, (DevResource * (end - begin))(*groups[begin:end]), ordinal))
        yield parts
    finally:
        for part in parts:
            driver.call("cuStreamDestroy_v2", ctypes.c_void_p(part.stream))
            driver.call("cuGreenCtxDestroy", part.context)


def _cuts(ratios: Sequence[float], groups: int) -> Iterator[tuple[int, int]]:
    begin, total = 0, 0.0
    for index, ratio in enumerate(ratios):
        total += ratio
        # At least one group for everybody, those to come included.
        end = round(groups * total / sum(ratios))
        end = min(max(end, begin + 1), groups - (len(ratios) - 1 - index))
        yield begin, end
        begin = end


def _part(driver: Driver, groups: Any, ordinal: int) -> Part:
    description, context, stream, got = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(), DevResource()
    driver.call("cuDevResourceGenerateDesc", ctypes.byref(description), groups, len(groups))
    driver.call("cuGreenCtxCreate", ctypes.byref(context), description, ordinal, _DEFAULT_STREAM)
    driver.call("cuGreenCtxGetDevResource", context, ctypes.byref(got), _SM)
    driver.call("cuGreenCtxStreamCreate", ctypes.byref(stream), context, _NON_BLOCKING, 0)
    return Part(context, stream.value or 0, got.sm_count)
