"""Steps that replay captured graphs give what steps without graphs give, and refuse what a replay would not do."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from gpu_cases import BOXES, expect_same, expect_step, gpu_type, module_and_batch, plain
from paceline.torch import DataParallel
from torch_support import classify, recorded

GPUS = {name: BOXES[name] for name in ("one", "two", "four")}


def graphs_of(trainer: DataParallel) -> list[Any]:
    graphs = trainer._execution.graphs
    assert graphs is not None
    return graphs.devices


def replays_of(trainer: DataParallel) -> int:
    return sum(one.replays for one in graphs_of(trainer))


class Calls:
    """Counts how often Python runs a loss function."""

    def __init__(self, loss_fn: Any = classify) -> None:
        self.count = 0
        self.loss_fn = loss_fn

    def __call__(self, one: Any, part: Any) -> Any:
        self.count += 1
        return self.loss_fn(one, part)


def per_item(one: Any, part: Any) -> Any:
    return nn.functional.cross_entropy(one(part[0]), part[1], reduction="none")


@pytest.mark.parametrize("devices", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("micro_batch", [None, 3])
def test_replays_give_the_gradient_of_one_device(fake: Any, devices: list[str], micro_batch: int | None) -> None:
    module, (x, y) = module_and_batch()
    calls = Calls()
    with DataParallel(module, devices, balance="even", micro_batch=micro_batch, graphs=True) as trainer:
        optimizer = trainer.optimizer(torch.optim.SGD, lr=0.3)
        for step in range(8):
            batch = (x + 0.1 * step, y.roll(step))
            expect_step(trainer, batch, calls, whole=classify)
            optimizer.step()
        pieces = 1 if micro_batch is None else 24 // len(devices) // 3
        assert calls.count == 3 * len(devices), "two warm-ups and the capture"
        assert replays_of(trainer) == len(devices) * (8 * pieces - 2)
        assert f"CUDA graphs: {len(devices)} captured" in trainer.explain()


def test_gradients_add_up_in_the_users_own(fake: Any) -> None:
    module, batch = module_and_batch()
    _, once = plain(module, batch)
    with DataParallel(module, BOXES["two"], balance="even", graphs=True) as trainer:
        for _ in range(6):
            trainer.step(classify, batch)
        assert replays_of(trainer)
    expect_same(module, [6 * gradient for gradient in once if gradient is not None])


class Grows(nn.Module):
    """Keeps a table, which it replaces when there is a longer item."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.tables = {"numbers": torch.zeros(1)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.tables["numbers"]) < x.shape[1]:
            self.tables["numbers"] = torch.arange(float(x.shape[1]), device=x.device)
        return self.weight * (x + self.tables["numbers"][: x.shape[1]])


def test_what_a_forward_replaces_stays_as_long_as_a_graph_reads_it(fake: Any) -> None:
    def loss_fn(one: Any, part: Any) -> Any:
        return one(part).sum(1).mean()

    with DataParallel(Grows(), BOXES["one"], prove=None, graphs=True) as trainer:
        for _ in range(4):
            assert float(trainer.step(loss_fn, torch.ones(4, 3))) == 6
        tables: Any = trainer._execution.replicas.list[0].module.tables
        read = weakref.ref(tables["numbers"])
        assert float(trainer.step(loss_fn, torch.ones(4, 5))) == 15
        assert len(tables["numbers"]) == 5
        assert read() is not None
        assert float(trainer.step(loss_fn, torch.ones(4, 3))) == 6


def test_parameters_without_gradient_keep_none(fake: Any) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.frozen = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(3, 3)
            self.frozen.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.frozen(self.used(x))
            return out

    with DataParallel(Partly().double(), BOXES["two"], balance="even", graphs=True) as trainer:
        for _ in range(5):
            expect_step(trainer, module_and_batch()[1])
        assert replays_of(trainer)


def test_weights_and_the_scale_may_change_between_replays(fake: Any) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["two"], balance="even", graphs=True) as trainer:
        for step in range(7):
            weight, scale = torch.arange(24).roll(step) % 5 + 1, 2.0**step

            def whole(one: Any, part: Any, weight: Any = weight, scale: float = scale) -> Any:
                return scale * (per_item(one, part) * weight).sum() / weight.sum()

            expect_step(
                trainer,
                batch,
                per_item,
                whole=whole,
                weight=weight,
                scaler=torch.amp.GradScaler(gpu_type(), init_scale=scale),
            )
        assert replays_of(trainer) == 10


def test_a_mean_counts_by_the_weight_of_its_slice_and_by_the_total(fake: Any) -> None:
    module, batch = module_and_batch()
    calls = Calls()
    with DataParallel(module, BOXES["two"], balance="even", graphs=True) as trainer:
        for step in range(6):
            weight = torch.where(torch.arange(24) < 12, 1, 2 + step)

            def whole(one: Any, part: Any, weight: Any = weight, step: int = step) -> Any:
                losses = per_item(one, part)
                return (12 * losses[:12].mean() + (24 + 12 * step) * losses[12:].mean()) / (3 + step)

            expect_step(trainer, batch, calls, whole=whole, weight=weight, total=3 + step)
    assert calls.count == 6


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_extras_are_those_of_each_slice(fake: Any, micro_batch: int | None) -> None:
    module, (x, y) = module_and_batch()

    def loss_fn(one: Any, part: Any) -> Any:
        out = one(part["x"])
        return nn.functional.cross_entropy(out, part["y"]), {"out": out, "mean": out.mean()}

    with DataParallel(module, BOXES["two"], balance="even", micro_batch=micro_batch, graphs=True) as trainer:
        found = []
        for step in range(6):
            trainer.step(loss_fn, {"x": x + step, "y": y})
            found.append(trainer.extras)
        assert replays_of(trainer) == (8 if micro_batch is None else 44)
    for step, extras in enumerate(found):
        expected = module(x + step).detach()
        torch.testing.assert_close(extras["out"], expected)
        torch.testing.assert_close(extras["mean"], expected.mean())


def test_draws_are_those_of_eager_steps(fake: Any) -> None:
    results = []
    for graphs in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 10), nn.Dropout(0.5), nn.Linear(10, 3)).double()
        _, batch = module_and_batch()
        torch.manual_seed(1)
        with DataParallel(module, BOXES["one"], graphs=graphs) as trainer:
            results.append([trainer.step(classify, batch) for _ in range(6)])
            if graphs:
                assert replays_of(trainer) == 4
    assert len(set(map(float, results[0]))) == 6
    assert list(map(float, results[0])) == list(map(float, results[1]))


def test_statistics_are_written_in_every_replay(fake: Any) -> None:
    module = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 3)).double()
    other = copy.deepcopy(module)
    _, (x, y) = module_and_batch()
    with DataParallel(module, BOXES["one"], graphs=True) as trainer:
        for step in range(6):
            trainer.step(classify, (x + step, y))
            classify(other, (x + step, y)).backward()
        assert replays_of(trainer) == 4
    for ours, theirs in zip(module.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


def stale_cases() -> list[Any]:
    def storage(module: Any) -> None:
        with torch.no_grad():
            module[0].weight.data = module[0].weight.data.clone() * 2

    def frozen(module: Any) -> None:
        module[0].weight.requires_grad_(False)

    def parameter(module: Any) -> None:
        module[2].weight = nn.Parameter(torch.ones_like(module[2].weight))

    def attribute(module: Any) -> None:
        module[1].negative_slope = 0.5

    def mode(module: Any) -> None:
        module[3].eval()

    return [storage, frozen, parameter, attribute, mode]


@pytest.mark.parametrize("change", stale_cases(), ids=lambda one: str(one.__name__))
def test_what_a_graph_does_not_fit_runs_without_it_and_is_captured_again(fake: Any, change: Any) -> None:
    module = nn.Sequential(nn.Linear(6, 10), nn.LeakyReLU(), nn.Linear(10, 3), nn.Dropout(0.0)).double()
    _, batch = module_and_batch()
    calls = Calls()
    with DataParallel(module, BOXES["two"], balance="even", graphs=True) as trainer:
        for _ in range(4):
            trainer.step(calls, batch)
        assert calls.count == 6
        change(module)
        for _ in range(4):
            expect_step(trainer, batch, calls, whole=classify)
        assert calls.count == 12
        assert sum(one.captures for one in graphs_of(trainer)) == 4


def test_modes_have_graphs_of_their_own(fake: Any) -> None:
    module: Any = nn.Sequential(nn.Linear(6, 10), nn.Dropout(0.0), nn.Linear(10, 3)).double()
    _, batch = module_and_batch()
    calls = Calls()
    with DataParallel(module, BOXES["two"], balance="even", graphs=True) as trainer:
        for mode, count in ((True, 6), (False, 12), (True, 12), (False, 12)):
            module[1].train(mode)
            for _ in range(4):
                trainer.step(calls, batch)
            assert calls.count == count


def test_functions_sizes_and_values_have_graphs_of_their_own(fake: Any) -> None:
    module, (x, y) = module_and_batch()

    def run(trainer: DataParallel, factor: float, items: int, entry: int) -> None:
        def loss_fn(one: Any, part: Any) -> Any:
            return factor * part["entry"] * classify(one, (part["x"], part["y"]))

        batch = {"x": x[:items], "y": y[:items], "entry": entry}
        expect_step(trainer, batch, loss_fn)

    with DataParallel(module, BOXES["one"], graphs=True) as trainer:
        half, double = 0.5, 2.0
        for _ in range(4):
            for factor, items in ((half, 24), (double, 24), (half, 20)):
                run(trainer, factor, items, 3)
        assert len(graphs_of(trainer)[0].captured) == 3
        replays = replays_of(trainer)
        run(trainer, half, 24, 4)  # another value, which the graph has not seen
        assert replays_of(trainer) == replays
        run(trainer, half, 24, 3)
        assert replays_of(trainer) == replays + 1


def test_there_are_at_most_so_many_graphs(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.torch._run.graphs.MOST_GRAPHS", 2)
    module, (x, y) = module_and_batch()
    with DataParallel(module, BOXES["one"], graphs=True) as trainer:
        for items in (24, 20, 16):
            for _ in range(4):
                expect_step(trainer, (x[:items], y[:items]))
        assert len(graphs_of(trainer)[0].captured) == 2


def test_loss_carries_the_gradients_of_replays(fake: Any) -> None:
    for devices in (BOXES["one"], BOXES["two"]):
        module, (x, y) = module_and_batch()
        first, second = (plain(module, (x + step, y))[1] for step in (3, 4))
        with DataParallel(module, devices, balance="even", graphs=True) as trainer:
            losses = [trainer.loss(classify, (x + step, y)) for step in range(5)]
            assert replays_of(trainer)
            (losses[-1] + losses[-2]).backward()  # the gradients of the first one are no longer in static memory
        pairs = zip(first, second, strict=True)
        expect_same(module, [one + two for one, two in pairs if one is not None and two is not None])


def test_a_failed_step_leaves_graphs_and_gradients_usable(fake: Any) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["two"], balance="even", graphs=True) as trainer:
        for _ in range(4):
            trainer.step(classify, batch)
        module.zero_grad()
        with pytest.raises(ZeroDivisionError):
            trainer.step(lambda one, part: 1 // 0, batch)  # type: ignore[arg-type,return-value]
        assert all(parameter.grad is None for parameter in module.parameters())
        expect_step(trainer, batch)


def test_modes_of_the_caller_see_every_operator(fake: Any) -> None:
    module, batch = module_and_batch()
    calls = Calls()
    with DataParallel(module, BOXES["one"], graphs=True) as trainer:
        for _ in range(4):
            trainer.step(calls, batch)
        with torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one):
            trainer.step(calls, batch)
    assert calls.count == 4


def test_a_default_device_hinders_no_graph_and_each_has_graphs_of_its_own(fake: Any) -> None:
    module, batch = module_and_batch()
    calls = Calls()
    with DataParallel(module, BOXES["one"], graphs=True) as trainer:
        for default, count in (("cpu", 3), ("meta", 6), ("cpu", 6), ("meta", 6)):
            with torch.device(default):
                for _ in range(4):
                    trainer.step(calls, batch)
            assert calls.count == count


def test_captures_are_no_evidence_of_a_devices_speed(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["one"], balance="even", graphs=True) as trainer:
        excluded = recorded(trainer, monkeypatch)
        for _ in range(5):
            trainer.step(classify, batch)
    assert excluded == [[True], [False], [True], [False], [False]]


def test_autocast_has_graphs_of_its_own(fake: Any) -> None:
    results: list[list[torch.Tensor | None]] = []
    for graphs in (False, True):
        module, (x, y) = module_and_batch(torch.float32)
        calls = Calls()
        found: list[torch.Tensor | None] = []
        with DataParallel(module, BOXES["two"], balance="even", graphs=graphs) as trainer:
            for step in range(8):
                module.zero_grad()
                with torch.autocast(gpu_type(), dtype=torch.bfloat16, enabled=bool(step % 2)):
                    found.append(trainer.step(calls, (x + step, y)))
                found += [parameter.grad for parameter in module.parameters()]
            if graphs:
                assert calls.count == 12
                assert replays_of(trainer) == 8
        results.append(found)
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_widths_that_were_not_captured_run_without_a_graph(fake: Any) -> None:
    module = nn.GRU(3, 4, batch_first=True).double()

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    def loss_fn(one: Any, part: Any) -> Any:
        return one(part)[0].square().sum((1, 2))

    # cuDNN's kernels for recurrent layers may want the whole GPU.
    without_cudnn = torch.backends.cudnn.flags(enabled=False)
    with without_cudnn, DataParallel(module, BOXES["two"], balance="even", graphs=True) as trainer:
        for step in range(7):  # the second one has other flat gradients, so it is the first of two warm-ups
            samples = [torch.randn(5 + (step == 4), 3, dtype=torch.float64) for _ in range(8)]
            whole = lambda one, part: loss_fn(one, collate(part)).mean()  # noqa: E731
            expect_step(trainer, samples, loss_fn, whole=whole, collate=collate)
        assert replays_of(trainer) == 6


def test_items_by_cost_replay_in_any_order(fake: Any) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["two"], balance="even", graphs=True) as trainer:
        for step in range(6):
            costs = torch.arange(24).roll(step) % 7 + 1
            expect_step(trainer, batch, per_item, whole=classify, cost=costs, weight=torch.ones(24))


def test_replays_and_other_micro_batches_of_a_step_add_up(fake: Any) -> None:
    module, (x, y) = module_and_batch()
    with DataParallel(module, BOXES["one"], micro_batch=10, graphs=True) as trainer:  # 10, 10 and 4 items
        for step in range(5):
            batch = (x + step, y)
            expect_step(trainer, batch)
        assert len(graphs_of(trainer)[0].captured) == 2
        assert replays_of(trainer) == 8 + 3
