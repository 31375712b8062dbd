"""Features, recipes and the journal of a step: what a new feature, or a new thing that a step changes, can rely on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline import Error
from paceline.torch import DataParallel
from paceline.torch._run import feature as features
from paceline.torch._run.feature import Bound, Feature
from paceline.torch._run.journal import Done, Journal, Participant
from paceline.torch._run.recipe import Retry
from torch_support import TWO, assert_same_gradients, classifier, classify, plain


class Switched(Feature):
    """Acts while it is `on`, and counts how often it is asked."""

    on = True

    def __init__(self) -> None:
        self.asked = self.begun = 0

    def bind(self, call: Any) -> Bound | None:
        self.asked += 1
        return _Begins(self) if self.on else None


class _Begins(Bound):
    def __init__(self, owner: Switched) -> None:
        self._owner = owner

    def begin(self, run: Any) -> None:
        self._owner.begun += 1


class Keyed(Switched):
    def key(self, call: Any) -> bool:
        return self.on


def test_a_recipe_is_made_once_and_again_when_its_key_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "_CHECKS", False)
    module, batch = classifier(8)
    with DataParallel(module, TWO) as trainer:
        trainer.step(classify, batch)  # what it learns changes the key
        feature = Keyed()
        trainer._execution.features.add(feature)
        for _ in range(3):
            trainer.step(classify, batch)
        assert (feature.asked, feature.begun) == (1, 3)
        feature.on = False
        for _ in range(2):
            trainer.step(classify, batch)
        assert (feature.asked, feature.begun) == (2, 3)
        module.eval()
        trainer.step(classify, batch)
        assert feature.asked == 3
        trainer._execution.features.remove(feature)
        trainer.step(classify, batch)
        assert feature.asked == 3


def test_a_feature_whose_key_lacks_something_is_noticed_where_recipes_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(features, "_CHECKS", True)
    module, batch = classifier(8)
    with DataParallel(module, TWO) as trainer:
        feature = Switched()
        trainer._execution.features.add(feature)
        for _ in range(2):
            trainer.step(classify, batch)
        feature.on = False
        with pytest.raises(AssertionError, match="_Begins"):
            trainer.step(classify, batch)


class Unhappy(Feature):
    def __init__(self, times: int) -> None:
        self.left = times

    def bind(self, call: Any) -> Bound | None:
        return _Unhappy(self)


class _Unhappy(Bound):
    def __init__(self, owner: Unhappy) -> None:
        self._owner = owner

    def retry(self, run: Any, outcome: Any, *, failed: bool) -> Retry | None:
        self._owner.left -= 1
        return Retry("it is a test", most=2, complete=True) if self._owner.left >= 0 else None


def test_a_step_runs_again_as_often_as_the_reason_allows_and_then_says_the_reason() -> None:
    module, batch = classifier(8)
    wanted = plain(module, classify, batch)[1]
    with DataParallel(module, TWO) as trainer:
        trainer._execution.features.add(Unhappy(2))
        trainer.step(classify, batch)
        assert_same_gradients(module, wanted)
        module.zero_grad()
        trainer._execution.features.add(Unhappy(100))
        with pytest.raises(Error, match="run 3 times for one reason, without success: it is a test"):
            trainer.step(classify, batch)
        assert all(parameter.grad is None for parameter in module.parameters())


class Noting(Participant):
    """Writes what it is told, and is interrupted in its first commit if it is the second."""

    def __init__(self, name: str, said: list[str]) -> None:
        self._name, self._said = name, said

    def commit(self, done: Done) -> None:
        self._said.append(f"commit {self._name}")
        if self._said == ["commit 1", "commit 2"]:
            raise KeyboardInterrupt

    def rollback(self) -> None:
        self._said.append(f"roll back {self._name}")


def test_a_journal_only_goes_forward_once_begun_and_rolls_back_the_last_one_first() -> None:
    said: list[str] = []
    done = Done(None, None, torch.zeros(()), [], [])
    journal = Journal([Noting(name, said) for name in "123"])
    journal.prepare(None)
    with pytest.raises(KeyboardInterrupt):
        journal.commit(done)
    begun = [journal.begun]
    journal.commit(done)
    journal.prepare(None)
    assert [*begun, journal.begun] == [True, False]
    journal.rollback()
    commits = ["commit 1", "commit 2", "commit 2", "commit 3"]
    assert said == [*commits, "roll back 3", "roll back 2", "roll back 1"]
