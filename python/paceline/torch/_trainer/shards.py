"""The state of an optimizer in ranges on several GPUs, each of which updates its range of the parameters."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._device import DeviceContext

from paceline.torch._replicas.replicas import Replicas
from paceline.torch._trainer.lifetime import Lifetime
from paceline.torch._trainer.optimizer import is_observed
from paceline.torch._trainer.shard_pieces import Owner, Piece, bytes_each, bytes_of, has_plain_gradient, why_uncut
from paceline.torch._trainer.shard_ranges import Range, ranges_of, shares_of

_HOST = torch.device("cpu")
# What home sends for one round goes out while it gets the results of the round before. In one round there is nothing to overlap, and rounds
# of small ranges take longer to launch than they save.
_ROUNDS = 4
_LEAST_BYTES_OF_ROUNDS = 64 << 20  # that an owner needs for its range on average, as `bytes_each` counts them
# The other separable ones update each element from its own gradient and state.
_OF_WHOLE_TENSORS = ("Adafactor", "Muon")

Step = Callable[[Any], Any]
State = dict[torch.Tensor, dict[str, Any]]
_Copy = tuple[int, int, int, int]  # the owner's device, to, from, bytes


def unsharded(cls: type, why: str) -> str:
    """A line of `explain`."""
    return f"Optimizer: {cls.__name__} is not sharded, since {why}.\n"


class Shards:
    """Keeps an optimizer's state in ranges on the GPUs of a trainer. Does not keep the trainer alive.

    The user's parameters and gradients at home stay what counts: each owner pulls its range of both, updates it by a step of the optimizer's
    class over these pieces, on its own stream, and home pulls the result, in rounds. Events order it all. The calling thread enqueues everything: there is
    little to enqueue, and workers would take turns under Python's lock.

    The state is in one of three places: in the ranges; at home, where the optimizer has it (`gather`); or, on the way between other ranges,
    on the host.
    """

    def __init__(self, cls: type[Optimizer], lifetime: Lifetime, *, always: bool) -> None:
        """`always`: also where home has room for the state, where it costs less time."""
        self._cls = cls
        self._always = always
        self._room = ""  # that home has enough of it for the state, in words
        self._why_not = ""  # the last step was sharded, in words
        self._lifetime = weakref.ref(lifetime)
        self._places = lifetime.places
        self._optimizer: Callable[[], Any] = lambda: None
        self._key: Any = None  # what the ranges were made for
        self._owners: list[Owner] = []
        self._pieces: dict[torch.Tensor, list[tuple[Owner, Piece]]] = {}
        self._between: State = {}  # on the host
        self._of_gpus: set[tuple[int, str]] = set()  # the tensors among them that belong on GPUs

    def attach(self, optimizer: Any) -> None:
        """Belong to this optimizer."""
        self._optimizer = weakref.ref(optimizer)
        lifetime = self._lifetime()
        if lifetime is not None:
            lifetime.shards[self] = None

    def step(self, step: Step) -> bool:
        """One step of the optimizer's class on all ranges. False: nothing was done; the state has to be at home."""
        lifetime = self._lifetime()
        if lifetime is None:
            return False
        if is_observed(DeviceContext):
            self._why_not = "the last step was in a mode (inference_mode, or one of torch.overrides or torch.utils) that has to see it"
            return False
        # A default device is not for the owners, which have devices of their own.
        with lifetime.if_idle() as idle, torch._C.DisableTorchFunction():
            if not idle or self._places.queues is None:
                self._why_not = "the trainer is closed, or was in another call"
                return False
            self._places.order_on_caller("optimizer.step")
            self._why_not = self._prepare(lifetime)
            if not self._why_not:
                self._run(step)
            return not self._why_not

    def gather(self) -> None:
        """Bring the state home, to the optimizer."""
        optimizer = self._optimizer()
        if optimizer is not None and (self._owners or self._between):
            optimizer.__dict__["state"].update(self._assembled(None))
            self.forget()

    def forget(self) -> None:
        """Drop the state."""
        self._key, self._owners, self._pieces = None, [], {}
        self._between, self._of_gpus = {}, set()

    def on_host(self) -> State:
        """A copy of the state in the host's memory."""
        return self._assembled(_HOST)

    def explain(self) -> str:
        """A line about who holds how much, or why it is not sharded; empty before the first step."""
        counts: Counter[int] = Counter()
        for owner, piece in self._all():
            counts[owner.device] += piece.end - piece.begin
        total = counts.total()
        if self._why_not:
            return unsharded(self._cls, self._why_not)
        if not total:
            return ""
        held, names = self._held(), self._places.names
        texts = [f"{names[d]} {counts[d] / total:.0%} ({held[d] / 2**20:.1f} MiB)" for d in counts]
        return f"Optimizer: {self._cls.__name__} is sharded: {', '.join(texts)} of the parameters and of its state.\n"

    def _held(self) -> Counter[int]:
        """The bytes of state that each device has."""
        held: Counter[int] = Counter()
        for owner in self._owners:
            held[owner.device] += sum(map(bytes_of, owner.state.copy().values()))  # another thread may step
        return held

    def _all(self) -> Iterator[tuple[Owner, Piece]]:
        for pieces in self._pieces.values():
            yield from pieces

    def _prepare(self, lifetime: Lifetime) -> str:
        """Have ranges that fit the parameters as they are now, and move the state to new ones if need be. Returns why not, or nothing."""
        groups = self._optimizer().param_groups
        parameters = [one for group in groups for one in group["params"]]
        if not parameters:
            return "it has no parameters"
        if any(group.get("differentiable") for group in groups):
            return "it is differentiable"
        if not all(map(has_plain_gradient, parameters)):
            return "a gradient is sparse, or unlike its parameter in type or memory"
        devices = self._owning_devices(lifetime)
        working = [device for device in devices if device not in lifetime.works.retired]
        marks = [(one.data_ptr(), one.shape, one.stride(), one.dtype) for one in parameters]
        counts = [len(group["params"]) for group in groups]
        key = (lifetime.replicas.generation, devices, working, list(map(id, parameters)), marks, counts)
        if self._key == key:
            return "" if self._owners else self._room
        if len(working) < 2:
            return "fewer than two GPUs work"
        if uncut := why_uncut(parameters):
            return uncut
        if not self._fit(lifetime.replicas, parameters):
            return "parameters have a new shape, type or memory layout, which the trainer takes over in its next step"
        if not (self._always or self._owners or self._between):
            self._room = self._room_at_home(groups, devices[0])
            if self._room:
                self._key = key
                return self._room
        held = self._held()
        self._between = self._assembled(_HOST) if self._owners else self._between
        self._key, self._owners, self._pieces = None, [], {}
        free = [self._places.spare_memory(device) + held[device] if device in working else 0 for device in devices]
        self._cut(lifetime.replicas, devices, groups, free)
        self._key, self._always = key, True  # from now on, whatever memory there is later
        return ""

    def _room_at_home(self, groups: list[dict[str, Any]], home: int) -> str:
        """What home still needs to update everything, and has, in words. Empty if it has less."""
        elements = sum(one.numel() for group in groups for one in group["params"])
        there = sum(map(bytes_of, self._optimizer().__dict__["state"].values()))
        needed, free = max(0, elements * bytes_each(groups) - there), self._places.spare_memory(home)
        if needed > free:
            return ""
        return (
            f"it needs {needed / 2**20:.1f} MiB and {self._places.names[home]} has {free / 2**20:.1f} MiB free. shard=True shards it "
            "nevertheless"
        )

    def _fit(self, replicas: Replicas, parameters: list[torch.Tensor]) -> bool:
        """Whether the devices' copies of the parameters are still like the parameters."""
        for parameter in parameters:
            for copy in replicas.copies_of(parameter).values():
                if (copy.shape, copy.stride(), copy.dtype) != (parameter.shape, parameter.stride(), parameter.dtype):
                    return False
        return True

    def _owning_devices(self, lifetime: Lifetime) -> list[int]:
        """The first working device of each GPU's memory, home's first."""
        places = self._places
        found: dict[int, int] = {}
        for device, space in enumerate(places.spaces):
            if places.on_gpu[device] and device not in lifetime.works.retired:
                found.setdefault(space, device)
        if places.home_space not in found:  # it still updates what it alone has
            found[places.home_space] = places.spaces.index(places.home_space)
        return sorted(found.values(), key=lambda device: places.spaces[device] != places.home_space)

    def _cut(self, replicas: Replicas, devices: list[int], groups: list[dict[str, Any]], free: list[int]) -> None:
        """Make ranges for these devices, and move the state there."""
        places = self._places
        parameters = [one for group in groups for one in group["params"]]
        sizes = [one.numel() if replicas.copies_of(one) else 0 for one in parameters]
        shares = shares_of(sum(sizes), bytes_each(groups), free, [places.bandwidth(device) for device in devices])
        rounds = _ROUNDS if sum(sizes) * bytes_each(groups) >= _LEAST_BYTES_OF_ROUNDS * len(devices) else 1
        shares = [share // rounds + (share % rounds) * (k == 0) for share in shares for k in range(rounds)]
        ranges = ranges_of(sizes, shares, whole=self._cls.__name__ in _OF_WHOLE_TENSORS)
        owners = [
            Owner(device, k, places.spaces[device] == places.home_space, [[] for _ in groups])
            for device in devices
            for k in range(rounds)
        ]
        pieces: dict[torch.Tensor, list[tuple[Owner, Piece]]] = {}
        found = iter(zip(parameters, sizes, ranges, strict=True))
        for index, group in enumerate(groups):
            for _ in group["params"]:
                parameter, size, cuts = next(found)
                cuts = cuts if size else [(0, 0, parameter.numel())]  # what no replica has stays at home
                pieces[parameter] = [
                    (owners[cut[0]], self._piece(parameter, owners[cut[0]], cut, replicas)) for cut in cuts
                ]
                for owner, piece in pieces[parameter]:
                    owner.groups[index].append(piece.tensor)
        optimizer, between = self._optimizer(), self._between
        own = optimizer.__dict__["state"]
        for parameter, of_it in pieces.items():
            values = between.get(parameter) or own.get(parameter)
            for owner, piece in of_it if values else ():
                moved = {name: self._placed(owner, piece, name, value) for name, value in values.items()}
                owner.state[piece.tensor] = moved
        left = self._at(None, {one: between[one] for one in between.keys() - pieces.keys()})
        # An interrupt from here on leaves some of the state in two places, but no part of it in none.
        self._owners, self._pieces = owners, pieces
        kept = {one: values for one, values in own.items() if one not in pieces}
        optimizer.__dict__["state"] = defaultdict(dict, kept | left)  # copies of the optimizer may have the old one
        self._between, self._of_gpus = {}, set()

    def _piece(self, parameter: torch.Tensor, owner: Owner, cut: Range, replicas: Replicas) -> Piece:
        _, begin, end = cut
        whole = end - begin == parameter.numel()
        layout = torch.empty_like(parameter, device="meta", requires_grad=False)
        piece = Piece(parameter, begin, end, whole, layout, parameter, None)
        if owner.at_home:
            piece.tensor = piece.of(parameter.detach())  # it shares the version counter
            return piece
        copy = replicas.copies_of(parameter)[self._places.spaces[owner.device]]
        piece.tensor = piece.of(copy).data  # with a version counter of its own
        with self._places.enter(owner.device):
            piece.gradient = torch.empty_like(piece.tensor)
        return piece

    def _placed(self, owner: Owner, piece: Piece, name: str, value: Any) -> Any:
        """A value of the parameter's state, or its range of it, where the owner computes."""
        if not isinstance(value, torch.Tensor):
            return value
        parameter = piece.parameter
        if not piece.whole and value.shape == parameter.shape:
            if value.stride() != parameter.stride():
                value = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
            value = piece.of(value)
        on_gpu = value.device != _HOST or (id(parameter), name) in self._of_gpus or self._places.home == _HOST
        place = parameter.device if owner.at_home else self._places.devices[owner.device]
        target = place if on_gpu else _HOST
        with contextlib.nullcontext() if owner.at_home else self._places.on_own_stream(owner.device):
            return torch.empty_like(value, device=target).copy_(value)

    def _assembled(self, place: torch.device | None) -> State:
        """The state as one device has it, in new memory there. None: where the parameters are."""
        found = self._at(place, self._between)
        for parameter, pieces in self._pieces.items():
            owner, first = pieces[0]
            names = [owner.state.get(piece.tensor, {}).keys() for owner, piece in pieces]
            if any(one != names[0] for one in names):
                continue  # the step that was to make it failed on some device: as before that step
            for name, value in owner.state.get(first.tensor, {}).items():
                found.setdefault(parameter, {})[name] = self._joined(parameter, pieces, name, value, place)
        return found

    def _at(self, place: torch.device | None, between: State) -> State:
        """What is on the way, as one device has it."""
        return {
            parameter: {
                name: value.to(place or parameter.device) if (id(parameter), name) in self._of_gpus else value
                for name, value in values.items()
            }
            for parameter, values in between.items()
        }

    def _joined(
        self,
        parameter: torch.Tensor,
        pieces: list[tuple[Owner, Piece]],
        name: str,
        value: Any,
        place: torch.device | None,
    ) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        of_gpu = value.device != _HOST
        if of_gpu and place == _HOST:
            self._of_gpus.add((id(parameter), name))
        target = (place or parameter.device) if of_gpu else _HOST
        first = pieces[0][1]
        cut = not first.whole and value.shape == first.tensor.shape
        like = first.layout if cut else value
        joined = torch.empty_like(like, dtype=value.dtype, device=target, requires_grad=False)
        for owner, piece in pieces if cut else pieces[:1]:
            part = owner.state[piece.tensor][name]
            # The queue of the owner has written it. PyTorch orders a copy between two GPUs on the present streams of both.
            with contextlib.nullcontext() if owner.at_home else self._places.on_own_stream(owner.device):
                (piece.of(joined) if cut else joined).copy_(part)
        if cut and joined.shape == parameter.shape and joined.stride() != parameter.stride():  # it has a new layout
            return torch.empty_like(parameter, dtype=value.dtype, device=target, requires_grad=False).copy_(joined)
        return joined

    def _run(self, step: Step) -> None:
        optimizer, queues = self._optimizer(), self._places.queues
        assert queues is not None
        scaled = getattr(optimizer, "grad_scale", None) is not None  # then the step also writes the gradients
        rounds = 1 + self._owners[-1].round
        pulls: list[list[_Copy]] = [[] for _ in range(rounds)]
        results: list[list[_Copy]] = [[] for _ in range(rounds)]
        written: dict[torch.Tensor, None] = {}
        for parameter, pieces in self._pieces.items():
            gradient = parameter.grad
            for owner, piece in pieces:
                if gradient is None or piece.gradient is None:
                    piece.tensor.grad = None if gradient is None else piece.of(gradient)
                    continue
                piece.tensor.grad = piece.gradient
                there, here = piece.gradient.data_ptr(), piece.address(gradient)
                pulls[owner.round].append((owner.device, there, here, piece.byte_count))
                results[owner.round] += [(owner.device, here, there, piece.byte_count)] if scaled else []
                there, here = piece.tensor.data_ptr(), piece.address(parameter)
                pulls[owner.round].append((owner.device, there, here, piece.byte_count))
                results[owner.round].append((owner.device, here, there, piece.byte_count))
                written[parameter] = None
        parts = []
        for owner in self._owners:
            part, copies = self._part(optimizer, owner)
            parts.append((owner, part))
            pulls[owner.round] += copies
        devices = list(dict.fromkeys(owner.device for owner in self._owners))
        try:
            for k in range(rounds):
                queues.begin_update([] if k else devices, pulls[k])  # what follows a round on a stream has waited, too
                try:
                    for owner, part in parts:
                        if owner.round == k:
                            with self._places.enter(owner.device):
                                step(part)
                finally:
                    queues.end_update(devices, results[k])
        finally:
            torch.autograd.graph.increment_version(list(written))
            for _, piece in self._all():
                piece.tensor.grad = None

    def _part(self, optimizer: Any, owner: Owner) -> tuple[Any, list[_Copy]]:
        """An optimizer of the owner's pieces with the present options, and the copies of those that are tensors at home."""
        copies: list[_Copy] = []
        there = functools.partial(self._there, owner, copies)
        groups = [
            {**{name: there(value, index, name) for name, value in group.items() if name != "params"}, "params": pieces}
            for index, (group, pieces) in enumerate(zip(optimizer.param_groups, owner.groups, strict=True))
            if pieces
        ]
        scaling = {
            name: there(getattr(optimizer, name), name)
            for name in ("grad_scale", "found_inf")
            if hasattr(optimizer, name)
        }
        part = self._cls.__new__(self._cls)
        part.__dict__.update(optimizer.__dict__, param_groups=groups, state=owner.state, **scaling)
        return part, copies

    def _there(self, owner: Owner, copies: list[_Copy], value: Any, *name: Any) -> Any:
        """An option for the owner. If it is a tensor at home, one in the owner's memory, with the copy that is to be made."""
        if isinstance(value, tuple | list) and any(isinstance(one, torch.Tensor) for one in value):
            return type(value)(self._there(owner, copies, one, *name, index) for index, one in enumerate(value))
        if owner.at_home or not isinstance(value, torch.Tensor) or value.device != self._places.home:
            return value
        copy = owner.options.get(name)
        if copy is None or (copy.shape, copy.dtype) != (value.shape, value.dtype):
            with self._places.enter(owner.device):
                copy = owner.options[name] = torch.empty_like(value, device=self._places.devices[owner.device])
        copies.append((owner.device, copy.data_ptr(), value.data_ptr(), value.numel() * value.element_size()))
        return copy
