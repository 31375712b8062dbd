"""A step as a part of one of all ranks: what is agreed on before and after it, and gradients that are sent in its last backward."""

from __future__ import annotations

from typing import Any

import torch

from paceline.torch._replicas.replicas import Replicas
from paceline.torch._run.gradients import PerTensor, grads_of, weakly
from paceline.torch._run.participants import refuse_outside_of_ranks
from paceline.torch._run.rank_sums import RankSums
from paceline.torch._run.ranks import Ranks
from paceline.torch._run.recipe import Retry, RetryError
from paceline.torch._run.train_run import TrainRun


class SentEarly(PerTensor):
    """The gradients of the only device of a rank, which are sent bucket by bucket in its last backward of a step."""

    def __init__(self, replicas: Replicas, sums: RankSums, bucket_of: dict[int, int], *, sends: bool) -> None:
        super().__init__(replicas.list, replicas.names)
        self._parameters, self._sums, self._bucket_of = replicas.list[0].parameters, sums, bucket_of
        self._sends = sends  # whether buckets are sent; otherwise only their order is noted
        self._begin = sums.sent  # buckets before this one were sent by an earlier attempt
        # Per bucket, the parameters that it waits for; None: it is not the last backward.
        self._waiting: list[set[int]] | None = None
        self.order: list[int] = []  # in which the last backward came to parameters
        self.came_again = False  # whether it came to one again, after its bucket had been sent

    def last(self, device: int) -> None:
        self._waiting = [{piece.index for piece in bucket.pieces} for bucket in self._sums.layout.buckets]

    def came(self, index: int) -> None:
        """The backward has added to the gradient of a parameter."""
        k = self._bucket_of[index]
        if self._waiting is None or k < self._begin:
            return
        left = self._waiting[k]
        if index in left:
            left.discard(index)
            self.order.append(index)
            if not left and self._sends:
                self._sums.fill(k, grads_of(self._parameters))
        elif not left:
            self.came_again |= self._sends


class LastBackward:
    """Hooks on the parameters of the only device's replica, which tell a sink where its last backward is."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._handles: list[Any] = []
        self._bucket_of: dict[int, int] = {}
        self._key: Any = None
        self._sink: SentEarly | None = None

    def begin(self, sums: RankSums, *, sends: bool) -> SentEarly:
        """The sink of an attempt, which `sends` buckets or only finds out their order."""
        replicas = self._replicas
        key = replicas.generation, sums.layout
        if key != self._key:
            self.release()
            self._key = key
            self._bucket_of = {piece.index: k for k, one in enumerate(sums.layout.buckets) for piece in one.pieces}
            for index in self._bucket_of:
                parameter = replicas.list[0].parameters[index]
                self._handles.append(parameter.register_post_accumulate_grad_hook(weakly(self._came, index)))
        self._sink = SentEarly(replicas, sums, self._bucket_of, sends=sends)
        return self._sink

    def end(self) -> None:
        """The attempt is over."""
        self._sink = None

    def release(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._key = [], None

    def _came(self, index: int, _: torch.Tensor) -> None:
        sink = self._sink
        if sink is not None:
            sink.came(index)


def open_sums(ranks: Ranks, run: TrainRun, early: LastBackward | None, steps: int) -> None:
    """Agree with the other ranks on what is summed. The only device of a rank sends its gradients in its last backward."""
    several, sends = ranks.prepare(run.call.all_replicas), run.call.work.sends_early
    run.objective.divisor = ranks.divisor(run.objective)
    if ranks.opened or ranks.norms or (early is not None and several and sends is not False):
        sums = ranks.open(run.objective, scale=run.scale, steps=steps)
        run.objective.divisor = sums.divisor  # all ranks agree on another one where norms meet
        if early is not None:
            run.sink = early.begin(sums, sends=sends is True)


def check_sums(ranks: Ranks, run: TrainRun, outcome: Any) -> None:
    """Raise for what only this rank knows: a device that has failed, and gradients that have no place in the sum."""
    places = run.call.all_places
    if isinstance(run.sink, SentEarly):
        ranks.buckets.found(run.sink.order)
        if run.sink.came_again:
            run.call.work.sends_early = False
            raise RetryError(Retry("a gradient changed after it had been sent to the other ranks", complete=True))
    if places.queues is not None:
        places.drain()
        _ = outcome.settled  # raises the error of a device that has failed
    refuse_outside_of_ranks(None if run.outside is None else run.outside.reached)
