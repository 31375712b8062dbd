"""What a step may change beside gradients: the state of a module before and after it, to go back to and to compare."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from paceline.torch._batch.batch import Batch
from paceline.torch._batch.joining import is_array
from paceline.torch._batch.nest import entries_of
from paceline.torch._check.around import KeptAround
from paceline.torch._devices.noise import OtherGenerators
from paceline.torch._devices.places import Places
from paceline.torch._devices.run_draws import RandomStates
from paceline.torch._replicas.attributes import HOOKS
from paceline.torch._replicas.buffers import KeptAttributes, KeptBuffers, as_tensor
from paceline.torch._replicas.kept_parameters import KeptParameters
from paceline.torch._replicas.reach import BARE, LONGEST, SIMPLE
from paceline.torch._replicas.replicas import Replicas

Words = tuple[str, str]  # where the two results come from that are compared
DEVICES: Words = "on one device", "here"
_TABLES = ("_modules", "_parameters")
_DEEPEST = 4
_OF_MEANS = 0.05  # of the tolerance
ROUNDINGS = 10  # a split may differ by so many times what another rounding of the parameters does
_MOST_BYTES = 1 << 20  # of a tensor that is compared by its elements


class State:
    """The module, its replicas, what `loss_fn` reaches beside these, and the generators, at one moment."""

    def __init__(self, replicas: Replicas, places: Places, loss_fn: Any) -> None:
        if replicas.common is not None:
            replicas.common.note()
        parts = [*replicas.all_modules, *_made_since(replicas)]
        self.buffers = KeptBuffers(parts)
        self.attributes = KeptAttributes(parts)
        for one in replicas.plain_objects:
            self.attributes.keep(vars(one))
        self.parameters = KeptParameters(list(replicas.parameters))
        self.around = KeptAround(loss_fn, parts)
        self._followed = replicas.followed()
        self._replicas = replicas
        self.random, self.others = RandomStates(places), OtherGenerators(self.around.generators)

    def restore(self) -> None:
        """Go back to that moment."""
        self.around.restore()
        self.attributes.restore()  # before buffers, since it decides which ones there are
        with torch.no_grad():
            self.buffers.restore()
        self.parameters.restore()
        self._followed()
        self.random.restore()
        self.others.restore()

    def restore_but(self, norms: Iterable[Any]) -> None:
        """Go back to that moment, except that these modules stand still if they do so now."""
        modes = [(part, part.training, part.running_mean, part.running_var) for part in norms]
        self.restore()
        for part, training, mean, variance in modes:
            part.training, part.running_mean, part.running_var = training, mean, variance

    def hold_apart(self) -> None:
        """Give each replica a copy of the data that was written since that moment, which they have in common."""
        common = self._replicas.common
        if common is not None:
            changed = (self.attributes.has_changed, self.buffers.has_changed)
            written = [path for path, one in common.held.items() if any(has(one) for has in changed)] + common.written
            if written:
                self._replicas.hold_apart(written)


def _made_since(replicas: Replicas) -> list[nn.Module]:
    """Submodules that the last forward has made."""
    known = set(map(id, replicas.modules))
    return [part for part in replicas.modules[0].modules() if id(part) not in known]


class Snapshot:
    """Copies of what the user's module holds, for comparison: buffers, plain attributes, and how many hooks and submodules there are."""

    def __init__(self, replicas: Replicas) -> None:
        named = [*replicas.named_modules, *((f"new {type(part).__name__}", part) for part in _made_since(replicas))]
        self.buffers = {
            _path(name, key): one.clone()
            for name, part in named
            for key, one in part._buffers.items()
            if one is not None and one.layout is torch.strided
        }
        self.attributes: dict[str, Any] = {}
        for name, part in named:
            for key, value in vars(part).items():
                if key not in BARE:
                    self.attributes[_path(name, key)] = _copied(value)
            self.attributes |= {_path(name, table): list(vars(part)[table]) for table in _TABLES}
            self.attributes[_path(name, "hooks")] = sum(len(vars(part)[table]) for table in HOOKS)

    def differences(self, other: Snapshot, tolerance: float, words: Words = DEVICES) -> dict[str, str]:
        """What differs, by name, in words: this one holds what one device has left, the `other` one what the split has left."""
        found = {}
        for kind, ours, theirs in (
            ("buffer", self.buffers, other.buffers),
            ("attribute", self.attributes, other.attributes),
        ):
            for name in {**ours, **theirs}:
                mine, got = ours.get(name, _ABSENT), theirs.get(name, _ABSENT)
                if not _alike(mine, got, tolerance):
                    found[name] = f"{kind} {name!r} has {_said(mine, got)} {words[0]} and {_said(got, mine)} {words[1]}"
        return found

    def holds_containers(self, names: Iterable[str]) -> bool:
        """Whether one of these attributes is a list or a dictionary."""
        return any(isinstance(self.attributes.get(name), (tuple, dict)) for name in names)


class _Token:
    """Stands for a value that is not compared."""

    def __init__(self, words: str) -> None:
        self.words = words


_ABSENT = _Token("nothing")
_GRAPH = _Token("a tensor with a graph")


def _path(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _copied(value: Any, depth: int = 0) -> Any:
    """A copy that can be compared later. Objects of other types, and tensors of a graph, which belong to their step, are left out."""
    if type(value) in SIMPLE:
        return value
    if (tensor := as_tensor(value)) is not None:
        if not tensor.is_leaf or tensor.requires_grad:
            return _GRAPH
        if tensor.layout is not torch.strided:
            return _Token("a sparse tensor")
        return tensor.clone() if tensor.nbytes <= _MOST_BYTES or tensor.is_complex() else _sums(tensor)
    if isinstance(value, (list, tuple)) and depth < _DEEPEST:
        return len(value), [_copied(one, depth + 1) for one in value] if len(value) <= LONGEST else []
    if isinstance(value, Mapping) and depth < _DEEPEST:
        return {key: _copied(one, depth + 1) for key, one in value.items()} if len(value) <= LONGEST else len(value)
    return _Token(f"a {type(value).__name__}")


def _sums(tensor: torch.Tensor) -> list[Any]:
    """What is compared of a large tensor."""
    sums = [tensor.sum(dtype=torch.float64)]
    if tensor.is_floating_point():
        sums.append(torch.linalg.vector_norm(tensor, dtype=torch.float64))
    return [tensor.shape, *sums]


def _alike(mine: Any, got: Any, tolerance: float) -> bool:
    if isinstance(mine, _Token) or isinstance(got, _Token):
        absent = mine is _ABSENT or got is _ABSENT
        return not absent or mine is _GRAPH or got is _GRAPH
    if type(mine) is not type(got):
        return False
    if isinstance(mine, torch.Tensor):
        return close(mine, got, tolerance)
    if isinstance(mine, float):
        return mine == got or math.isclose(mine, got, rel_tol=tolerance) or (mine != mine and got != got)
    if isinstance(mine, (list, tuple)):
        return len(mine) == len(got) and all(
            _alike(one, other, tolerance) for one, other in zip(mine, got, strict=True)
        )
    if isinstance(mine, dict):
        return mine.keys() == got.keys() and all(_alike(one, got[key], tolerance) for key, one in mine.items())
    return bool(mine == got)


def close(wanted: torch.Tensor, got: torch.Tensor | None, tolerance: float, *, rounding: float = 0.0) -> bool:
    """Whether two tensors are equal but for rounding. `rounding` is how far it brings an entry where that is known."""
    if got is None or wanted.shape != got.shape or wanted.dtype != got.dtype:
        return False
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return torch.equal(wanted, got)
    least = max(tolerance * _largest(wanted), rounding)
    return torch.allclose(wanted, got.to(wanted.device), rtol=tolerance, atol=least, equal_nan=True)


def same_nest(mine: Any, got: Any, tolerance: float) -> bool:
    """Whether all tensors in two nests are equal but for rounding."""
    return not differing(mine, got, tolerance)


def differing(
    mine: Any, got: Any, tolerance: float, rounded: Any = None, path: str = "", far: list[float] | None = None
) -> list[str]:
    """The paths at which two nests differ by more than rounding. `rounded`: `mine` with parameters that were rounded otherwise.

    `far` gets the largest difference of each tensor, relative to its largest entry, and that of each number.
    """
    entries, others = entries_of(mine), entries_of(got)
    if isinstance(mine, torch.Tensor) and isinstance(got, torch.Tensor):
        if mine.dim() == 0 and mine.is_floating_point():  # a mean, whose terms round apart
            tolerance = max(_OF_MEANS * tolerance, 4 * torch.finfo(mine.dtype).eps)
        equal = close(mine, got, tolerance, rounding=ROUNDINGS * _largest_change(mine, rounded))
        if equal and far is not None and (mine.is_floating_point() or mine.is_complex()):
            far.append(_largest(got.to(mine.device) - mine) / (_largest(mine) or 1.0))
    elif entries is not None and others is not None:
        found, again = ({key: value for key, value, _ in ones or ()} for ones in (others, entries_of(rounded)))
        equal = {key for key, *_ in entries} == found.keys()
        if equal:
            every = (
                differing(one, found[key], tolerance, again.get(key), path + step, far) for key, one, step in entries
            )
            return [name for names in every for name in names]
    elif is_array(mine) and is_array(got):
        return differing(torch.from_numpy(mine), torch.from_numpy(got), tolerance, path=path, far=far)
    elif isinstance(mine, float) and isinstance(got, float):
        equal = math.isclose(mine, got, rel_tol=tolerance) or mine != mine
        if equal and far is not None and math.isfinite(mine):
            far.append(abs(got - mine) / (abs(mine) or 1.0))
    elif isinstance(mine, (int, str)) and isinstance(got, (int, str)):
        equal = mine == got
    elif type(mine) is type(got) and hasattr(mine, "__dict__") and not callable(mine):
        return differing(vars(mine), vars(got), tolerance, path=path, far=far)
    else:
        equal = True
    return [] if equal else [path]


def _largest_change(mine: torch.Tensor, rounded: Any) -> float:
    """The largest difference of an entry, 0 where none can be told."""
    if not isinstance(rounded, torch.Tensor) or rounded.shape != mine.shape or not mine.is_floating_point():
        return 0.0
    return _largest(rounded - mine)


def _largest(tensor: torch.Tensor) -> float:
    """The largest of the finite entries, regardless of signs. 0 if there is none."""
    return float(tensor.nan_to_num(0, 0, 0).abs().max()) if tensor.numel() else 0.0


def _said(value: Any, other: Any) -> str:
    """A value in a few words, which tell it from the other."""
    if isinstance(value, _Token):
        return value.words
    if isinstance(value, torch.Tensor):
        if value.numel() == 1:
            return f"{value.item():.6g}"
        if isinstance(other, torch.Tensor) and other.shape != value.shape:
            return f"shape {tuple(value.shape)}"
        return f"values that sum to {value.double().sum().item():.6g}" if not value.is_complex() else "other values"
    if isinstance(value, tuple) and isinstance(other, tuple):
        return f"{value[0]} entries" if value[0] != other[0] else "other entries"
    if isinstance(value, dict) and isinstance(other, dict):
        for key, one in value.items():
            if key not in other or not _alike(one, other[key], 1e-9):
                return f"{_said(one, other.get(key, _ABSENT))} under {key!r}"
        return "fewer entries"
    return f"{value!r}"[:60]


@dataclasses.dataclass
class Result:
    """What a run made of the batch. `found` is the state that it left, `written` has the values of the parameters that it wrote, if they are known."""

    loss: torch.Tensor
    gradients: list[torch.Tensor | None]
    outside: list[torch.Tensor | None]
    extras: Any
    found: Snapshot
    written: Mapping[int, torch.Tensor | None]
    joined: Mapping[Any, Mapping[str, torch.Tensor]] = dataclasses.field(default_factory=dict)  # buffers, by rules

    @property
    def finite(self) -> bool:
        """Whether there is anything to compare with."""
        gradients = (one for one in self.gradients if one is not None and one.layout is torch.strided)
        return math.isfinite(self.loss.item()) and all(bool(one.isfinite().all()) for one in gradients)


class Edited:
    """The tensors of a batch that ``loss_fn`` may change in place, so that each run begins with the same values."""

    def __init__(self, batch: Batch, *, leaves: bool = False) -> None:
        """`leaves`: whether tensors that require gradients may be changed, too, as where none are wanted."""
        tensors = [one for _, one in batch.tensors() if not one.is_inference() and (leaves or not one.requires_grad)]
        self._batch = batch
        self._kept = [(one, one._version, one.detach().clone()) for one in tensors]
        self._after: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def note(self) -> None:
        """After the run that counts: remember what it has left."""
        self._after = [(one, one.detach().clone()) for one, version, _ in self._kept if one._version != version]
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Before another run."""
        self._batch.count_edits(of_all=True)
        for one, version, values in self._kept:
            if one._version != version:
                one.copy_(values)

    @torch.no_grad()
    def end(self) -> None:
        """Leave the batch as the run that counts has left it."""
        self.begin()
        for one, values in self._after:
            one.copy_(values)
