"""`DataParallel(group=)` with gradients that are sent bucket by bucket: other calls than one step, and what the ranks do not agree on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline import InvalidArgument
from rank_processes import Run, error_of
from test_torch_rank_sums import WARM, Deep, items, mine, small_buckets, squares, trainer_of
from torch_support import gradients, plain, worst_difference

SIZES = [9, 8]
SCALE = 2.0**10


def calling(rank: int, how: str) -> Any:
    module, part = Deep(), mine(rank, SIZES)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    with small_buckets() as sent, trainer_of(module) as trainer:
        for _ in range(WARM):
            trainer.step(squares, part)
        module.zero_grad()
        sent.clear()
        if how == "loss":
            trainer.loss(squares, part).backward()
        elif how == "two losses":
            (trainer.loss(squares, part) + trainer.loss(squares, part)).backward()
        elif how == "scaler":
            trainer.step(squares, part, scaler=scaler)
        else:
            for _ in range(2):
                trainer.step(squares, part)
    return gradients(module), sent


@pytest.mark.parametrize(
    ("how", "times"), [("loss", 1), ("two losses", 2), ("scaler", SCALE), ("two steps that accumulate", 2)]
)
def test_gradients_are_those_of_the_whole_batch(on_ranks: Run, how: str, times: float) -> None:
    wanted = [None if one is None else times * one for one in plain(Deep(), squares, items())[1]]
    for found, sent in on_ranks(2, calling, how):
        assert worst_difference(found, wanted) < 1e-12 * times
        assert len(sent) >= len(wanted), "each layer is a bucket"


def disagreeing(rank: int, how: str) -> Any:
    module, part = Deep(), mine(rank, SIZES)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE * (1 + rank)) if how == "scale" else None
    with small_buckets() as sent, trainer_of(module) as trainer:
        for _ in range(WARM):
            trainer.step(squares, part)
        module.zero_grad()
        sent.clear()
        if how == "call" and rank:
            error = error_of(lambda: trainer.loss(squares, part))
        else:
            error = error_of(
                lambda: trainer.step(squares, part, total=17 + rank if how == "total" else None, scaler=scaler)
            )
        sums, left = list(sent), gradients(module)
        trainer.step(squares, part)
    return *error, sums, left, gradients(module)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("call", "rank 1 has called something else than rank 0"),
        ("total", "rank 1 has total=18.0, rank 0 has total=17.0"),
        ("scale", "rank 1 has"),
    ],
)
def test_what_ranks_do_not_agree_on_is_told_before_anything_counts(on_ranks: Run, how: str, message: str) -> None:
    wanted = plain(Deep(), squares, items())[1]
    for kind, text, sums, left, found in on_ranks(2, disagreeing, how):
        assert kind is InvalidArgument
        assert message in text
        assert sums == []
        assert left == [None] * len(wanted)
        assert worst_difference(found, wanted) < 1e-12
