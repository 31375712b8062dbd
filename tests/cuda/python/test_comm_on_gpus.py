"""`Communicator` on GPUs that are not there: arrays of NumPy say that they are a GPU's, and tell a stream or do not."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from array import array
from typing import Any, ClassVar

import numpy as np
import pytest

from paceline import Communicator, DeviceGroup, InvalidArgument, Unavailable

pytestmark = pytest.mark.own_gpus("it names GPUs and their memory")

GPU = 2  # DLPack's number for memory of CUDA


def capsule_of(values: Any, index: int) -> tuple[Any, int]:
    """A versioned capsule that says it is of a GPU, and what it points to."""
    capsule = values.__dlpack__(max_version=(1, 0))
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    pointer = int(get(capsule, b"dltensor_versioned"))
    place = (ctypes.c_int32 * 2).from_address(pointer + 40)  # after version, context, deleter, flags and data
    place[0], place[1] = GPU, index
    return capsule, pointer


FromObject = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p))
CurrentWorkStream = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class Table(ctypes.Structure):
    """DLPackExchangeAPI, with its header at the beginning."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocator", ctypes.c_void_p),
        ("from_object", FromObject),
        ("to_object", ctypes.c_void_p),
        ("tensor_from_object", ctypes.c_void_p),
        ("current_work_stream", CurrentWorkStream),
    ]


class OldArray:
    """Memory of a GPU of a library that knows `__dlpack__` alone."""

    def __init__(self, values: Any, index: int) -> None:
        self.values = np.array(values, np.float32)
        self.index = index
        self.asked: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return GPU, self.index

    def __dlpack__(self, **keywords: Any) -> Any:
        self.asked.append(keywords)
        return capsule_of(self.values, self.index)[0]


class Array(OldArray):
    """Memory of a GPU of a library with the C exchange API, whose current stream is the legacy default stream."""

    streams_told: ClassVar[list[int]] = []


def lend(lender: Any, out: Any) -> int:
    capsule, pointer = capsule_of(lender.values, lender.index)
    ctypes.pythonapi.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
    ctypes.pythonapi.PyCapsule_SetName(capsule, b"used_dltensor_versioned")
    out[0] = pointer
    return 0


def tell_stream(kind: int, index: int, out: Any) -> int:
    Array.streams_told.append(index)
    out[0] = None
    return 0


TABLE = Table(1, 3, None, None, FromObject(lend), None, None, CurrentWorkStream(tell_stream))
Array.__dlpack_c_exchange_api__ = ctypes.addressof(TABLE)  # type: ignore[attr-defined]


def test_arrays_of_gpus_are_reduced_in_place_on_their_own_streams(fake: Any) -> None:
    Array.streams_told.clear()
    with DeviceGroup(["cuda:0", "cuda:1", "host:0"]) as group:
        communicator = Communicator(group, transport="copies")
        arrays: list[Any] = [Array([1, 2, 3], 0), Array([10, 20, 30], 1), np.array([100, 200, 300], np.float32)]
        communicator.all_reduce(arrays)
        for values in (arrays[0].values, arrays[1].values, arrays[2]):
            assert values.tolist() == [111, 222, 333]
        communicator.broadcast([Array([1, 2], 0), second := Array([5, 6], 1), np.zeros(2, np.float32)])
        assert second.values.tolist() == [1, 2]
        host = np.zeros(3, np.float32)
        communicator.send(arrays[0], sent := Array([0, 0, 0], 1), source=0, target=1)
        communicator.send(sent, host, source=1, target=2)
        assert host.tolist() == [111, 222, 333]
        assert communicator.description == "copies through cuda:0 (as asked for), by PCIe peer access"
        communicator.wait()
        communicator.close()
        with pytest.raises(Unavailable, match="closed"):
            communicator.wait()
    assert Array.streams_told == [0, 1, 0, 1, 0, 1, 1]
    assert all(not lender.asked for lender in arrays[:2])
    assert fake.leftovers == 0


def test_a_gpu_that_does_not_come_is_a_timeout_that_names_it(fake: Any) -> None:
    with DeviceGroup(["cuda:0", "cuda:1"]) as group:
        communicator = Communicator(group, transport="copies", timeout=0.02)
        fake.hang(1)  # the legacy default stream of the current GPU, which is the first
        arrays = [Array([1, 2], 0), Array([3, 4], 1)]
        communicator.all_reduce(arrays)
        with pytest.raises(TimeoutError, match=r"cuda:0: what its buffer's stream was given .* within 0\.04 s"):
            communicator.wait()
        fake.go_on(1)  # while the arrays are there: what was enqueued still writes to them
        communicator.close()


def test_ctrl_c_waits_until_nothing_writes_to_the_arrays(fake: Any) -> None:
    went_on = threading.Event()

    def press() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)  # some looks at signals
        went_on.set()
        fake.go_on(1)

    with DeviceGroup(["cuda:0", "cuda:1"]) as group:
        communicator = Communicator(group, transport="copies")
        fake.hang(1)  # the stream of the first array, which the caller has to wait for
        thread = threading.Timer(1.0, press)  # well after the call below has begun
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            communicator.all_reduce([OldArray([1, 2], 0), OldArray([3, 4], 1)])
        assert went_on.is_set()
        thread.join()
        communicator.close()


def test_libraries_that_tell_no_stream_are_made_to_order_theirs(fake: Any) -> None:
    with DeviceGroup(["cuda:0", "cuda:1"]) as group:
        communicator = Communicator(group, transport="copies")
        arrays = [OldArray([1, 2], 0), Array([3, 4], 1)]
        communicator.all_reduce(arrays, "mean")
        assert arrays[0].values.tolist() == arrays[1].values.tolist() == [2, 3]
        assert arrays[0].asked == [{"max_version": (1, 0), "copy": False, "stream": 1}]
        communicator.close()


@pytest.mark.parametrize("kind", [Array, OldArray])
def test_arrays_have_to_be_in_the_memory_of_their_device(fake: Any, kind: type[OldArray]) -> None:
    with DeviceGroup(["cuda:0", "cuda:1"]) as group:
        communicator = Communicator(group, transport="copies")
        good = kind([1, 2], 0)
        wrong: list[tuple[Any, str]] = [
            (kind([1, 2], 3), r"buffers\[1\] .* not in the memory of cuda:1 \(DLPack device type 2, number 3\)"),
            (np.zeros(2, np.float32), r"buffers\[1\] \(ndarray\) is not in the memory of cuda:1.*type 1"),
            (array("f", [1.0, 2.0]), r"buffers\[1\] .* not in the memory of cuda:1"),
        ]
        for other, message in wrong:
            with pytest.raises(InvalidArgument, match=message):
                communicator.all_reduce([good, other])
        assert good.values.tolist() == [1, 2]
        communicator.close()


# In a process of its own: one that has found an NCCL keeps it.
WITHOUT_NCCL = """
import ctypes, os
from paceline import Communicator, DeviceGroup, Unavailable, _core

ctypes.CDLL(_core.__file__).paceline_fake_boot(2)
os.environ["PACELINE_NCCL_LIBRARY"] = "/nowhere/libnccl.so.2"
with DeviceGroup(["cuda:0", "cuda:1"]) as group:
    try:
        Communicator(group, transport="nccl")
    except Unavailable as error:
        print(error)
    communicator = Communicator(group)
    print(communicator.description)
    communicator.close()
"""


def test_an_nccl_that_is_asked_for_and_not_there_is_said(fake: Any) -> None:
    said = subprocess.run([sys.executable, "-c", WITHOUT_NCCL], capture_output=True, text=True, check=True).stdout
    assert "/nowhere/libnccl.so.2 cannot be loaded" in said
    assert "copies through cuda:0 (NCCL: /nowhere/libnccl.so.2" in said
