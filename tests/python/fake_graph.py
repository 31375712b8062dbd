"""Stands for a CUDA graph: the operators that a thread calls while it captures are recorded, and a replay runs the records in the same memory.

As on a GPU nothing of a capture takes effect: memory from before is as it was, what was made has no values, and the generator has not moved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# On a GPU the host waits for these. In inference mode `item` comes here as it is.
_WAITS = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal"}


class Graph:
    """Stands for `cuda.Graph`."""

    def __init__(self, index: int, pool: Any) -> None:
        self.pool = pool
        self.index = index
        self._records: list[Any] = []

    def mark(self) -> int:
        """An event that each replay records at this place."""
        event = self.make_event()
        self._records.append(event)
        return event

    def make_event(self) -> int:
        """An event that belongs to the graph."""
        raise TypeError("Graph.make_event is for subclasses, which have streams")

    def record_event(self, event: int) -> None:
        """Record it on the calling thread's stream."""
        raise TypeError("Graph.record_event is for subclasses, which have streams")

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Record the operators of the ``with`` block."""
        self._records = []
        recorder, generator = _Recorder(self._records), torch.default_generator.get_state()
        try:
            with recorder:
                yield
        finally:
            with torch.no_grad():
                for storage, bytes_before in recorder.before.values():
                    storage.copy_(bytes_before)
                for tensor in recorder.made:
                    if tensor.is_floating_point():
                        tensor.detach().fill_(torch.nan)
            torch.default_generator.set_state(generator)

    def replay(self) -> None:
        """Run what was recorded."""
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            for record in self._records:
                if isinstance(record, int):
                    self.record_event(record)
                    continue
                operator, args, options, kept = record
                results = tree_leaves(operator(*args, **options))
                for tensor, result in zip(kept, results, strict=True):
                    if tensor is not None:
                        tensor.copy_(result)


class _Recorder(TorchDispatchMode):
    def __init__(self, records: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records = records
        self.made: list[torch.Tensor] = []
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._own: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if name in _WAITS:
            raise RuntimeError(
                "CUDA error: operation not permitted when stream is capturing (cudaErrorStreamCaptureUnsupported)"
            )
        inputs = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if func._schema.is_mutable or name in ("native_batch_norm", "_native_batch_norm_legit"):
            for one in inputs:
                storage = one.untyped_storage()
                if storage.data_ptr() not in self._own and storage.data_ptr() not in self.before:
                    self.before[storage.data_ptr()] = storage, storage.clone()
        seen = tree_map(_as_it_is, (args, kwargs))
        results = func(*args, **kwargs)
        read = {one.untyped_storage().data_ptr() for one in inputs}
        kept = []
        for one in tree_leaves(results):
            fresh = isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in read
            # Held without its graph, which would end only with this one.
            kept.append(one.detach() if fresh else None)
            if fresh:
                self._own.add(one.untyped_storage().data_ptr())
                self.made.append(one.detach())
        if torch.Tag.inplace_view not in func.tags:  # these change shapes only, and run nothing on a GPU
            self.records.append((func, *seen, kept))
        return results


def _as_it_is(one: Any) -> Any:
    """The same memory with the shape that the tensor has now."""
    return one.detach() if isinstance(one, torch.Tensor) else one
