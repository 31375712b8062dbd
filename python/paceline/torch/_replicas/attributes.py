"""Finds what the user changes on modules between steps besides parameters and buffers: plain attributes and hooks."""

from __future__ import annotations

import copy
import ctypes
import operator
from collections import OrderedDict, deque
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch._replicas.reach import BARE, LONGEST, SIMPLE, Reach, attributes_of, has_slots

# These tables hold hooks by number. A number is never used again. Further tables hold flags, by the same numbers.
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOK_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
# Attributes that are followed elsewhere: `Replica.follow` compares `training`, and `_is_full_backward_hook` goes with the hooks.
_ELSEWHERE = BARE - {"_is_full_backward_hook"}
MOST_BYTES = 4096  # of a tensor or an array that is compared by its elements
# Containers that are compared entry by entry, found by their __eq__. A subclass belongs to them unless it has an __eq__ of its own.
_CONTAINERS: dict[Any, Any] = {one.__eq__: one for one in (dict, list, tuple, set, deque)} | {OrderedDict.__eq__: dict}

_tables = operator.attrgetter(*HOOKS)


class Change(NamedTuple):
    """An attribute that was set, changed in place, or (`gone`) deleted. `holder` is the index of the module or object that has it."""

    holder: int
    name: str
    value: Any
    gone: bool = False


class _Is:
    """Equal to one object only, as long as `read` finds the same in it. Tensors and arrays would compare by their elements."""

    __slots__ = ("_one", "_read", "_then")
    __array_ufunc__ = None
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, one: Any, read: Callable[[Any], Any] = lambda one: None, depth: int = 0) -> None:
        self._one, self._read, self._then = one, read, frozen(read(one), depth)

    def __eq__(self, other: object) -> bool:
        return other is self._one and bool(self._then == self._read(other))


def _elements(array: Any) -> tuple[Any, ...]:
    return array.shape, array.dtype.str, array.tobytes()


def _content(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What changes with a tensor: its version, the memory that it has, and the values of a small one, which NumPy and ``.data`` write uncounted."""
    if tensor.is_inference() or tensor.layout is not torch.strided:
        return ()
    found = tensor.requires_grad, tensor._version, tensor.data_ptr(), tensor.shape
    if tensor.nbytes > MOST_BYTES or not tensor.is_cpu or not tensor.is_contiguous():
        return found
    return *found, ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _fields(value: Any) -> tuple[Any, ...]:
    base = _CONTAINERS.get(type(value).__eq__)
    return dict(attributes_of(value)), None if base is None else base(value)


def frozen(value: Any, depth: int = 0) -> Any:
    """A snapshot of `value`, which compares equal to `value` until `value` changes."""
    kind = type(value)
    if kind in SIMPLE:
        return value
    if depth > 4:
        return _Is(value)
    if isinstance(value, torch.Tensor):
        return _Is(value) if _is_trained(value) else _Is(value, _content, depth)
    compares = getattr(kind, "__eq__", None)
    base = _CONTAINERS.get(compares)
    if base is not None and len(value) > LONGEST:
        return _Is(value)
    beside = None if base is None or kind is OrderedDict else getattr(value, "__dict__", None)
    if has_slots(kind) or (beside is not None and beside is not value):
        return _Is(value, _fields, depth + 1)
    if base is dict:
        return {key: frozen(one, depth + 1) for key, one in dict.items(value)}
    if base is not None:
        return set(value) if base is set else base(frozen(one, depth + 1) for one in value)
    if kind.__module__ == "numpy" and hasattr(value, "tobytes"):
        return _Is(value, _elements, depth + 1) if value.nbytes <= MOST_BYTES else _Is(value)
    return value if compares is object.__eq__ else _Is(value)


class Attributes:
    """The attributes and hooks of modules, and of plain objects in them, as they were when the replicas last followed them.

    They are compared before every step, in passes of C code that take about 0.3 µs per module.
    """

    def __init__(self, reach: Reach) -> None:
        self._paths = [*(name for name, _ in reach.modules), *reach.objects]
        self._unregistered = [*reach.unregistered, *(name for name, _ in reach.modules[reach.registered :])]
        self.holders: list[Any] = [*(part for _, part in reach.modules), *reach.objects.values()]
        self._modules: list[nn.Module] = self.holders[: len(reach.modules)]
        self._types = list(map(type, self._modules))
        self._dicts: list[dict[str, Any]] = list(map(vars, self.holders))
        self._saved: list[dict[str, Any]] = [{} for _ in self._dicts]
        self._differing = set(range(len(self._dicts)))  # holders in which `changes` has found differences
        self.note()

    def note(self) -> None:
        """Note the present state, after the replicas have followed all hooks and what `changes` has found."""
        changed = self._differing
        for index in changed:
            kept = self._kept_elsewhere(index)
            values = self._dicts[index].items()
            self._saved[index] = {key: value if key in kept else frozen(value) for key, value in values}
        self._lengths = list(map(len, self._dicts))
        self._values = list(chain.from_iterable(map(dict.values, self._saved)))
        self._tables: list[dict[int, Any]] = list(chain.from_iterable(map(_tables, self._modules)))
        self._numbers = list(map(list, self._tables))
        self._all_numbers = list(chain.from_iterable(self._numbers))

    def noted(self) -> dict[str, Any]:
        """All that is known of the present state, in lists that `note` does not change."""
        return {**vars(self), "_saved": list(self._saved)}

    def take(self, written: dict[int, dict[str, Any]]) -> None:
        """Set what a replica's forward has written, by holder and name. This does not count as a change by the user."""
        for index, values in written.items():
            self._dicts[index].update(values)
        self._differing = set(written)
        self.note()

    def _kept_elsewhere(self, index: int) -> frozenset[str]:
        return _ELSEWHERE if index < len(self._modules) else frozenset()

    @property
    def same(self) -> bool:
        """Whether nothing has changed since `note`. It may be False if a value was replaced by an equal one."""
        try:
            return (
                list(map(len, self._dicts)) == self._lengths
                and self._values == list(chain.from_iterable(map(dict.values, self._dicts)))
                and self.same_hooks
            )
        except Exception:  # from the __eq__ of a new value
            return False

    @property
    def same_hooks(self) -> bool:
        """Whether each module has the same hooks."""
        if not self._all_numbers:
            return not any(self._tables)
        return list(chain.from_iterable(self._tables)) == self._all_numbers

    @property
    def same_types(self) -> bool:
        """Whether each module still has the same class."""
        return list(map(type, self._modules)) == self._types

    def changes(self) -> list[Change]:
        """The changes since `note`, one by one, without hooks."""
        found = []
        pairs = enumerate(zip(self._saved, self._dicts, strict=True))
        self._differing = {index for index, (saved, now) in pairs if not equal(saved, now)}
        for index in sorted(self._differing):
            saved, now = self._saved[index], self._dicts[index]
            kept = self._kept_elsewhere(index)
            found += [
                Change(index, name, value)
                for name, value in now.items()
                if name not in kept and not (name in saved and equal(saved[name], value))
            ]
            found += [Change(index, name, None, gone=True) for name in saved if name not in now]
        return found

    def path_of(self, change: Change) -> str:
        """Where the attribute is, from the module."""
        holder = self._paths[change.holder]
        return f"{holder}.{change.name}" if holder else change.name

    def need_new_replicas(self, changes: list[Change]) -> bool:
        """Whether a change may affect what is trained or run, or how it is compiled."""
        probe = nn.Module()
        for change in changes:
            path = self.path_of(change)
            if change.name == "_compiled_call_impl" or any(one.startswith(path) for one in self._unregistered):
                return True
            vars(probe)["value"] = change.value
            if type(change.value) not in SIMPLE and Reach(probe).leads_on:
                return True
        return False


def align(ours: Any, theirs: Any) -> None:
    """Give an object that ``replicate`` has made the simple attributes of the user's object."""
    for name, value in vars(ours).items():
        if name not in BARE and type(value) in SIMPLE and type(vars(theirs).get(name)) in SIMPLE:
            vars(theirs)[name] = value


def align_hooks(ours: nn.Module, theirs: nn.Module, counterparts: dict[int, Any]) -> None:
    """Give a module that ``replicate`` has made the user's hooks, unless its constructor has registered them already."""
    if list(map(len, _tables(ours))) != list(map(len, _tables(theirs))):
        for name in (*HOOKS, *_HOOK_FLAGS):
            vars(theirs)[name] = copy.deepcopy(vars(ours)[name], dict(counterparts))
        theirs._is_full_backward_hook = ours._is_full_backward_hook


def is_of_a_forward(value: Any, depth: int = 0) -> bool:
    """Whether `value` holds a tensor with a graph. A forward of the user has left it there. It cannot be copied."""
    if isinstance(value, torch.Tensor):
        return not value.is_leaf
    if type(value) in SIMPLE or isinstance(value, (type, nn.Module)) or depth > 3:
        return False
    if not isinstance(value, (list, tuple)):
        value = (value if isinstance(value, dict) else getattr(value, "__dict__", {})).values()
    return any(is_of_a_forward(one, depth + 1) for one in list(value))


def _is_trained(tensor: torch.Tensor) -> bool:
    """Whether the replicas share this tensor, which is then followed with the parameters."""
    return tensor.requires_grad or isinstance(tensor, nn.Parameter)


def carry(changes: list[Change], holders: list[Any], counterparts: dict[int, Any]) -> None:
    """Make changes of the user's `holders` on a replica, too.

    Values that are not simple are copied, and `counterparts` gets the copies. References to the user's objects become references to the
    replica's.
    """
    for change in changes:
        holder = counterparts.get(id(holders[change.holder]))
        if holder is None:
            continue
        if change.gone:
            vars(holder).pop(change.name, None)
            continue
        try:
            vars(holder)[change.name] = copy.deepcopy(change.value, counterparts)
        except Exception as error:
            raise InvalidArgument(
                f"step: attribute '{change.name}' ({type(change.value).__name__}) was set after the trainer was made, and cannot be copied to the "
                f"other devices' modules: {error}. Set it before, and make the trainer with replicate=, or keep it outside of the module."
            ) from error


def equal(saved: Any, now: Any) -> bool:
    """Whether a value is still what `frozen` has made a snapshot of."""
    try:
        return saved is now or bool(saved == now)
    except Exception:
        return False
