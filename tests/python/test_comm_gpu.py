"""The GPU part of `Communicator`, as far as a machine without a GPU shows it: the DLPack C exchange API, the lookup of NCCL, options."""

from __future__ import annotations

import ctypes
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from paceline import Communicator, DeviceGroup, InvalidArgument, Unavailable

CAPSULE = b"dlpack_exchange_api"


@pytest.fixture
def communicator() -> Iterator[Communicator]:
    with DeviceGroup(["host:0", "host:1"]) as group:
        yield Communicator(group)


class Header(ctypes.Structure):
    pass


Header._fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("previous", ctypes.POINTER(Header))]
FromObject = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p))


class Table(ctypes.Structure):
    _fields_ = [
        ("header", Header),
        ("allocator", ctypes.c_void_p),
        ("from_object", FromObject),
        ("to_object", ctypes.c_void_p),
        ("tensor_from_object", ctypes.c_void_p),
        ("current_work_stream", ctypes.c_void_p),
    ]


def take_pointer(capsule: Any) -> int:
    """Return the content of a versioned capsule, and rename the capsule as consumers do."""
    api = ctypes.pythonapi
    api.PyCapsule_GetPointer.restype, api.PyCapsule_GetPointer.argtypes = (
        ctypes.c_void_p,
        [ctypes.py_object, ctypes.c_char_p],
    )
    api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
    pointer = api.PyCapsule_GetPointer(capsule, b"dltensor_versioned")
    api.PyCapsule_SetName(capsule, b"used_dltensor_versioned")
    return int(pointer)


def lend(array: Any, out: Any) -> int:
    array.asked += 1
    out[0] = take_pointer(array.source.__dlpack__(max_version=(1, 0)))
    return 0


from_object = FromObject(lend)


class Lender:
    """An array whose type has an exchange table. `__dlpack__` serves consumers that know none of the table's versions."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.asked = 0

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.source.__dlpack__(**keywords)


KEPT: list[Any] = []  # the tables must live as long as the process


def lender_type(attribute: str, majors: list[int], as_capsule: bool) -> type[Lender]:
    previous = None
    for major in reversed(majors):
        table = Table(Header(major, 0, previous), None, from_object if major == 1 else FromObject(), None, None, None)
        KEPT.append(table)
        previous = ctypes.pointer(table.header)
    address = ctypes.addressof(KEPT[-1])
    api: Any = address
    if as_capsule:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        api = new(address, CAPSULE, None)
    return type("Lending", (Lender,), {attribute: api})


@pytest.mark.parametrize("attribute", ["__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__"])
@pytest.mark.parametrize("as_capsule", [True, False])
@pytest.mark.parametrize(("majors", "asked"), [([1], 1), ([2, 1], 1), ([3, 2, 1], 1), ([2], 0), ([0], 0)])
def test_the_c_exchange_api_is_used_in_the_version_that_is_known(
    communicator: Communicator, attribute: str, as_capsule: bool, majors: list[int], asked: int
) -> None:
    source = np.arange(4, dtype=np.float32)
    lender = lender_type(attribute, majors, as_capsule)(source)
    before = sys.getrefcount(source)
    communicator.all_reduce([lender, np.ones(4, np.float32)])
    assert source.tolist() == [1, 2, 3, 4]
    assert lender.asked == asked
    assert sys.getrefcount(source) == before


def test_what_the_c_exchange_api_lends_read_only_is_refused(communicator: Communicator) -> None:
    fixed = np.zeros(4, np.float32)
    fixed.flags.writeable = False
    lender = lender_type("__dlpack_c_exchange_api__", [1], True)(fixed)
    with pytest.raises(InvalidArgument, match=r"buffers\[1\] \(Lending\) is read-only"):
        communicator.all_reduce([np.ones(4, np.float32), lender])
    communicator.all_gather([lender, fixed], [np.zeros(8, np.float32), np.zeros(8, np.float32)])


def test_torch_is_not_asked_by_its_slow_method(communicator: Communicator) -> None:
    torch = pytest.importorskip("torch")
    if not any(hasattr(torch.Tensor, name) for name in ("__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__")):
        pytest.skip("this version of torch has no C exchange API")

    class Watched(torch.Tensor):  # type: ignore[misc, name-defined]
        def __dlpack__(self, **keywords: Any) -> Any:
            raise AssertionError("asked")

    tensor = torch.ones(4).as_subclass(Watched)
    communicator.all_reduce([tensor, torch.ones(4)])
    assert tensor.tolist() == [2, 2, 2, 2]


def test_arrays_of_jax_are_refused_whatever_their_capsule_says(communicator: Communicator) -> None:
    class Array:
        def __dlpack__(self) -> Any:
            return np.zeros(4, np.float32).__dlpack__()  # an unversioned capsule, which has no flags

    Array.__module__ = "jaxlib.xla_extension"
    with pytest.raises(InvalidArgument, match=r"buffers\[0\] \(Array\) is read-only.*pass a writable array"):
        communicator.all_reduce([Array(), np.zeros(4, np.float32)])
    communicator.all_gather([Array(), Array()], [np.zeros(8, np.float32), np.zeros(8, np.float32)])


def test_options_are_checked_and_calls_that_gpus_need_do_nothing_on_the_host(communicator: Communicator) -> None:
    group = communicator.group
    with pytest.raises(InvalidArgument, match="no transport 'gloo'; use 'auto', 'nccl' or 'copies'"):
        Communicator(group, transport="gloo")  # type: ignore[arg-type]
    for timeout in (0.0, -1.0, math.nan):
        with pytest.raises(InvalidArgument, match="timeout is"):
            Communicator(group, timeout=timeout)
    other = Communicator(group, transport="copies", timeout=math.inf)
    other.wait()
    assert other.description == "the host's memory"
    other.close()


def nccl_info_with(**environment: str) -> dict[str, str]:
    script = "import json; from paceline._nccl import nccl_info; print(json.dumps(nccl_info()))"
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


def test_nccl_is_named_or_it_is_said_why_there_is_none() -> None:
    info = nccl_info_with(PACELINE_NCCL_LIBRARY="/nowhere/libnccl.so.2")
    assert info["version"] == info["path"] == ""
    if "no CUDA backend" not in info["why_none"]:
        assert "/nowhere/libnccl.so.2 cannot be loaded" in info["why_none"]
        info = nccl_info_with()
        assert bool(info["version"]) == bool(info["path"]) == (not info["why_none"])


def test_a_package_of_pip_with_nccl_is_looked_at(tmp_path: Any) -> None:
    """A file that is no library, so that the loader's message shows which file was tried."""
    library = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.write_text("nothing")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    why_none = nccl_info_with(PYTHONPATH=path, PACELINE_NCCL_LIBRARY="")["why_none"]
    if not why_none or "no CUDA backend" in why_none:
        pytest.skip("no CUDA backend, or the system has an NCCL of its own")
    assert str(library) in why_none


def test_devices_that_are_not_there_are_unavailable_before_anything_is_made() -> None:
    with pytest.raises((InvalidArgument, Unavailable), match="cuda:77"):
        DeviceGroup(["cuda:77"])
