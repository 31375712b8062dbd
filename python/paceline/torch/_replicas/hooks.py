"""Hooks that keep tensors for ``loss_fn`` outside of the module are refused, by what they do while a proof runs the whole batch.

Functions are not copied with a module. If a hook stores features in a dictionary of the script, every device stores its features there and
overwrites those of the others, and ``loss_fn`` would read whatever came last. Objects are copied: if a hook is a method of an object, the
replicas' copies of the object get the features, and the user's object gets none.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch._replicas.attributes import HOOKS
from paceline.torch._replicas.reach import BARE, FUNCTIONS, LIBRARIES, LONGEST, SIMPLE, Reach, held_by, name_of

_KINDS = dict(zip(HOOKS, ("forward pre-hook", "forward hook", "backward pre-hook", "backward hook"), strict=True))
_CLOSED = (type, types.ModuleType, types.BuiltinFunctionType, torch.Generator, *FUNCTIONS)
_DEPTH = 3  # levels of nesting: a dictionary in a list in an object


class Root(NamedTuple):
    """A place where a hook may keep something."""

    name: str
    get: Callable[[], Any]  # returns what is there now
    copied: bool  # the place is in a copy, so the user's object does not get it


class _Kept(NamedTuple):
    tensor: torch.Tensor
    version: int
    root: Root


@contextlib.contextmanager
def hooks_watched(roots: Iterable[nn.Module], named: Iterable[tuple[str, nn.Module]], function: Any) -> Iterator[None]:
    """Let hooks raise if they keep a tensor that `function` reads outside of the modules, while one thread runs them. `named`: `roots` and their parts."""
    own = {one for root in roots for one in Reach(root).seen}
    tables = [
        (getattr(module, table), f"{kind} of {name or 'the module'}")
        for name, module in named
        for table, kind in _KINDS.items()
    ]
    tables += [(getattr(nn.modules.module, f"_global{table}"), f"global {kind}") for table, kind in _KINDS.items()]
    watched = []
    for hooks, described in tables:
        for number, hook in list(hooks.items()):
            places = [] if _is_of(hook, "torch.") else list(_roots(hook, own, set()))
            if places:
                hooks[number] = one = _Watched(hook, described, places, own, function)
                watched.append((hooks, number, one))
    try:
        yield
    finally:
        for hooks, number, one in watched:
            if hooks.get(number) is one:
                hooks[number] = one.hook


def hooks_of(modules: Iterable[nn.Module]) -> Iterator[tuple[str, Any]]:
    """The kind of each hook on the modules, and the hook, without those that are PyTorch's or paceline's own. Global hooks come last."""
    tables = [(kind, getattr(module, table)) for module in modules for table, kind in _KINDS.items()]
    tables += [(f"global {kind}", getattr(nn.modules.module, f"_global{table}")) for table, kind in _KINDS.items()]
    for kind, hooks in tables:
        for hook in list(hooks.values()):
            if not _is_of(hook, "torch.", "paceline."):
                yield kind, hook


def hooks_of_user(modules: Iterable[nn.Module]) -> Iterator[tuple[str, str]]:
    """The kind and the name of each hook on the modules that is neither PyTorch's nor paceline's own."""
    return ((kind, name_of(hook)) for kind, hook in hooks_of(modules) if not kind.startswith("global"))


class _Watched:
    """Calls the user's hook, and looks whether it has kept a tensor."""

    def __init__(self, hook: Any, described: str, roots: list[Root], own: set[int], function: Any) -> None:
        self.hook = hook
        self._described, self._roots, self._own, self._function = described, roots, own, function

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        before = _kept_in(self._roots, self._own)
        result = self.hook(*arguments, **options)
        for key, kept in _kept_in(self._roots, self._own).items():
            if key in before and before[key].version == kept.version:
                continue
            # A tensor may be kept for the user to read after the step, if it has no gradient and the function does not look at it.
            if key in before or kept.tensor.requires_grad or kept.root.copied or self._is_read(kept.tensor):
                raise self._refusal(kept)
        return result

    def _is_read(self, tensor: torch.Tensor) -> bool:
        """Whether the function refers to something that holds the tensor."""
        return id(tensor) in _kept_in(_roots(self._function, set(), set()), set())

    def _refusal(self, kept: _Kept) -> InvalidArgument:
        why = "All devices write there at the same time, each what belongs to its own slice of the batch."
        later = " What is for after the step only may be kept there as output.detach()."
        if kept.root.copied:
            why, later = "Every device's replica has a copy of that, and yours gets nothing.", ""
        return InvalidArgument(
            f"step: the {self._described} ({name_of(self.hook)}) keeps a tensor of shape {tuple(kept.tensor.shape)} in {kept.root.name}, which the "
            f"module does not hold. {why} Keep it on the module that the hook is given (module.features = output), and read it in loss_fn from "
            f"loss_fn's own module argument; or return it from forward.{later}"
        )


def _kept_in(roots: Iterable[Root], own: set[int]) -> dict[int, _Kept]:
    """The tensors in these places, by identity, without those of the replica."""
    found: dict[int, _Kept] = {}
    for root in roots:
        _collect(root, root.get(), own, found, _DEPTH)
    return found


def _roots(hook: Any, own: set[int], seen: set[int]) -> Iterator[Root]:
    """Everything that a hook refers to other than by its arguments, except what belongs to the replica."""
    if id(hook) in seen or id(hook) in own or _is_of(hook, "torch."):
        return
    seen.add(id(hook))
    if isinstance(hook, functools.partial):
        for one in (*hook.args, *hook.keywords.values()):
            yield from _root("an argument of functools.partial", one, own, seen)
        yield from _roots(hook.func, own, seen)
    elif isinstance(hook, types.MethodType):
        yield from _root(f"the {type(hook.__self__).__name__}", hook.__self__, own, seen)
        yield from _roots(hook.__func__, own, seen)
    elif isinstance(hook, types.BuiltinFunctionType):  # such as list.append, bound
        yield from _root(f"the {type(hook.__self__).__name__}", hook.__self__, own, seen)
    elif isinstance(hook, types.FunctionType):
        for cell_name, cell in zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True):
            yield from _variable(cell_name, functools.partial(_content_of, cell), own, seen)
        names = {name for code in _codes_of(hook.__code__) for name in code.co_names}
        for name in names:
            yield from _variable(name, functools.partial(hook.__globals__.get, name), own, seen)
            content = hook.__globals__.get(name)
            if isinstance(content, types.ModuleType) and content.__name__.partition(".")[0] not in LIBRARIES:
                for inner in names & vars(content).keys():
                    yield from _variable(f"{name}.{inner}", functools.partial(vars(content).get, inner), own, seen)
        for one in (*(hook.__defaults__ or ()), *(hook.__kwdefaults__ or {}).values()):
            yield from _root("a default argument", one, own, seen, copied=False)
    elif not isinstance(hook, nn.Module):
        yield from _root(f"the {type(hook).__name__}", hook, own, seen)
        yield from _roots(type(hook).__call__, own, seen)


def _variable(name: str, get: Callable[[], Any], own: set[int], seen: set[int]) -> Iterator[Root]:
    if isinstance(get(), FUNCTIONS):
        yield from _roots(get(), own, seen)
    elif not isinstance(get(), _CLOSED):  # also None, which a global or nonlocal statement may replace
        yield Root(f"'{name}'", get, False)


def _root(name: str, content: Any, own: set[int], seen: set[int], copied: bool = True) -> Iterator[Root]:
    if isinstance(content, FUNCTIONS):
        yield from _roots(content, own, seen)
    elif type(content) not in SIMPLE and not isinstance(content, _CLOSED) and id(content) not in own:
        yield Root(name, lambda: content, copied)


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _is_of(hook: Any, *rooms: str) -> bool:
    return str(getattr(hook, "__module__", None)).startswith(rooms)


def sign_of(function: Any) -> tuple[Any, ...]:
    """A key that differs between functions. A function made again around the same objects, like a lambda in a loop, has the same key."""
    owner, inner = getattr(function, "__self__", None), getattr(function, "__func__", function)
    if not isinstance(inner, types.FunctionType):
        return (id(function),)
    return (id(owner), inner.__code__, *map(id, held_by(inner)))


def _collect(root: Root, value: Any, own: set[int], found: dict[int, _Kept], depth: int) -> None:
    if id(value) in own:
        return
    if isinstance(value, torch.Tensor):
        found[id(value)] = _Kept(value, 0 if value.is_inference() else value._version, root)
    elif depth:
        for one in _inside(value):
            _collect(root, one, own, found, depth - 1)


def _codes_of(code: types.CodeType) -> list[types.CodeType]:
    """The code itself and that of the functions inside of it."""
    inner = [one for constant in code.co_consts if isinstance(constant, types.CodeType) for one in _codes_of(constant)]
    return [code, *inner]


def _inside(value: Any) -> list[Any]:
    """What `value` holds. If it holds many things: the last ones."""
    # Objects of this package are left out: the trainer keeps tensors as it runs.
    own = str(type(value).__module__).startswith("paceline.")
    if own or type(value) in SIMPLE or isinstance(value, (torch.Tensor, *_CLOSED)):
        return []
    # list() is one call of C code, so other devices cannot change the container meanwhile.
    if isinstance(value, (list, tuple, set, deque)):
        return list(value)[-LONGEST:]
    content = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    known = BARE if isinstance(value, nn.Module) else ()
    return [one for key, one in list(content.items()) if key not in known][-LONGEST:]
