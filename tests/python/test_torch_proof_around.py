"""What a proof does with objects outside of the module that the function reaches: it puts them back, or names them."""

from __future__ import annotations

import random
import threading
import types
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, TensorDataset

from proof_cases import made, net, rows, squares

pytestmark = pytest.mark.usefixtures("proved")


def test_generators_of_python_and_numpy_are_where_one_device_leaves_them() -> None:
    def made_anew() -> list[Any]:
        return [random.Random(3), np.random.default_rng(3), np.random.RandomState(3)]

    own, plain = made_anew(), made_anew()
    python, numpys, old = own

    def loss_fn(module: Any, part: Any) -> Any:
        return squares(module, part) * (1 + python.random() + numpys.random() + old.random())

    with made(net()) as trainer:
        trainer.step(loss_fn, rows())
        said = trainer.explain()
        assert all(f"a {name} of loss_fn" in said for name in ("Random", "Generator", "RandomState"))
    for one in plain:
        one.random()
    assert [one.random() for one in own] == [one.random() for one in plain]


def test_what_is_left_alone_is_named() -> None:
    lock, loader = threading.Lock(), DataLoader(TensorDataset(rows(4)))
    options = types.SimpleNamespace(scale=2.0, calls=0)

    def loss_fn(module: Any, part: Any) -> Any:
        with lock:
            options.calls += 1
        return squares(module, part) * options.scale * len(loader)

    with made(net()) as trainer:
        trainer.step(loss_fn, rows())
        assert "; not put back: DataLoader, lock; " in trainer.explain()
        assert options.calls == 1
        trainer.step(squares, rows())
        assert trainer.explain().count("not put back") == 1
