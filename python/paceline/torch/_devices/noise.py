"""Records the random draws of a whole batch and replays them for its parts, so that a loss that draws can be compared with itself."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.torch._devices.places import Places

# What may move a generator while no operator of the function draws: only the generator's state tells, and it does not tell who.
OTHER_THREAD = "another thread, which needs a torch.Generator of its own"
UNSEEN = f"code whose draws PyTorch does not show, such as compiled code, or {OTHER_THREAD}"
_RANDOM = torch.Tag.nondeterministic_seeded
_FUSED_DROPOUT = torch.ops.aten.native_dropout.default


@dataclasses.dataclass
class Draw:
    """One call of a random operator for the whole batch. It may have drawn nothing, as attention without dropout does."""

    name: str  # without the overload, since a call with a generator is another overload
    settings: list[Any]
    values: torch.Tensor | None = None
    inputs: list[torch.Tensor] = dataclasses.field(default_factory=list)  # they decide what may be drawn: probabilities


class Noise:
    """What the items of a batch draw: each item draws the same in every run, whatever other items run with it.

    The first run that enters `of` has to be one of the whole batch. It is recorded below autograd, where PyTorch marks the operators that
    draw. That includes functional dropout, the dropout of recurrent layers and of attention, and recomputed forwards. A later run of some
    items gets their part of what was recorded. `shared` names what does not belong to items, and `lost` what could not be replayed.
    """

    def __init__(self, items: int, places: Places, tolerance: float) -> None:
        self.items = items
        self.generators = {torch.default_generator, *map(places.generator, range(len(places)))}
        self.tolerance = tolerance
        self.draws: list[Draw] = []
        self.recorded = False
        self.shared: dict[str, None] = {}  # what is drawn once for all items of a slice
        self.lost: dict[str, None] = {}  # what could not be replayed
        self.interleaved = False  # whether places come before items, where one dimension holds both
        self.lock = threading.Lock()  # devices share generators, and a draw changes a generator's state
        # Whether the run that is recorded counts, so that generators of loss_fn stay where it leaves them.
        self.counts = False
        self._begun: dict[torch.Generator, torch.Tensor] = {}  # the states of these generators before and after it
        self._left: dict[torch.Generator, torch.Tensor] = {}
        self.types: set[torch.dtype] = set()  # of what operators gave in the run that is recorded
        self.has_blocks = False  # whether one dimension holds both items and places

    def leave(self) -> None:
        """Bring the generators that loss_fn passes to where the run that counts has left them."""
        for generator, state in self._left.items():
            generator.set_state(state)

    def go_back(self) -> None:
        """Bring them to where that run has found them."""
        for generator, state in self._begun.items():
            generator.set_state(state)

    @property
    def drew(self) -> bool:
        """Whether the whole batch drew anything."""
        return bool(self.operators or self.lost)

    @property
    def operators(self) -> list[str]:
        """The names of the operators that drew."""
        return list(dict.fromkeys(draw.name for draw in self.draws if draw.values is not None))

    def of(self, rows: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
        """Record or replay on the calling thread, for one forward and backward of these items."""
        if not self.recorded:
            self.recorded = True
            return _Recording(self)
        return _Replaying(self, rows) if self.operators else contextlib.nullcontext()

    def part(self, values: torch.Tensor, shape: torch.Size, rows: torch.Tensor) -> torch.Tensor | None:
        """The part of a recorded tensor that belongs to these items, or None if the shape leaves that open."""
        if values.shape == shape:
            return values
        along = [index for index, (a, b) in enumerate(zip(values.shape, shape, strict=False)) if a != b]
        if values.dim() != len(shape) or len(along) != 1:
            return None
        places, rest = divmod(values.shape[along[0]], self.items)
        if rest or shape[along[0]] != places * len(rows):
            return None
        self.has_blocks |= places > 1
        place = torch.arange(places, device=rows.device)
        index = place[:, None] * self.items + rows if self.interleaved else rows[:, None] * places + place
        return values.index_select(along[0], index.flatten().to(values.device))


class SliceNoise:
    """As `Noise`, for a batch that first runs in slices: each slice is recorded, and later runs cut the slices."""

    counts = False

    def __init__(self, places: Places, tolerance: float) -> None:
        self.records = True  # whether slices are recorded
        self._places, self._tolerance = places, tolerance
        self._slices: dict[int, Noise] = {}  # by the first item
        self._lost: dict[str, None] = {}
        self._lock = threading.Lock()

    def of(self, rows: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
        """Record or replay on the calling thread, for one forward and backward of these items."""
        begin = int(rows[0])
        with self._lock:
            if self.records:
                self._slices[begin] = slice = Noise(len(rows), self._places, self._tolerance)
                slice.lock = self._lock
            else:
                begin = max(first for first in self._slices if first <= begin)
            slice = self._slices[begin]
            if begin + slice.items <= int(rows[-1]):
                self._lost["the slices of an earlier try"] = None
                return contextlib.nullcontext()
            return slice.of(rows - begin)

    def clear(self) -> None:
        """Forget all slices, before another try to record them."""
        self._slices.clear()

    def lose(self, names: Iterable[str]) -> None:
        """Note draws that cannot be replayed."""
        self._lost |= dict.fromkeys(names)

    def leave(self) -> None:
        """Nothing of a run that is recorded here stays."""

    def go_back(self) -> None:
        """Nor does it move the generators that loss_fn passes."""

    @property
    def drew(self) -> bool:
        """Whether a slice drew anything."""
        return any(slice.drew for slice in self._slices.values())

    @property
    def lost(self) -> dict[str, None]:
        """What could not be replayed."""
        return self._lost | {name: None for slice in self._slices.values() for name in slice.lost}

    @property
    def types(self) -> set[torch.dtype]:
        """Of what operators gave when slices were recorded."""
        return set().union(*(slice.types for slice in self._slices.values()))


class _Random(TorchDispatchMode):
    """Sees the operators that may draw."""

    called: Callable[[Any, Any, Any, list[torch.Generator]], Any]  # by a subclass

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Skipping would import the compiler, which takes a second and 75 MiB. Where code is compiled, a proof and `check` run it eagerly."""
        return False

    def __init__(self, noise: Noise) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noise = noise
        self._own: dict[torch.Generator, torch.Tensor] = {}  # generators that loss_fn passes, and their states

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _RANDOM not in func.tags:
            return func(*args, **kwargs)
        own = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
        with self.noise.lock:  # no other device is in the middle of a draw
            for generator in own:
                self._own.setdefault(generator, generator.get_state())
        return self.called(func, args, kwargs, [*self.noise.generators, *own])

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        for generator, state in self._own.items():
            generator.set_state(state)


class _Recording(_Random):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(result, torch.Tensor):
            self.noise.types.add(result.dtype)
        return result

    def __exit__(self, *exception: Any) -> None:
        if self.noise.counts:
            self.noise._begun = {**self._own, **self.noise._begun}
            self.noise._left |= {generator: generator.get_state() for generator in self._own}
        super().__exit__(*exception)

    def called(self, func: Any, args: Any, kwargs: Any, generators: list[torch.Generator]) -> Any:
        with self.noise.lock:
            states = [generator.get_state() for generator in generators]
            result = func(*args, **kwargs)
            moved = any(not torch.equal(one.get_state(), state) for one, state in zip(generators, states, strict=True))
        draw = Draw(_name_of(func), _settings(args, kwargs))
        self.noise.draws.append(draw)
        if not moved:
            return result
        values = result[1] if func is _FUSED_DROPOUT else result
        if isinstance(values, torch.Tensor) and len(_written(func)) < 2:
            draw.values = values.clone()
            draw.inputs = [tensor.clone() for tensor in _inputs(func, args, kwargs)]
        else:
            self.noise.lost[draw.name] = None
        return result


class _Replaying(_Random):
    def __init__(self, noise: Noise, rows: torch.Tensor) -> None:
        super().__init__(noise)
        self._rows = rows
        self._next = 0

    def called(self, func: Any, args: Any, kwargs: Any, generators: list[torch.Generator]) -> Any:
        noise = self.noise
        with noise.lock:
            states = [generator.get_state() for generator in generators]
            result = func(*args, **kwargs)
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
        draw = noise.draws[self._next] if self._next < len(noise.draws) else None
        self._next += 1
        if draw is None or (draw.name, draw.settings) != (_name_of(func), _settings(args, kwargs)):
            noise.lost[_name_of(func)] = None
            return result
        if draw.values is None:
            return result
        values = result[1] if func is _FUSED_DROPOUT else result
        part = noise.part(draw.values, values.shape, self._rows)
        if part is None or not self._same_inputs(draw, _inputs(func, args, kwargs)):
            noise.lost[draw.name] = None
            return result
        if part is draw.values and len(self._rows) < noise.items:
            noise.shared[f"{draw.name} of shape {tuple(part.shape)}"] = None
        values.copy_(part)
        if func is _FUSED_DROPOUT:
            result[0].copy_(args[0] * part / (1 - args[1]) if args[1] < 1 else torch.zeros_like(args[0]))
        return result

    def _same_inputs(self, draw: Draw, inputs: list[torch.Tensor]) -> bool:
        """Whether the inputs that decide about the numbers are the same as in the recorded call."""
        tolerance = self.noise.tolerance
        for theirs, mine in zip(draw.inputs, inputs, strict=True):
            part = self.noise.part(theirs, mine.shape, self._rows)
            if part is None or not torch.allclose(part.double().to(mine.device), mine.double(), tolerance, tolerance):
                return False
        return True


def _written(func: Any) -> set[str]:
    """The names of the arguments that the operator writes to."""
    return {one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write}


def _inputs(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors whose values a draw depends on."""
    if func is _FUSED_DROPOUT or func._schema.name.endswith("_like"):
        return []
    written = _written(func)
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    return [value for name, value in given.items() if isinstance(value, torch.Tensor) and name not in written]


def _settings(args: Any, kwargs: Any) -> list[Any]:
    """The arguments that are numbers, such as a probability. Shapes are lists and do not count."""
    return [value for value in (*args, *kwargs.values()) if isinstance(value, (bool, int, float))]


def _name_of(func: Any) -> str:
    return str(func._schema.name.partition("::")[2].strip("_"))


def states_of(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """What gets and what sets the state of a generator of Python or NumPy. None for anything else."""
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and isinstance(generator, numpy.RandomState):
        return generator.get_state, generator.set_state
    if numpy is not None and isinstance(generator, numpy.Generator):
        bits = generator.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return None


class OtherGenerators:
    """The present state of the global generators of Python and NumPy, and of others of theirs, to go back to."""

    def __init__(self, others: Iterable[Any] = ()) -> None:
        self._kept: list[tuple[str, Callable[[], Any], Callable[[Any], None], Any]]
        self._kept = [("Python's random", random.getstate, random.setstate, random.getstate())]
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            self._kept.append(("numpy.random", numpy.get_state, numpy.set_state, numpy.get_state()))

        for one in others:
            known = states_of(one)
            if known is not None:
                get, put = known
                self._kept.append((f"a {type(one).__name__} of loss_fn", get, put, get()))

    @property
    def moved(self) -> list[str]:
        """The names of the generators that somebody has drawn from since then."""
        return [name for name, get, _, state in self._kept if repr(get()) != repr(state)]

    def restore(self) -> None:
        """Go back to that state: the same draws follow again."""
        for _, _, put, state in self._kept:
            put(state)
