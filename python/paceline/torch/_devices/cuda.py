"""All calls of ``torch.cuda`` in `paceline.torch`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

# cudaStreamLegacy. PyTorch's handle of the default stream is 0, which elsewhere means no stream.
_LEGACY_STREAM = 1


def device(index: int) -> torch.device:
    """The GPU with this number. PyTorch and paceline number them alike."""
    return torch.device("cuda", index)


def meet_peers(indices: list[int]) -> None:
    """Let PyTorch find out which of these GPUs access each other's memory, by one copy of an element for each of them.

    PyTorch asks once in a process. Then it enables the access, and lets the peer into what its allocator maps itself (``expandable_segments``)
    or has from CUDA's pool (``cudaMallocAsync``). Until then only PyTorch's own copies reach such memory. If paceline finds afterwards that
    direct copies arrive wrong, it disables the access, and PyTorch does not enable it again: CUDA sends its copies through the host.
    """
    for source in indices:
        for target in indices:
            if source != target and torch.cuda.can_device_access_peer(source, target):
                torch.zeros(1, device=device(source)).to(device(target))


def current_stream(index: int) -> int:
    """CUDA's handle of the calling thread's stream on that GPU."""
    return torch.cuda.current_stream(index).cuda_stream or _LEGACY_STREAM


def on_stream(index: int, handle: int) -> contextlib.AbstractContextManager[None]:
    """Run on this stream of that GPU what the calling thread does inside of the ``with`` block."""
    return torch.cuda.stream(_stream(index, handle))


def _stream(index: int, handle: int) -> torch.cuda.Stream:
    if handle == _LEGACY_STREAM:
        return torch.cuda.default_stream(index)
    return torch.cuda.ExternalStream(handle, device=index)


def has_finished(index: int, handle: int) -> bool:
    """Whether the stream has done everything that was enqueued on it."""
    return _stream(index, handle).query()


def let_follow_current(index: int, handle: int) -> None:
    """Let the stream of that handle wait for the calling thread's stream on that GPU, if it is another one."""
    current = torch.cuda.current_stream(index)
    if (current.cuda_stream or _LEGACY_STREAM) != handle:
        _stream(index, handle).wait_stream(current)


def is_capturing() -> bool:
    """Whether the calling thread is capturing a CUDA graph."""
    return torch.cuda.is_current_stream_capturing()


class CopyStream:
    """Brings host memory to a GPU while the stream that needs it still computes."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(index)

    def bring(self, tensor: torch.Tensor, handle: int) -> torch.Tensor:
        """A copy on the GPU. The stream of that handle may use it from now on.

        PyTorch's allocator of pinned memory reuses the staging copy once the GPU has read it. `record_stream` keeps the memory of the
        result until the compute stream is done with it. Fresh memory needs no wait.
        """
        compute = _stream(self._index, handle)
        staged = tensor if tensor.is_pinned() else tensor.contiguous().pin_memory()
        with torch.cuda.stream(self._stream):
            there = staged.to(self._device, non_blocking=True)
        compute.wait_stream(self._stream)
        there.record_stream(compute)
        return there


_failed: list[Any] = []  # graphs whose capture has failed


class Graph:
    """A CUDA graph of the work that a thread sends to a GPU. Its memory stays in the pool, so every replay uses the same addresses."""

    def __init__(self, index: int, pool: Any) -> None:
        self.index = index
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()
        self._marks: list[torch.cuda.Event] = []
        self._stream: torch.cuda.Stream  # the captured one

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Record the work of the ``with`` block. Nothing of it runs."""
        current = torch.cuda.current_stream(self.index)
        # CUDA captures no default stream. The stream of a part is used itself, since its kernels belong to the part.
        is_default = current == torch.cuda.default_stream(self.index)
        self._stream = stream = torch.cuda.Stream(self.index) if is_default else current
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            with torch.inference_mode(False):  # before 2.11 it makes tensors of the generator, which training uses, too
                self._graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                yield
            except BaseException:
                with contextlib.suppress(RuntimeError):  # what ended the capture is the error to see
                    self._end()
                raise
            self._end()
        current.wait_stream(stream)

    def _end(self) -> None:
        """End the capture. If that fails, put back what PyTorch leaves as it is in a capture.

        Before 2.12 `capture_end` stops at CUDA's error. Then the pool takes no other capture, and the generator refuses to draw. A capture that
        succeeds sets the generator back. The allocator goes on asking the graph which streams it captures, so the graph has to stay.
        """
        try:
            self._graph.capture_end()
        except RuntimeError:
            _failed.append(self._graph)
            with contextlib.suppress(RuntimeError):  # newer versions have ended it
                torch._C._cuda_endAllocateToPool(self.index, self._pool)
            with contextlib.suppress(RuntimeError):
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(capture_error_mode="relaxed")
                torch.zeros(1, device=device(self.index))
                graph.capture_end()
            raise

    def mark(self) -> int:
        """In a capture: CUDA's handle of an event that each replay records behind what was captured so far. The graph owns it."""
        event = torch.cuda.Event(external=True)
        # Autograd may add gradients on other streams, each of which the captured one follows.
        current = torch.cuda.current_stream(self.index)
        if current != self._stream:
            self._stream.wait_stream(current)
        event.record(self._stream)
        self._marks.append(event)
        return event.cuda_event

    def replay(self) -> None:
        """Run the work on the calling thread's stream, with the next numbers of the GPU's generator."""
        self._graph.replay()


def graph_pool() -> Any:
    """Memory for graphs that run one after the other."""
    return torch.cuda.graph_pool_handle()


class Queue:
    """A stream of one GPU, and what orders it among others. PyTorch keeps its streams until the process ends."""

    def __init__(self, index: int) -> None:
        self._stream = torch.cuda.Stream(index)

    def enter(self) -> None:
        """Send to it what the calling thread does on its GPU from now on. The GPU becomes the thread's own."""
        torch.cuda.set_stream(self._stream)

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        """Send to it what the calling thread does on its GPU inside of the ``with`` block."""
        return torch.cuda.stream(self._stream)

    def mark(self) -> Any:
        """An event after all that was enqueued so far. `wait` and `seconds_between` take it."""
        return _marked(self._stream)

    def has_finished(self) -> bool:
        """Whether it has done everything that was enqueued."""
        return self._stream.query()

    def follow(self, event: Any) -> None:
        """Let what is enqueued from now on wait for the event."""
        self._stream.wait_event(event)

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep PyTorch from reusing the tensor's memory before the stream has finished its present work."""
        tensor.record_stream(self._stream)


def _marked(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def mark_current(index: int) -> Any:
    """An event after all that the calling thread's stream on that GPU has to do so far."""
    return _marked(torch.cuda.current_stream(index))


def mark_default(index: int) -> Any:
    """The same of that GPU's default stream."""
    return _marked(torch.cuda.default_stream(index))


def keep_for_default(tensor: torch.Tensor) -> None:
    """Keep PyTorch from reusing the tensor's memory while the default stream of its GPU may use it."""
    tensor.record_stream(torch.cuda.default_stream(tensor.device))


def follow_on_current(index: int, event: Any) -> None:
    """Let the calling thread's stream on that GPU wait for the event."""
    torch.cuda.current_stream(index).wait_event(event)


def wait(event: Any) -> None:
    """Hold the calling thread until the GPU has come to the event."""
    event.synchronize()


def has_passed(event: Any) -> bool:
    """Whether the GPU has come to the event."""
    return bool(event.query())


def present() -> int | None:
    """The number of the calling thread's GPU, or None if the process does not use any."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def name_of_present() -> str:
    """What the calling thread's GPU is called; empty without a GPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def seconds_between(first: Any, last: Any) -> float:
    """Seconds from one event of a GPU to a later one. Both have been waited for."""
    return 1e-3 * float(first.elapsed_time(last))


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Host memory for a copy of the tensor, which a GPU can write while the host goes on."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


def generator(index: int) -> torch.Generator:
    """The generator that every thread and stream of that GPU draws from."""
    torch.cuda.init()
    return torch.cuda.default_generators[index]


def uuid(index: int) -> str:
    """What names that GPU on every machine and in every process."""
    return str(torch.cuda.get_device_properties(index).uuid)


def wait_for_stream(index: int) -> None:
    """Wait for what the calling thread's stream on that GPU has to do."""
    torch.cuda.current_stream(index).synchronize()


def pinned(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Host memory that GPUs can copy from while the host goes on."""
    return torch.empty(count, dtype=dtype, device="cpu", pin_memory=True)


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that GPUs can read while the host goes on."""
    return tensor.pin_memory()


def prepare_worker(index: int) -> None:
    """Prepare the calling thread for computing on that GPU."""
    torch.cuda.set_device(index)


def mark_memory(index: int) -> int:
    """The bytes that PyTorch has allocated on a GPU. `peak_memory` counts from here."""
    torch.cuda.reset_peak_memory_stats(index)
    return torch.cuda.memory_allocated(index)


def peak_memory(index: int) -> int:
    """The most bytes that PyTorch had allocated at once since `mark_memory`."""
    return torch.cuda.max_memory_allocated(index)


def memory_in_use(index: int) -> int:
    """The bytes that PyTorch has allocated on a GPU."""
    return torch.cuda.memory_allocated(index)


def reserved_memory(index: int) -> int:
    """The bytes of a GPU that PyTorch keeps, used or not."""
    return torch.cuda.memory_reserved(index)


def free_memory(index: int) -> int:
    """The bytes of a GPU that nobody has, but for a sixteenth of all, and what PyTorch keeps of it without using it.

    The sixteenth is for what plans do not know: cuBLAS's workspaces of each stream, the rounding of PyTorch's allocator, and gaps between
    its blocks. It is a guess; if memory runs out nevertheless, the plan changes.
    """
    return spare_memory(index, reserved_memory(index) - torch.cuda.memory_allocated(index))


def spare_memory(index: int, unused: int = 0) -> int:
    """The bytes of a GPU that nobody has, but for a sixteenth of all. What PyTorch keeps without using it is for the next step's activations."""
    free, whole = torch.cuda.mem_get_info(index)
    return max(0, free + unused - whole // 16)


def memory_bandwidth(index: int) -> float | None:
    """Of a GPU's memory, in bytes per second: two transfers in each clock. None if PyTorch does not say."""
    facts: Any = torch.cuda.get_device_properties(index)
    kilohertz, bits = getattr(facts, "memory_clock_rate", 0), getattr(facts, "memory_bus_width", 0)
    return 2e3 * kilohertz * bits / 8 or None


def release_memory(streams_end: bool) -> None:
    """Let PyTorch give back unused memory.

    If streams are about to end, also the workspaces that cuBLAS has for each stream. They belong to the whole process, and captured
    graphs may refer to them, so they are not released otherwise.
    """
    if streams_end:
        torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
