"""A PyTorch device in host memory (fake_device.cpp), which stands for GPUs in tests of what moves between memories."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.cpp_extension import load

_built: list[Any] = []


def extension() -> Any:
    """The extension, which is compiled when it is first needed (20 s). A test that cannot have it is skipped."""
    if not _built:
        root = Path(__file__).parents[2]
        folder = Path(os.environ.get("PACELINE_BUILD_DIR", root / "build")) / f"fake_device-{torch.__version__}"
        folder.mkdir(parents=True, exist_ok=True)
        source = root / "tests/cuda/python/fake_device.cpp"
        os.environ["PATH"] += f":{Path(sys.executable).parent}"  # where ninja may be
        try:
            built = load(
                "paceline_fake_device", [str(source)], extra_cflags=["-O0", "-std=c++20"], build_directory=str(folder)
            )
        except (RuntimeError, OSError) as error:
            _built.append(f"the fake device does not compile here: {error}")
        else:
            torch._register_device_module("hpu", _module(built))
            _built.append(built)
    if isinstance(_built[0], str):
        pytest.skip(_built[0])
    return _built[0]


def device(index: int) -> torch.device:
    """Stands for `cuda.device`."""
    return torch.device("hpu", index)


class Queue:
    """Stands for `cuda.Queue`."""

    def __init__(self, index: int) -> None:
        self._index = index
        self.stream = extension().new_stream(index)

    def enter(self) -> None:
        """Make it the calling thread's stream."""
        extension().enter(self._index, self.stream)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make it the calling thread's stream inside of the ``with`` block."""
        device, stream = extension().device(), extension().current(self._index)
        self.enter()
        try:
            yield
        finally:
            extension().enter(self._index, stream)
            extension().enter(device, extension().current(device))

    def mark(self) -> tuple[int, float]:
        """An event, with the moment."""
        return extension().record(self.stream), time.perf_counter()

    def has_finished(self) -> bool:
        """It does its work during calls."""
        return True

    def follow(self, event: tuple[int, float]) -> None:
        """Wait for it on the stream."""
        extension().wait(self.stream, event[0])

    def keep(self, tensor: torch.Tensor) -> None:
        """Record the stream."""
        extension().keep(tensor, self.stream)


def replace(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the module `cuda` of the package use this device."""
    built = extension()
    monkeypatch.setattr(cuda, "device", device)
    monkeypatch.setattr(cuda, "Queue", Queue)
    monkeypatch.setattr(cuda, "mark_current", lambda index: (built.record(built.current(index)), time.perf_counter()))
    # The number of a device's default stream is that of the device.
    monkeypatch.setattr(cuda, "mark_default", lambda index: (built.record(index), time.perf_counter()))
    monkeypatch.setattr(cuda, "keep_for_default", lambda tensor: built.keep(tensor, tensor.device.index))
    monkeypatch.setattr(cuda, "wait_for_stream", lambda index: built.host_waits(built.record(built.current(index))))
    monkeypatch.setattr(cuda, "follow_on_current", lambda index, event: built.wait(built.current(index), event[0]))
    monkeypatch.setattr(cuda, "wait", lambda event: built.host_waits(event[0]))
    monkeypatch.setattr(cuda, "seconds_between", lambda first, last: last[1] - first[1])
    monkeypatch.setattr(cuda, "free_memory", lambda index: 2**34)
    monkeypatch.setattr(cuda, "pinned_like", lambda tensor: torch.empty_like(tensor, device="cpu"))


def _module(built: Any) -> types.ModuleType:
    """What PyTorch looks for in ``torch.hpu``."""
    module = types.ModuleType("hpu")
    module.is_available = lambda: True  # type: ignore[attr-defined]
    module.device_count = lambda: 8  # type: ignore[attr-defined]
    module.current_device = built.device  # type: ignore[attr-defined]
    module._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
    module.is_initialized = lambda: True  # type: ignore[attr-defined]
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]  # type: ignore[attr-defined]
    module.get_rng_state = lambda device=None: torch.default_generator.get_state()  # type: ignore[attr-defined]
    module.set_rng_state = lambda state, device=None: torch.default_generator.set_state(state)  # type: ignore[attr-defined]
    module._lazy_init = lambda: None  # type: ignore[attr-defined]
    module.device = lambda index: contextlib.nullcontext()  # type: ignore[attr-defined]
    return module
