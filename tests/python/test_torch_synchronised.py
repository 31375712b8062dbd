"""``batch_norm="synchronised"``: batch normalisation over the batch of all devices, compared with one device."""

from __future__ import annotations

import copy
import threading
import time
import warnings
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline import Cancelled, InvalidArgument
from paceline.torch import DataParallel
from paceline.torch._devices.meeting import Meeting, MeetingOffError
from torch_support import (
    TWO,
    assert_same_gradients,
    classify,
    gradients,
    hosts,
    output_of,
    worst_difference,
)

pytestmark = pytest.mark.filterwarnings("error:DataParallel. .*each micro-batch is normalised")

Synchronised: Any = {"batch_norm": "synchronised"}
ITEMS = 13


class Images(nn.Module):
    """Convolutions with two norms in a row, and a branch with a norm of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3)
        self.norms = nn.Sequential(nn.BatchNorm2d(4, **options), nn.ReLU(), nn.BatchNorm2d(4, **options))
        self.branch = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, **options))
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.norms(self.first(x))
        return self.head((x + self.branch(x)).tanh().mean((2, 3)))


def rows(**options: Any) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.BatchNorm1d(8, **options),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.BatchNorm1d(8, **options),
        nn.Linear(8, 3),
    )


def case(kind: str, items: int = ITEMS, **options: Any) -> tuple[nn.Module, Any]:
    """A module and its batch, far from mean 0 and variance 1."""
    torch.manual_seed(0)
    module = (Images(**options) if kind == "images" else rows(**options)).double()
    x = torch.randn(items, 2, 6, 5).double() if kind == "images" else torch.randn(items, 6).double()
    return module, (30 + 3 * x, torch.randint(0, 3, (items,)))


def same_buffers(module: nn.Module, reference: nn.Module) -> bool:
    pairs = zip(module.buffers(), reference.buffers(), strict=True)
    return all(torch.allclose(ours, theirs, rtol=1e-12, atol=1e-13) for ours, theirs in pairs)


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
            assert_same_gradients(module, gradients(reference))
            assert same_buffers(module, reference)
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
            assert_same_gradients(module, gradients(reference))
            assert same_buffers(module, reference)


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
        assert trainer.step(single, (x, y), weight).item() == pytest.approx(loss.item(), rel=1e-12)
        assert_same_gradients(module, gradients(reference))
        assert same_buffers(module, reference)

        def over_nothing(replica: Any, part: Any) -> Any:
            return (single(replica, part[:2]) * part[2]).sum() / part[2].sum()

        with pytest.raises(InvalidArgument, match=r"mean over nothing \(0/0\).*one loss per item"):
            trainer.step(over_nothing, (x, y, weight), weight)


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
    assert_same_gradients(module, gradients(reference))
    assert same_buffers(module, reference)


def test_prediction_in_training_mode_is_synchronised() -> None:
    module, (x, _) = case("images")
    reference = copy.deepcopy(module)
    with DataParallel(module, TWO, **Synchronised) as trainer:
        output = trainer.predict(x)
    assert worst_difference([output], [reference(x).detach()]) < 1e-12
    assert same_buffers(module, reference)


def test_single_precision_and_autocast_agree_with_one_device() -> None:
    module, (x, y) = case("images")
    module, batch = module.float(), (x.float(), y)
    for autocast, tolerance in ((False, 1e-4), (True, 3e-2)):
        module.zero_grad()
        reference = copy.deepcopy(module)
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
            DataParallel(module, TWO, **Synchronised) as trainer,
        ):
            classify(reference, batch).backward()
            trainer.step(classify, batch)
        ours, theirs = (
            torch.cat([one.grad.flatten() for one in m.parameters() if one.grad is not None])
            for m in (module, reference)
        )
        assert (ours - theirs).norm() < tolerance * theirs.norm()


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
        ({**Synchronised, "corrections": True}, "corrections=True"),
    ],
    ids=["name", "micro_batch", "memory", "corrections"],
)
def test_options_that_do_not_go_together_are_refused(options: Any, named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        DataParallel(rows(), TWO, **options)


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


def penalised(module: Any, part: Any) -> Any:
    x = part[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    return gradient.square().mean()


class Failing:
    """Fails on the slice with a marked item: before, between or after the norms."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __call__(self, module: Any, part: Any) -> Any:
        fails = bool((part[0] > 1e6).any())
        hidden = part[0]
        for index, layer in enumerate(module):
            if fails and self.where == str(index):
                raise ArithmeticError("on purpose")
            hidden = layer(hidden)
        if fails and self.where == "backward":
            hidden.register_hook(_raise)
        return nn.functional.cross_entropy(hidden, part[1])


def _raise(_: torch.Tensor) -> None:
    raise ArithmeticError("on purpose")


@pytest.mark.parametrize("where", ["0", "2", "5", "backward"])
@pytest.mark.parametrize("device", [0, 2])
def test_a_device_that_fails_leaves_nobody_waiting_and_its_error_is_raised(where: str, device: int) -> None:
    module, (x, y) = case("rows", 12)
    bad = x.clone()
    bad[4 * device] = 1e9
    before = copy.deepcopy(module.state_dict())
    with DataParallel(module, hosts(3), balance="even", **Synchronised) as trainer:
        for _ in range(3):
            with pytest.raises(ArithmeticError, match="on purpose") as raised:
                trainer.step(Failing(where), (bad, y))
            assert f"host:{device}" in str(getattr(raised.value, "__notes__", raised.value.__cause__))
        assert gradients(module) == [None] * len(gradients(module))
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        reference = copy.deepcopy(module)
        classify(reference, (x, y)).backward()
        trainer.step(classify, (x, y))
    assert_same_gradients(module, gradients(reference))


def test_shares_follow_speeds_without_the_time_that_a_device_waits() -> None:
    module, batch = case("rows", 16)
    with DataParallel(module, TWO, **Synchronised) as trainer:
        slow: list[Any] = []

        def loss_fn(replica: Any, part: Any) -> Any:
            time.sleep(len(part[0]) * (6e-3 if replica is slow[0] else 2e-3))
            return classify(replica, part)

        trainer.step(classify, batch)
        slow.append(trainer._execution.replicas.list[1].module)
        for _ in range(25):
            trainer.step(loss_fn, batch)
        assert trainer.shares["host:0"] >= 10  # 12 would be ideal


def test_out_of_memory_is_not_answered_with_smaller_pieces() -> None:
    module, (x, y) = case("rows", 12)

    def full(replica: Any, part: Any) -> Any:
        if bool((part[0] > 1e6).any()):
            raise MemoryError
        return classify(replica, part)

    bad = x.clone()
    bad[0] = 1e9
    with DataParallel(module, TWO, **Synchronised) as trainer:
        with pytest.raises(MemoryError):
            trainer.step(full, (bad, y))
        reference = copy.deepcopy(module)
        classify(reference, (x, y)).backward()
        trainer.step(full, (x, y))
    assert_same_gradients(module, gradients(reference))


@pytest.mark.parametrize("kind", ["more", "other"])
def test_slices_that_run_other_norms_are_an_error_that_names_both_devices(kind: str) -> None:
    module: Any
    module, batch = case("rows", 12)

    def loss_fn(replica: Any, part: Any) -> Any:
        first = part[0].data_ptr() == batch[0].data_ptr()
        if kind == "more":
            hidden = replica[:3](part[0])
            return replica[3:](replica[1](hidden) if first else hidden).square().mean()
        return replica[4 if first else 1](replica[0](part[0])).square().mean()

    with DataParallel(module, TWO, balance="even", **Synchronised) as trainer:
        with pytest.raises(InvalidArgument, match=r"host:\d runs the forward of \d, and host:\d"):
            trainer.step(loss_fn, batch)
        trainer.step(classify, batch)


def test_a_late_device_is_waited_for() -> None:
    module, batch = case("rows", 12)
    reference = copy.deepcopy(module)
    classify(reference, batch).backward()
    others, late = threading.Event(), threading.Event()

    def loss_fn(replica: Any, part: Any) -> Any:
        if part[0].data_ptr() != batch[0].data_ptr():
            others.set()
        else:
            assert others.wait(10)
            late.wait(0.5)  # nobody sets it
        return classify(replica, part)

    with DataParallel(module, TWO, balance="even", **Synchronised) as trainer:
        trainer.step(loss_fn, batch)
    assert_same_gradients(module, gradients(reference))


SETUP = """
module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
batch = torch.randn(8, 4).double()
reference = __import__("copy").deepcopy(module)
mean_of_squares(reference, batch).backward()
inside, leave = threading.Event(), threading.Event()
first = batch.data_ptr()

def interrupt_after(seconds):
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()

def same_gradients():
    return all(torch.allclose(a.grad, b.grad, rtol=1e-9, atol=1e-14) for a, b in zip(module.parameters(), reference.parameters()))

def interrupted(call, kind=KeyboardInterrupt):
    try:
        call()
    except kind:
        return True
    raise SystemExit("not raised")

def one_is_late(replica, part):
    if part.data_ptr() == first:
        inside.set()
        leave.wait(20)
    return mean_of_squares(replica, part)

trainer = DataParallel(module, ["host:0", "host:1"], balance="even", batch_norm="synchronised")
"""


def test_ctrl_c_while_devices_wait_for_each_other_ends_the_step() -> None:
    program = (
        SETUP
        + """
threading.Timer(0.8, leave.set).start()
interrupt_after(0.3)
print(interrupted(lambda: trainer.step(one_is_late, batch)), all(p.grad is None for p in module.parameters()))
trainer.step(mean_of_squares, batch)
print(same_gradients())
"""
    )
    assert output_of(program) == "True True\nTrue"


def test_a_step_that_is_cancelled_at_any_moment_ends() -> None:
    module, batch = case("rows")
    reference = copy.deepcopy(module)
    classify(reference, batch).backward()
    random = Random(0)
    ended = {"done": 0, "cancelled": 0}
    with DataParallel(module, hosts(3), **Synchronised) as trainer:
        before = copy.deepcopy(module.state_dict())
        for _ in range(60):
            timer = threading.Timer(random.uniform(0, 4e-3), trainer._works.steps.step_loop.cancel)
            timer.start()
            try:
                trainer.step(classify, batch)
                ended["done"] += 1
                assert_same_gradients(module, gradients(reference))
            except Cancelled:
                ended["cancelled"] += 1
                assert gradients(module) == [None] * len(gradients(module))
            timer.join()
            module.load_state_dict(before)
            module.zero_grad()
    assert ended["cancelled"] > 0


@pytest.mark.parametrize("began", [False, True])
def test_a_device_that_never_comes_is_not_waited_for(began: bool) -> None:
    """A device that has begun ends without having met. One that has not begun got no items, since the run was cancelled."""
    meeting = Meeting(TWO, [0, 1])
    outcome: list[BaseException] = []

    def first() -> None:
        meeting.begin(0)
        try:
            meeting.meet("the forward of norm", 1, sum)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    if began:
        meeting.begin(1)
    meeting.end(1)
    thread.join(10)
    (error,) = outcome
    assert isinstance(error, InvalidArgument if began else MeetingOffError)
    assert not began or "host:0 runs the forward of norm, and host:1 has ended its slice" in str(error)


def test_a_second_ctrl_c_leaves_the_step_and_the_program_ends() -> None:
    program = (
        SETUP
        + """
interrupt_after(0.3)
interrupt_after(0.8)
print(interrupted(lambda: trainer.step(one_is_late, batch)))
leave.set()
while trainer.group.busy:
    time.sleep(0.01)
trainer.step(mean_of_squares, batch)
print(same_gradients())
"""
    )
    assert output_of(program) == "True\nTrue"


def test_closing_in_another_thread_ends_the_step() -> None:
    program = (
        SETUP
        + """
import paceline
threading.Timer(0.6, leave.set).start()
threading.Timer(0.3, trainer.close).start()
print(interrupted(lambda: trainer.step(one_is_late, batch), paceline.Cancelled))
"""
    )
    assert output_of(program) == "True"


def test_a_program_that_ends_in_a_daemon_thread_ends_while_devices_wait() -> None:
    program = (
        SETUP
        + """
def forever(replica, part):
    if part.data_ptr() == first:
        inside.set()
        while True:
            time.sleep(0.05)
    return mean_of_squares(replica, part)

threading.excepthook = lambda *_: None
threading.Thread(target=trainer.step, args=(forever, batch), daemon=True).start()
inside.wait(10)
time.sleep(0.3)
print("end")
"""
    )
    assert output_of(program) == "end"


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
        assert_same_gradients(module, gradients(reference))
        assert same_buffers(module, reference)
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
