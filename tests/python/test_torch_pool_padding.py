"""`Pool.serve(pad=, cost=)`: requests of different lengths in one batch."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch import Pool
from pool_support import Held, pool_of


class Tagger(nn.Module):
    """Scores each token of a text with attention, and the text as a whole. It masks what is padded with 0."""

    def __init__(self, *, masks: bool = True, classes: int = 7) -> None:
        super().__init__()
        self.masks = masks
        self.embed = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.tags, self.whole = nn.Linear(16, classes), nn.Linear(16, classes)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        _shapes.append(tuple(tokens.shape))
        mask = tokens == 0
        hidden = self.layer(self.embed(tokens), src_key_padding_mask=mask if self.masks else None)
        mean = (hidden * ~mask[..., None]).sum(1) / (~mask).sum(1, keepdim=True)
        return {"tags": self.tags(hidden), "whole": self.whole(mean), "back": tokens}


_shapes: list[tuple[int, ...]] = []
LENGTHS = [5, 9, 2, 7, 7, 12, 1, 3, 30, 6, 4, 8, 28, 5, 2, 11]


def texts(lengths: list[int]) -> list[torch.Tensor]:
    return [torch.randint(1, 50, (length,)) for length in lengths]


@pytest.mark.parametrize("count", [1, 2])
def test_answers_of_padded_batches_are_those_of_each_request_alone(count: int) -> None:
    model, items = Tagger().eval(), texts(LENGTHS * 4)
    with pool_of(count) as pool:
        tagger = pool.serve(model, max_batch=8, pad=0)
        _shapes.clear()
        with Held(pool, count):
            answers = [tagger(item) for item in items]
        found = [answer.result() for answer in answers]
    assert max(shape[0] for shape in _shapes) > 1
    assert len(_shapes) < len(items)
    for item, answer in zip(items, found, strict=True):
        wanted = model(item[None])
        assert torch.equal(answer["back"], item)
        for key in ("tags", "whole"):
            assert answer[key].shape == wanted[key][0].shape
            assert torch.allclose(answer[key], wanted[key][0], atol=1e-5)
            assert answer[key].untyped_storage().nbytes() == answer[key].nbytes


@pytest.mark.parametrize("classes", [5, 9, 12])
def test_a_size_that_is_the_longest_length_by_chance_is_not_cut(classes: int) -> None:
    model, items = Tagger(classes=classes).eval(), texts([5, 9, 2, 12])
    with pool_of(1) as pool:
        tagger = pool.serve(model, max_batch=4, pad=0)
        for some in (items[:3], items[:2], items, items[1:]):
            with Held(pool):
                answers = [tagger(item) for item in some]
            for item, answer in zip(some, answers, strict=True):
                assert answer.result()["whole"].shape == (classes,)
                assert answer.result()["tags"].shape == (len(item), classes)


def test_batches_hold_requests_of_like_costs() -> None:
    costs: list[float] = []

    def cost(item: torch.Tensor) -> float:
        costs.append(float(len(item)))
        return costs[-1]

    def busy(batch: torch.Tensor) -> torch.Tensor:
        _shapes.append(tuple(batch.shape))
        for _ in range(batch.numel()):
            torch.randn(24, 24).mm(torch.randn(24, 24))
        return batch

    with pool_of(1) as pool:
        same = pool.serve(busy, max_batch=4, pad=-1, cost=cost, idempotent=True)
        for _ in range(4):  # until the pool knows that a batch takes as long as its number times its longest request
            list(same.map(texts([4, 4, 100, 100])))
        _shapes.clear()
        items = texts([4, 100] * 8)
        with Held(pool):
            answers = [same(item) for item in items[:16]]
        assert all(torch.equal(answer.result(), item) for item, answer in zip(items, answers, strict=True))
    assert len(costs) == 16 + 16
    padding = sum(rows * length for rows, length in _shapes) - sum(map(len, items))
    assert padding < 400  # in the order of the queue it would be 8 * 96


def test_a_model_that_does_not_mask_is_refused_and_named() -> None:
    with pool_of(1) as pool:
        tagger = pool.serve(Tagger(masks=False).eval(), max_batch=4, pad=0)
        assert tagger(texts([4])[0]).result()["back"].shape == (4,)  # nothing is padded
        for _ in range(2):
            with Held(pool):
                answers = [tagger(item) for item in texts([3, 20])]
            failed = [answer.exception() for answer in answers]
            assert all(isinstance(one, InvalidArgument) for one in failed)
            assert "changes by up to" in str(failed[0])
            assert "mask" in str(failed[0])


def test_a_small_effect_of_padding_is_noticed_when_there_is_more_padding() -> None:
    asked: list[int] = []

    def counts(batch: torch.Tensor) -> torch.Tensor:
        asked.append(len(batch))
        return batch + 1e-5 * batch.shape[1]

    with pool_of(1) as pool:
        # Requests of equal costs always share a batch, whatever the padding.
        served = pool.serve(counts, max_batch=2, pad=0, cost=lambda _: 1.0, idempotent=True)
        for lengths, runs in ([100, 110], 2), ([101, 111], 1), ([40, 90], 2), ([50, 110], 1), ([2, 900], 2):
            asked.clear()
            with Held(pool):
                answers = [served(torch.ones(length)) for length in lengths]
            failed = [answer.exception() for answer in answers]
            assert len(asked) == runs
            assert [isinstance(one, InvalidArgument) for one in failed] == [lengths[0] == 2] * 2


def halves(batch: torch.Tensor) -> torch.Tensor:
    return batch[:, ::2]


def most_likely(batch: torch.Tensor) -> torch.Tensor:
    return (batch.sum(1, keepdim=True) > 5).long().expand_as(batch)


def pairs(batch: Any) -> Any:
    return batch["one"][:, :, None] * batch["other"][:, None, :]


@pytest.mark.parametrize(
    ("model", "lengths", "text"),
    [
        (halves, [4, 9], "dimension 1 of the answer.*serve without pad="),
        (most_likely, [4, 9], "changes in .*of its numbers"),
    ],
)
def test_answers_of_which_the_padding_is_not_known_are_refused(
    model: Callable[[Any], Any], lengths: list[int], text: str
) -> None:
    with pool_of(1) as pool:
        served = pool.serve(model, max_batch=4, pad=1, idempotent=True)
        with Held(pool):
            answers = [served(torch.ones(length)) for length in lengths]
        for answer in answers:
            with pytest.raises(InvalidArgument, match=text):
                answer.result()


def test_two_lengths_of_a_request_are_told_apart() -> None:
    def item(one: int, other: int) -> dict[str, torch.Tensor]:
        return {"one": torch.randn(one), "other": torch.randn(other)}

    with pool_of(1) as pool:
        served = pool.serve(pairs, max_batch=4, pad={"one": 0.0, "other": 0}, idempotent=True)
        for sizes in ([(3, 5), (4, 5)], [(3, 5), (3, 9)], [(3, 5), (4, 9)], [(4, 5), (3, 9)]):
            items = [item(*one) for one in sizes]
            with Held(pool):
                answers = [served(one) for one in items]
            for one, answer in zip(items, answers, strict=True):
                assert torch.equal(answer.result(), one["one"][:, None] * one["other"][None, :])
        served = pool.serve(pairs, max_batch=4, pad=0, idempotent=True)
        with Held(pool):  # both lengths are the same here
            answers = [served(item(3, 3)), served(item(5, 5))]
        for answer in answers:
            assert len(set(answer.result().shape)) == 1
        with Held(pool):
            answers = [served(item(3, 5)), served(item(5, 3))]
        for answer in answers:
            with pytest.raises(InvalidArgument, match="is not clear"):
                answer.result()


def test_another_dimension_may_be_the_length_and_a_mask_comes_with_the_request() -> None:
    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(3, 4, 5, padding=2, bias=False)

        def forward(self, batch: Any) -> torch.Tensor:
            x, mask = batch
            return torch.tanh(self.conv(x * mask) * mask)

    model = Filter().eval()
    with pool_of(1) as pool:
        served = pool.serve(model, max_batch=4, pad=7, length_dim=-1)
        with pytest.raises(InvalidArgument, match=r"pad=7 is no value of torch.bool"):
            served((torch.randn(3, 6), torch.ones(6, dtype=torch.bool)))
        served = pool.serve(model, max_batch=4, pad=(7, False), length_dim=-1)
        items = [(torch.randn(3, length), torch.ones(1, length, dtype=torch.bool)) for length in (6, 11, 9)]
        with Held(pool):
            answers = [served(item) for item in items]
        for item, answer in zip(items, answers, strict=True):
            wanted = model((item[0][None], item[1][None]))[0]
            assert torch.allclose(answer.result(), wanted, atol=1e-6)


def test_a_version_is_warmed_with_the_longest_request_and_the_shortest() -> None:
    seen: set[tuple[int, ...]] = set()

    def note(batch: torch.Tensor) -> torch.Tensor:
        seen.add(tuple(batch.shape))
        return batch * 1

    with pool_of(1) as pool:
        batcher = pool.serve(note, max_batch=4, pad=0, idempotent=True)
        for length in (3, 9, 2, 5):
            batcher(torch.ones(length)).result()
        seen.clear()
        batcher.publish(note)
    assert seen == {(size, length) for size in (1, 2, 3, 4) for length in (2, 9)}


def test_arguments_for_padding_are_checked() -> None:
    with pool_of(1) as pool:
        serve: Any = pool.serve
        for call, text in [
            (lambda: serve(Tagger().eval(), cost=len), "pad=0, for example"),
            (lambda: serve(print, pad=0), "Say idempotent=True"),
            (lambda: serve(Tagger().eval(), pad=0, cost=lambda _: 0)(torch.ones(3).long()), "returned 0 for a request"),
            (lambda: serve(Tagger().eval(), pad=0, cost=lambda _: "4")(torch.ones(3).long()), "returned '4'"),
            (lambda: serve(Tagger().eval(), pad=0.5)(torch.ones(3).long()), "pad=0.5 is no value of torch.int64"),
            (lambda: serve(Tagger().eval(), pad=[0, 0])(torch.ones(3).long()), "structure of a request"),
        ]:
            with pytest.raises(InvalidArgument, match=text):
                call()  # type: ignore[no-untyped-call]
        assert pool.submit(lambda _: 1).result() == 1


def test_the_programs_of_the_guide_run() -> None:
    text = (Path(__file__).resolve().parents[2] / "python" / "guide" / "pools.md").read_text()
    sections = dict(re.findall(r"^#+ ([^\n]+)\n\n```python\n(.*?)```", text, re.MULTILINE | re.DOTALL))
    tokens = texts([6])[0]
    names: dict[str, Any] = {
        "Pool": Pool,
        "model": Tagger(),
        "tokens": tokens,
        "train_trial": lambda _, config: config,
        "config": 7,
        "rank": lambda state, x: x * state,
        "load_model": lambda _: 2,
    }
    with pool_of(1) as names["pool"]:
        exec(sections["Requests of different lengths"], names)
        assert len(names["tags"]) == len(tokens)
    names |= {"model": nn.Identity(), "better": nn.Identity(), "x": torch.ones(2), "compare": lambda *_: None}
    with pool_of(1) as names["pool"]:
        exec(sections["Versions of a model"], names)
        assert names["y"].version in (1, 2)
        assert [(one["number"], one["role"]) for one in names["ranker"].versions] == [(1, "live")]
    exec(sections["Memory"], names)
    with names["pool"]:
        assert names["trial"].result() == 7
        assert names["trial"].device == "host:0"
        assert names["ranker"](torch.tensor(3)).result() == 6
