"""What a prediction may return: one entry of any kind per item, means, objects, and rows that are filled up."""

from __future__ import annotations

import io
import pathlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline import Error, InvalidArgument, Unavailable
from paceline.torch import DataParallel
from paceline.torch._check import base
from paceline.torch._trainer import lifetime
from torch_support import TWO, classifier

ITEMS = 9


def rows() -> tuple[nn.Module, torch.Tensor]:
    module, (x, _) = classifier(ITEMS)
    return module, x


def predicted(fn: Callable[[Any, Any], Any], **options: Any) -> list[Any]:
    """Of one device, of a proof, and of devices."""
    module, x = rows()
    with torch.no_grad():
        found = [fn(module, x)]
    with DataParallel(module, TWO, balance=[2, 1], prove="raise") as trainer:
        return [*found, trainer.predict(fn, x, **options), trainer.predict(fn, x, **options)]


PER_ITEM: dict[str, Callable[[Any, Any], Any]] = {
    "numbers": lambda module, part: [int(one) for one in module(part).argmax(1)],
    "texts": lambda module, part: tuple(f"{float(one):.4f}" for one in part[:, 0]),
    "lists": lambda module, part: {"words": [[str(float(v)) for v in row[: int(abs(row[0]) * 3)]] for row in part]},
    "rows of their own": lambda module, part: [module(row) for row in part],
    "detections": lambda module, part: [
        {"boxes": row.repeat(int(label) + 1, 1), "label": int(label)}
        for row, label in zip(part, module(part).argmax(1), strict=True)
    ],
}


@pytest.mark.parametrize("kind", PER_ITEM)
def test_lists_with_one_entry_per_item_come_back_in_order(kind: str) -> None:
    wanted, proved, got = predicted(PER_ITEM[kind])
    for found in (proved, got):
        torch.testing.assert_close(found, wanted) if kind == "rows of their own" else assert_equal_nests(found, wanted)


def assert_equal_nests(found: Any, wanted: Any) -> None:
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted)
    elif isinstance(wanted, list) and isinstance(wanted[0], dict):
        for one, other in zip(found, wanted, strict=True):
            assert one.keys() == other.keys()
            for key in other:
                assert_equal_nests(one[key], other[key])
    else:
        assert found == wanted


def test_a_proof_sees_entries_that_depend_on_the_slice() -> None:
    with pytest.raises(Error, match="the outputs differ"):
        predicted(lambda module, part: [f"{index} of {len(part)}" for index in range(len(part))])


def test_by_cost_entries_come_in_the_callers_order() -> None:
    module, x = rows()
    with DataParallel(module, TWO, prove=False) as trainer:
        got = trainer.predict(lambda m, part: [float(row[0]) for row in part], x, cost=torch.arange(1.0, ITEMS + 1))
    assert got == x[:, 0].tolist()


def test_arrays_and_means_are_put_together() -> None:
    wanted, _, got = predicted(
        lambda module, part: {"array": module(part).numpy(), "loss": part.mean(), "kind": "a", "width": 3}
    )
    np.testing.assert_allclose(got["array"], wanted["array"])
    torch.testing.assert_close(got["loss"], wanted["loss"])
    assert (got["kind"], got["width"]) == ("a", 3)


class Layer:
    def __init__(self, keys: torch.Tensor) -> None:
        self.keys, self.dtype, self.full = keys, keys.dtype, False


class Cache:
    """As libraries of models return it: an object that holds objects that hold tensors."""

    def __init__(self, layers: list[Layer]) -> None:
        self.layers = layers


@pytest.mark.parametrize("layers", [1, 3, 6])
def test_objects_are_put_together_attribute_by_attribute(layers: int) -> None:
    wanted, _, got = predicted(lambda module, part: Cache([Layer(module(part) * index) for index in range(layers)]))
    assert len(got.layers) == layers
    for one, other in zip(got.layers, wanted.layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys)
        assert (one.dtype, one.full) == (torch.float64, False)


def generated(module: Any, part: Any) -> torch.Tensor:
    """As many columns as the longest item of the slice has, filled up with -1."""
    lengths = (part[:, 0].abs() * 5).long() + 1
    places = torch.arange(int(lengths.max()))
    return torch.where(places < lengths[:, None], places, -1)


def test_rows_of_other_widths_are_filled_up_or_refused_by_name() -> None:
    wanted, proved, got = predicted(generated, pad=-1)
    assert torch.equal(proved, wanted)
    assert torch.equal(got, wanted)
    with pytest.raises(InvalidArgument, match=r"predict\(\.\.\., pad=value\)"):
        predicted(generated)


def test_calls_of_several_threads_wait_for_each_other_and_one_inside_of_another_is_refused() -> None:
    module, x = rows()
    errors: list[BaseException] = []
    with DataParallel(module, TWO, prove=False) as trainer:
        wanted = trainer.predict(x)

        def predicts() -> None:
            try:
                for _ in range(20):
                    torch.testing.assert_close(trainer.predict(x), wanted)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=predicts) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        with pytest.raises(Unavailable, match="in the middle of another call"):
            trainer.predict(lambda m, part: trainer.predict(part), x)
    with (
        DataParallel(module, TWO, prove="warn") as trainer,
        pytest.raises(Unavailable, match="in the middle of another call"),
    ):
        trainer.predict(lambda m, part: trainer.predict(part), x)


def test_predictions_have_figures_and_are_shown_where_there_is_no_step() -> None:
    module, x = rows()
    file = io.StringIO()
    with DataParallel(module, TWO, balance=[2, 1], prove="warn") as trainer:
        assert "predictions" not in trainer.report()
        for part in trainer.progress([x] * 3, every=0, file=file):
            trainer.predict(part)
        figures = trainer.report()
        assert figures["steps"] == 0
        assert (figures["predictions"]["steps"], figures["predictions"]["proved"]) == (3, 1)
        assert [one["items"] for one in figures["predictions"]["devices"].values()] == [12, 6]
        assert trainer.shares == {"host:0": 6, "host:1": 3}
        assert trainer.explain().startswith("predict: weighted balance, 2 steps measured")
        assert "host:0 6" in file.getvalue()
        for _ in range(2):
            trainer.step(lambda m, part: m(part).square().mean(), x)
        assert "\npredict: " in trainer.explain()


def halves(fn: Callable[[Any, Any], Any], items: int = 4, **options: Any) -> Any:
    """In slices of equal size, without a proof."""
    module, (x, _) = classifier(items)
    with DataParallel(module, TWO, balance="even", prove=False, **options) as trainer:
        return trainer.predict(fn, x)


def test_a_tuple_with_as_many_entries_as_a_slice_has_items_is_a_nest() -> None:
    module, (x, _) = classifier(4)
    out, nothing = halves(lambda m, part: (m(part), None))
    torch.testing.assert_close(out, module(x).detach())
    assert nothing is None
    out, loss = halves(lambda m, part: (m(part), part.mean()))
    assert out.shape == (4, 3)
    torch.testing.assert_close(loss, x.mean())
    out, kind = halves(lambda m, part: (m(part), "a"))
    assert (out.shape, kind) == ((4, 3), "a")


def test_a_list_that_may_be_read_in_two_ways_is_refused() -> None:
    for fn in (lambda m, part: [m(row) for row in part], lambda m, part: [row.sum() for row in part]):
        with pytest.raises(InvalidArgument, match="may be one tensor per item"):
            halves(fn, 6)
    assert halves(lambda m, part: [0, 0]) == [0, 0, 0, 0]
    assert halves(lambda m, part: [None, "a"]) == [None, "a", None, "a"]
    assert [one.shape for one in halves(lambda m, part: [m(row) for row in part], 8)] == [(3,)] * 8


def test_all_else_has_to_be_the_same() -> None:
    same = {
        "set": {1, 2},
        "path": pathlib.Path("a"),
        "range": range(3),
        "nan": float("nan"),
        "type": int,
        "function": len,
    }
    assert halves(lambda m, part: dict(same, rows=part))["set"] == {1, 2}
    with pytest.raises(InvalidArgument, match=r"is .* in one micro-batch and .* in another"):
        halves(lambda m, part: {"first": float(part[0, 0]), "rows": part})
    with pytest.raises(InvalidArgument, match="other entries"):
        halves(lambda m, part: {str(float(part[0, 0])): part})


def test_arrays_of_any_type_are_put_together() -> None:
    found = halves(
        lambda m, part: {"text": np.array([f"{v:.3f}" for v in part[:, 0]]), "turned": part.numpy()[:, ::-1]}
    )
    _, (x, _) = classifier(4)
    assert found["text"].tolist() == [f"{v:.3f}" for v in x[:, 0]]
    np.testing.assert_array_equal(found["turned"], x.numpy()[:, ::-1])
    with pytest.raises(InvalidArgument, match="is an array of shape"):
        halves(lambda m, part: np.array(3))


def test_the_first_call_of_a_module_refuses_what_the_second_does() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = classifier(4)[0]

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(x).mean()

    module = DataParallel(Mean(), TWO, prove="warn")
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=r"output has shape \(\)"):
            module(classifier(4)[1][0])


def test_a_thread_that_a_prediction_waits_for_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifetime, "_PATIENCE", 0.2)
    module, x = rows()

    def fn(inner: Any, part: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(trainer.predict, part).result(30)

    for prove in (False, "warn"):
        with (
            DataParallel(module, TWO, prove=prove) as trainer,
            pytest.raises(Unavailable, match="in the middle of another call"),
        ):
            trainer.predict(fn, x)


def test_a_loop_of_steps_after_predictions_shows_steps() -> None:
    module, x = rows()
    file = io.StringIO()
    with DataParallel(module, TWO, prove=False) as trainer:
        for _ in range(5):
            trainer.predict(x)
        for part in trainer.progress([x] * 4, every=0, file=file):
            trainer.step(lambda m, one: m(one).square().mean(), part)
    assert "step -" not in file.getvalue()
    assert "step 3" in file.getvalue().splitlines()[-1]


def test_ctrl_c_before_a_proof_has_begun_is_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    module, x = rows()
    monkeypatch.setattr(base, "State", interrupted)
    with DataParallel(module, TWO, prove="warn") as trainer, pytest.raises(KeyboardInterrupt):
        trainer.predict(x)
