"""Gives a replica its own versions of functions that refer to the module, such as lambdas over a submodule or over ``self``.

`copy.deepcopy` does not copy functions, so a copied module would call the parts of the original. A function is made again, over the replica's
parts. It has its own variables, and copies of lists and dictionaries there, as attributes of the replica have: a cache of one device is none of another.
A hook is made again, too, but fills the lists and dictionaries of the user.
"""

from __future__ import annotations

import copy
import functools
import types
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from paceline.torch._replicas.attributes import HOOKS, equal, frozen
from paceline.torch._replicas.reach import FUNCTIONS, LONGEST, closure_of, held_by

_CONTAINERS = (list, dict, OrderedDict)
_DEEPEST = 4  # levels of containers in which a forward leaves tensors
_CHANGING = (*_CONTAINERS, set, deque)


class Seen(NamedTuple):
    """An attribute of a cell or a function, as it was when a function over it was made again."""

    owner: Any
    name: str
    value: Any  # as `frozen`

    @property
    def same(self) -> bool:
        try:
            return equal(self.value, getattr(self.owner, self.name))
        except ValueError:  # a variable that was deleted
            return False


class Functions:
    """Makes functions again, for one replica. `counterparts` has the replica's parts by the identity of the user's."""

    def __init__(self, counterparts: dict[int, Any]) -> None:
        self._counterparts = counterparts
        self._memo = dict(counterparts)  # with the copies of lists and dictionaries
        self._is_hook = False
        self._made: dict[int, types.FunctionType] = {}  # by the identity of the user's
        self.seen: list[Seen] = []

    def give(self, ours: Any, theirs: Any) -> None:
        """Put new functions into the attributes of `theirs`, a copy of `ours`, and into lists and dictionaries there."""
        for name, value in list(vars(theirs).items()) if ours is not theirs else ():
            self._is_hook = name in HOOKS
            if isinstance(value, FUNCTIONS):
                vars(theirs)[name] = self._of(value)
            elif type(value) in _CONTAINERS and value is not vars(ours).get(name):
                for key, one in list(enumerate(value) if isinstance(value, list) else value.items()):
                    if isinstance(one, FUNCTIONS):
                        value[key] = self._of(one)

    def _of(self, value: Any, *, copies: bool = False) -> Any:
        """The value for the replica, the same if nothing in it belongs to the module. `copies`: but for containers that may change."""
        if not self._refers(value, set()):
            if not copies or type(value) not in _CHANGING:
                return value
            detach([value], self._memo)
            return copy.deepcopy(value, self._memo)
        if id(value) in self._counterparts:
            return self._counterparts[id(value)]
        if isinstance(value, types.FunctionType):
            return self._made.get(id(value)) or self._function(value)
        if isinstance(value, types.MethodType):
            return types.MethodType(self._of(value.__func__), self._of(value.__self__))
        if isinstance(value, functools.partial):
            return functools.partial(self._of(value.func), *self._of(value.args), **self._of(value.keywords))
        if isinstance(value, dict):
            return type(value)((key, self._of(one)) for key, one in value.items())
        return type(value)(map(self._of, value))

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        cells, contents = function.__closure__ or (), dict(closure_of(function))
        variables = dict(zip(function.__code__.co_freevars, cells, strict=True))
        wanted = {name for name, one in contents.items() if not self._is_hook or self._refers(one, set())}
        own = {name: types.CellType() if name in wanted else cell for name, cell in variables.items()}
        new = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, tuple(own.values()))
        self._made[id(function)] = new  # which may call itself
        for name in wanted:
            own[name].cell_contents = self._of(contents[name], copies=True)
            self.seen.append(Seen(variables[name], "cell_contents", frozen(contents[name])))
        functools.update_wrapper(new, function)
        vars(new).pop("__wrapped__")
        vars(new).update(vars(function))
        new.__defaults__, new.__kwdefaults__ = self._of(function.__defaults__), self._of(function.__kwdefaults__)
        self.seen.append(Seen(function, "__defaults__", frozen(function.__defaults__)))
        return new

    def _refers(self, value: Any, known: set[int]) -> bool:
        """Whether the value refers to a part of the module."""
        if id(value) in self._counterparts:
            return True
        if id(value) in known:
            return False
        known.add(id(value))
        return any(self._refers(one, known) for one in _inside(value))


def _inside(value: Any) -> list[Any]:
    """What functions hold, and lists, tuples and dictionaries that are not long."""
    if isinstance(value, types.FunctionType):
        return held_by(value)
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if type(value) not in (tuple, *_CONTAINERS) or len(value) > LONGEST:
        return []
    return list(value.values() if isinstance(value, dict) else value)


def detach(values: Iterable[Any], memo: dict[int, Any], depth: int = 0) -> None:
    """Let copies of tensors with a graph, which a forward has left and `copy.deepcopy` refuses, have none."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if not value.is_leaf and id(value) not in memo:
                memo[id(value)] = value.detach().clone()
        elif type(value) in (list, tuple, dict, OrderedDict, set, deque) and depth < _DEEPEST:
            detach(list(value.values() if isinstance(value, dict) else value), memo, depth + 1)
