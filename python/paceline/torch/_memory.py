"""Memory that ran out: how many items may be in work at once, per memory space."""

from __future__ import annotations

from itertools import pairwise

import torch

from paceline.torch._places import Places


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller micro-batch may help."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


class MemoryCaps:
    """The largest micro-batch of each memory space, once memory has run out there.

    A claim of more items is worked off in pieces: gradients add up to the same, and no other device is affected.
    """

    def __init__(self, places: Places) -> None:
        self._spaces = places.space_names
        self._names = places.names
        self._caps: dict[str, int] = {}
        self._told: dict[str, str] = {}

    def pieces(self, device: int, begin: int, end: int) -> list[tuple[int, int]]:
        """Items ``[begin, end)`` in as few pieces as fit, of sizes that differ by at most one."""
        cap = self._caps.get(self._spaces[device])
        items = end - begin
        if cap is None or items <= cap:
            return [(begin, end)]
        count = -(-items // cap)
        bounds = [begin + items * k // count for k in range(count + 1)]
        return list(pairwise(bounds))

    def shrink(self, device: int, items: int) -> bool:
        """After memory ran out with so many items at once: half of that from now on. False if there is no less."""
        space = self._spaces[device]
        if items <= 1:
            return False
        cap = max(1, items // 2)
        self._caps[space] = min(cap, self._caps.get(space, cap))
        self._told[space] = (
            f"{space}: at most {self._caps[space]} items at once, since {self._names[device]} ran out of memory with {items}."
        )
        return True

    def explain(self) -> str:
        """A line for each memory space that has a cap; empty if there is none."""
        return "".join(f"{line}\n" for _, line in sorted(self._told.items()))
