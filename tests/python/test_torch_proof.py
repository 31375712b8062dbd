"""The first step of each kind of work has the result of one device, and is compared with a split one."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline import Error, InvalidArgument
from paceline.torch import DataParallel, ProofWarning, proving
from paceline.torch._replicas import kept_parameters
from proof_cases import HOSTS, Seen, gradients, made, net, rows, said, said_by, same, squares


def test_the_first_step_is_that_of_one_device_bit_for_bit() -> None:
    module, batch = net(), rows()
    plain = copy.deepcopy(module)
    for one in (plain, module):
        weight: Any = one[0].weight
        weight.grad = torch.ones_like(weight)
    loss = squares(plain, batch)
    loss.backward()
    with made(module) as trainer:
        assert trainer.step(squares, batch).item() == loss.item()
        assert same(plain, module, exact=True)
        assert "equal to one device up to" in trainer.explain()
        trainer.step(squares, batch)
        assert trainer.shares == {"host:0": 6, "host:1": 10}


def test_the_function_runs_whole_once_for_each_kind_of_work() -> None:
    seen, sizes = Seen(), list[int]()

    def loss_fn(module: Any, slice: torch.Tensor) -> Any:
        sizes.append(len(slice))
        seen.items.append((len(slice), proving()))
        return squares(module, slice)

    with made(net()) as trainer:
        for _ in range(3):
            trainer.step(loss_fn, rows())
        assert sizes[0] == 16
        assert sorted(sizes[1:]) == [6, 6, 10, 10]
        assert seen.items[0] == (16, False)
        assert sorted(seen.items[1:]) == [(6, False), (6, False), (6, True), (10, False), (10, False), (10, True)]
        trainer.module.eval()
        trainer.step(loss_fn, rows())
        assert sizes.count(16) == 2
        trainer.step(lambda module, slice: loss_fn(module, slice[0]), (rows(), rows()))
        assert sizes.count(16) == 3
        trainer.step(loss_fn, rows(24))
        assert 24 not in sizes
    assert not proving()


def test_a_kind_is_proved_again_at_fixed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.torch._trainer.proofs._AGAIN", 10)
    with made(net()) as trainer:
        for _ in range(101):
            trainer.step(squares, rows())
        assert [int(line.split()[2]) for line in trainer.explain().splitlines() if line.startswith("Proof")] == [
            1,
            10,
            100,
        ]


def test_a_mean_over_labels_is_named_with_its_cure() -> None:
    labels = torch.randint(0, 3, (16, 6))
    labels[:6, 1:] = -100
    inputs = torch.randn(16, 6, 4, dtype=torch.float64)

    def loss_fn(module: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(module(batch[0]).flatten(0, 1), batch[1].flatten())

    said = said_by(net(), loss_fn, (inputs, labels), steps=50)
    assert said.count("another result than on one device") == 1
    assert "the gradient of" in said
    assert "weight=lambda batch:" in said
    with made(net(), prove="raise") as trainer:
        with pytest.raises(Error, match="Nothing was committed"):
            trainer.step(loss_fn, (inputs, labels))
        assert all(one.grad is None for one in trainer.module.parameters())


def test_means_of_items_draw_and_normalise_without_a_word() -> None:
    for module in (
        nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double(),
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double(),
    ):
        assert said_by(module, squares, rows(), steps=3) == ""


def test_a_loss_carries_the_gradients_of_one_device() -> None:
    module, batch = net(), rows()
    plain = copy.deepcopy(module)
    (squares(plain, batch) / 2).backward()
    with made(module) as trainer:
        loss = trainer.loss(squares, batch)
        assert all(one.grad is None for one in module.parameters())
        (loss / 2).backward()
    assert same(plain, module)


def test_tensors_outside_get_their_gradient_once() -> None:
    head = nn.Parameter(torch.ones(3, dtype=torch.float64))
    module, batch = net(), rows()
    wanted = torch.autograd.grad((copy.deepcopy(module)(batch) * head).square().mean(), head)[0]
    head.grad = torch.ones_like(head)

    def loss_fn(module: Any, rows: torch.Tensor) -> Any:
        return (module(rows) * head).square().mean()

    assert said_by(module, loss_fn, batch) == ""
    assert torch.allclose(head.grad, wanted + 1)


def test_extras_and_weights_are_those_of_the_whole_batch() -> None:
    def loss_fn(module: Any, rows: torch.Tensor) -> Any:
        out = module(rows)
        return out.square().mean(1), {"out": out.detach(), "mean": out.detach().mean()}

    with made(net()) as trainer:
        trainer.step(loss_fn, rows())
        assert trainer.extras["out"].shape == (16, 3)
        assert "differs from one device" not in trainer.explain()
    with made(net()) as trainer:  # a plain mean is no mean by weight
        trainer.step(loss_fn, rows(), weight=torch.arange(16.0))
        assert "what loss_fn returns beside the loss differs, at ['mean'];" in trainer.explain()


@pytest.mark.parametrize("options", [{"micro_batch": 4}, {"memory": 0.5}])
def test_a_limited_micro_batch_limits_the_whole_run(options: dict[str, Any]) -> None:
    sizes: list[int] = []

    def loss_fn(module: Any, slice: torch.Tensor) -> Any:
        sizes.append(len(slice))
        return squares(module, slice)

    module, batch = net(), rows()
    plain = copy.deepcopy(module)
    squares(plain, batch).backward()
    assert said_by(module, loss_fn, batch, **options) == ""
    assert max(sizes[:4]) <= 4
    assert same(plain, module)


def test_what_is_not_finite_is_proved_by_a_later_step() -> None:
    factor = [float("inf")]
    with made(net()) as trainer:
        for factor[0] in (float("inf"), 1.0, 1.0):
            trainer.step(lambda module, rows: squares(module, rows) * factor[0], rows())
        proofs = [line for line in trainer.explain().splitlines() if line.startswith("Proof")]
    assert len(proofs) == 2
    assert "not a finite number" in proofs[0]
    assert "equal to one device" in proofs[1]


def test_the_environment_says_what_the_caller_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_PROVE", "sometimes")
    with pytest.raises(InvalidArgument, match="PACELINE_PROVE is 'sometimes'"):
        DataParallel(net(), HOSTS)
    with pytest.raises(InvalidArgument, match="prove is 'never'"):
        DataParallel(net(), HOSTS, prove="never")  # type: ignore[arg-type]
    monkeypatch.setenv("PACELINE_PROVE", "off")
    with DataParallel(net(), HOSTS) as trainer:
        trainer.step(squares, rows())
        assert "Proof" not in trainer.explain()


@pytest.mark.parametrize("outside", [False, True])
def test_hooks_rest_in_a_proof_and_run_once_for_its_loss(outside: bool) -> None:
    module, batch, head = net(), rows(), nn.Parameter(torch.ones(3, dtype=torch.float64))
    hooked = head if outside else next(module.parameters())
    seen: list[torch.Tensor] = []
    late: list[torch.Tensor] = []
    hooked.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 2)  # type: ignore[func-returns-value]
    hooked.register_post_accumulate_grad_hook(lambda one: late.append(one.grad.clone()))
    with made(module) as trainer:
        for number in (1, 2):
            hooked.grad = None
            trainer.loss(lambda module, rows: (module(rows) * head).square().mean(), batch).backward()
            assert len(seen) == len(late) == number
            torch.testing.assert_close(late[-1], 2 * seen[-1])
            assert torch.equal(late[-1], gradients(hooked)[0])
        assert "equal to one device" in trainer.explain()
    torch.testing.assert_close(seen[0], seen[1])


def test_a_replay_proves_what_the_run_has_proved(tmp_path: Path) -> None:
    ledger, batches = tmp_path / "ledger", [rows() for _ in range(4)]

    def trained(replay: bool) -> list[float]:
        torch.manual_seed(0)
        with made(net(), balance="auto") as trainer:
            if replay:
                trainer.replay_claims(ledger)
            else:
                trainer.write_ledger(ledger)
            return [trainer.step(squares, batch).item() for batch in batches]

    assert trained(replay=False) == trained(replay=True)


def test_a_function_that_takes_the_whole_batch_is_told_so() -> None:
    whole = rows()
    said = said_by(net(), lambda module, _: squares(module, whole), whole, steps=3)
    assert said.count("refers to a tensor of the whole batch") == 1
    assert said_by(net(), squares, whole) == ""


def test_rounding_inside_of_the_function_is_no_difference() -> None:
    def loss_fn(module: Any, rows: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return squares(module, rows)

    module = nn.Sequential(*[part for _ in range(6) for part in (nn.Linear(4, 4), nn.Tanh())])
    assert said_by(module, loss_fn, rows(64).float()) == ""


def test_near_an_optimum_rounding_is_no_difference() -> None:
    torch.manual_seed(0)
    module, inputs = nn.Linear(4, 1), torch.randn(64, 4)
    targets = inputs.sum(1, keepdim=True) + torch.randn(64, 1)
    with torch.no_grad():
        found = torch.linalg.lstsq(
            torch.cat([inputs, torch.ones(64, 1)], 1).double(), targets.double()
        ).solution.float()
        module.weight.copy_(found[:4].T)
        module.bias.copy_(found[4])
    assert said_by(module, lambda module, batch: F.mse_loss(module(batch[0]), batch[1]), (inputs, targets)) == ""


def test_extras_that_are_nothing_but_rounding_are_no_difference() -> None:
    draws = torch.Generator().manual_seed(0)
    module, batch = nn.Linear(4, 3), torch.randn(64, 4, generator=draws)
    advantages, actions = torch.randn(64, generator=draws), torch.randint(3, (64,), generator=draws)
    advantages -= advantages.mean()
    before = module(batch).log_softmax(1).gather(1, actions[:, None]).squeeze(1).detach()

    def loss_fn(module: Any, b: Any) -> Any:  # as that of PPO, whose first ratios are all 1
        ratio = (module(b[0]).log_softmax(1).gather(1, b[1][:, None]).squeeze(1) - b[2]).exp()
        return -b[3] * ratio, {"policy": (-b[3] * ratio).mean(), "far": (ratio - 1).detach()}

    assert said_by(module, loss_fn, (batch, actions, before, advantages)) == ""


def reducing(how: str, *, by_default: bool) -> Any:
    def reduced(module: Any, rows: torch.Tensor, how: str = how if by_default else "mean") -> Any:
        return getattr(module(rows).square(), how)()

    return reduced if by_default else functools.partial(reduced, how=how)


@pytest.mark.parametrize("by_default", [True, False])
def test_what_a_function_is_given_makes_a_kind_of_work(by_default: bool) -> None:
    with made(net()) as trainer:
        for how in ("mean", "sum"):
            step = functools.partial(trainer.step, reducing(how, by_default=by_default), rows())
            assert said(step).count("another result than on one device") == (how == "sum")


def test_a_resumed_run_is_proved_and_goes_on_in_the_same_bits() -> None:
    batches = [rows() for _ in range(4)]
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    other = copy.deepcopy(module)
    with made(module, micro_batch=8) as trainer:
        losses = [trainer.step(squares, batch).item() for batch in batches[:2]]
        state = trainer.training_state()
        losses += [trainer.step(squares, batch).item() for batch in batches[2:]]
    with made(other, micro_batch=8) as trainer:
        trainer.load_training_state(state)
        assert [trainer.step(squares, batch).item() for batch in batches[2:]] == losses[2:]
        assert sum(line.startswith("Proof") for line in trainer.explain().splitlines()) == 1


def test_pairs_of_items_are_named_where_their_order_is_all_that_counts() -> None:
    def preferred(module: Any, rows: Any) -> Any:
        """The first half is chosen, the second one rejected. At the start all score alike."""
        chosen, rejected = module(rows).sum(1).chunk(2)
        return -nn.functional.logsigmoid(chosen - rejected).mean()

    module = nn.Linear(4, 3, bias=False).double()
    nn.init.zeros_(module.weight)
    assert "the gradient of weight differs" in said_by(module, preferred, rows())


def over_a_mask(module: Any, batch: Any) -> Any:
    rows, counts = batch
    return (module(rows).square().mean(1) * (counts == 1)).sum() / (counts == 1).sum().clamp(min=1)


def test_a_mask_of_floating_point_numbers_hides_no_difference() -> None:
    counts = torch.zeros(16, dtype=torch.float64)
    counts[[0, 1, 2, 3, 15]] = 1
    assert "the gradient of" in said_by(net(), over_a_mask, (rows(), counts))
    assert "the gradient of" in said_by(net(), lambda m, x: m(x.sqrt()).square().sum() / 16, rows().relu())


def test_parameters_are_where_they_were_if_their_values_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_parameters, "_MOST_BYTES", 8)
    module = net()
    before = copy.deepcopy(module)
    assert said_by(module, lambda m, x: m(x).square().sum() / 16, rows())
    assert all(map(torch.equal, module.parameters(), before.parameters()))


def test_a_batch_in_memory_that_cannot_be_written_is_proved(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    rows().numpy().tofile(tmp_path / "rows")
    batch = torch.from_numpy(numpy.memmap(tmp_path / "rows", dtype=numpy.float64, mode="r", shape=(16, 4)))
    assert said_by(net(), lambda m, x: m(x).square().sum() / 16, batch)


def test_a_list_of_samples_that_is_cut_inside_its_entries_names_collate() -> None:
    torch.manual_seed(0)
    images = [torch.randn(3, 8 + index, 9, dtype=torch.float64) for index in range(6)]
    with made(nn.Conv2d(3, 4, 3).double()) as trainer:
        for _ in range(2):
            with pytest.raises(InvalidArgument, match=r"raises RuntimeError with slices of it.*collate=.*split="):
                trainer.step(
                    lambda module, part: torch.stack([module(one[None]).mean() for one in part]).mean(), images
                )
        clouds = [torch.randn(5, 4, dtype=torch.float64) for _ in range(6)]
    with (
        made(net()) as trainer,
        pytest.warns(ProofWarning, match=r"whose 6 tensors were cut along dimension 0 .*collate="),
    ):
        trainer.step(lambda module, part: torch.stack([module(one).amax(0).sum() for one in part]).mean(), clouds)


def test_each_function_that_differs_is_warned_of_by_name() -> None:
    def other(module: Any, part: Any) -> Any:
        return module(part).square().mean().sqrt()

    def another(module: Any, part: Any) -> Any:
        return module(part).square().mean().sqrt()

    with made(net()) as trainer:
        trainer.step(squares, rows())
        differs = [trainer.differs]
        for function in (other, another):
            with pytest.warns(ProofWarning, match=f"The function is .*{function.__name__}"):
                trainer.step(function, rows())
        differs.append(trainer.differs)
        assert differs == [False, True]
        assert trainer.explain().count("differs from one device") == 2
