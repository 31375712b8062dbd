"""What `loss_fn` hands out of a step: slices finish in any order, so it goes to places of its own."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.nn import functional as F

from paceline.torch import DataParallel
from torch_support import TWO, classifier


def test_rows_of_their_own_are_right_whatever_device_is_first() -> None:
    module, (x, y) = classifier(30)
    finished: list[int] = []
    last_is_done = threading.Event()
    appended: list[torch.Tensor] = []

    # As in python/guide/losses.md, but for what makes the first slice the last one to finish.
    correct = torch.empty(len(x), dtype=torch.bool)

    def loss_fn(module: Any, b: Any) -> Any:
        x, y, row = b
        logits = module(x)
        if row[0] == 0:
            assert last_is_done.wait(60)
        correct[row] = logits.argmax(1) == y
        appended.append(logits.argmax(1))
        finished.append(int(row[0]))
        if row[0] > 0:
            last_is_done.set()
        return F.cross_entropy(logits, y)

    wanted = module(x).argmax(1)
    with DataParallel(module, TWO, balance="even") as trainer:
        trainer.step(loss_fn, (x, y, torch.arange(len(x))))
    assert finished == [15, 0]
    assert torch.equal(correct, wanted == y)
    assert not torch.equal(torch.cat(appended), wanted), "a list that is appended to comes in the order of finishing"
