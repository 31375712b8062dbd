"""`DataParallel(reducer=)`: ranks that come and go, summed by an object of the caller's. Here ranks are threads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Cancelled, Error, InvalidArgument
from paceline.torch import DataParallel
from test_torch_terms import COUNTS, losses_of, tasks, total_of
from torch_support import classifier, classify, descend, gradients, hosts, plain, worst_difference

SECONDS = 20  # after which a test has hung


class Dead(BaseException):
    """What ends a thread that plays a killed process."""


class Quorum:
    """The members that sum together. If one dies, the sum that the others wait for is abandoned, as with torchft."""

    def __init__(self, count: int) -> None:
        self.members = [Member(self, rank) for rank in range(count)]
        self.alive = list(self.members)
        self.changed = threading.Condition()
        self.waiting: dict[Member, torch.Tensor] = {}
        self.round = 0

    def add(self, member: Member, tensor: torch.Tensor) -> bool:
        """Sum a tensor over the members that are alive, in place. False if a member died meanwhile."""
        with self.changed:
            if self.alive != member.others:
                return False
            self.waiting[member] = tensor
            before, alive = self.round, list(self.alive)
            if len(self.waiting) == len(self.alive):
                self._finish()
            assert self.changed.wait_for(lambda: self.round > before or self.alive != alive, SECONDS)
            if self.round > before:
                return True
            self.waiting.pop(member, None)
            return False

    def die(self, member: Member) -> None:
        with self.changed:
            if member in self.alive:  # a step that fails tells the others, which a killed process would not
                self.alive.remove(member)
            self.changed.notify_all()
        raise Dead

    def _finish(self) -> None:
        whole = torch.stack([self.waiting[member] for member in self.alive]).sum(0)
        for tensor in self.waiting.values():
            tensor.copy_(whole)
        self.waiting = {}
        self.round += 1
        self.changed.notify_all()


class Member:
    """A reducer."""

    def __init__(self, quorum: Quorum, rank: int) -> None:
        self.rank = rank
        self.sums = 0
        self.dies_at = -1  # the number of the sum
        self.commits = 0
        self.others: list[Member] = []  # the members that are alive when a step begins
        self._quorum = quorum
        self._failed = False

    def begin(self) -> int:
        """Wait until all members that are alive begin the next step. Returns how many there are."""
        done = False
        while not done:
            self.others = list(self._quorum.alive)
            done = self._quorum.add(self, torch.zeros(()))
        return len(self.others)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        if self.sums == self.dies_at:
            self._quorum.die(self)
        self.sums += 1
        if not self._failed:
            self._failed = not self._quorum.add(self, tensor)

    def should_commit(self) -> bool:
        done, self._failed = not self._failed, False
        self.commits += done
        return done


def on_threads(members: list[Member], function: Callable[[Member], Any]) -> list[Any]:
    """What the function returns for each member, each on a thread of its own. None for one that died."""
    results: list[Any] = [None] * len(members)

    def run(member: Member) -> None:
        try:
            member.begin()
            results[member.rank] = function(member)
        except Dead:
            pass
        except BaseException as error:
            results[member.rank] = error

    threads = [threading.Thread(target=run, args=(member,), daemon=True) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "a rank hangs"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def part_of(batch: Any, begin: int, end: int) -> Any:
    return tuple(tensor[begin:end] for tensor in batch) if end > begin else None


@pytest.mark.parametrize("cut", [44, 64])
def test_the_gradient_is_that_of_one_device(cut: int) -> None:
    module, batch = classifier(64)
    loss, wanted = plain(module, classify, batch)

    def rank(member: Member) -> Any:
        own = copy.deepcopy(module)
        with DataParallel(own, hosts(member.rank + 1), reducer=member) as trainer:
            found = trainer.step(classify, part_of(batch, 0, cut) if member.rank == 0 else part_of(batch, cut, 64))
        return found, gradients(own)

    quorum = Quorum(2)
    for found, theirs in on_threads(quorum.members, rank):
        assert found.item() == pytest.approx(loss.item(), rel=1e-13)
        assert worst_difference(theirs, wanted) < 1e-12
    assert [member.commits for member in quorum.members] == [1, 1]


def test_a_reducer_may_return_what_is_waited_for() -> None:
    module, batch = classifier(16)
    wanted = plain(module, classify, batch)[1]

    class Twice:
        """As if another rank had computed the same."""

        def all_reduce(self, tensor: torch.Tensor) -> Any:
            class Work:
                def wait(self) -> None:
                    tensor.mul_(2)

            return Work()

        def should_commit(self) -> bool:
            return True

    with DataParallel(module, hosts(2), reducer=Twice()) as trainer:
        trainer.step(classify, batch)
    assert worst_difference(gradients(module), wanted) < 1e-12


@pytest.mark.parametrize("sums", [0, 1], ids=["before the votes", "before the gradients"])
def test_if_a_rank_dies_the_other_repeats_the_step_with_all_items(sums: int) -> None:
    steps, dies_in = 12, 5
    reference, batch = classifier(64)
    modules = [copy.deepcopy(reference) for _ in range(2)]
    for _ in range(steps):
        classify(reference, batch).backward()
        descend(reference)
    quorum = Quorum(2)
    quorum.members[1].dies_at = 2 * dies_in + sums
    refused: list[Any] = []

    def rank(member: Member) -> Any:
        own = modules[member.rank]
        with DataParallel(own, [f"host:{member.rank}"], reducer=member) as trainer:
            done = 0
            while done < steps:
                both = [(0, 44), (44, 64)]
                begin, end = both[member.rank] if member.begin() == 2 else (0, 64)
                try:
                    trainer.step(classify, part_of(batch, begin, end))
                except Cancelled as error:
                    refused.append((done, "Run the step again" in str(error), gradients(own)))
                    continue
                descend(own)
                done += 1
        return [parameter.detach() for parameter in own.parameters()]

    survivor, dead = on_threads(quorum.members, rank)
    assert dead is None
    assert refused == [(dies_in, True, [None] * 4)]
    assert worst_difference(survivor, [parameter.detach() for parameter in reference.parameters()]) < 1e-12


@pytest.mark.parametrize("dies_at", [-1, 1], ids=["nobody dies", "dies before the weights are summed"])
def test_terms_are_divided_by_their_weights_over_the_ranks_that_are_left(dies_at: int) -> None:
    module, batch = tasks(20)  # the second rank has no label
    wanted = plain(module, total_of, batch)[1]
    quorum = Quorum(2)
    quorum.members[1].dies_at = dies_at
    refused = []

    def rank(member: Member) -> Any:
        own = copy.deepcopy(module)
        with DataParallel(own, [f"host:{member.rank}"], reducer=member) as trainer:
            while True:
                alone = member.begin() == 1
                mine = slice(0, 20) if alone else slice(0, 14) if member.rank == 0 else slice(14, 20)
                try:
                    trainer.step(losses_of, {name: one[mine] for name, one in batch.items()}, weight=COUNTS)
                    return gradients(own)
                except Cancelled:
                    refused.append(gradients(own))

    results = [found for found in on_threads(quorum.members, rank) if found is not None]
    assert len(results) == (2 if dies_at < 0 else 1)
    assert len(refused) == (0 if dies_at < 0 else 1)
    for found in results:
        assert worst_difference(found, wanted) < 1e-12


def test_if_one_rank_fails_no_rank_commits() -> None:
    module, batch = classifier(16)

    def rank(member: Member) -> Any:
        own = copy.deepcopy(module)

        def loss_fn(m: Any, b: Any) -> Any:
            if member.rank == 1:
                raise KeyError("bad item")
            return classify(m, b)

        with DataParallel(own, hosts(1), reducer=member) as trainer:
            with pytest.raises(KeyError if member.rank == 1 else Error) as raised:
                trainer.step(loss_fn, batch)
            return str(raised.value), gradients(own)

    quorum = Quorum(2)
    results = on_threads(quorum.members, rank)
    assert "step: 1 of 2 ranks failed" in results[0][0]
    assert all(found == [None] * 4 for _, found in results)
    assert [member.commits for member in quorum.members] == [0, 0]


@pytest.mark.parametrize(
    ("how", "message"), [("total", "values of total"), ("module", "parameters"), ("call", "calls")]
)
def test_what_ranks_do_not_agree_on_is_an_error_on_all(how: str, message: str) -> None:
    module, batch = classifier(16)

    def rank(member: Member) -> Any:
        own = copy.deepcopy(module)
        if how == "module" and member.rank:
            own[0].bias.requires_grad_(False)
        with DataParallel(own, hosts(1), reducer=member) as trainer:
            call = trainer.loss if how == "call" and member.rank else trainer.step
            with pytest.raises(InvalidArgument, match=f"ranks differ in their {message}"):
                call(classify, batch, total=16 + member.rank if how == "total" else None)
        return gradients(own)

    assert on_threads(Quorum(2).members, rank) == [[None] * 4, [None] * 4]


def test_a_reducer_without_its_methods_or_beside_a_group_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="without a method all_reduce"):
        DataParallel(nn.Linear(2, 2), hosts(1), reducer=object())  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="Leave one of them out"):
        DataParallel(nn.Linear(2, 2), hosts(1), reducer=Quorum(1).members[0], group=None)


class Failing:
    """A reducer whose first sum fails: with an error, or silently, as torchft's does."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error
        self._fails = True

    def all_reduce(self, tensor: torch.Tensor) -> None:
        if self._error is not None and self._fails:
            self._fails = False
            raise self._error

    def should_commit(self) -> bool:
        return not self._fails


def test_an_error_of_the_reducer_of_any_type_ends_one_step_only() -> None:
    module, batch = classifier(8)
    with DataParallel(module, hosts(2), reducer=Failing(TimeoutError("no answer"))) as trainer:
        with pytest.raises(Error, match="the reducer has failed: no answer"):
            trainer.step(classify, batch)
        trainer.step(classify, batch)


def test_a_sum_that_failed_silently_is_cancelled_on_a_rank_without_items() -> None:
    module, _ = classifier(8)
    with DataParallel(module, hosts(2), reducer=Failing(None)) as trainer:
        with pytest.raises(Cancelled):
            trainer.step(classify, None)


class Alone:
    """A quorum of one rank."""

    def all_reduce(self, tensor: torch.Tensor) -> None: ...

    def should_commit(self) -> bool:
        return True


def test_a_tensor_outside_of_the_module_is_refused_at_whichever_step_it_is_reached_first() -> None:
    """Deep inside of a graph whose end looks as before, so that other trainers would find it in the fourth step."""
    module, batch = classifier()
    outside = torch.ones(6, dtype=torch.double, requires_grad=True)
    reached = False

    def loss_fn(replica: Any, part: Any) -> Any:
        hidden = replica(part[0] * (outside if reached else outside.detach()))
        for _ in range(16):
            hidden = hidden.tanh()
        return nn.functional.cross_entropy(hidden, part[1])

    with DataParallel(module, hosts(2), reducer=Alone()) as trainer:
        for _ in range(2):
            trainer.step(loss_fn, batch)
        before = gradients(module)
        reached = True
        with pytest.raises(InvalidArgument, match="outside of the module"):
            trainer.step(loss_fn, batch)
    assert outside.grad is None
    assert worst_difference(gradients(module), before) == 0
