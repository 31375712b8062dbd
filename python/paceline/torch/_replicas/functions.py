"""Gives a replica its own versions of functions that refer to the module, such as lambdas over a submodule or over ``self``.

`copy.deepcopy` does not copy functions, so a copied module would call the parts of the original. A function is made again, over the replica's
parts. All else that it refers to by closure and defaults stays the user's.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from typing import Any, NamedTuple

from paceline.torch._replicas.reach import LONGEST, closure_of

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_CONTAINERS = (list, dict, OrderedDict)


class Seen(NamedTuple):
    """An attribute of a cell or a function, as it was when a function over it was made again."""

    owner: Any
    name: str
    value: Any

    @property
    def same(self) -> bool:
        try:
            return getattr(self.owner, self.name) is self.value
        except ValueError:  # a variable that was deleted
            return False


class Functions:
    """Makes functions again, for one replica. `counterparts` has the replica's parts by the identity of the user's."""

    def __init__(self, counterparts: dict[int, Any]) -> None:
        self._counterparts = counterparts
        self._made: dict[int, types.FunctionType] = {}  # by the identity of the user's
        self.seen: list[Seen] = []

    def give(self, ours: Any, theirs: Any) -> None:
        """Put new functions into the attributes of `theirs`, a copy of `ours`, and into lists and dictionaries there."""
        for name, value in list(vars(theirs).items()) if ours is not theirs else ():
            if isinstance(value, _FUNCTIONS):
                vars(theirs)[name] = self._of(value)
            elif type(value) in _CONTAINERS and value is not vars(ours).get(name):
                for key, one in list(enumerate(value) if isinstance(value, list) else value.items()):
                    if isinstance(one, _FUNCTIONS):
                        value[key] = self._of(one)

    def _of(self, value: Any) -> Any:
        """The value for the replica, the same if nothing in it belongs to the module."""
        if not self._refers(value, set()):
            return value
        if id(value) in self._counterparts:
            return self._counterparts[id(value)]
        if isinstance(value, types.FunctionType):
            return self._made.get(id(value)) or self._function(value)
        if isinstance(value, types.MethodType):
            return types.MethodType(self._of(value.__func__), self._of(value.__self__))
        if isinstance(value, functools.partial):
            return functools.partial(self._of(value.func), *self._of(value.args), **self._of(value.keywords))
        if isinstance(value, dict):
            return {key: self._of(one) for key, one in value.items()}
        return type(value)(map(self._of, value))

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        cells, contents = function.__closure__ or (), dict(closure_of(function))
        variables = dict(zip(function.__code__.co_freevars, cells, strict=True))
        belong = {name for name, one in contents.items() if self._refers(one, set())}
        # Cells of other variables stay those of the user, who may set them.
        own = {name: types.CellType() if name in belong else cell for name, cell in variables.items()}
        new = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, tuple(own.values()))
        self._made[id(function)] = new  # which may call itself
        for name in belong:
            own[name].cell_contents = self._of(contents[name])
            self.seen.append(Seen(variables[name], "cell_contents", contents[name]))
        functools.update_wrapper(new, function)
        vars(new).pop("__wrapped__")
        vars(new).update(vars(function))
        new.__defaults__, new.__kwdefaults__ = self._of(function.__defaults__), self._of(function.__kwdefaults__)
        self.seen.append(Seen(function, "__defaults__", function.__defaults__))
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
        held = [one for _, one in closure_of(value)]
        return [*held, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if type(value) not in (tuple, *_CONTAINERS) or len(value) > LONGEST:
        return []
    return list(value.values() if isinstance(value, dict) else value)
