"""The gradients of one step on their way to the other ranks: buckets of flat memory, in an order that all ranks have."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.torch._replicas.replicas import Replicas
from paceline.torch._run.buckets import Layout
from paceline.torch._run.gradients import is_held_elsewhere
from paceline.torch._run.rank_header import Header, Opening, Whole
from paceline.torch._run.rank_rounds import Rounds

# As in DistributedDataParallel: large enough to keep a link busy, and the first one, which nothing precedes, is sent early.
MOST_BYTES, FIRST_BYTES = 25 << 20, 1 << 20
_MOST_LAYOUTS = 4  # two networks that are frozen in turns have two; each keeps memory for all gradients


class Buckets:
    """Which gradients lie in which bucket. Which parameters require a gradient may change from step to step.

    Parameters fill the buckets in reverse order, until rank 0 has told in which order a backward came to them, as in
    DistributedDataParallel (Li et al., PyTorch Distributed, VLDB 2020).
    """

    def __init__(self) -> None:
        self.layout = Layout([], [])
        self.mark = 0  # a checksum of their order
        self._order: list[int] = []
        self._found: list[int] = []  # the order that a backward has shown, in this process
        self._told = False
        self._generation = -1
        self.kept: list[torch.Tensor | None] = []  # memory of a step, for the next one

    @property
    def news(self) -> list[int]:
        """The order that this process has found out and not told. Empty: nothing new."""
        return [] if self._told else self._found

    def found(self, indices: Sequence[int]) -> None:
        """Note the order in which a backward came to parameters. The first one counts."""
        if indices and not self._found:
            known = set(indices)
            self._found = [*indices, *(index for index in self._order if index not in known)]

    def begin(self, replicas: Replicas) -> None:
        """Lay the parameters out, if they are other objects than before."""
        if not self._order:
            self._order = list(range(len(replicas.parameters)))[::-1]
        if replicas.generation != self._generation:
            self._generation, self.kept = replicas.generation, []
            self.layout = Layout(replicas.parameters, replicas.names, self._order, MOST_BYTES, FIRST_BYTES)
            self.mark = zlib.crc32(repr(self._order).encode())

    def follow(self, replicas: Replicas, order: list[int]) -> None:
        """Lay the parameters out in the order that rank 0 has told."""
        self._order, self._told, self._generation = order, True, -1
        self.begin(replicas)

    def memory(self, home: torch.device) -> Callable[[int], torch.Tensor]:
        """Makes memory for a bucket, when its gradients are there. On the host that of an earlier step, if nobody has its gradients any more."""
        kept, self.kept, layout = self.kept, [], self.layout
        stream = torch.cuda.current_stream(home) if home.type == "cuda" else None

        def make(k: int) -> torch.Tensor:
            if kept and (flat := kept[k]) is not None and not is_held_elsewhere(flat.untyped_storage()):
                return flat
            with torch.cuda.stream(stream):
                return layout.empty_bucket(k, home)

        return make


class Layouts:
    """The buckets of a module's gradients, by which parameters are frozen."""

    def __init__(self) -> None:
        self._checksum = -1, 0  # the generation of the replicas, and a checksum of their parameters
        self._buckets: dict[int, Buckets] = {}  # least recently used first

    def checksum(self, replicas: Replicas) -> int:
        """A checksum of the parameters' names, shapes and types, and of which are frozen."""
        if self._checksum[0] != replicas.generation:
            named = zip(replicas.names, replicas.parameters, strict=True)
            text = repr([(name, tuple(one.shape), one.stride(), str(one.dtype)) for name, one in named])
            self._checksum = replicas.generation, zlib.crc32(text.encode())
        return zlib.crc32(bytes(one.requires_grad for one in replicas.parameters), self._checksum[1])

    def of(self, replicas: Replicas) -> tuple[int, Buckets]:
        """A checksum of the parameters and of the order of their buckets, and the buckets."""
        checksum = self.checksum(replicas)
        buckets = self._buckets.pop(checksum, None) or Buckets()
        if len(self._buckets) >= _MOST_LAYOUTS:
            del self._buckets[next(iter(self._buckets))]
        self._buckets[checksum] = buckets
        buckets.begin(replicas)
        return zlib.crc32(buckets.mark.to_bytes(4, "little"), checksum), buckets


class RankSums:
    """The sums of one step over all ranks, bucket by bucket.

    Every rank sends all buckets in their order: a bucket is sent when it and all before it are final, and the ranks have agreed.

    Parameters
    ----------
    memory
        Makes the memory of a bucket.
    divisor
        What the objective is divided by on this rank.
    start
        Starts to sum a tensor over all ranks in place. It returns what has a method ``wait``, or None.
    header
        What this rank says of itself.
    opening
        What the other ranks have told at the beginning. None: nothing is sent before `settle`.
    """

    between = -1.0  # seconds of its own work since the step before; negative if unknown
    rounds: Rounds | None = None  # in which the norms of all ranks meet, if they do

    def __init__(
        self,
        layout: Layout,
        memory: Callable[[int], torch.Tensor],
        divisor: float,
        start: Callable[[torch.Tensor], Any],
        header: Header,
        opening: Opening | None = None,
    ) -> None:
        self.layout, self.divisor, self._memory, self._start = layout, divisor, memory, start
        self.header, self._opening = header, opening
        self.factor = 1.0  # from this rank's divisor to that of the whole batch
        self._settled = False  # whether that is known
        count = len(layout.buckets)
        self.flats: list[torch.Tensor | None] = [None] * count
        self._final = [False] * count
        self._present: list[list[int]] = [[] for _ in layout.buckets]  # parameters that have a gradient on this rank
        self._works: list[Any] = []
        self._error: Exception | None = None  # why nothing more can be sent
        self._sending = False  # stays True if an interrupt comes while a bucket is sent
        self._lock = threading.Lock()  # a worker may still be in its backward when the caller's thread gives up
        self._closed = False  # whether workers fill nothing any more

    def opening_headers(self) -> Whole:
        """Wait for what all ranks have told at the beginning."""
        assert self._opening is not None
        return self._opening.whole()

    @property
    def sent(self) -> int:
        """How many buckets were sent."""
        return len(self._works)

    def fill(self, k: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Bucket `k` is final on this rank. Sends what can be sent by now."""
        with self._lock:
            if not self._closed:
                self._fill(k, gradients)
                self._send()

    def fill_rest(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """All other buckets are final."""
        with self._lock:
            self._closed = True
            for k, final in enumerate(self._final):
                if not final:
                    self._fill(k, gradients)
                self._send()

    def send(self) -> None:
        """Send what is final."""
        with self._lock:
            self._send()

    def _fill(self, k: int, gradients: Sequence[torch.Tensor | None]) -> None:
        flat = self.flats[k]
        if flat is None:
            flat = self.flats[k] = self._memory(k)
        self.layout.fill(k, flat, gradients)
        self._present[k] = [one.index for one in self.layout.buckets[k].pieces if gradients[one.index] is not None]
        self._final[k] = True

    def settle(self, divisor: float) -> None:
        """All ranks agree, and this is what the objective is divided by."""
        self.factor, self._settled = self.divisor / divisor, True

    def divide_by(self, divisor: float) -> None:
        """Let this rank divide by what all ranks have agreed on. To be called after `settle`, before anything is computed."""
        self.divisor, self.factor = divisor, 1.0

    def _send(self) -> None:
        if not self._settled:
            weight = self._opening and self._opening.weight()
            divisor = weight and (self.header.total or weight)
            if not divisor or divisor < 0:
                return
            self.settle(divisor)
        while self.sent < len(self.flats) and self._final[self.sent] and not self._sending and self._error is None:
            self._sending = True
            flat = self.flats[self.sent]
            assert flat is not None
            try:
                if self.factor != 1:
                    flat.mul_(self.factor)
                self._works.append(self._start(flat))
            except Exception as error:  # told on the caller's thread
                self._error = error
            self._sending = False

    def forget(self) -> None:
        """Another attempt fills again what was not sent."""
        self._final[self.sent :] = [False] * (len(self._final) - self.sent)

    def check(self) -> None:
        """Raise what sending has raised, when nothing is under way any more."""
        if self._error is not None or self._sending:
            self.wait()

    def wait(self) -> None:
        """Wait until all ranks have sent everything. Raises what sending has raised, when nothing is under way any more."""
        error = self._error
        if error is None and self._sending:
            error = RuntimeError("interrupted while gradients were sent")
        for work in self._works:
            try:
                if work is not None and hasattr(work, "wait"):
                    work.wait()
            except Exception as caught:
                error = error or caught
        if error is not None:
            raise error

    def present(self, count: int) -> list[bool]:
        """Which of `count` parameters have a gradient on this rank."""
        found = set().union(*self._present)
        return [index in found for index in range(count)]

    def totals(self, present: Sequence[bool]) -> list[torch.Tensor | None]:
        """The gradients of the batch of all ranks. None for those that are `present` on no rank."""
        found = self.layout.gradients([flat for flat in self.flats if flat is not None])
        return [found.get(index) if there else None for index, there in enumerate(present)]
