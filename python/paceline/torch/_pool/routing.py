"""Which version of a model answers a request."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from paceline import Cancelled, Expired, InvalidArgument, Rejected
from paceline.torch._pool.answerer import Answerer, Key, Present
from paceline.torch._pool.future import PoolFuture
from paceline.torch._pool.jobs import Priority

OnShadow = Callable[[Any, PoolFuture[Any], PoolFuture[Any]], object]

WHOLE = 1_000_000  # weights are counted in whole numbers, which add up exactly
_COPIES = 8  # batches on each device that wait in the shadow: as many as the engine's queue of a kind holds


class Version(NamedTuple):
    """A version of a served model. `Batcher.publish` makes it.

    Attributes
    ----------
    number
        As in ``future.version`` of the requests that it answers. What `Pool.serve` was given is version 1. Versions that were refused while they were loaded or warmed have had numbers, too.
    endpoint
        The name of the batcher.
    """

    number: int
    endpoint: str


@dataclasses.dataclass(frozen=True)
class State:
    """Which versions there are."""

    live: Answerer
    candidates: tuple[tuple[Answerer, int], ...] = ()  # with their parts of all requests, in millionths
    shadows: tuple[tuple[Answerer, OnShadow | None], ...] = ()
    previous: Answerer | None = None  # kept for a rollback

    def all(self) -> list[tuple[str, Answerer]]:
        """Each with its role."""
        others = [("candidate", one) for one, _ in self.candidates] + [("shadow", one) for one, _ in self.shadows]
        return [("live", self.live), *others, *([] if self.previous is None else [("previous", self.previous)])]

    def without(self, gone: Answerer) -> State:
        """The others. The live one stays."""
        return State(
            self.live,
            tuple(one for one in self.candidates if one[0] is not gone),
            tuple(one for one in self.shadows if one[0] is not gone),
            None if self.previous is gone else self.previous,
        )


def part_of(call: str, weight: float) -> int:
    """A weight in millionths."""
    part = round(weight * WHOLE) if isinstance(weight, (int, float)) and 0 < weight <= 1 else 0
    if part == WHOLE and weight < 1:
        part = WHOLE - 1  # a candidate
    if part == 0:
        raise InvalidArgument(f"{call}: weight={weight!r} must be from a millionth to 1.")
    return part


def check_sum(call: str, state: State, part: int) -> None:
    """Raise if the candidates and one more leave nothing to the live version."""
    if part < WHOLE <= part + sum(one for _, one in state.candidates):
        raise InvalidArgument(
            f"{call}: weight={part / WHOLE} is not there. The live version has what the candidates leave, which must be more than nothing."
        )


class Router:
    """Sends each request to one of several versions, and copies of it to those in the shadow."""

    def __init__(self, state: State) -> None:
        self._parts = [(state.live, WHOLE - sum(part for _, part in state.candidates)), *state.candidates]
        self._credits, self._shadows = [0] * len(self._parts), state.shadows
        self._lock = threading.RLock()  # a finalizer may submit while it is held

    def put(self, key: Key, item: Any, leaves: list[torch.Tensor], spec: Any, *how: Any) -> PoolFuture[Any]:
        """Submit a request."""
        future = self._choose(key).put(key, item, leaves, spec, *how)
        for shadow, on_shadow in self._shadows:
            with contextlib.suppress(Exception):  # the request itself was taken, and its caller has to get the future
                _mirror(shadow, on_shadow, future, leaves, spec)
        return future

    def _choose(self, key: Key) -> Answerer:
        if key is not None:
            return max(self._parts, key=lambda one: _score(key, *one))[0]
        with self._lock:  # smooth weighted round robin: what a part has missed is carried on to the next request
            for index, (_, part) in enumerate(self._parts):
                self._credits[index] += part
            best = max(range(len(self._parts)), key=self._credits.__getitem__)
            self._credits[best] -= WHOLE
        return self._parts[best][0]


def _score(key: Key, answerer: Answerer, part: int) -> float:
    """Weighted rendezvous hashing (Thaler & Ravishankar 1998): another part moves only keys that come to its version, or leave it. The live version's part changes with each candidate's."""
    digest = hashlib.blake2b(f"{answerer.version} {key!r}".encode(), digest_size=8).digest()
    return -part / math.log((int.from_bytes(digest, "little") + 0.5) / 2.0**64)


def _mirror(
    shadow: Answerer, on_shadow: OnShadow | None, live: PoolFuture[Any], leaves: list[torch.Tensor], spec: Any
) -> None:
    jobs = shadow.jobs
    if not shadow.copied or (live.done() and _never_ran(live)):
        return
    if len(shadow.open) >= _COPIES * shadow.options.max_batch * len(jobs.devices):
        return shadow.figures.count("rejected")
    copies = [one.detach().clone() for one in leaves]  # the caller may change these once the request is answered
    item = copies[0] if spec is None else pytree.tree_unflatten(copies, spec)
    answer = shadow.put(None, item, copies, spec, None, "background", False, own=True)
    jobs.copies.add(answer)
    answer.add_done_callback(jobs.copies.discard)

    def tell(_: object) -> None:
        same = answer.version == shadow.version  # otherwise it was retired just now
        if same and not _never_ran(answer) and not _never_ran(live):
            on_shadow(item, live, answer)  # type: ignore[misc]

    if on_shadow is not None:
        answer.add_done_callback(lambda _: live.add_done_callback(tell))


def cancel_copies(of: Answerer) -> None:
    """Cancel the copies that wait for a version. Their callbacks may want any lock."""
    for one in list(of.jobs.copies):
        if one in of.open:
            one.cancel()


@contextlib.contextmanager
def without_copies(shadow: Answerer) -> Iterator[None]:
    """Let a version leave the shadow in the block. Before it no copy waits, which would take the room of requests in the queue."""
    try:
        shadow.copied = False
        cancel_copies(shadow)
        yield
    except BaseException:
        shadow.copied = True
        raise
    cancel_copies(shadow)  # those that were just made


def _never_ran(ended: PoolFuture[Any]) -> bool:
    return ended.cancelled() or isinstance(ended.exception(), (Cancelled, Expired, Rejected))


class Gap:
    """Stands in the place of a `Router` while no device has any version."""

    def __init__(self, present: Present, check_may_wait: Callable[[], None]) -> None:
        self._present, self._check_may_wait, self.over = present, check_may_wait, threading.Event()

    def put(
        self,
        key: Key,
        item: Any,
        leaves: Any,
        spec: Any,
        deadline: float | None,
        priority: Priority,
        wait: bool,
        tenant: str = "",
        own: bool = False,
    ) -> PoolFuture[Any]:
        """Wait until there is a version, and submit the request."""
        try:
            if not wait:
                raise InvalidArgument("the request says wait=False, as those of ask() do")
            self._check_may_wait()
        except InvalidArgument as error:
            future: PoolFuture[Any] = PoolFuture()
            why = f"The request was not taken: its model is just exchanged for another version, and {error}."
            future._end("rejected", why, None, None)
            return future
        begun = time.monotonic()
        self.over.wait()
        if deadline is not None:
            deadline = max(deadline - (time.monotonic() - begun), 1e-9)
        return self._present.put(key, item, leaves, spec, deadline, priority, wait, tenant, own)
