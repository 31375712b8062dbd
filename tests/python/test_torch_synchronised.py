"""``batch_norm="synchronised"``: batch normalisation over the batch of all devices, compared with one device."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from norm_cases import ITEMS, Synchronised, assert_same, case, rows, same_buffers
from paceline import InvalidArgument
from paceline.torch import DataParallel
from paceline.torch._devices.meeting import Meeting
from torch_support import TWO, assert_same_gradients, classify, gradients, hosts, worst_difference

pytestmark = pytest.mark.filterwarnings("error:DataParallel. .*each micro-batch is normalised")


def assert_steps_like_one_device(
    module: nn.Module,
    batches: list[Any],
    devices: list[str],
    loss_fn: Any = classify,
    call: str = "step",
    **options: Any,
) -> dict[str, int]:
    """Train on the batches, with an optimizer. Returns the last shares."""
    reference = copy.deepcopy(module)
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.01) for one in (module, reference))
    with DataParallel(module, devices, **Synchronised, **options) as trainer:
        for batch in batches:
            wanted = loss_fn(reference, batch)
            wanted.backward()
            loss = trainer.step(loss_fn, batch) if call == "step" else trainer.loss(loss_fn, batch)
            if call == "loss":
                loss.backward()
            assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
            assert_same(module, reference)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        return trainer.shares


@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}], ids=str
)
@pytest.mark.parametrize("kind", ["rows", "images"])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_loss_gradients_and_running_statistics_are_those_of_one_device(devices: int, kind: str, options: Any) -> None:
    module, batch = case(kind, **options)
    shares = assert_steps_like_one_device(module, [batch] * 3, hosts(devices))
    assert 0 not in shares.values()


@pytest.mark.parametrize("balance", [[3, 1], [1, 9], [5, 1, 2], "even", "auto"], ids=str)
@pytest.mark.parametrize("call", ["step", "loss"])
def test_shares_may_be_unequal(balance: Any, call: str) -> None:
    module, batch = case("images")
    devices = hosts(2 if isinstance(balance, str) else len(balance))
    shares = assert_steps_like_one_device(module, [batch] * 2, devices, call=call, balance=balance)
    assert isinstance(balance, str) or len(set(shares.values())) > 1


@pytest.mark.parametrize("balance", [[1, 0, 1], [1, 0, 0]], ids=str)
def test_a_device_without_items_is_not_waited_for(balance: Any) -> None:
    module, batch = case("rows")
    assert 0 in assert_steps_like_one_device(module, [batch] * 2, hosts(3), balance=balance).values()


def test_the_size_of_the_batch_may_change_and_a_device_may_get_one_item() -> None:
    module, _ = case("rows")
    batches = [case("rows", items)[1] for items in (8, 3, 4, 16, 5)]
    assert_steps_like_one_device(module, batches, hosts(3))


def test_a_retired_device_is_not_waited_for() -> None:
    module, batch = case("rows")
    reference = copy.deepcopy(module)
    classify(reference, batch).backward()
    with DataParallel(module, hosts(3), **Synchronised) as trainer:
        trainer.retire("host:1")
        trainer.step(classify, batch)
        assert trainer.shares["host:1"] == 0
    assert_same_gradients(module, gradients(reference))


def test_one_item_fails_as_it_does_in_plain_pytorch() -> None:
    module, _ = case("rows")
    with DataParallel(module, TWO, **Synchronised) as trainer:
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            trainer.step(classify, case("rows", 1)[1])
        trainer.step(classify, case("rows", 2)[1])


def test_the_users_module_stays_what_it_was() -> None:
    module, batch = case("images")
    attributes = [(part, dict(vars(part)), type(part)) for part in module.modules()]
    with DataParallel(module, TWO, **Synchronised) as trainer:
        trainer.step(classify, batch)
        replicas = [part for replica in trainer._execution.replicas.list for part in replica.module.modules()]
        assert not any("forward" in vars(part) for part in replicas)
    for part, before, kind in attributes:
        assert type(part) is kind
        assert vars(part).keys() == before.keys()


def test_a_norm_that_the_user_exchanges_or_freezes_is_followed() -> None:
    module: Any
    module, batch = case("rows")
    reference = copy.deepcopy(module)
    with DataParallel(module, TWO, **Synchronised) as trainer:
        for change in range(3):
            for one in (module, reference):
                if change == 1:
                    one[1] = nn.BatchNorm1d(8, momentum=0.3).double()
                if change == 2:
                    one[4].eval()
                one.zero_grad()
            classify(reference, batch).backward()
            trainer.step(classify, batch)
            assert_same(module, reference)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_norm_on_the_inputs_and_volumes_need_no_gradient_of_their_values(frozen: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.BatchNorm3d(2), nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
    ).double()
    module[0].requires_grad_(not frozen)
    x = (5 + torch.randn(ITEMS, 2, 2, 2, 2).double()).contiguous(memory_format=torch.channels_last_3d)
    assert_steps_like_one_device(module, [(x, torch.randint(0, 3, (ITEMS,)))] * 2, hosts(3))


def test_a_subclass_with_a_forward_of_its_own_is_synchronised() -> None:
    class Activated(nn.BatchNorm1d):
        def forward(self, input: torch.Tensor) -> Any:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            return nn.functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.2, self.eps
            ).relu()

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), Activated(8), nn.Linear(8, 3)).double()
    assert_steps_like_one_device(module, [case("rows")[1]] * 2, TWO)


@pytest.mark.parametrize("options", [{}, {"replicate": lambda module: rows().double()}], ids=["", "replicate"])
def test_norms_for_several_processes_and_copies_of_ones_own_are_synchronised(options: Any) -> None:
    module, batch = case("rows")
    if not options:
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    assert_steps_like_one_device(module, [batch] * 2, TWO, **options)


def test_in_evaluation_mode_devices_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = case("rows")
    module.eval()
    assert_steps_like_one_device(module, [batch], TWO)
    monkeypatch.setattr(Meeting, "meet", lambda *_: pytest.fail("met"))
    with DataParallel(module, TWO, balance="even", **Synchronised) as trainer:
        trainer.step(classify, batch)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_meets_again(reentrant: bool) -> None:
    module: Any
    module, batch = case("rows")

    def recomputed(replica: Any, part: Any) -> Any:
        hidden = checkpoint(replica[:3], replica[0].weight.sum() * 0 + part[0], use_reentrant=reentrant)
        return nn.functional.cross_entropy(replica[3:](hidden), part[1])

    assert_steps_like_one_device(module, [batch] * 2, TWO, recomputed)


def test_random_draws_and_extras_go_along() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    _, batch = case("rows")

    def loss_fn(replica: Any, part: Any) -> Any:
        return classify(replica, part), replica[:2](part[0]).detach()

    reference = copy.deepcopy(module)
    with DataParallel(module, TWO, **Synchronised) as trainer:
        for _ in range(3):
            assert trainer.step(loss_fn, batch).isfinite()
        extras = trainer.extras
        for _ in range(2 * 3):
            wanted = reference[:2](batch[0]).detach()
    assert worst_difference([extras], [wanted]) < 1e-12
    assert same_buffers(module, reference)


def test_items_without_weight_count_in_the_statistics_as_on_one_device() -> None:
    module, (x, y) = case("rows", 12)
    weight = torch.tensor([0.0] * 6 + [1.0, 2.0, 1.0, 0.0, 1.0, 3.0]).double()
    reference = copy.deepcopy(module)

    def single(replica: Any, part: Any) -> Any:
        return nn.functional.cross_entropy(replica(part[0]), part[1], reduction="none")

    loss = (single(reference, (x, y)) * weight).sum() / weight.sum()
    loss.backward()
    with DataParallel(module, TWO, balance="even", **Synchronised) as trainer:
        assert trainer.step(single, (x, y), weight=weight).item() == pytest.approx(loss.item(), rel=1e-12)
        assert_same(module, reference)

        def over_nothing(replica: Any, part: Any) -> Any:
            return (single(replica, part[:2]) * part[2]).sum() / part[2].sum()

        with pytest.raises(InvalidArgument, match=r"mean over nothing \(0/0\).*one loss per item"):
            trainer.step(over_nothing, (x, y, weight), weight=weight)


def test_runs_of_a_batch_are_synchronised() -> None:
    module, batch = case("rows")
    reference = copy.deepcopy(module)
    classify(reference, batch).backward()
    (2 * classify(reference, batch)).backward()

    def fn(replica: Any, micro_batch: Any) -> None:
        micro_batch.backward(classify(replica, micro_batch.data))
        micro_batch.weigh(2 * classify(replica, micro_batch.data)).backward()

    with DataParallel(module, TWO, **Synchronised) as trainer, trainer.batch(batch) as global_batch:
        global_batch.run(fn)
    assert_same(module, reference)


def test_prediction_in_training_mode_is_synchronised() -> None:
    module, (x, _) = case("images")
    reference = copy.deepcopy(module)
    with DataParallel(module, TWO, **Synchronised) as trainer:
        output = trainer.predict(x)
    assert worst_difference([output], [reference(x).detach()]) < 1e-12
    assert same_buffers(module, reference)


def test_single_precision_and_autocast_agree_with_one_device() -> None:
    module, (x, y) = case("images")
    exact = copy.deepcopy(module)
    classify(exact, (x, y)).backward()
    module, batch = module.float(), (x.float(), y)

    def error_of(one: nn.Module) -> float:
        pairs = zip(one.parameters(), exact.parameters(), strict=True)
        errors = [(p.grad - q.grad).flatten() for p, q in pairs if p.grad is not None and q.grad is not None]
        return float(torch.cat(errors).norm())

    for autocast in (False, True):
        module.zero_grad()
        reference = copy.deepcopy(module)
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
            DataParallel(module, TWO, balance="even", **Synchronised) as trainer,
        ):
            classify(reference, batch).backward()
            trainer.step(classify, batch)
        # The error of bfloat16 depends on the processor. Statistics of half a batch make it three times as large.
        assert 0 < error_of(module) < 2 * error_of(reference)


def test_check_finds_nothing_and_leaves_no_trace() -> None:
    module, batch = case("rows")
    before = copy.deepcopy(module.state_dict())
    with DataParallel(module, TWO, **Synchronised) as trainer:
        report = trainer.check(classify, batch)
        assert report.exact, str(report)
        assert report.splits[-1].name == "host:0 7, host:1 6"
        coupled = trainer.check(lambda m, b: m(b[0]).std(), batch)
        assert "coupled items" in {cause.kind for cause in coupled.causes}
        found = trainer.find_batch_size(
            classify, lambda items: case("rows", items)[1], smallest=3, largest=6, seconds=0.0
        )
        assert list(found.seconds) == [3, 6]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_replayed_claims_give_the_same_bits(tmp_path: Path) -> None:
    module, batch = case("rows")
    again = copy.deepcopy(module)
    with DataParallel(module, TWO, balance=[2, 1], **Synchronised) as trainer:
        trainer.write_ledger(tmp_path / "run.jsonl")
        trainer.step(classify, batch)
    with DataParallel(again, TWO, **Synchronised) as trainer:
        trainer.replay_claims(tmp_path / "run.jsonl")
        trainer.step(classify, batch)
    assert all(map(torch.equal, gradients(module), gradients(again)))  # type: ignore[arg-type]


def test_a_ledger_of_several_micro_batches_is_refused(tmp_path: Path) -> None:
    module, batch = case("rows", 16)
    with warnings.catch_warnings(), DataParallel(module, TWO, micro_batch=2) as trainer:
        warnings.simplefilter("ignore")
        trainer.write_ledger(tmp_path / "run.jsonl")
        trainer.step(classify, batch)
    module.zero_grad()
    with DataParallel(module, TWO, **Synchronised) as trainer:
        trainer.replay_claims(tmp_path / "run.jsonl")
        with pytest.raises(InvalidArgument, match="several micro-batches of a device in one step"):
            trainer.step(classify, batch)
        trainer.replay_claims(None)
        trainer.step(classify, batch)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batch_norm": "together"}, "it must be 'apart' or 'synchronised'"),
        ({**Synchronised, "micro_batch": 4}, "micro_batch=4"),
        ({**Synchronised, "memory": 0.5}, "memory=0.5"),
        ({**Synchronised, "hold_back": True}, "hold_back=True"),
    ],
    ids=["name", "micro_batch", "memory", "hold_back"],
)
def test_options_that_do_not_go_together_are_refused(options: Any, named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        DataParallel(rows(), TWO, **options)


def penalised(module: Any, part: Any) -> Any:
    x = part[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    return gradient.square().mean()


def test_what_cannot_run_at_the_same_time_is_refused_with_the_reason() -> None:
    module, batch = case("rows")
    with DataParallel(module, TWO, **Synchronised) as trainer:
        with pytest.raises(InvalidArgument, match="together with cost="):
            trainer.step(classify, batch, cost=torch.arange(ITEMS) + 1.0)
        with pytest.raises(InvalidArgument, match=r"together with torch\.compile"):
            trainer.step(torch.compile(classify), batch)
        with pytest.raises(RuntimeError, match="create_graph=True through batch normalisation"):
            trainer.step(penalised, batch)
        assert gradients(module) == [None] * len(gradients(module))
        module.eval()
        trainer.step(classify, batch, cost=torch.arange(ITEMS) + 1.0)


# Norms over a part of the slice


class Masked(nn.Module):
    """Normalises the rows that a mask chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        return self.head(self.norm(self.first(x)[mask]))


def sum_of_squares(module: Any, batch: Any) -> Any:
    return module(*batch).square().sum()


def test_a_slice_may_bring_no_values_to_a_norm() -> None:
    module = Masked().double()
    mask = torch.tensor([False] * 8 + [True] * 8)
    batch = torch.randn(16, 6, dtype=torch.double), mask
    reference = copy.deepcopy(module)
    (sum_of_squares(reference, batch) / 8).backward()
    with DataParallel(module, TWO, balance="even", reduction="sum", **Synchronised) as trainer:
        trainer.step(sum_of_squares, batch, total=8)
        assert_same(module, reference)
        with pytest.raises(
            ValueError, match="more than 1 value per channel is needed, and all devices together have 1"
        ):
            trainer.step(sum_of_squares, (batch[0], torch.arange(16) == 3), total=1)


class Own(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.batch_norm(x, self.weight, self.bias, self.running_mean, self.running_var, True, 0.1, 1e-5, False)


def test_a_norm_that_cannot_be_synchronised_is_refused() -> None:
    module = nn.Sequential(nn.Linear(6, 4), Own(4), nn.Linear(4, 3)).double()
    with DataParallel(module, TWO, **Synchronised) as trainer:
        with pytest.raises(InvalidArgument, match=r"1 normalises without torch\.nn\.functional\.batch_norm"):
            trainer.step(classify, case("rows")[1])
