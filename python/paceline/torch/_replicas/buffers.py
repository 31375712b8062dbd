"""Copies buffers between the user's module and the replicas, and keeps their values in case a step fails."""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from paceline import InvalidArgument
from paceline._core.engine import ModuleContents, TensorMemory
from paceline.torch._devices.caller_state import NoGrad

Slots = dict[str, Any]  # a module's own buffers, by name; an entry may be None
Pair = tuple[Slots, Slots, str]  # two modules' buffers, and a name in both
_Copy = tuple[list[torch.Tensor], list[torch.Tensor]]  # targets and sources of one type each, in one memory each

_MOST_BYTES = 1 << 29  # of tensors in attributes that are kept by value
_LONGEST, _DEEPEST = 10_000, 8  # of containers: entries, and how far they are followed into each other

_shape = operator.attrgetter("shape")
_data_ptr: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_host = TensorMemory(torch.Tensor)


class Buffers:
    """The buffers of a replica. They get the user's values before each step, and the user's module gets theirs after it.

    All are copied every time, because there is no cheap way to know what a step wrote. Version counters do not count what batch
    normalisation writes to its statistics, nor what is written through ``.data``.
    """

    def __init__(self, pairs: list[Pair]) -> None:
        """Take triples: the user's dictionary, the replica's, the name in both."""
        self.pairs = pairs
        self._back = [(theirs, ours, name) for ours, theirs, name in pairs]

    def pull(self, *, anew: bool = False) -> None:
        """Copy the user's values into the replica, or `anew` into new tensors, so that graphs of earlier forwards keep the old ones."""
        if self.pairs:
            copy_slots(self.pairs, anew=anew)

    def push(self) -> None:
        """Copy the replica's values into the user's module."""
        if self.pairs:
            copy_slots(self._back)

    @property
    def differ(self) -> bool:
        """Whether the replica has other values than the user's module. NaN counts as another value."""
        return any_differs(self.pairs)


class KeptBuffers:
    """The buffers of modules at one moment, to go back to. Tensors for their values are allocated once: on a GPU one for each type."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._contents = ModuleContents(["_buffers"], objects=True)
        self._kept: list[tuple[Slots, str, Any, Slots]] = []  # the last one has the values, by the same names
        self._on_host: list[Pair] = []  # those that are copied one by one
        self._flat: list[tuple[list[torch.Tensor], torch.Tensor]] = []  # buffers as vectors, and the copy of them all
        self._copied: list[torch.Tensor] = []  # these buffers
        self._form: list[Any] = []  # of these
        self._lasts = False  # whether the copies can be made in later steps, too
        self.note()

    def __bool__(self) -> bool:
        return bool(self._kept)

    def note(self) -> None:
        """Go back to the present buffers from now on."""
        with NoGrad():
            # A step asks this about hundreds of buffers. The loops are not Python's.
            if not (self._lasts and self._contents.same(self._modules) and _form(self._copied) == self._form):
                return self._lay_out()
            _, left = _host.copy(self._on_host)
            copy_slots(left)
            for vectors, flat in self._flat:
                torch.cat(vectors, out=flat)
            return None

    def _lay_out(self) -> None:
        self._contents.note(self._modules)
        self._kept, self._on_host, self._copied, self._flat, self._lasts = [], [], [], [], True
        groups: dict[Any, list[int]] = {}
        for own in [owner._buffers for owner in self._modules]:
            values: Slots = dict(own)
            for name, buffer in own.items():
                if buffer is None or buffer.layout is not torch.strided:
                    pass
                elif buffer.is_nested or not buffer.is_contiguous():
                    values[name], self._lasts = buffer.clone(), False
                elif buffer.is_cpu:
                    values[name] = buffer.clone()
                    self._on_host.append((own, values, name))
                else:
                    groups.setdefault((buffer.device, buffer.dtype), []).append(len(self._kept))
                    self._copied.append(buffer)
                self._kept.append((own, name, buffer, values))
        for indices in groups.values():
            vectors = [self._kept[index][2].detach().view(-1) for index in indices]
            flat = torch.cat(vectors)
            for index, value in zip(indices, flat.split(list(map(len, vectors))), strict=True):
                _, name, buffer, values = self._kept[index]
                values[name] = value.view(buffer.shape)
            self._flat.append((vectors, flat))
        self._form = _form(self._copied)

    @property
    def changed(self) -> bool:
        """Whether a buffer was set or written to, by whatever means. NaN counts as changed."""
        if any(slots.get(name) is not buffer for slots, name, buffer, _ in self._kept):
            return True
        pairs = [(buffer, values[name]) for _, name, buffer, values in self._kept if buffer is not None]
        return any(buffer.layout is torch.strided and not torch.equal(buffer, value) for buffer, value in pairs)

    def has_changed(self, buffer: Any) -> bool:
        """Whether a buffer has other values now."""
        return any(one is buffer and not torch.equal(one, values[name]) for _, name, one, values in self._kept)

    def restore(self) -> None:
        """Put the same tensors back, with the same values."""
        targets, sources = [], []
        for slots, name, buffer, values in self._kept:
            slots[name] = buffer
            if buffer is not None and not _overlaps(buffer):
                targets.append(buffer)
                sources.append(values[name])
        copy_all(targets, sources)


class KeptAttributes:
    """The present attributes of modules, to go back to: a forward may store things there, or count.

    Containers get back what they held, and tensors their values. Values of parameters and buffers are kept elsewhere. Long containers and large
    tensors are left alone.
    """

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self._kept: dict[int, tuple[Any, Any]] = {}  # containers by identity, each with a copy
        self._tensors: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}  # by their memory, each with a copy
        self._bytes = 0  # of these copies
        for part in modules:
            self.keep_module(part)

    def keep_module(self, part: nn.Module) -> None:
        """Keep the attributes of one more module."""
        for table in (part._parameters, part._buffers):
            self._kept[id(table)] = table, copy.copy(table)
        self.keep(vars(part))

    def keep(self, value: Any, depth: int = 0) -> bool:
        """Keep what a container holds, or a tensor's values. Anything else is left out. Returns whether it is one of these."""
        if (tensor := as_tensor(value)) is not None:
            self._keep_tensor(tensor)
            return True
        base = _base_of(value)
        if base is None or id(value) in self._kept or depth > _DEEPEST:
            return base is not None
        before = base(value)
        self._kept[id(value)] = value, before
        if len(value) <= _LONGEST:
            for one in before.values() if isinstance(before, dict) else before:
                self.keep(one, depth + 1)
        return True

    def _keep_tensor(self, tensor: torch.Tensor) -> None:
        writable = tensor.is_leaf and not (tensor.requires_grad or tensor.is_inference() or _overlaps(tensor))
        if writable and _memory(tensor) not in self._tensors and self._bytes + tensor.nbytes <= _MOST_BYTES:
            self._bytes += tensor.nbytes
            self._tensors[_memory(tensor)] = tensor, tensor.clone()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether this tensor is among those that are kept."""
        return tensor.layout is torch.strided and tensor.numel() > 0 and _memory(tensor) in self._tensors

    def has_changed(self, value: Any) -> bool:
        """Whether a container or an array that is kept holds something else now."""
        if id(value) in self._kept:
            return not holds_the_same(*self._kept[id(value)])
        tensor = as_tensor(value)
        kept = None if tensor is None else self._tensors.get(_memory(tensor))
        return kept is not None and not same_bits(*kept)

    def restore(self) -> None:
        """Put the same objects back, into attributes and into containers. What has not changed is not touched."""
        for container, before in self._kept.values():
            if not holds_the_same(container, before):
                refill(container, before)
        with torch.no_grad():
            for tensor, value in self._tensors.values():
                if not same_bits(tensor, value):
                    tensor.copy_(value)


def as_tensor(value: Any) -> torch.Tensor | None:
    """The tensor itself, or one with the memory of a NumPy array that can be written. None for anything else."""
    if isinstance(value, torch.Tensor):
        return value
    if type(value).__module__ != "numpy" or not hasattr(value, "flags") or not value.flags.writeable or not value.ndim:
        return None
    try:
        return torch.from_numpy(value)
    except (TypeError, ValueError):  # a type or strides that PyTorch does not have
        return None


def _memory(tensor: torch.Tensor) -> Any:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _base_of(value: Any) -> Any:
    """The type of containers that `value` is, or None."""
    return next((base for base in (OrderedDict, dict, list, set, deque) if isinstance(value, base)), None)


def holds_the_same(container: Any, before: Any) -> bool:
    """Whether a container holds the objects that it held, in the same order."""
    if isinstance(container, set):
        return len(container) == len(before) and set.__eq__(container, before) is True
    if isinstance(container, dict):
        ours, theirs = (_base_of(one).items(one) for one in (container, before))
        return len(ours) == len(theirs) and all(
            one is other and value is wanted
            for (one, value), (other, wanted) in zip(list(ours), list(theirs), strict=False)
        )
    return len(container) == len(before) and all(map(operator.is_, list(container), before))


def refill(container: Any, before: Any) -> None:
    """Put back what a container held, past methods of a class of its own."""
    base = _base_of(container)
    base.clear(container)
    (base.extend if base in (list, deque) else base.update)(container, before)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits, so that NaN equals itself, and 0.0 differs from -0.0."""
    here, there = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(here, there.to(here.device))


def copy_slots(pairs: list[Pair], place: torch.device | None = None, *, anew: bool = False) -> None:
    """Copy buffers from the first dictionary to the second. `place`: the memory of buffers that the second one does not have yet."""
    sources: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    if not anew:
        written, pairs = _host.copy(pairs)
        if written:  # graphs that have saved them have to notice
            torch.autograd.graph.increment_version(written)
    for source, target, name in pairs:
        value, old = source.get(name), target.get(name)
        if value is old and not anew:
            continue
        where = place if old is None else old.device
        if value is None:
            target[name] = None
        elif old is not None and _shares(old):
            if _memory(value) != _memory(old):
                target[name] = alias_of_data(value)
        elif _shares(value) and old is not None and _memory(value) == _memory(old):
            continue
        elif value.layout is not torch.strided:
            share(value, target, name, where)
        elif anew or old is None or old.shape != value.shape or old.dtype != value.dtype:
            target[name] = value.to(value.device if where is None else where, copy=True)
        elif _overlaps(old):
            if not torch.equal(old, value.to(old.device)):
                target[name] = value.to(old.device, copy=True)
        else:
            sources.append(value)
            targets.append(old)
    if targets:
        copy_all(targets, sources)


def alias_of_data(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the same memory and version counter, which a replica has in the place of a copy."""
    alias = tensor.detach()
    alias._paceline_shares = True  # type: ignore[attr-defined]
    return alias


def _shares(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "_paceline_shares")


def share(value: torch.Tensor, target: Slots, name: str, place: torch.device | None) -> None:
    """Hand on a sparse buffer, which forwards may replace, but not write to: each memory has one copy, which goes nowhere until it changes."""
    old = target.get(name)
    if old is not None and (_copied_from(old, value) or _copied_from(value, old)):
        return
    target[name] = there = value if place is None else value.to(place)
    if there is not value:
        there._paceline_copied_from = value, value._version  # type: ignore[attr-defined]


def _copied_from(there: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a sparse buffer in another memory is a copy of what `value` is now."""
    source, version = getattr(there, "_paceline_copied_from", (None, 0))
    return source is value and version == value._version


def sparse_slots(modules: Iterable[nn.Module]) -> list[tuple[Slots, str]]:
    """Where the modules have sparse buffers."""
    found = [(part._buffers, name, one) for part in modules for name, one in part._buffers.items()]
    return [(own, name) for own, name, one in found if one is not None and one.layout is not torch.strided]


class SharedBuffers:
    """Sparse buffers before a run. Devices share them, so a forward that writes to one would do so once for each micro-batch."""

    def __init__(self, slots: Iterable[tuple[Slots, str]]) -> None:
        """Take what `sparse_slots` has found."""
        found = [(name, own.get(name)) for own, name in slots]
        self._seen = [(name, one, one._version) for name, one in found if one is not None]

    def check(self) -> None:
        """Raise if one was written to."""
        for name, one, version in self._seen:
            if one._version != version:
                raise InvalidArgument(
                    f"step: the forward writes to the sparse buffer {name!r} in place. The devices share it, so it was written once for each micro-batch. "
                    f"It has the new values now. Set it to a new tensor, as by self.{name} = self.{name} * factor, or make it dense."
                )


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensors to tensors, by one call for each pair of memories and types: one kernel copies such a list."""
    for copied in _copies(targets, sources):
        torch._foreach_copy_(*copied)


def _copies(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> list[_Copy]:
    groups: dict[Any, _Copy] = {}
    for target, source in zip(targets, sources, strict=True):
        key = target.device, target.dtype, source.device, source.dtype
        group = groups.setdefault(key, ([], []))
        group[0].append(target)
        group[1].append(source)
    return list(groups.values())


def _form(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """What ``.data`` and ``resize_`` change of a tensor that stays the same object, and a copy of it must follow."""
    return [list(map(one, tensors)) for one in (_data_ptr, _shape)]


def any_differs(pairs: Iterable[Pair]) -> bool:
    """Whether a buffer has another value in the second dictionary than in the first. NaN counts as another value."""
    for ours, theirs, name in pairs:
        value, other = ours.get(name), theirs.get(name)
        if value is None or other is None:
            if value is not other:
                return True
        elif value.layout is torch.strided and not torch.equal(value, other.to(value.device)):
            return True
    return False


def lies_like(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a copy from the one to the other is a copy of memory."""
    return (
        one.layout is other.layout is torch.strided
        and (one.device, one.dtype, one.shape) == (other.device, other.dtype, other.shape)
        and not (_overlaps(one) or _overlaps(other))
    )


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, as after `expand`, or do not lie in order, as in a sparse tensor. PyTorch does not copy to such a tensor."""
    return tensor.layout is not torch.strided or 0 in tensor.stride()
