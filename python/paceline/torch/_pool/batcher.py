"""Requests that are answered in batches."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from paceline import InvalidArgument
from paceline.torch._pool.answerer import Answerer, Key, Present
from paceline.torch._pool.future import PoolFuture
from paceline.torch._pool.jobs import Jobs, Priority
from paceline.torch._pool.progress import watched
from paceline.torch._pool.routing import OnShadow, Version
from paceline.torch._pool.tenants import name_of
from paceline.torch._pool.versions import Versions
from paceline.torch._replicas.reach import Handle

# How many batches `map` keeps ahead for each device: one runs, one is ready, and the next one fills.
_AHEAD = 3


class Batcher(Handle):
    """Answers requests in batches of what waits. `Pool.serve` makes it.

    Requests are items: tensors in host memory, or nests of tensors, without a dimension for the batch. Do not change them until they are answered.
    Only requests of equal structure, shapes and types share a batch; with ``pad=`` lengths may differ. Each such kind is measured and queued on its own, and
    kept until the pool ends: give requests of many lengths ``pad=``.

    `publish` takes another model into the place of this one while requests come. Each request has one version, by which it is answered: that of its submit. A
    batch holds requests of one version.

    Threads: any. Copies of a module that holds a batcher hold the same one.
    """

    def __init__(self, jobs: Jobs, answerer: Answerer, make: Callable[[Any, int, Mapping[str, Any]], Answerer]) -> None:
        self._jobs, self._name, self._max_batch = jobs, answerer.name, answerer.options.max_batch
        self._present = Present(answerer)
        self._versions = Versions(jobs, self._present, make)

    def __repr__(self) -> str:
        return f"<paceline.torch.Batcher {self._name}, batches of up to {self._max_batch}>"

    def __call__(
        self,
        item: Any,
        *,
        deadline: float | None = None,
        priority: Priority = "interactive",
        wait: bool = True,
        key: Key = None,
        tenant: str | None = None,
    ) -> PoolFuture[Any]:
        """Submit one item. Its answer is the item's part of what the model returns for a batch, in memory of its own.

        Parameters
        ----------
        item
            A tensor, or a nest of tensors in lists, tuples and dictionaries.
        deadline, priority, wait
            As for `Pool.submit`.
        key
            What all requests of a user or a session have in common. While several versions answer, requests with one key have one version, as long as the
            weights stay.
        tenant
            For whom it is, as for `Pool.submit`. It costs 1, or with ``pad=`` what its length costs. A batch may hold requests of several tenants.

        Returns
        -------
        PoolFuture
            It says by which ``version`` it is answered.

        Raises
        ------
        InvalidArgument
            For an item that is no nest of tensors in host memory.
        Unavailable
            If the pool is closed.
        """
        if type(item) is torch.Tensor:
            leaves, spec = [item], None
        else:
            leaves, spec = pytree.tree_flatten(item)
        bad = [one for one in leaves if not isinstance(one, torch.Tensor) or one.device.type != "cpu"]
        if bad or not leaves:
            one = bad[0] if bad else None
            what = f"a tensor on {one.device}" if isinstance(one, torch.Tensor) else f"a {type(one).__name__}"
            raise InvalidArgument(
                f"{self._name}: a request has {what if bad else 'no tensor'}. It must be a tensor in host memory, or a nest of such tensors: devices copy "
                "their batches from there. torch.as_tensor(...) makes one of an array or a number, and cpu() of a tensor elsewhere."
            )
        if not (key is None or isinstance(key, (str, int, bytes))):
            raise InvalidArgument(f"{self._name}: a request has key={key!r}; it must be a string, a number or bytes.")
        return self._present.put(key, item, leaves, spec, deadline, priority, wait, name_of(self._name, tenant))

    async def ask(
        self,
        item: Any,
        *,
        deadline: float | None = None,
        priority: Priority = "interactive",
        key: Key = None,
        tenant: str | None = None,
    ) -> Any:
        """The answer, for asyncio. Cancelling the task cancels a request that waits. A full queue raises `Rejected`.

        Raises
        ------
        InvalidArgument
            In a job, whose device it would keep.
        """
        future = self(item, deadline=deadline, priority=priority, wait=False, key=key, tenant=tenant)
        try:
            future._check_wait()  # the loop of a job would wait for the job's own device
        except BaseException:
            future.cancel()
            raise
        return await asyncio.wrap_future(future)

    def map(
        self,
        items: Iterable[Any],
        *,
        priority: Priority = "batch",
        tenant: str | None = None,
        progress: bool = False,
        total: int | None = None,
    ) -> Iterator[Any]:
        """The answers to all items, in their order, on all devices of the pool.

        Items are read when they are needed: some batches for each device are ahead of the answer that is asked for. The first request that
        fails raises its error in its place. What then waits is cancelled, as when the loop is left.

        Parameters
        ----------
        items
            Any iterable. Its elements are requests.
        priority, tenant
            As for `Pool.submit`.
        progress
            Whether to write to ``sys.stderr`` how many are done, and what each device does: redrawn in place on a terminal if rich is installed, else a
            line every ten seconds.
        total
            The number of items, for the progress. Default: ``len(items)``, if it has a length.
        """
        answers = self._answers(items, priority, tenant)
        if not progress:
            return answers
        if total is None:
            with contextlib.suppress(TypeError):  # a generator
                total = len(items)  # type: ignore[arg-type]
        return watched(answers, total, self._jobs.devices_now)

    def _answers(self, items: Iterable[Any], priority: Priority, tenant: str | None) -> Iterator[Any]:
        most = _AHEAD * self._max_batch * len(self._jobs.devices)
        waiting: deque[PoolFuture[Any]] = deque()
        try:
            for item in items:
                waiting.append(self(item, priority=priority, tenant=tenant))
                if len(waiting) >= most:
                    yield _next_of(waiting)
            while waiting:
                yield _next_of(waiting)
        finally:
            for future in waiting:
                future.cancel()

    def publish(
        self,
        model: Any,
        *,
        weight: float = 1.0,
        shadow: bool = False,
        on_shadow: OnShadow | None = None,
        allow_gap: bool = False,
        **options: Any,
    ) -> Version:
        """Let another model answer, from when it is loaded and warmed on all devices that may answer. Returns then, and waits for jobs of the pool.

        The model is loaded on a thread of its own, which is no worker; `initializer` is called there, too. Then every size of batches runs once on each device, with requests of shapes that were answered before (64
        of them at most; with ``pad=`` the shortest and the longest of each), and the pool measures it: jobs of priority ``"normal"``, each as long as a batch. A device that is retired for more than a second loads
        with its first batch, one that `Autoscale` has released before it comes back. The version that was live is kept on the devices, for `rollback`. Others are freed after their last batches.

        Where memory is too short for both versions, by the pool's ``memory=`` or because it runs out, the one before the live one is freed. If that does not
        help, half of these devices exchange the versions first, one after the other, and the rest after the swap. Each takes no work meanwhile, and
        none can be retired.

        Parameters
        ----------
        model
            As for `Pool.serve`.
        weight
            The part of the requests that it answers. Below 1 it is a candidate: the live version answers what candidates leave. Of 1,000 requests
            ``weight=0.1`` gives it 100, evenly spread, by error diffusion. Those with ``key=`` are assigned by a hash.
        shadow
            Let it answer copies of all requests, in the background: only where nothing else waits, and only as many as fit into its queue. Nobody gets these answers.
        on_shadow
            ``on_shadow(item, future, shadow)`` is called with the futures of both answers once both have ended, on a worker. Not for copies that were dropped, nor for
            requests that were cancelled or refused.
        allow_gap
            Whether requests may wait if no device can answer while versions are exchanged, as on a lone device. Those of `ask` are `Rejected` meanwhile.
        options
            ``initializer``, ``replicate``, ``compile``, ``graphs``, ``resident``, ``memory``, ``idempotent`` as for `Pool.serve`, where they differ from what that was given.

        Raises
        ------
        Rejected
            If the version cannot be loaded or warmed, within the pool's ``hang_seconds``, or does not fit. It says where, and has the error as its cause. The service goes on as before, but the
            version that was kept for `rollback` may have been freed, if memory ran out.
        InvalidArgument
            In a job, a step or a callback, and for other arguments.
        Unavailable
            If the pool is closed.
        """
        return self._versions.publish(model, weight, shadow, on_shadow, allow_gap, options)

    def promote(self, version: Version | int | None = None, *, weight: float = 1.0, allow_gap: bool = False) -> Version:
        """Let a candidate, a version in the shadow or the one before answer all requests from now on, at once. Other candidates are retired.

        Parameters
        ----------
        version
            None: the newest candidate or version in the shadow.
        weight
            Below 1: it becomes a candidate with this part of the requests.
        allow_gap
            As for `publish`, for the version before, which is loaded again where memory is too short for two.

        Raises
        ------
        InvalidArgument
            If there is no such version.
        Rejected
            If it must be loaded again, and cannot be. The service goes on as before.
        Unavailable
            While devices exchange versions, and if the pool is closed.
        """
        return self._versions.promote(version, weight, allow_gap)

    def rollback(self, *, allow_gap: bool = False) -> Version:
        """Retire the candidates; if there are none, the live version. Then the version that was live before answers, at once, since it is kept loaded: not on devices that `Autoscale` has released since, where it loads with its first batch.

        Only if memory is too short for two versions it is loaded again first, as by `publish`.

        Parameters
        ----------
        allow_gap
            As for `publish`, for a version that is loaded again.

        Raises
        ------
        InvalidArgument
            If there is none.
        Rejected
            If it must be loaded again, and cannot be. The service goes on as before.
        Unavailable
            While devices exchange versions, and if the pool is closed.
        """
        return self._versions.rollback(allow_gap)

    def retire(self, version: Version | int) -> None:
        """Let a candidate, a version in the shadow, or the one that is kept for `rollback` go. Its memory is free after its last batch.

        Raises
        ------
        InvalidArgument
            If there is no such version, or if it is live.
        Unavailable
            While devices exchange versions, and if the pool is closed.
        """
        self._versions.retire(version)

    @property
    def versions(self) -> list[dict[str, Any]]:
        """Of each version its ``number``, its ``role`` (live, candidate, shadow, previous), its ``weight``, and its figures, which go with it.

        ``outcomes``: how many of its requests ended how. ``batches`` that completed. ``wait``, from the submit of a request to its run, and ``run``, of a batch that completed: ``mean``, ``p50`` and ``p99`` of the
        last 1,000, in seconds, None before the first one; ``counts``, how many took at most so many seconds, and ``seconds_sum``, both of all. Copies of requests for a version in the shadow count as its own,
        those that were dropped as ``rejected``. What warms a version counts nowhere.
        """
        return self._versions.report()


def _next_of(waiting: deque[PoolFuture[Any]]) -> Any:
    answer = waiting[0].result()  # an interrupt leaves it to be cancelled with the others
    waiting.popleft()
    return answer
