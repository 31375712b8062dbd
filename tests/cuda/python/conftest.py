"""`paceline.torch` on GPUs that are not there: the package is linked to the fake of the CUDA runtime, CPU tensors stand for the GPUs'.

    PYTHONPATH=BUILD/fake_python_package python -m pytest tests/cuda/python

What a GPU does on its own time happens here during the call; which stream it would have been on is written down.

With PACELINE_PARTS_AS_GPUS=1 four parts of one GPU stand for the four GPUs. With a package that is not linked to the fake, this GPU is a
real one: a test that asks the fake for something is skipped. PACELINE_PEER_ACCESS=0 then sends copies between the parts through the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import fake_device  # noqa: E402
import fake_graph  # noqa: E402
import paceline  # noqa: E402
from gpu_cases import AS_PARTS, ON_A_GPU  # noqa: E402
from gpu_support import forget_streams  # noqa: E402
from paceline import _core  # noqa: E402
from paceline.torch._devices import caller_state, cuda  # noqa: E402
from paceline.torch._devices.compiling import has_compiled  # noqa: E402
from paceline.torch._run import flat_gradients  # noqa: E402
from paceline.torch._run.flat_gradients import FlatGradients  # noqa: E402
from paceline.torch._trainer import shard_ranges, shards  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what parts of one GPU cannot stand for."""
    for item in items:
        marker = item.get_closest_marker("own_gpus")
        if marker is not None and AS_PARTS:
            item.add_marker(pytest.mark.skip(reason=f"parts of one GPU do not stand for GPUs here: {marker.args[0]}"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """PyTorch looks for accelerators once, so the fake device has to be there before the first test that makes it look."""
    if not ON_A_GPU and any({"gpus", "far_gpus"} & {*getattr(item, "fixturenames", ())} for item in session.items):
        with contextlib.suppress(pytest.skip.Exception):
            fake_device.extension()


class Fake:
    """The fake's switches, and what was asked of ``torch.cuda``."""

    boots: ClassVar[int] = 0  # of this process

    def __init__(self) -> None:
        self.library = ctypes.CDLL(_core.__file__)
        if hasattr(self.library, "paceline_fake_make_event"):
            self.library.paceline_fake_make_event.restype = ctypes.c_void_p
        self.released = 0
        self.streams_ended = 0
        self.met: list[list[int]] = []  # GPUs whose peers PyTorch has got to know
        self.broken = ""  # what PyTorch says of a GPU that has failed
        self._streams = threading.local()

    def boot(self, gpus: int) -> None:
        """A machine as after boot, with so many GPUs."""
        self.library.paceline_fake_boot(gpus)

    def lie(self, source: int, target: int) -> None:
        """Direct copies from one GPU's memory to the other's deliver zeros."""
        self.library.paceline_fake_lie(source, target)

    def set_memory(self, gpu: int, size: int) -> None:
        """The GPU has so many bytes of memory."""
        self.library.paceline_fake_set_memory(gpu, ctypes.c_size_t(size))

    def hang(self, stream: int) -> None:
        """The stream runs nothing any more."""
        self.library.paceline_fake_hang(ctypes.c_void_p(stream))

    def go_on(self, stream: int) -> None:
        """The stream runs again."""
        self.library.paceline_fake_go_on(ctypes.c_void_p(stream))

    def poison(self, gpu: int) -> None:
        """The GPU answers every call as after a kernel's illegal access."""
        self.library.paceline_fake_poison(gpu, 700)

    def fail_nccl(self, function: str, rank: int) -> None:
        """The next such call of NCCL's for that rank fails."""
        self.library.paceline_fake_nccl_fail(function.encode(), rank, 1)

    def hang_nccl(self, function: str) -> None:
        """The next such collective of NCCL's does not end by itself."""
        self.library.paceline_fake_nccl_hang(function.encode())

    def nccl_calls(self, function: str) -> int:
        """How often it was called."""
        return int(self.library.paceline_fake_nccl_calls(function.encode()))

    @property
    def leftovers(self) -> int:
        """What was not given back, also after a while: other threads and the collector may be at it. Parts that stand for GPUs are given back when nothing uses them."""
        deadline = time.monotonic() + 30.0
        while True:
            if AS_PARTS:
                with contextlib.suppress(paceline.Error):
                    paceline.release_partitions("cuda:0")
            left = int(self.library.paceline_fake_leftovers())
            if not left or time.monotonic() > deadline:
                return left
            gc.collect()
            time.sleep(0.01)

    @property
    def unused_pool_bytes(self) -> int:
        """What the pools keep though nothing uses it."""
        return int(self.library.paceline_fake_unused_pool_bytes())

    @property
    def synchronizations(self) -> int:
        """Calls that held a thread until a GPU was done."""
        return int(self.library.paceline_fake_synchronize_calls())

    @property
    def streams(self) -> list[tuple[int, int]]:
        """The streams that the calling thread is on: (GPU, handle), the latest last."""
        if not hasattr(self._streams, "stack"):
            self._streams.stack = []
        stack: list[tuple[int, int]] = self._streams.stack
        return stack

    @contextlib.contextmanager
    def on_stream(self, index: int, handle: int) -> Iterator[None]:
        """Stands for `cuda.on_stream`."""
        self.streams.append((index, handle))
        try:
            yield
        finally:
            self.streams.pop()

    def release_memory(self, streams_end: bool) -> None:
        """Stands for `cuda.release_memory`."""
        self.released += 1
        self.streams_ended += streams_end
        if self.broken:
            raise RuntimeError(self.broken)


class CopyStream:
    """Stands for `cuda.CopyStream`."""

    used: ClassVar[list[tuple[int, int]]] = []  # (GPU, handle of the stream that the copies are for)

    def __init__(self, index: int) -> None:
        self._index = index

    def bring(self, tensor: Any, handle: int) -> Any:
        """A copy."""
        self.used.append((self._index, handle))
        return tensor.clone()


class Queue:
    """Stands for `cuda.Queue`, where nobody asks whether streams wait for each other."""

    def __init__(self, index: int) -> None: ...

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Nothing."""
        yield


class Graph(fake_graph.Graph):
    """Stands for `cuda.Graph`, with events of the fake."""

    def __init__(self, fake: Fake, index: int, pool: Any) -> None:
        super().__init__(index, pool)
        self._fake = fake
        self._events: list[int] = []

    def __del__(self) -> None:
        for event in self._events:
            self._fake.library.paceline_fake_destroy_event(ctypes.c_void_p(event))

    def make_event(self) -> int:
        """An event that goes with the graph."""
        self._events.append(self._fake.library.paceline_fake_make_event(self.index))
        return self._events[-1]

    def record_event(self, event: int) -> None:
        """Record it on the stream that the calling thread is on."""
        _, stream = self._fake.streams[-1]
        self._fake.library.paceline_fake_record(ctypes.c_void_p(event), ctypes.c_void_p(stream))


class Real:
    """A real GPU. It has none of the fake's switches: a test that reads or sets one is skipped there, so it does this first."""

    returns_all = False  # whether nothing may use a part any more when the test is over

    def __getattr__(self, name: str) -> Any:
        pytest.skip(f"a real GPU has no {name!r}, which belongs to the fake")

    def __setattr__(self, name: str, value: Any) -> None:
        getattr(self, name)

    @property
    def leftovers(self) -> int:
        """0. A real GPU tells whether its parts can be given back, and is asked when the test is over: PyTorch's tensors may have used their streams."""
        self.__dict__["returns_all"] = True
        return 0


def _real_parts() -> Iterator[Real]:
    """Four parts of a real GPU, on which tests make their tensors."""
    paceline.partition("cuda:0", [0.25] * 4)
    torch.set_default_device("cuda:0")
    real = Real()
    try:
        yield real
    finally:
        torch.set_default_device(None)
        forget_streams()
        # The report of a test that failed may hold its trainer.
        with contextlib.nullcontext() if real.returns_all else contextlib.suppress(paceline.Error):
            paceline.release_partitions("cuda:0")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake | Real]:
    """Four GPUs; afterwards nothing may have gone wrong that the fake has noticed."""
    if has_compiled():  # in an earlier test of the process; all parameters would be waited for at once
        torch.compiler.reset()
    fake = Fake()
    if hasattr(fake.library, "paceline_fake_boot"):
        yield from _fake_gpus(fake, monkeypatch)
    elif ON_A_GPU:
        yield from _real_parts()
    else:
        pytest.skip("this package is not linked to the fake: PYTHONPATH=BUILD/fake_python_package")


def _fake_gpus(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    gc.collect()  # what tests before left in cycles belongs to the machine before, and so do parts that it knows
    for index in range(4) if Fake.boots else ():
        with contextlib.suppress(paceline.Error):
            paceline.release_partitions(f"cuda:{index}")
    Fake.boots += 1
    fake.boot(1 if AS_PARTS else 4)
    if AS_PARTS:
        paceline.partition("cuda:0", [0.25] * 4)
    monkeypatch.setattr(cuda, "device", lambda index: torch.device("cpu"))
    monkeypatch.setattr(cuda, "meet_peers", fake.met.append)
    monkeypatch.setattr(cuda, "current_stream", lambda index: None)
    monkeypatch.setattr(cuda, "on_stream", fake.on_stream)
    monkeypatch.setattr(cuda, "CopyStream", CopyStream)
    monkeypatch.setattr(cuda, "Queue", Queue)
    monkeypatch.setattr(cuda, "Graph", functools.partial(Graph, fake))
    monkeypatch.setattr(cuda, "graph_pool", object)
    monkeypatch.setattr(cuda, "generator", lambda index: torch.default_generator)
    monkeypatch.setattr(cuda, "uuid", lambda index: f"GPU-{index}")
    monkeypatch.setattr(cuda, "is_capturing", lambda: False)
    monkeypatch.setattr(cuda, "let_follow_current", lambda index, handle: None)
    monkeypatch.setattr(cuda, "pinned", lambda count, dtype: torch.empty(count, dtype=dtype))
    monkeypatch.setattr(cuda, "pin", lambda tensor: tensor.clone())
    monkeypatch.setattr(cuda, "pinned_like", torch.empty_like)
    monkeypatch.setattr(cuda, "mark_current", lambda index: None)
    monkeypatch.setattr(cuda, "mark_default", lambda index: None)
    monkeypatch.setattr(cuda, "follow_on_current", lambda index, event: None)
    monkeypatch.setattr(cuda, "wait", lambda event: None)
    monkeypatch.setattr(cuda, "prepare_worker", lambda index: None)
    monkeypatch.setattr(cuda, "spare_memory", lambda index, unused=0: 2**34)
    for name in ("mark_memory", "peak_memory"):
        monkeypatch.setattr(cuda, name, lambda index: 0)
    monkeypatch.setattr(cuda, "memory_bandwidth", lambda index: None)
    monkeypatch.setattr(cuda, "release_memory", fake.release_memory)
    kept: list[
        Any
    ] = []  # on a GPU memory that is dropped returns in the order of its stream, but here it is the host's

    def drop_sums(flat: FlatGradients) -> None:
        kept.append(flat._sums)
        flat._sums = []

    monkeypatch.setattr(FlatGradients, "drop_sums", drop_sums)
    yield fake
    text = ctypes.create_string_buffer(500)
    assert fake.library.paceline_fake_problems(text, 500) == 0, text.value.decode()
    assert fake.synchronizations == 0


@pytest.fixture
def whole_afterwards(fake: Any) -> Iterator[None]:
    """What the process knows of parts must not outlive the machine they were on."""
    yield
    gc.collect()
    if not isinstance(fake, Real):
        paceline.release_partitions("cuda:0")
    assert fake.leftovers == 0


@pytest.fixture
def gpus(fake: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The extension of the fake device. Nothing may be used that its stream has not waited for."""
    if isinstance(fake, Real):
        pytest.skip("PyTorch has the real GPU here, not the fake device")
    built = fake_device.extension()
    fake_device.replace(cuda, monkeypatch)
    monkeypatch.setattr(
        caller_state,
        "_PLAIN_AUTOCAST",
        {*caller_state._PLAIN_AUTOCAST, ("hpu", False, torch.get_autocast_dtype("hpu"))},
    )
    built.take_problems()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # Let the plain backward run on this thread, too, and attention on the host be in the operators that the fake device runs it in.
    with torch.autograd.set_multithreading_enabled(False), sdpa_kernel(SDPBackend.MATH):
        yield built
    torch.set_num_threads(threads)
    assert built.take_problems() == []


@pytest.fixture
def far_gpus(fake: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The fake device under the queues of the fake runtime. Its tensors are on other devices, so a missing copy is an error.

    On a real GPU that is so anyway. There, too, what a test does not put on the GPU is on the host.
    """
    if isinstance(fake, Real):
        torch.set_default_device(None)
        return fake
    gpus = request.getfixturevalue("gpus")

    @contextlib.contextmanager
    def on_stream(index: int, handle: int) -> Iterator[None]:
        before = gpus.device()
        with fake.on_stream(index, handle):
            gpus.enter(index, gpus.current(index))
            try:
                yield
            finally:
                gpus.enter(before, gpus.current(before))

    class FarCopyStream(CopyStream):
        def bring(self, tensor: Any, handle: int) -> Any:
            return tensor.to(fake_device.device(self._index))

    monkeypatch.setattr(cuda, "on_stream", on_stream)
    monkeypatch.setattr(cuda, "CopyStream", FarCopyStream)
    monkeypatch.setattr(cuda, "prepare_worker", lambda index: gpus.enter(index, gpus.current(index)))
    return gpus


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter's gradient in a bucket of its own."""
    monkeypatch.setattr(flat_gradients, "MOST_BYTES", 1)


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharded optimizers cut small tensors, too, in several rounds."""
    monkeypatch.setattr(shard_ranges, "ALIGNMENT", 16)
    monkeypatch.setattr(shards, "_LEAST_BYTES_OF_ROUNDS", 1)


@pytest.fixture
def streams(fake: Any, far_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tensors of GPUs are on the fake device, which has a stream of its own for each of a pool. On a real GPU nothing is replaced."""
    if ON_A_GPU:
        return far_gpus
    known: dict[tuple[int, int], int] = {}

    @contextlib.contextmanager
    def on_stream(index: int, handle: int) -> Iterator[None]:
        stream = known.setdefault((index, handle), far_gpus.new_stream(index))
        device, before = far_gpus.device(), far_gpus.current(index)
        with fake.on_stream(index, handle):
            far_gpus.enter(index, stream)
            try:
                yield
            finally:
                far_gpus.enter(index, before)
                far_gpus.enter(device, far_gpus.current(device))

    def keep_for_default(tensor: Any) -> None:
        """Called when the fake runtime says that the pool's stream has done its work, of which the fake device does not know."""
        for (index, _), stream in list(known.items()):
            if index == tensor.device.index:
                far_gpus.host_waits(far_gpus.record(stream))
        far_gpus.keep(tensor, tensor.device.index)

    monkeypatch.setattr(cuda, "on_stream", on_stream)
    monkeypatch.setattr(cuda, "keep_for_default", keep_for_default)
    return far_gpus
