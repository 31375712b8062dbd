"""A step whose micro-batches are replayed from CUDA graphs where there are some."""

from __future__ import annotations

from typing import Any

import torch

from paceline import InvalidArgument
from paceline.torch._batch.extras import parted
from paceline.torch._batch.joining import joined
from paceline.torch._batch.terms import Terms
from paceline.torch._run.call import Call
from paceline.torch._run.gradients import View
from paceline.torch._run.graphs import Captured, Graphs, Inputs, key_of
from paceline.torch._run.outside import leaves_of
from paceline.torch._run.train_run import TrainRun


class GraphRun(TrainRun):
    """Runs micro-batches without a graph as `TrainRun` does, and captures those that were seen often enough."""

    def __init__(self, call: Call, graphs: Graphs, **options: Any) -> None:
        super().__init__(call, **options)
        graphs.follow(call.all_replicas)
        if isinstance(self.objective, Terms):
            raise InvalidArgument(
                "step: graphs=True together with a weight= that is a mapping. The terms that a slice has weight in differ from slice to slice, and a "
                "captured graph does not. Add the terms up in loss_fn and give one weight, or train without graphs=True."
            )
        self._graphs = graphs
        self._keys: list[Any] = [None] * len(self.replicas)  # per device: what its present micro-batch is captured for
        self._capturing = [False] * len(self.replicas)

    def captures(self, device: int, size: tuple[Any, ...]) -> bool:
        key = None
        if not self.state.sees_operators:  # the caller's modes would see nothing of a replay
            given = (self.scale is not None, self.objective.is_weighted)
            key = key_of(self.loss_fn, size, self.replicas[device], given)
        self._keys[device] = key
        self._capturing[device] = key is not None and self._graphs.devices[device].meet(key)
        return self._capturing[device]

    def compute(self, device: int, begin: int, end: int) -> bool:
        graphs, key = self._graphs.devices[device], self._keys[device]
        captured = graphs.captured.get(key)
        if self.idle(begin, end) or (captured is None and not self._capturing[device]):
            ran = super().compute(device, begin, end)
            if self.draws.drew:
                graphs.drew.add(key)
            return ran
        arrivals = self.replicas[device].arrivals
        if arrivals is not None:  # a replay reads no dictionary that would wait
            arrivals.wait_for_all()
        try:
            with torch.no_grad():
                inputs = self._inputs(device, begin, end, keep=captured is None)
            if captured is None:
                self._check_draws(graphs.drew, key)
                captured = self._capture(device, key, inputs, begin, end)
            elif not captured.inputs.fits(inputs):
                return super().compute(device, begin, end)
            with torch.no_grad():
                self._replay(device, captured, inputs, begin, end)
        except torch.OutOfMemoryError:
            graphs.clear()  # the step runs again in smaller pieces, which need the memory
            raise
        return True

    def finish(self, device: int) -> list[View | None] | None:
        if len(self.replicas) == 1:
            try:
                with self.places.enter(device), torch.no_grad():
                    self._graphs.devices[device].give_gradients(self.replicas[device])
            except BaseException as error:
                self.failures.append((device, 0, 0, error))
                return None
        return super().finish(device)

    def _check_draws(self, drew: set[Any], key: Any) -> None:
        if key in drew:  # noticed only where devices share a generator
            raise InvalidArgument(
                f"step: graphs=True: random numbers are drawn (dropout?), and among {', '.join(self.places.names)} are parts of one GPU, which share "
                "its random generator. Their replays would run at once and overwrite each other's place in its sequence. Set dropout to 0, use "
                "whole GPUs, or train without graphs=True."
            )

    def _inputs(self, device: int, begin: int, end: int, *, keep: bool) -> Inputs:
        """The slice on the device. `keep`: in memory of its own, which no later step takes."""
        bring = self.places.mover(device)
        move = (lambda tensor: bring(tensor).clone()) if keep else bring
        inputs = Inputs(lambda each: self.batch.slice(begin, end, each), move)
        self.brought(device)
        return inputs

    def _capture(self, device: int, key: Any, inputs: Inputs, begin: int, end: int) -> Captured:
        replica, place = self.replicas[device], self.places.devices[device]
        own = set(map(id, replica.parameters))
        weights, scale = self.objective.weights_of(begin, end), self.scale_on(device)

        def body(captured: Captured) -> None:
            loss, extras = parted(self.loss_fn(replica.module, inputs.part))
            loss = self.objective.of_slice(loss, end - begin)
            term = self.objective.static_term(loss, captured.factor, captured.weights)
            leaves = list(leaves_of(term)) if term.requires_grad else []
            if not leaves or any(id(leaf) not in own for leaf in leaves):
                what = "no parameter" if not leaves else "a tensor outside of the module that requires grad"
                raise InvalidArgument(
                    f"step: graphs=True: the loss of {self.batch.described(begin, end)} reaches {what}, whose gradient a replay would not give. Make "
                    "such tensors parameters of the module, detach them, or train without graphs=True."
                )
            self.backward(device, term if captured.scale is None else term * captured.scale)
            captured.dims, captured.term = loss.dim(), term.detach()
            captured.extras = None if extras is None else _each(begin, end, extras, torch.Tensor.detach)

        captured = Captured(self.places.graph(device, self._graphs.devices[device].pool()), inputs, self.loss_fn, place)
        captured.weights = None if weights is None else weights.to(place, copy=True)
        captured.scale = None if scale is None else scale.clone()
        self._graphs.devices[device].capture(key, replica, captured, body)
        return captured

    def _replay(self, device: int, captured: Captured, inputs: Inputs, begin: int, end: int) -> None:
        graphs = self._graphs.devices[device]
        if inputs is not captured.inputs and inputs.tensors:
            torch._foreach_copy_(captured.inputs.tensors, inputs.tensors)
        captured.factor.fill_(self.objective.factor(begin, end, captured.dims))
        weights, scale = self.objective.weights_of(begin, end), self.scale_on(device)
        if captured.weights is not None and weights is not None:
            captured.weights.copy_(weights, non_blocking=True)
        if captured.scale is not None and scale is not None:
            captured.scale.copy_(scale)
        graphs.replay(self.replicas[device], captured, last=self._last[device])
        self.terms[device].append((begin, captured.term.clone()))
        if captured.extras is not None:
            self.extras.add(begin, end, _each(begin, end, captured.extras, torch.Tensor.clone))
        self.with_gradient = True
        self.draws.look(device)


def _each(begin: int, end: int, extras: Any, act: Any) -> Any:
    """The extras of a slice, with what `act` makes of each tensor."""
    return joined([(begin, end, extras)], "extras", lambda pieces, path: act(pieces[0][2]), "step")
