"""Which GPU gets which range of the parameters: by its free memory, then by its bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from paceline import InvalidArgument
from paceline.plan import split_batch

# Borders inside of a tensor are multiples of this: a kernel's vectors and tails are then where they are in the whole tensor, and copies
# begin at addresses that are multiples of 16 bytes.
ALIGNMENT = 1024
_MOST_BLOCKS = 1 << 16  # finer shares gain nothing

Range = tuple[int, int, int]  # of a tensor, in elements in the order of memory: owner, begin, end


def shares_of(elements: int, bytes_each: int, free: Sequence[int], bandwidths: Sequence[float | None]) -> list[int]:
    """Elements for each owner: proportional to the bandwidths, within the free bytes. If these do not suffice, proportional to them.

    A bandwidth that is not known makes all count alike.
    """
    block = max(1, -(-elements // _MOST_BLOCKS))
    known = [bandwidth for bandwidth in bandwidths if bandwidth]
    all_known = len(known) == len(free)
    models = [(0.0, max(known) / bandwidth if bandwidth and all_known else 1.0) for bandwidth in bandwidths]
    limits = [max(0, room // (bytes_each * block)) for room in free]
    try:
        shares = split_batch(-(-elements // block), models, maximum=limits).shares
    except InvalidArgument:  # too little memory altogether
        whole = max(1, sum(max(0, room) for room in free))
        shares = [elements * max(0, room) // whole // block for room in free]
    return [share * block for share in shares]


def ranges_of(sizes: Sequence[int], shares: Sequence[int], *, whole: bool) -> list[list[Range]]:
    """The ranges of each tensor, one after the other as the shares say. `whole`: no tensor is cut."""
    ends = list(accumulate(shares))[:-1]
    found: list[list[Range]] = []
    offset = 0
    for size in sizes:
        unit = max(1, size if whole else ALIGNMENT)
        cuts = [0, *(min(size, max(0, round((end - offset) / unit) * unit)) for end in ends), size]
        pieces = [(owner, begin, end) for owner, (begin, end) in enumerate(pairwise(cuts)) if begin < end]
        found.append(pieces or [(0, 0, 0)])
        offset += size
    return found
