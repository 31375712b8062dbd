"""Collectives from Python: the arrays they accept, the results they write, and their messages about mistakes."""

from __future__ import annotations

import ctypes
import gc
import math
import sys
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from paceline import Communicator, DeviceGroup, InvalidArgument, Timeout, Unavailable

torch = pytest.importorskip("torch", reason="torch's tensors are the arrays that matter most")

SMALL, LARGE = 5, 200_000  # reduced by the calling thread; reduced by all workers


@pytest.fixture(scope="module")
def group() -> Iterator[DeviceGroup]:
    with DeviceGroup(["host:0", "host:1"]) as group:
        yield group


@pytest.fixture
def communicator(group: DeviceGroup) -> Communicator:
    return Communicator(group)


# --- results ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, SMALL, LARGE])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int32", "int64"])
def test_all_reduce_adds_torch_tensors_in_place(communicator: Communicator, dtype: str, count: int) -> None:
    tensors = [(torch.arange(count) % 50 * (d + 1)).to(getattr(torch, dtype)) for d in range(2)]
    expected = tensors[0] + tensors[1]
    addresses = [tensor.data_ptr() for tensor in tensors]
    communicator.all_reduce(tensors)
    for tensor in tensors:
        assert torch.equal(tensor, expected)
    assert [tensor.data_ptr() for tensor in tensors] == addresses


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32", "int64"])
def test_all_reduce_adds_numpy_arrays_of_any_shape_in_place(communicator: Communicator, dtype: str) -> None:
    a = np.arange(24, dtype=dtype).reshape(2, 3, 4)
    b = np.ones(24, dtype=dtype)
    communicator.all_reduce([a, b])
    assert a.ravel().tolist() == b.tolist() == list(range(1, 25))


@pytest.mark.parametrize("code", list("fdilq"))
def test_all_reduce_takes_arrays_of_the_standard_library(communicator: Communicator, code: str) -> None:
    a, b = array(code, [1, 2, 3]), array(code, [10, 20, 30])
    communicator.all_reduce((a, b))
    assert a.tolist() == b.tolist() == [11, 22, 33]


def test_all_reduce_takes_memoryviews_of_raw_bytes(communicator: Communicator) -> None:
    halves = np.array([1.5, 2.5], dtype=np.float16)
    raw = bytearray(halves.tobytes())
    view = np.frombuffer(raw, np.float16).data  # a memoryview of format "e"
    communicator.all_reduce([view, halves])
    assert np.frombuffer(raw, np.float16).tolist() == [3.0, 5.0]
    floats = bytearray(array("f", [1.0, 2.0]))
    communicator.all_reduce([memoryview(floats).cast("f"), array("f", [0.5, 0.5])])
    assert memoryview(floats).cast("f").tolist() == [1.5, 2.5]


@pytest.mark.parametrize(
    ("code", "op", "expected"),
    [
        ("d", "sum", [4.0, -3.0]),
        ("d", "mean", [2.0, -1.5]),
        ("d", "min", [1.0, -4.0]),
        ("d", "max", [3.0, 1.0]),
        ("i", "mean", [2, -1]),  # truncated towards zero
    ],
)
def test_every_operation_does_what_its_name_says(
    communicator: Communicator, code: str, op: Any, expected: list[float]
) -> None:
    arrays = [array(code, [1, -4]), array(code, [3, 1])]
    communicator.all_reduce(arrays, op=op)
    assert arrays[0].tolist() == arrays[1].tolist() == expected


def test_arrays_of_different_libraries_work_together_and_may_be_empty(communicator: Communicator) -> None:
    parameter = torch.nn.Parameter(torch.ones(1, 3))
    parameter.grad = torch.arange(3.0).reshape(3, 1).t()  # (1, 3): contiguous for any value of its first stride
    floats = array("f", [3.0, 4.0, 5.0])
    communicator.all_reduce([parameter.grad, floats])
    assert parameter.grad.ravel().tolist() == floats.tolist() == [3.0, 5.0, 7.0]
    communicator.all_reduce([torch.empty(0), np.empty(0, np.float32)])


@pytest.mark.parametrize("part", [1, LARGE])
def test_reduce_scatter_all_gather_and_broadcast_compose(communicator: Communicator, part: int) -> None:
    inputs = [torch.randn(2 * part) for _ in range(2)]
    parts = [torch.empty(part) for _ in range(2)]
    communicator.reduce_scatter(inputs, parts, "max")
    expected = torch.maximum(*inputs)
    assert torch.equal(torch.cat(parts), expected)
    wholes = [torch.empty(2 * part) for _ in range(2)]
    communicator.all_gather(parts, wholes)
    assert torch.equal(wholes[0], expected)
    assert torch.equal(wholes[1], expected)
    communicator.broadcast([wholes[0], inputs[1]], root=1)
    assert torch.equal(wholes[0], inputs[1])
    communicator.send(parts[0], parts[1], source=0, target=1)
    assert torch.equal(parts[1], expected[:part])


def test_inputs_that_are_only_read_may_be_read_only(communicator: Communicator) -> None:
    fixed = np.arange(2.0)
    fixed.flags.writeable = False
    wholes = [np.zeros(4), np.zeros(4)]
    communicator.all_gather([fixed, memoryview(fixed.tobytes()).cast("d")], wholes)
    assert wholes[1].tolist() == [0, 1, 0, 1]


def test_a_part_of_a_tensor_can_be_its_own_output(communicator: Communicator) -> None:
    whole = [torch.full((4,), float(d + 1)) for d in range(2)]
    communicator.reduce_scatter(whole, [whole[0][:2], whole[1][2:]])
    assert whole[0].tolist() == [3, 3, 1, 1]
    assert whole[1].tolist() == [2, 2, 3, 3]


# --- mistakes ----------------------------------------------------------------------------------------------------


def read_only_numpy() -> Any:
    fixed = np.zeros(4, np.float32)
    fixed.flags.writeable = False
    return fixed


MISTAKES: list[tuple[str, Callable[[], Any], str]] = [
    ("strided numpy", lambda: np.zeros(8, np.float32)[::2], r"buffers\[1\] \(ndarray\) is not contiguous"),
    ("strided torch", lambda: torch.zeros(4, 2)[:, 0], r"buffers\[1\] \(Tensor\) is not contiguous"),
    ("transposed", lambda: torch.zeros(3, 2).t(), r"buffers\[1\] \(Tensor\) is not contiguous"),
    ("expanded", lambda: torch.zeros(1).expand(4), r"buffers\[1\] \(Tensor\) is not contiguous"),
    ("strided view", lambda: memoryview(array("f", range(8)))[::2], r"buffers\[1\] \(memoryview\) is not contiguous"),
    ("read-only numpy", read_only_numpy, r"buffers\[1\] \(ndarray\) is read-only"),
    ("read-only view", lambda: memoryview(bytes(16)).cast("f"), r"buffers\[1\] \(memoryview\) is read-only"),
    ("requires grad", lambda: torch.zeros(4, requires_grad=True), r"buffers\[1\] \(Tensor\) requires grad.*detach"),
    ("parameter", lambda: torch.nn.Parameter(torch.zeros(4)), r"buffers\[1\] \(Parameter\) requires grad.*\.grad"),
    ("other device", lambda: torch.zeros(4, device="meta"), r"buffers\[1\] \(Tensor\)"),
    ("sparse", lambda: torch.zeros(4).to_sparse(), r"buffers\[1\] \(Tensor\)"),
    ("type", lambda: torch.zeros(4, dtype=torch.float64), r"buffers\[1\] is float64, but buffers\[0\] is float32"),
    ("unsigned", lambda: np.zeros(4, np.uint8), r"buffers\[1\] \(ndarray\) has elements of type uint8; supported are"),
    ("complex", lambda: torch.zeros(4, dtype=torch.complex64), r"elements of type complex64"),
    ("bool", lambda: torch.zeros(4, dtype=torch.bool), r"elements of type bool8"),
    ("raw bytes", lambda: bytearray(16), r"buffers\[1\] \(bytearray\) has elements of format 'B'.*cast"),
    ("byte order", lambda: np.zeros(4, ">f4"), r"buffers\[1\] \(ndarray\)"),
    ("size", lambda: torch.zeros(3), r"buffers\[1\] has 3 elements, but buffers\[0\] has 4"),
    ("list", lambda: [0.0] * 4, r"buffers\[1\] is a list, not an array"),
    ("none", lambda: None, r"buffers\[1\] is a NoneType, not an array"),
]


@pytest.mark.parametrize(("make", "message"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_mistakes_name_the_array_and_write_nothing(
    communicator: Communicator, make: Callable[[], Any], message: str
) -> None:
    good = torch.arange(4.0)
    with pytest.raises(InvalidArgument, match=message):
        communicator.all_reduce([good, make()])
    assert good.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="all_reduce"):
        communicator.all_reduce([good, make()])


def test_mistakes_in_the_call_are_named(communicator: Communicator) -> None:
    arrays = [torch.zeros(2), torch.zeros(2)]
    calls: list[tuple[Callable[[Any], None], Any, str]] = [
        (communicator.all_reduce, arrays[:1], "buffers has 1 buffer for a group of 2 devices"),
        (communicator.all_reduce, torch.zeros(2, 2), "buffers is a Tensor; pass a list with one array per device"),
        (communicator.all_reduce, [arrays[0], arrays[0]], r"buffers\[0\] and buffers\[1\] overlap"),
        (lambda a: communicator.all_reduce(a, "prod"), arrays, "no operation 'prod'; use 'sum', 'mean'"),  # type: ignore[arg-type]
        (lambda a: communicator.broadcast(a, root=2), arrays, "root is 2"),
        (lambda a: communicator.broadcast(a, root=-1), arrays, "root is -1"),
        (lambda a: communicator.send(*a, source=-1, target=1), arrays, "send: source is -1; use the index of a device"),
        (lambda a: communicator.send(*a, source=0, target=2), arrays, "send: target is 2; use the index of a device"),
        (lambda a: communicator.send(a[0], a[1][:1], source=0, target=1), arrays, r"send: buffers\[1\] has 1 element"),
        (lambda a: communicator.reduce_scatter(a, a), arrays, "2 times"),
        (lambda a: communicator.all_gather(a, [1, 2]), arrays, r"all_gather: outputs\[0\] is a int"),
    ]
    for call, argument, message in calls:
        with pytest.raises(InvalidArgument, match=message):
            call(argument)


@pytest.mark.parametrize("timeout", [0.0, math.inf, 1e300])
def test_a_group_may_be_closed_with_any_patience(timeout: float) -> None:
    group = DeviceGroup(["host:0", "host:1"])
    try:
        group.close(timeout)
    except Timeout:
        assert timeout == 0.0
    assert group.closed


@pytest.mark.parametrize("timeout", [math.nan, -1.0, -math.inf])
def test_a_timeout_that_is_none_is_refused(timeout: float) -> None:
    with DeviceGroup(["host:0"]) as group:
        with pytest.raises(InvalidArgument, match="close: timeout is"):
            group.close(timeout)
        assert not group.closed


def test_a_closed_group_is_unavailable() -> None:
    group = DeviceGroup(["host:0"])
    communicator = Communicator(group)
    group.close()
    with pytest.raises(Unavailable, match="closed"):
        communicator.all_reduce([torch.zeros(2)])


# --- lifetimes and protocols -------------------------------------------------------------------------------------


class Producer:
    """An array of an unknown library. Records its calls, and can answer like an old or odd library."""

    def __init__(self, source: Any, *, knows_version: bool = True, device: tuple[int, int] = (1, 0)) -> None:
        self.source = source
        self.knows_version = knows_version
        self.device = device
        self.capsule: Any = None

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **keywords: Any) -> Any:
        if keywords and not self.knows_version:
            raise TypeError("__dlpack__() got an unexpected keyword argument")
        self.capsule = self.source.__dlpack__(**keywords)
        return self.capsule


def capsule_name(capsule: Any) -> str:
    get_name = ctypes.pythonapi.PyCapsule_GetName
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    name = get_name(capsule)
    assert name is not None
    return bytes(name).decode()


@pytest.mark.parametrize(("knows_version", "name"), [(True, "used_dltensor_versioned"), (False, "used_dltensor")])
@pytest.mark.parametrize("fails", [False, True])
def test_capsules_are_consumed_and_their_memory_given_back(
    communicator: Communicator, knows_version: bool, name: str, fails: bool
) -> None:
    source = np.zeros(4, np.float32)
    producer = Producer(source, knows_version=knows_version)
    before = sys.getrefcount(source)
    if fails:
        with pytest.raises(InvalidArgument):
            communicator.all_reduce([producer, np.zeros(3, np.float32)])
    else:
        communicator.all_reduce([producer, np.ones(4, np.float32)])
        assert source.tolist() == [1, 1, 1, 1]
    assert capsule_name(producer.capsule) == name
    assert sys.getrefcount(source) == before


def test_an_array_that_nobody_else_holds_is_alive_during_the_call_and_freed_after_it(
    communicator: Communicator,
) -> None:
    class Tracked(np.ndarray[Any, Any]):
        pass

    arrays = [np.zeros(LARGE, np.float32).view(Tracked) for _ in range(2)]
    watched = [weakref.ref(a) for a in arrays]
    communicator.all_reduce(arrays)
    arrays.clear()
    gc.collect()
    assert [w() for w in watched] == [None, None]


def test_buffers_are_locked_only_during_the_call(communicator: Communicator) -> None:
    raw = bytearray(8)
    communicator.all_reduce([memoryview(raw).cast("f"), array("f", [1.0, 2.0])])
    raw.extend(b"more")  # raises BufferError while the memory is still borrowed
    assert len(raw) == 12


def test_arrays_on_other_devices_are_refused_by_their_device(communicator: Communicator) -> None:
    elsewhere = Producer(np.zeros(4, np.float32), device=(2, 3))
    with pytest.raises(InvalidArgument, match=r"buffers\[1\] \(Producer\) is not in the memory of the CPU.*type 2.*3"):
        communicator.all_reduce([np.zeros(4, np.float32), elsewhere])
    assert elsewhere.capsule is None
    pinned = Producer(np.ones(4, np.float32), device=(3, 0))
    communicator.all_reduce([np.ones(4, np.float32), pinned])
    assert pinned.source.tolist() == [2, 2, 2, 2]


def test_what_a_producer_raises_is_part_of_the_message_and_an_interrupt_is_passed_on(
    communicator: Communicator,
) -> None:
    class Broken(Producer):
        def __dlpack__(self, **keywords: Any) -> Any:
            raise self.source

    good = np.zeros(4, np.float32)
    with pytest.raises(InvalidArgument, match=r"buffers\[0\] \(Broken\) cannot be used through DLPack: no luck"):
        communicator.all_reduce([Broken(BufferError("no luck")), good])
    with pytest.raises(KeyboardInterrupt):
        communicator.all_reduce([Broken(KeyboardInterrupt()), good])
    odd = Producer(good)
    odd.__class__ = type("Odd", (Producer,), {"__dlpack__": lambda self, **keywords: "no capsule"})
    with pytest.raises(InvalidArgument, match="returned no DLPack capsule"):
        communicator.all_reduce([odd, good])


def test_the_interpreter_runs_other_threads_meanwhile(group: DeviceGroup) -> None:
    """Two threads with a group each. If a call held the GIL, one caller would keep the other from starting."""
    failures: list[str] = []
    barrier = threading.Barrier(2)

    def work(names: list[str]) -> None:
        with DeviceGroup(names) as own:
            communicator = Communicator(own)
            barrier.wait(30)
            for _ in range(20):
                arrays = [np.full(LARGE, d, np.float32) for d in range(2)]
                communicator.all_reduce(arrays)
                if not (arrays[0] == 1).all():
                    failures.append("wrong sum")

    threads = [threading.Thread(target=work, args=([f"host:{2 * i}", f"host:{2 * i + 1}"],)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert failures == []


def test_repr_names_the_devices(communicator: Communicator, group: DeviceGroup) -> None:
    assert communicator.group is group
    assert "host:0" in repr(communicator)
