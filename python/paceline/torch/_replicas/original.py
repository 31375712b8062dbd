"""Refuses to read attributes of the user's module that the forwards of replicas have just written to their own modules.

On one device such a read gives what the last forward has left. On several devices the replicas run the forwards, and the user's module still
has what an earlier call left there. A loss made of that would be wrong.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from paceline import InvalidArgument
from paceline.torch._replicas.reach import BARE

_Check = Callable[[str], None]  # raises if the attribute of this name must not be read

_checks: dict[int, _Check] = {}  # by the identity of a module, while it is guarded


@contextlib.contextmanager
def guarded(modules: list[tuple[str, nn.Module]], wrote: Callable[[int, str], bool]) -> Iterator[None]:
    """While devices run, an attribute raises when it is read if ``wrote(index of the module, name)`` is true.

    Meanwhile the class of each module is a subclass of its own class, which overrides ``__getattribute__``.
    """
    guards: list[tuple[nn.Module, type]] = []
    try:
        for index, (path, module) in enumerate(modules):
            own: Any = type(module)
            if id(module) in _checks:  # another trainer runs it
                continue
            with contextlib.suppress(Exception):  # the class allows no subclass, or no other class in its place
                object.__setattr__(module, "__class__", _guard_of(own))
                guards.append((module, own))
                _checks[id(module)] = functools.partial(_check, path, wrote, index)
        yield
    finally:
        for module, own in guards:
            _checks.pop(id(module), None)
            if type(module) is _guard_of(own):  # else somebody else has changed it meanwhile, as parametrizations do
                object.__setattr__(module, "__class__", own)


def _check(path: str, wrote: Callable[[int, str], bool], index: int, name: str) -> None:
    if wrote(index, name):
        raise InvalidArgument(
            f"step: '{path + '.' if path else ''}{name}' is read from the original module. The forwards of this step have written it to the "
            "replicas, one for each device, so what the original has is from an earlier call. Read it from the module argument of "
            f"loss_fn(module, batch), such as module.{path + '.' if path else ''}{name}, or return it from forward."
        )


@functools.lru_cache(maxsize=256)
def _guard_of(own: Any) -> type:
    """A subclass of `own` that checks every read. It has the name and module of `own`."""

    def read(self: Any, name: str) -> Any:
        if name not in BARE:
            check = _checks.get(id(self))
            if check is not None:
                check(name)
        return own.__getattribute__(self, name)

    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__getattribute__": read}
    guard: type = type(own)(own.__name__, (own,), names)
    return guard
