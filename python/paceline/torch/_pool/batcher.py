"""Requests that are answered in batches."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from paceline import InvalidArgument
from paceline.torch._pool.job import DONE, PoolFuture, Work, code_of

if TYPE_CHECKING:
    from paceline.torch._pool.pool import Pool

# How many batches `map` keeps ahead for each device: one runs, one is ready, and the next one fills.
_AHEAD = 3


class _Request(Work):
    """One item of a batch. The run of the batch sets its value."""

    def __init__(self, future: PoolFuture[Any], leaves: list[Any], spec: Any) -> None:
        super().__init__(future, lambda _: None)
        self.leaves, self.spec = leaves, spec


class Batcher:
    """Answers requests in batches of what waits. `Pool.serve` makes it.

    Requests are items: tensors, or nests of tensors, without a dimension for the batch. Only requests of equal shapes and types share a batch.
    """

    def __init__(self, pool: Pool, fn: Callable[[Any], Any], max_batch: int, max_delay: float, name: str) -> None:
        self._pool, self._fn, self._max_batch, self._max_delay, self._name = pool, fn, max_batch, max_delay, name
        self._kinds: dict[Any, str] = {}  # by the structure, shapes and types of a request

    def __call__(
        self, item: Any, *, deadline: float | None = None, priority: str = "interactive", wait: bool = True
    ) -> PoolFuture[Any]:
        """Submit one item. Its answer is the item's part of what the model returns for a batch.

        Parameters
        ----------
        deadline, priority, wait
            As for `Pool.submit`.
        """
        leaves, spec = pytree.tree_flatten(item)
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) or leaf.device.type != "cpu":
                what = f"a tensor on {leaf.device}" if isinstance(leaf, torch.Tensor) else f"a {type(leaf).__name__}"
                raise InvalidArgument(f"{self._name}: a request has {what}. It must be tensors in host memory, or a nest of them.")
        key = spec, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = f"{self._name} {len(self._kinds)}"
            self._pool.add_batches(kind, self._max_batch, self._max_delay, self._run)
        future: PoolFuture[Any] = PoolFuture()
        self._pool.put(_Request(future, leaves, spec), kind=kind, deadline=deadline, priority=priority, wait=wait, batched=True)
        return future

    async def ask(self, item: Any, *, deadline: float | None = None, priority: str = "interactive") -> Any:
        """The answer, for asyncio. Cancelling the task cancels a request that waits. A full queue raises `Rejected`."""
        return await asyncio.wrap_future(self(item, deadline=deadline, priority=priority, wait=False))

    def map(self, items: Iterable[Any], *, priority: str = "batch") -> Iterator[Any]:
        """The answers to all items, in their order, on all devices. Few items are ahead of the answer that is asked for."""
        most = _AHEAD * self._max_batch * len(self._pool.devices)
        waiting: deque[PoolFuture[Any]] = deque()
        try:
            for item in items:
                waiting.append(self(item, priority=priority))
                if len(waiting) >= most:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def _run(self, devices: list[str], requests: Sequence[_Request]) -> int:
        """Called on a worker, for requests of one kind."""
        try:
            self._pool.prepare(devices[0])
            batch = [torch.stack(leaves) for leaves in zip(*(one.leaves for one in requests), strict=True)]
            with torch.inference_mode():
                answers = self._fn(pytree.tree_unflatten(batch, requests[0].spec))
            leaves, spec = pytree.tree_flatten(answers)
            for leaf in leaves:
                if not (isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == len(requests)):
                    what = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else f"a {type(leaf).__name__}"
                    raise InvalidArgument(
                        f"{self._name}: the model returned {what} for {len(requests)} requests. It must return tensors, or a nest of them, whose "
                        "dimension 0 is the request."
                    )
            for index, request in enumerate(requests):
                request.value = pytree.tree_unflatten([leaf[index] for leaf in leaves], spec)
        except BaseException as error:
            for request in requests:
                request.error = error
            return code_of(error)
        return DONE
