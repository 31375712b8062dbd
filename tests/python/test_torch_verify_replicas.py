"""Whether the devices of a trainer still agree: one micro-batch on each of them, and the bits of the parameters' copies."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Error, InvalidArgument
from paceline.torch import DataParallel
from paceline.torch._check.agreement import differing_copies
from torch_support import (
    TWO,
    assert_same_gradients,
    classifier,
    classify,
    gradients,
    hosts,
    loss_of_words,
    on_worker,
    plain,
    words,
)


def wrong_on(name: str, factor: float = 1 + 1e-6) -> Any:
    """`classify`, whose loss is a little wrong on one device."""

    def loss_fn(module: Any, part: Any) -> Any:
        loss = classify(module, part)
        return loss * factor if on_worker(name) else loss

    return loss_fn


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_devices_that_compute_alike_agree_and_nothing_is_left_behind(devices: int) -> None:
    module, batch = classifier(12)
    with DataParallel(module, hosts(devices)) as trainer:
        trainer.step(classify, batch)
        before, steps = gradients(module), trainer.report()["steps"]
        state = torch.get_rng_state()
        report = trainer.verify_replicas(classify, batch)
        assert report.agree
        assert report.verdict == "the devices agree"
        assert list(report.differences) == hosts(devices)
        assert all(value <= 1e-12 for value in report.differences.values())
        assert report.items == (0, 12 // devices)
        assert report.copies == {}
        assert "one memory space" in str(report)
        assert all(torch.equal(a, b) for a, b in zip(gradients(module), before, strict=True))  # type: ignore[arg-type]
        assert trainer.report()["steps"] == steps
        assert torch.equal(torch.get_rng_state(), state)


def test_a_device_that_computes_something_else_is_named() -> None:
    module, batch = classifier(12)
    with DataParallel(module, hosts(3)) as trainer:
        report = trainer.verify_replicas(wrong_on("host:1"), batch)
        assert report.differing == ("host:1",)
        assert not report.agree
        assert "host:1 by 1e-06" in report.verdict
        assert trainer.verify_replicas(wrong_on("host:1"), batch, tolerance=1e-5).agree
        assert not trainer.verify_replicas(wrong_on("host:2", float("nan")), batch).agree
        trainer.retire("host:1")
        assert trainer.verify_replicas(wrong_on("host:1"), batch).agree


def test_a_replica_with_another_buffer_is_found() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3).double()
            self.register_buffer("scale", torch.ones((), dtype=torch.double))

        def forward(self, x: torch.Tensor) -> Any:
            return self.linear(x) * self.scale

    _, batch = classifier(12)
    with DataParallel(Scaled(), TWO) as trainer:
        assert trainer.verify_replicas(classify, batch).agree
        # A replica's buffers follow the user's before each step. A forward that writes one anew stays wrong.
        replica = trainer._execution.replicas.list[1].module

        def change(changed: Any, _: Any) -> None:
            changed.scale.fill_(2.0)

        replica.register_forward_pre_hook(change)
        assert trainer.verify_replicas(classify, batch).differing == ("host:1",)


@pytest.mark.parametrize("every", [1, 3])
def test_every_so_many_steps_it_is_looked_at_and_an_error_commits_nothing(every: int) -> None:
    module, batch = classifier(12)
    _, wanted = plain(module, classify, batch)
    with DataParallel(module, TWO, verify_every=every) as trainer:
        for step in range(1, 2 * every + 1):
            module.zero_grad()
            trainer.step(classify, batch) if step % 2 else trainer.loss(classify, batch).backward()
            assert_same_gradients(module, wanted)
        before = gradients(module)
        for _ in range(every - 1):
            module.zero_grad()
            trainer.step(classify, batch)
            before = gradients(module)
        with pytest.raises(Error, match="host:1 by 1e-06") as caught:
            trainer.step(wrong_on("host:1"), batch)
        assert caught.value.device == "host:1"
        assert all(torch.equal(a, b) for a, b in zip(gradients(module), before, strict=True))  # type: ignore[arg-type]


def test_dropout_draws_the_same_on_all_devices_and_training_goes_on_as_without() -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3)).double()
    _, batch = classifier(12)
    found = []
    for every in (None, 1):
        torch.manual_seed(2)
        module.zero_grad()
        with DataParallel(module, TWO, balance="even", verify_every=every) as trainer:
            for _ in range(2):
                trainer.step(classify, batch)
            report = trainer.verify_replicas(classify, batch)
            assert report.agree
            assert not report.unknown
            assert len(report.differences) == 2
        found.append(gradients(module))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_batch_normalisation_weights_and_samples_are_no_difference() -> None:
    _, batch = classifier(12)
    norm = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    with DataParallel(norm, TWO) as trainer:
        mean = norm[1].running_mean
        assert isinstance(mean, torch.Tensor)
        before = mean.clone()
        assert trainer.verify_replicas(classify, batch).agree
        assert torch.equal(mean, before)
    module, text = words(16, seed=0)
    weight = text["length"].double()
    weight[:8] = 0  # a share in which nothing counts says nothing
    with DataParallel(module, TWO) as trainer:
        report = trainer.verify_replicas(loss_of_words, text, weight=weight)
        assert report.agree
        assert report.items == (8, 16)

    def collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])

    module, _ = classifier(12)
    with DataParallel(module, TWO) as trainer:
        assert trainer.verify_replicas(classify, list(zip(*batch, strict=True)), collate=collate).agree


def test_what_cannot_be_compared_is_no_difference() -> None:
    module, batch = classifier(12)
    calls: list[int] = []

    def counting(replica: Any, part: Any) -> Any:
        calls.append(1)
        return classify(replica, part) * len(calls)

    with DataParallel(module, TWO) as trainer:
        for loss_fn, why in (
            (counting, "gave two results"),
            (lambda m, b: classify(m, b) * float("nan"), "not a finite number"),
            (lambda m, b: classify(m, b) * (1 + random.random()), "could not be repeated"),
        ):
            report = trainer.verify_replicas(loss_fn, batch)
            assert report.agree
            assert report.differences == {}
            assert report.verdict.startswith("cannot tell")
            assert why in report.verdict
        trainer.loss(classify, batch).backward()
        handle = next(module.parameters()).register_hook(lambda gradient: 2 * gradient)
        assert "gradient hooks" in trainer.verify_replicas(classify, batch).verdict
        handle.remove()


def test_a_copy_in_another_memory_space_with_a_flipped_bit_is_named() -> None:
    module, _ = classifier(12)
    with DataParallel(module, hosts(3)) as trainer:
        replicas, places = trainer._execution.replicas, trainer._execution.places
        # Host devices share a memory. Pretend that the second and third have one of their own, with copies.
        places.spaces, places.space_names = [0, 1, 1], ["host", "cuda:0", "cuda:0"]
        for replica in replicas.list[1:]:
            replica.parameters = [one.detach().clone() for one in replica.parameters]
        assert differing_copies(replicas, places, range(3)) == {"cuda:0": ()}
        replicas.list[1].parameters[2].view(torch.int64).flatten()[5] ^= 1
        assert differing_copies(replicas, places, range(3)) == {"cuda:0": ("2.weight",)}
        assert differing_copies(replicas, places, [0]) == {}, "a retired device gets no parameters"


def test_what_is_no_number_of_steps_is_refused() -> None:
    for every in (0, -1, 1.5, True):
        with pytest.raises(InvalidArgument, match="verify_every is"):
            DataParallel(classifier(4)[0], TWO, verify_every=every)  # type: ignore[arg-type]


def test_a_batch_without_weight_is_nothing_to_compare() -> None:
    module, batch = classifier(8)
    with DataParallel(module, TWO, verify_every=1) as trainer:
        trainer.step(classify, batch, weight=torch.zeros(8), total=4)
        assert (
            "no item of the batch has weight"
            in trainer.verify_replicas(classify, batch, weight=torch.zeros(8), total=4).verdict
        )
