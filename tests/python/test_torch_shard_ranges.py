"""How the parameters are divided among the owners of a sharded optimizer."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch")

from paceline.torch._trainer.shard_ranges import ALIGNMENT, ranges_of, shares_of

MUCH = 1 << 40


@pytest.mark.parametrize("whole", [False, True])
def test_ranges_cover_each_tensor_once_and_in_order(whole: bool) -> None:
    random.seed(1)
    for _ in range(200):
        sizes = [random.choice([0, 1, 7, 1000, 5000, 200_000]) for _ in range(random.randint(1, 9))]
        free = [random.choice([0, 10_000, 1_000_000, MUCH]) for _ in range(random.randint(2, 5))]
        bandwidths = [random.choice([1e12, 3e12]) for _ in free]
        shares = shares_of(sum(sizes), 16, free, bandwidths)
        found = ranges_of(sizes, shares, whole=whole)
        owners = [owner for pieces in found for owner, begin, end in pieces if end > begin]
        assert owners == sorted(owners)
        for size, pieces in zip(sizes, found, strict=True):
            assert [piece[1] for piece in pieces] == [0, *(piece[2] for piece in pieces[:-1])]
            assert pieces[-1][2] == size
            assert all(begin % ALIGNMENT == 0 for _, begin, _ in pieces)
            assert len(pieces) == 1 or not whole


def test_shares_are_those_of_the_bandwidths_within_the_memory() -> None:
    assert shares_of(4_000_000, 16, [MUCH] * 3, [1e12, 2e12, 1e12]) == pytest.approx([1e6, 2e6, 1e6], abs=100)
    assert shares_of(4_000_000, 16, [MUCH] * 4, [1e12, None, 1e12, 1e12]) == pytest.approx([1e6] * 4, abs=100)
    assert shares_of(3_000_000, 16, [MUCH, 8_000_000, MUCH], [None] * 3) == pytest.approx(
        [1.25e6, 5e5, 1.25e6], abs=100
    )
    assert shares_of(10**10, 16, [MUCH] * 2, [1e12, 3e12]) == pytest.approx([2.5e9, 7.5e9], rel=1e-3)


def test_too_little_memory_is_divided_like_the_free_bytes() -> None:
    assert shares_of(1_000_000, 16, [1_000_000, 3_000_000], [3e12, 1e12]) == pytest.approx([2.5e5, 7.5e5], abs=100)
    assert sum(len(pieces) for pieces in ranges_of([5, 6], shares_of(11, 16, [0, 0], [None, None]), whole=False)) == 2


def test_tensors_that_stay_whole_go_where_most_of_them_would_lie() -> None:
    assert ranges_of([600, 900, 500], [1000, 1000], whole=True) == [[(0, 0, 600)], [(1, 0, 900)], [(1, 0, 500)]]
    assert ranges_of([0, 2048], [1024, 1024], whole=False) == [[(0, 0, 0)], [(0, 0, 1024), (1, 1024, 2048)]]
