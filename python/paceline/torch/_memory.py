"""How much may be in work at once: by a limit that was set, and by memory that ran out."""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Hashable, Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch

from paceline import OutOfMemory
from paceline._words import plural
from paceline.torch._items import OrderedBatch
from paceline.torch._memory_model import MemoryModel, metered
from paceline.torch._places import Places

_MOST_SHAPES = 64  # with models and caps of their own, for each device; a sequence's length is a shape
_FIRST_PART = 16  # of a claim is the first size that is measured


# How PyTorch tells it where it has no type of its own for it: its allocator on the host, the driver (streams, events, pinned memory), and
# the libraries, which take memory by themselves.
_OUT_OF_MEMORY = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller micro-batch may help."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(told in str(error) for told in _OUT_OF_MEMORY)


class Measuring:
    """A piece that may be measured."""

    counts = True  # False: there was nothing to do


class Sized(Protocol):
    """A batch, as far as memory goes."""

    @property
    def memory_key(self) -> Hashable:
        """Batches of equal keys have one model and one cap."""

    def memory_size(self, begin: int, end: int) -> float:
        """What the memory for these items grows with: more than zero, and no less with more items."""


def _end(batch: Sized, begin: int, end: int, most: float, least: int = 1) -> int:
    """Up to where the items from `begin` on are no larger than `most`, or the nearest place that leaves `least` items on both sides."""
    fits = bisect.bisect_right(range(begin + 1, end + 1), most, key=lambda at: batch.memory_size(begin, at))
    return begin + _fitting(fits, end - begin, least)


def _fitting(wanted: int, left: int, least: int) -> int:
    """As plan::fitting_piece."""
    if wanted >= left or left < 2 * least:
        return left
    return min(max(wanted, least), left - least)


def _make_room(kinds: dict[Hashable, Any]) -> None:
    """For one more kind of batches: what was found first is forgotten."""
    if len(kinds) >= _MOST_SHAPES:
        del kinds[next(iter(kinds))]


class Cap(NamedTuple):
    """Memory that ran out."""

    size: float  # of the micro-batch, as its batch counts it
    why: str

    @property
    def most(self) -> float:
        """What is tried from then on; an item alone always is."""
        return self.size / 2


class MemoryCaps:
    """The largest micro-batch of each device, for each kind of batches.

    A claim of more is worked off in pieces: gradients add up to the same, and no other device is affected. Where a limit is
    set the first claims are worked off in small pieces of growing size, until two sizes have been measured.
    """

    def __init__(self, places: Places, limits: list[int | None] | None = None) -> None:
        self._places = places
        self._spaces = places.space_names
        self._names = places.names
        self._limits = limits or [None] * len(places)
        self._models: list[dict[Hashable, MemoryModel]] = [{} for _ in self._names]
        self._idle = [False] * len(
            self._names
        )  # whether the device's last piece was nothing to do; each entry is its worker's
        # Of memory spaces, and of devices with a limit: what one kind of batches takes tells nothing of another.
        self._caps: dict[str, dict[Hashable, Cap]] = {}

    def pieces(self, device: int, begin: int, end: int, batch: Sized, least: int = 1) -> Iterable[tuple[int, int]]:
        """Items ``[begin, end)`` in as few pieces as fit, of sizes that differ by at most one if they fit then, once it is known what fits.

        None has fewer than `least` items, even if that is what fits, unless there are fewer.
        """
        if self._limits[device] is None and not self._caps:
            return ((begin, end),)
        return self._pieces(device, begin, end, batch, least)

    def _pieces(self, device: int, begin: int, end: int, batch: Sized, least: int) -> Iterator[tuple[int, int]]:
        model = self._model(device, batch.memory_key)
        while model is not None and model.wants_more and end - begin >= 2 * least:
            middle = self._end_to_measure(device, model, batch, begin, end, least)
            known = (model.smallest, model.largest)
            self._idle[device] = False
            yield begin, middle
            begin = middle
            if self._idle[device]:  # without weight: the next ones have to be looked at
                continue
            if (model.smallest, model.largest) == known:  # nothing was measured, or the same again
                break
        if begin == end:
            return
        limit = self._limits[device]
        fits = model.most(limit) if model is not None and limit is not None else None
        cap = self._cap(device, batch.memory_key)
        yield from self._divided(batch, begin, end, cap if fits is None else min(fits, cap), least)

    @staticmethod
    def _divided(batch: Sized, begin: int, end: int, most: float, least: int) -> Iterator[tuple[int, int]]:
        """In as few pieces as are no larger than `most`."""
        if math.isinf(most):
            yield begin, end
            return
        bounds = [begin]
        while bounds[-1] < end:
            bounds.append(_end(batch, bounds[-1], end, most, least))
        count = len(bounds) - 1
        even = [begin + (end - begin) * k // count for k in range(count + 1)]
        if all(batch.memory_size(*piece) <= most for piece in pairwise(even)):
            bounds = even
        yield from pairwise(bounds)

    def measured(self, device: int, begin: int, end: int, batch: Sized) -> contextlib.AbstractContextManager[Measuring]:
        """Around a piece, on its worker."""
        if self._limits[device] is None:
            return contextlib.nullcontext(Measuring())
        return self._measured(device, begin, end, batch)

    @contextlib.contextmanager
    def _measured(self, device: int, begin: int, end: int, batch: Sized) -> Iterator[Measuring]:
        measuring = Measuring()
        model, limit = self._model(device, batch.memory_key), self._limits[device]
        if model is None or limit is None or not model.wants_more:
            yield measuring
            return
        with metered(self._places.devices[device], limit, self._names[device]) as meter:
            yield measuring
        if measuring.counts:
            model.add(batch.memory_size(begin, end), meter.used)
        else:
            self._idle[device] = True

    def shrink(self, device: int, begin: int, end: int, batch: Sized, error: BaseException, least: int = 1) -> bool:
        """After memory ran out with these items at once: half of that from now on, in batches of their kind. False if there is no less."""
        # Pieces that are beyond the cap are the least there are.
        if end - begin <= least or batch.memory_size(begin, end) > self._cap(device, batch.memory_key):
            return False
        # A limit is the device's own; what really ran out is the memory of all that share it.
        limited = isinstance(error, OutOfMemory)
        name = self._names[device] if limited else self._spaces[device]
        why = "it reached its limit" if limited else f"{self._names[device]} ran out of memory"
        caps = dict(self._caps.get(name, {}))  # another thread may be reading the old ones
        caps.pop(batch.memory_key, None)  # what failed was within it, so half of that is less
        _make_room(caps)
        caps[batch.memory_key] = Cap(batch.memory_size(begin, end), why)
        self._caps[name] = caps
        return True

    def report(self) -> dict[str, dict[str, float]]:
        """What `limits` tells, and of each GPU the peak of the pool."""
        result = self.limits()
        for space, peak in self._places.pool_peaks().items():
            result.setdefault(space, {})["pool_peak_bytes"] = peak
        return result

    def limits(self) -> dict[str, dict[str, float]]:
        """Of each device with a limit: the limit, and for the item that takes most the model and what fits; of costs by themselves."""
        result: dict[str, dict[str, float]] = {}
        for device, (name, limit, models) in enumerate(zip(self._names, self._limits, self._models, strict=True)):
            if limit is None:
                continue
            result[name] = {"limit_bytes": limit}
            measured = {key: model for key, model in dict(models).items() if model.sizes > 0}
            costs = measured.pop(OrderedBatch.memory_key, None)
            if measured:
                key, model = max(measured.items(), key=lambda entry: entry[1].per_item)
                most = model.most_items(limit)
                result[name] |= {"fixed_bytes": model.fixed, "bytes_per_item": model.per_item}
                if most is not None:
                    result[name]["largest_micro_batch"] = int(min(most, self._cap(device, key)))
            if costs is not None:
                result[name] |= {"fixed_bytes_with_costs": costs.fixed, "bytes_per_cost": costs.per_item}
                largest = costs.most(limit)
                if largest is not None:
                    result[name]["largest_padded_cost"] = min(largest, self._cap(device, OrderedBatch.memory_key))
        return result

    def explain(self) -> str:
        """Lines for memory that ran out, and for each device that has a limit; empty if there are none."""
        text = "".join(f"{line}\n" for line in self._told())
        for name, entry in self.limits().items():
            if "largest_micro_batch" in entry:
                text += (
                    f"{name}: at most {plural(int(entry['largest_micro_batch']), 'item')} at once in {entry['limit_bytes']:.0f} bytes: a micro-batch takes "
                    f"{entry['fixed_bytes']:.0f} bytes and {entry['bytes_per_item']:.0f} for each item.\n"
                )
            if "largest_padded_cost" in entry:
                text += (
                    f"{name}: a cost of at most {entry['largest_padded_cost']:.6g} at once, items counted as the longest, in "
                    f"{entry['limit_bytes']:.0f} bytes: a micro-batch takes {entry['fixed_bytes_with_costs']:.0f} bytes and {entry['bytes_per_cost']:.4g} for each unit.\n"
                )
        return text

    def _end_to_measure(self, device: int, model: MemoryModel, batch: Sized, begin: int, end: int, least: int) -> int:
        """Small at first. Then twice that, or where it is not certain to fit one item more: a failure costs one repetition."""
        if model.largest is None:
            middle = _end(batch, begin, end, batch.memory_size(begin, end) / _FIRST_PART)
        else:
            measured = model.largest[0]
            fits = model.most(self._limits[device] or 0)
            if fits is None or fits >= 2 * measured:
                middle = _end(batch, begin, end, 2 * measured)
            else:
                middle = min(end, _end(batch, begin, end, measured) + 1)
        middle = _end(batch, begin, middle, self._cap(device, batch.memory_key))
        return begin + _fitting(middle - begin, end - begin, least)

    def _model(self, device: int, key: Hashable) -> MemoryModel | None:
        if self._limits[device] is None:
            return None
        models = self._models[device]
        if key not in models:
            _make_room(models)
        return models.setdefault(key, MemoryModel())

    def _cap(self, device: int, key: Hashable) -> float:
        """What batches of that kind count at most, after memory ran out; infinite before."""
        caps = (self._caps.get(name, {}).get(key) for name in (self._spaces[device], self._names[device]))
        return min((cap.most for cap in caps if cap is not None), default=math.inf)

    def _told(self) -> Iterator[str]:
        """Of memory that ran out: the smallest number of items that any kind of batches is down to, and the cost."""
        for name, caps in sorted(self._caps.items()):
            items = sorted(cap for key, cap in caps.items() if key != OrderedBatch.memory_key)
            if items:
                least = items[0]
                others = f"; items of {plural(len(items) - 1, 'other shape')} have caps of their own"
                yield (
                    f"{name}: at most {plural(int(least.most), 'item')} at once, since {least.why} with {least.size:.0f}"
                    f"{others if items[1:] else ''}."
                )
            costs = caps.get(OrderedBatch.memory_key)
            if costs is not None:
                yield (
                    f"{name}: a cost of at most {costs.most:.6g} at once, items counted as the longest, since {costs.why} with {costs.size:.6g}."
                )
