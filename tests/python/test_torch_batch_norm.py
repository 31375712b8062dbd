"""Forwards that write buffers. Batch normalisation: every batch that one device trains is trained. Spectral normalisation: each device runs forwards as often as one device would."""

from __future__ import annotations

import copy
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.balance import replay
from paceline.torch import DataParallel
from torch_support import TWO, assert_same_gradients, classifier, classify, gradients, hosts, module_of

pytestmark = pytest.mark.filterwarnings("ignore:DataParallel. .*each micro-batch is normalised")

ITEMS = range(2, 14)


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()


def batch_of(items: int) -> tuple[torch.Tensor, torch.Tensor]:
    return classifier(items)[1]


class Unsteady:
    """`classify`, in times that vary so much that devices take work over from each other. It keeps the sizes of slices.

    By up to `spread` times as long: at 4, changes of speed are seen everywhere, and whether much is taken over is chance.
    """

    def __init__(self, seconds: float = 5e-5, spread: float = 4.0, most: int | None = None) -> None:
        self.seconds, self.spread = seconds, spread  # of an item, at least
        self.most = most  # that fit into memory
        self.seen: list[int] = []

    def __call__(self, module: Any, part: Any) -> Any:
        if self.most is not None and len(part[0]) > self.most:
            raise MemoryError
        self.wait(len(part[0]))
        return classify(module, part)

    def wait(self, items: int) -> None:
        self.seen.append(items)
        time.sleep(self.seconds * items * (1 + len(self.seen) * 7 % 5 / 4 * self.spread))

    def corrected(self, step: Callable[[], object]) -> bool:
        """Whether one of many steps has more micro-batches than devices."""
        for _ in range(300):
            self.seen.clear()
            step()
            if len(self.seen) > 2:
                return True
        return False


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"balance": "even"},
        {"balance": [8, 1, 1]},
        {"granularity": 3},
        {"micro_batch": 2},
        {"micro_batch": 4},
        {"hold_back": True},
        {"memory": 0.5},
    ],
    ids=str,
)
def test_every_batch_that_one_device_trains_is_trained(devices: int, options: Any) -> None:
    loss_fn, module = Unsteady(), normalised()
    balance = options.get("balance")
    options = options | ({"balance": balance[:devices]} if isinstance(balance, list) else {})
    with DataParallel(module, hosts(devices), **options) as trainer:
        for items in [*ITEMS, *reversed(ITEMS)]:
            trainer.step(loss_fn, batch_of(items))
        assert trainer.report()["steps"] == 2 * len(ITEMS)
    assert min(loss_fn.seen) == 2
    assert max(loss_fn.seen) <= max(options.get("micro_batch", 99), 3)


@pytest.mark.parametrize("options", [{}, {"balance": "even"}, {"micro_batch": 3}], ids=str)
def test_items_that_are_dealt_out_by_cost_come_in_twos_at_least(options: Any) -> None:
    loss_fn = Unsteady()
    with DataParallel(normalised(), TWO, **options) as trainer:
        for items in [*ITEMS, *ITEMS]:
            trainer.step(loss_fn, batch_of(items), cost=torch.arange(items) ** 2.0)
    assert min(loss_fn.seen) >= 2


@pytest.mark.parametrize("most", [2, 3, 5])
def test_where_memory_runs_out_no_piece_is_of_one_item(most: int) -> None:
    loss_fn = Unsteady(most=most)
    with DataParallel(normalised(), TWO, balance="even") as trainer:
        for items in (24, 8, 12) if most == 2 else (24, 9, 13):
            trainer.step(loss_fn, batch_of(items))
        if most == 2:
            with pytest.raises(MemoryError):  # there are no two pieces of 3 items
                trainer.step(loss_fn, batch_of(6))
    assert min(loss_fn.seen) == 2
    assert max(loss_fn.seen) <= most


def test_predictions_and_what_leaves_no_trace_take_as_many() -> None:
    with DataParallel(normalised(), TWO, micro_batch=4) as trainer:
        for items in ITEMS:
            assert trainer.predict(batch_of(items)[0]).shape == (items, 3)
        for items, cost in ((9, None), (5, torch.arange(5) + 1.0)):
            (cause,) = trainer.check(classify, batch_of(items), cost=cost).causes
            assert cause.kind == "running statistics"
        found = trainer.find_batch_size(classify, batch_of, smallest=3, largest=9, seconds=0.0)
        assert list(found.seconds) == [3, 6, 9]


def test_small_batches_run_again_as_they_ran(tmp_path: Path) -> None:
    module = normalised()
    again = copy.deepcopy(module)
    ran = []
    with DataParallel(module, TWO, micro_batch=2) as trainer:
        trainer.write_ledger(tmp_path / "run.jsonl")
        for items in (3, 9, 5):
            trainer.step(classify, batch_of(items))
            ran.append(trainer.shares)
    assert replay(tmp_path / "run.jsonl").mismatches == []
    with DataParallel(again, TWO) as trainer:
        trainer.replay_claims(tmp_path / "run.jsonl")
        for items, shares in zip((3, 9, 5), ran, strict=True):
            trainer.step(classify, batch_of(items))
            assert trainer.shares == shares
    assert all(map(torch.equal, gradients(again), gradients(module)))  # type: ignore[arg-type]


def test_any_share_will_do_in_evaluation_mode() -> None:
    module = normalised().eval()
    with DataParallel(module, hosts(3), balance="even") as trainer:
        trainer.step(classify, batch_of(3))
        assert list(trainer.shares.values()) == [1, 1, 1]
        module.train()
        trainer.step(classify, batch_of(3))
        assert sorted(trainer.shares.values()) == [0, 0, 3]
        module.eval()
        trainer.step(classify, batch_of(3))
        assert list(trainer.shares.values()) == [1, 1, 1]


def told(record: Any) -> list[str]:
    return [str(one.message) for one in record if "each micro-batch is normalised" in str(one.message)]


def test_that_micro_batches_are_normalised_apart_is_said_once_where_it_was_called_and_by_explain() -> None:
    module = normalised()
    with warnings.catch_warnings(record=True) as record, DataParallel(module, TWO, balance="even") as trainer:
        warnings.simplefilter("always")
        trainer.step(classify, batch_of(3))  # on one device, as a whole
        assert told(record) == []
        assert "GroupNorm" not in trainer.explain()
        for _ in range(3):
            trainer.step(classify, batch_of(8))
        (message,) = told(record)
        assert message.startswith("paceline: 1 (BatchNorm1d): each micro-batch is normalised")
        (warning,) = (one for one in record if str(one.message) == message)
        assert warning.category is UserWarning
        assert warning.filename == __file__
        assert "GroupNorm" in trainer.explain()
        module.eval()
        assert "GroupNorm" not in trainer.explain()


@pytest.mark.parametrize("options", [{}, {"micro_batch": 4}], ids=str)
def test_one_device_is_warned_of_micro_batches_only(options: Any) -> None:
    with warnings.catch_warnings(record=True) as record, DataParallel(normalised(), ["host:0"], **options) as trainer:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):  # as in plain PyTorch
            trainer.step(classify, batch_of(1))
        trainer.step(classify, batch_of(8))
    assert len(told(record)) == len(options)


def test_a_warning_that_is_an_error_leaves_everything_as_it_was() -> None:
    module = normalised()
    before = [buffer.clone() for buffer in module.buffers()]
    with DataParallel(module, TWO) as trainer:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="each micro-batch is normalised"):
                trainer.step(classify, batch_of(8))
        assert gradients(module) == [None] * len(gradients(module))
        assert all(map(torch.equal, module.buffers(), before))
        trainer.step(classify, batch_of(8))
        assert trainer.report()["steps"] == 1


def own_norm(m: Any, x: torch.Tensor) -> Any:
    """Batch normalisation that is no module of PyTorch's."""
    return nn.functional.batch_norm(m.layer(x), m.mean, m.variance, training=m.training)


def own() -> Any:
    return module_of(own_norm, layer=nn.Linear(6, 3), mean=torch.zeros(3), variance=torch.ones(3))


@pytest.mark.parametrize("kind", ["own", "outside"])
def test_batch_normalisation_that_no_module_shows_is_given_two_items(kind: str) -> None:
    norm = nn.BatchNorm1d(3).double()
    module = own() if kind == "own" else nn.Linear(6, 3).double()
    sizes = Unsteady()

    def loss_fn(replica: Any, part: Any) -> Any:
        return sizes((lambda x: norm(replica(x))) if kind == "outside" else replica, part)

    with DataParallel(module, TWO, balance="even") as trainer:
        for _ in range(3):
            sizes.seen.clear()
            trainer.step(loss_fn, batch_of(3))
        assert sizes.seen == [3]
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            trainer.step(loss_fn, batch_of(1))
        with pytest.warns(UserWarning, match="paceline: loss_fn, or .* calls batch_norm: each micro-batch is"):
            trainer.step(loss_fn, batch_of(8))


def test_a_norm_of_ones_own_runs_once_on_each_device() -> None:
    module, sizes = own().eval(), Unsteady()
    with DataParallel(module, TWO) as trainer:
        trainer.step(sizes, batch_of(64))
        module.train()
        trainer.step(sizes, batch_of(64))  # which shows it, though no version counts what batch_norm writes
        sizes.seen.clear()
        for _ in range(20):
            trainer.step(sizes, batch_of(64))
        assert len(sizes.seen) == 40


SPECTRAL = pytest.mark.parametrize(
    "spectral_norm", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm], ids=["parametrized", "hooked"]
)
Spectral = Callable[[nn.Module], nn.Module]


def network(spectral_norm: Spectral) -> nn.Sequential:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the older of the two
        return nn.Sequential(spectral_norm(nn.Linear(6, 10)), nn.Tanh(), nn.Linear(10, 3)).double()


def steps_of_one_device(
    trainer: DataParallel, module: nn.Module, spectral_norm: Spectral, loss_fn: Any
) -> Iterator[int]:
    """Steps forever, which are those of one device. How many micro-batches each ran."""
    _, batch = classifier(64)
    while True:
        loss_fn.seen.clear()
        module.zero_grad()
        alone = network(spectral_norm)  # the older one cannot be copied once it has run
        alone.load_state_dict(module.state_dict())
        for ours, theirs in zip(module.modules(), alone.modules(), strict=True):
            theirs.training = ours.training
        classify(alone, batch).backward()
        trainer.step(loss_fn, batch)
        assert_same_gradients(module, gradients(alone))
        torch.testing.assert_close(list(module.buffers()), list(alone.buffers()), rtol=1e-12, atol=1e-12)
        yield len(loss_fn.seen)


@SPECTRAL
def test_spectral_normalisation_goes_on_as_on_one_device(spectral_norm: Spectral) -> None:
    module, loss_fn = network(spectral_norm), Unsteady()
    with DataParallel(module, TWO) as trainer:
        ran = itertools.islice(steps_of_one_device(trainer, module, spectral_norm, loss_fn), 30)
        assert sum(ran) <= 60, "one micro-batch of each device"


@SPECTRAL
@pytest.mark.parametrize("devices", [1, 2])
def test_a_forward_that_begins_to_write_later_is_noticed_before_anything_is_committed(
    spectral_norm: Spectral, devices: int
) -> None:
    # So slow that micro-batches of other sizes are tried.
    module, loss_fn = network(spectral_norm).eval(), Unsteady(1e-3, spread=0.2)
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        steps = steps_of_one_device(trainer, module, spectral_norm, loss_fn)
        ran = list(itertools.islice(steps, 7))
        # Every other step tries sizes, if nothing is written. The search begins when it is known that nothing is drawn.
        if ran[-1] > devices:
            ran.append(next(steps))
        assert ran[-2] > devices
        module[0].train()
        assert next(steps) == ran[-2] + devices, "it was run again"
        assert list(itertools.islice(steps, 5)) == [devices] * 5
        assert trainer.report()["steps"] == len(ran) + 6


@pytest.mark.parametrize("asked", [False, True])
def test_other_buffers_leave_corrections_on_and_so_does_who_asks_for_them(asked: bool) -> None:
    module, batch = classifier(64)
    module.register_buffer("scale", torch.ones(1))
    options: Any = {"hold_back": True} if asked else {"granularity": 2}  # with which no other sizes are tried
    if asked:
        module = network(nn.utils.parametrizations.spectral_norm)
    loss_fn = Unsteady(2e-4, spread=0.4)
    with DataParallel(module, TWO, **options) as trainer:
        assert loss_fn.corrected(lambda: trainer.step(loss_fn, batch))


def test_prediction_in_training_mode_goes_on_as_on_one_device() -> None:
    module = network(nn.utils.parametrizations.spectral_norm)
    x, times = classifier(64)[1][0], Unsteady()

    def predict(replica: Any, part: Any) -> Any:
        times.wait(len(part))
        return replica(part)

    with DataParallel(module, TWO) as trainer:
        for _ in range(30):
            alone = copy.deepcopy(module)
            with torch.no_grad():
                wanted = alone(x)
            torch.testing.assert_close(trainer.predict(predict, x), wanted, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(list(module.buffers()), list(alone.buffers()), rtol=1e-12, atol=1e-12)
