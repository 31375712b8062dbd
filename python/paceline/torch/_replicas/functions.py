"""Gives a replica its own versions of functions that refer to the module, such as lambdas over a submodule or over ``self``.

`copy.deepcopy` does not copy functions, so a copied module would call the parts of the original. A function is made again, over the replica's
parts, if everything else that it refers to by closure and defaults cannot change: simple values, functions, types, Python modules, and tuples of
these. Other functions stay as they are. With a list or a dictionary beside the module, for example, devices would share what the function keeps
there.
"""

from __future__ import annotations

import copy
import dis
import enum
import functools
import operator
import types
from collections import OrderedDict
from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

from paceline.torch._replicas.hook_code import codes_of
from paceline.torch._replicas.reach import SIMPLE, closure_of

_UNCHANGING = (type, types.ModuleType, types.MethodDescriptorType, types.WrapperDescriptorType, enum.Enum)
# What a built-in function is bound to that is no method of an object.
_NOBODYS = (type, types.ModuleType, types.NoneType)
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


class _UnsafeError(Exception):
    """A function refers to what devices would share. The text names it."""


class Functions:
    """Makes functions again, for one replica.

    `counterparts` has the replica's parts by the identity of the user's. `trained` are the identities of modules and parameters: a function
    that refers to none of these stays as it is.
    """

    def __init__(self, counterparts: dict[int, Any], trained: Iterable[int]) -> None:
        self._counterparts = counterparts
        self._own = set(map(id, counterparts.values()))
        self._trained = set(trained)
        self._open: dict[int, types.FunctionType] = {}  # functions that are being made, for those that call themselves
        self.seen: list[Seen] = []
        self.made: set[int] = set()  # the functions that were made again, by identity
        self.refused: dict[int, str] = {}  # why a function was not made again, by its identity

    def among(self, counterparts: dict[int, Any]) -> Functions:
        """The same, with other counterparts. What is made and refused goes to the same lists."""
        there = copy.copy(self)
        there._counterparts, there._own = counterparts, set(map(id, counterparts.values()))
        return there

    def give(self, ours: Any, theirs: Any) -> None:
        """Put new functions into the attributes of `theirs`, a copy of `ours`."""
        if ours is not theirs:
            for name, value in list(vars(theirs).items()):
                renewed = self.renewed(value, vars(ours).get(name))
                if renewed is not value:
                    vars(theirs)[name] = renewed

    def renewed(self, value: Any, source: Any) -> Any:
        """What takes the place of `value`, a copy of `source`. Lists and dictionaries get new functions in place."""
        if type(value) in _CONTAINERS and value is not source:
            for key, one in list(enumerate(value) if isinstance(value, list) else value.items()):
                if isinstance(one, _FUNCTIONS):
                    value[key] = self._top(one)
        return self._top(value) if isinstance(value, _FUNCTIONS) else value

    def _top(self, function: Any) -> Any:
        if not self._refers(function, set()):
            return function
        seen = len(self.seen)
        try:
            made = self._of(function, "")
            self.made.add(id(function))
            return made
        except _UnsafeError as error:
            del self.seen[seen:]
            self.refused[id(function)] = str(error)
            return function
        finally:
            self._open.clear()

    def _of(self, value: Any, name: str) -> Any:
        """The value for the replica, the same if nothing in it belongs to the module. `name` is what it is called where it was found."""
        if id(value) in self._counterparts:
            return self._counterparts[id(value)]
        if type(value) in SIMPLE or isinstance(value, _UNCHANGING) or id(value) in self._own:
            return value
        if isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, _NOBODYS):
            return value
        if type(value) is tuple:
            parts = tuple(self._of(one, name) for one in value)
            return parts if any(map(operator.is_not, parts, value)) else value
        if isinstance(value, types.MethodType):
            function, owner = self._of((value.__func__, value.__self__), name)
            same = function is value.__func__ and owner is value.__self__
            return value if same else types.MethodType(function, owner)
        if type(value) is functools.partial and not value.__dict__:
            parts = (value.func, value.args, tuple(value.keywords.values()))
            new = self._of(parts, name)
            if new is parts:
                return value
            return functools.partial(new[0], *new[1], **dict(zip(value.keywords, new[2], strict=True)))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        raise _UnsafeError(f"it also refers to '{name}' ({type(value).__name__}), which all devices would share")

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        if id(function) in self._open:
            return self._open[id(function)]
        refers = self._refers(function, set())
        if not refers and str(function.__module__).startswith("torch."):
            return function
        code = function.__code__
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        if function.__dict__.keys() - {"__wrapped__"}:
            raise _UnsafeError(f"{function.__name__} has attributes, which all devices would share")
        contents = dict(closure_of(function))
        instructions = chain.from_iterable(map(dis.get_instructions, codes_of(code)))
        writes = {one.argval for one in instructions if one.opname in ("STORE_DEREF", "DELETE_DEREF")}
        unclear = [name for name in cells if name not in contents or name in writes]
        if unclear:
            raise _UnsafeError(f"its variable '{unclear[0]}' is set later, or by the function itself")
        # Cells of other variables stay those of the user, who may set them.
        belong = {name for name, one in contents.items() if id(one) in self._counterparts or self._refers(one, set())}
        own = {name: types.CellType() if name in belong else cell for name, cell in cells.items()}
        new = types.FunctionType(code, function.__globals__, function.__name__, None, tuple(own.values()))
        self._open[id(function)] = new if refers else function
        for name, content in contents.items():
            theirs = self._of(content, name)
            if name in belong:
                own[name].cell_contents = theirs
                self.seen.append(Seen(cells[name], "cell_contents", content))
            elif theirs is not content:
                raise _UnsafeError(f"its variable '{name}' holds objects of the module")
        functools.update_wrapper(new, function)
        new.__dict__.clear()
        new.__defaults__ = self._of(function.__defaults__, "a default argument")
        named = function.__kwdefaults__ or {}
        new.__kwdefaults__ = {key: self._of(one, key) for key, one in named.items()}
        self.seen.append(Seen(function, "__defaults__", function.__defaults__))
        return new if refers else function

    def _refers(self, value: Any, known: set[int]) -> bool:
        """Whether the value refers to a module or a parameter of the user's."""
        if id(value) in self._trained:
            return True
        if id(value) in known:
            return False
        known.add(id(value))
        inside: list[Any] = []
        if isinstance(value, types.FunctionType):
            inside = [one for _, one in closure_of(value)]
            inside += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        elif isinstance(value, types.MethodType):
            inside = [value.__func__, value.__self__]
        elif isinstance(value, functools.partial):
            inside = [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, (tuple, list)):
            inside = list(value)
        elif isinstance(value, dict):
            inside = list(value.values())
        return any(self._refers(one, known) for one in inside)
