"""Finds what a forward leaves for the forward of the next micro-batch, while blocks are measured."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from paceline.torch._devices.failures import warn_caller
from paceline.torch._pipeline.blocks import Block
from paceline.torch._pipeline.gates import journey_here
from paceline.torch._replicas.reach import BARE
from paceline.torch._run.call import Call
from paceline.torch._run.executor import Executor
from paceline.torch._run.feature import Bound, Feature

Named = tuple[str, nn.Module]
_Key = tuple[int, str]  # a module by number, and the name of its attribute
_CONTAINERS = (list, dict, set, deque)
_notes: dict[int, Callable[[str], None]] = {}  # by the identity of a module, while it is watched


class Carried(Feature):
    """Looks in steps that measure blocks, and in the first step. Elsewhere nothing is found that these have not shown."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        self._looked = self._warned = False

    def key(self, call: Call) -> bool:
        work: Any = call.work
        return not work.predicts and (work.planner.measures or not self._looked)

    def bind(self, call: Call) -> Bound | None:
        looks = self.key(call) and len(call.all_places) > 1 and not call.seen.compiled
        return _Carries(self, self._blocks, call.all_replicas.named_modules) if looks else None

    def found(self, names: Sequence[str], call: Call) -> None:
        """What a run has left, in words. Warns once."""
        self._looked |= call.keep
        if names and not self._warned:
            self._warned = True
            warn_caller(_message(names), UserWarning)


class _Carries(Bound):
    """Looks at the first two micro-batches of each lane.

    An attribute is carried if the first one sets it, and the second one reads it before it sets it again. One that is set before it is read is
    a result of the forward, and one that is set once is a cache: both are fine.
    """

    def __init__(self, carried: Carried, blocks: Sequence[Block], modules: Sequence[Named]) -> None:
        self._carried, self._modules = carried, modules
        owners: dict[int, list[str]] = {}
        for block in blocks:
            for part in block.module.modules():
                owners.setdefault(id(part), []).append(block.name)
        # By name: the blocks that have a part, if there are several.
        self._owners = {name: owners[id(part)] for name, part in modules if len(owners.get(id(part), ())) > 1}

    def begin(self, run: Executor) -> None:
        self._found: dict[str, None] = {}  # in words
        self._set: dict[int, set[_Key]] = {}  # by lane: what its first micro-batch has set
        self._over: set[int] = set()  # lanes that have run two

    def check(self, run: Executor, outcome: Any) -> None:
        self._carried.found(list(self._found), run.call)

    @contextlib.contextmanager
    def micro_batch(self, run: Executor, device: int, begin: int, end: int) -> Iterator[None]:
        lane, began = device, time.perf_counter()
        if lane in self._over:
            yield
            return
        theirs = run.replicas[lane].counterparts
        modules = [(name, theirs.get(id(part), part)) for name, part in self._modules]
        before, written = _states(modules), self._buffers(modules)
        wanted = self._set.get(lane)
        read: set[_Key] = set()
        looked_at = sorted({index for index, _ in wanted or ()})

        def note(number: int, name: str) -> None:
            key = looked_at[number], name
            if wanted is not None and key in wanted and vars(modules[key[0]][1]).get(name) is before[key][0]:
                read.add(key)

        with watched([modules[index][1] for index in looked_at], note):
            if (journey := journey_here()) is not None:
                journey.paused(time.perf_counter() - began)
            yield
        after = _states(modules)
        changed = {key for key, state in after.items() if not _same(state, before.get(key))}
        if wanted is None:
            self._set[lane] = changed
        else:
            self._over.add(lane)
            for index, name in sorted(changed & read):
                self._found[f"the attribute {_path(modules[index][0], name)}"] = None
        now = self._buffers(modules)
        self._found |= dict.fromkeys(what for what, version in now.items() if version != written[what])

    def _buffers(self, modules: list[Named]) -> dict[str, Any]:
        """Versions of the buffers that several blocks share, by what to say of them."""
        return {
            f"the buffer {_path(name, buffer)}, which {' and '.join(self._owners[name][:2])} share": _version(value)
            for name, part in modules
            if name in self._owners
            for buffer, value in part._buffers.items()
            if value is not None
        }


@contextlib.contextmanager
def watched(modules: Sequence[nn.Module], note: Callable[[int, str], None]) -> Iterator[None]:
    """Call ``note(index of the module, name)`` before an attribute is read. Meanwhile the class of each module is a subclass of its own class."""
    watched: list[tuple[nn.Module, type]] = []
    try:
        for index, module in enumerate(modules):
            own: Any = type(module)
            with contextlib.suppress(Exception):  # the class allows no subclass, or no other class in its place
                object.__setattr__(module, "__class__", _watching(own))
                watched.append((module, own))
                _notes[id(module)] = functools.partial(note, index)
        yield
    finally:
        for module, own in watched:
            _notes.pop(id(module), None)
            object.__setattr__(module, "__class__", own)


@functools.lru_cache(maxsize=256)
def _watching(own: Any) -> type:
    """A subclass that has the name of `own`, and of which every read is noted."""

    def read(self: Any, name: str) -> Any:
        note = _notes.get(id(self)) if name not in BARE else None
        if note is not None:
            note(name)
        return own.__getattribute__(self, name)

    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__getattribute__": read}
    watching: type = type(own)(own.__name__, (own,), names)
    return watching


def _message(found: Sequence[str]) -> str:
    """What to tell the user of it."""
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return (
        f"Pipeline: a forward leaves something for the next micro-batch in {', '.join(found[:3])}{more}. Several micro-batches are under way at once, "
        "so it finds what some earlier one has left, and gradients that depend on it are not those of one device. Pass it through the forward or "
        "the batch, or keep it in a buffer that one block alone writes and reads. Where it only counts or logs, ignore this. Otherwise use one device."
    )


def _states(modules: Sequence[Named]) -> dict[_Key, tuple[Any, Any]]:
    """The numbers, tensors and containers in attributes, each with what changes if it is written in place."""
    found: dict[_Key, tuple[Any, Any]] = {}
    for index, (_, module) in enumerate(modules):
        for name, value in vars(module).items():
            if name in BARE:
                continue
            if isinstance(value, torch.Tensor):
                found[index, name] = value, 0 if value.is_inference() else value._version
            elif isinstance(value, _CONTAINERS):
                found[index, name] = value, len(value)
            elif isinstance(value, (int, float, complex)) or value is None:
                found[index, name] = value, value
    return found


def _same(state: tuple[Any, Any], before: tuple[Any, Any] | None) -> bool:
    return before is not None and state[0] is before[0] and state[1] == before[1]


def _version(buffer: torch.Tensor) -> Any:
    """Changes when the buffer is written. Batch normalisation does not count what it writes, so the sum counts, too."""
    total = str(buffer.double().sum().item()) if buffer.is_floating_point() else ""
    return id(buffer), buffer._version, total


def _path(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name
