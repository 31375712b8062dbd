"""Calls of `DataParallel`: forward and backward on all devices, with the caller's loss between them."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from norm_cases import Images, assert_same, case, rows, same_buffers
from paceline.torch import DataParallel
from torch_support import TWO, assert_same_gradients, classifier, gradients, hosts, on_worker, worst_difference

pytestmark = pytest.mark.filterwarnings("error:DataParallel. .*each micro-batch is normalised")

COUNTS = [1, 2, 3]


def contrastive(a: torch.Tensor, b: torch.Tensor) -> Any:
    """Each item against all others of the batch."""
    return nn.functional.cross_entropy(a @ b.T, torch.arange(len(a)))


@pytest.mark.parametrize("count", COUNTS)
def test_a_loss_that_couples_items_has_the_gradient_of_one_device(count: int) -> None:
    module, (x, _) = classifier(17)
    reference = copy.deepcopy(module)
    wanted = contrastive(reference(x), reference(x.flip(0)))
    wanted.backward()
    with DataParallel(module, hosts(count), balance=[1 + index for index in range(count)]) as parallel:
        output = parallel(x)
        torch.testing.assert_close(output, reference(x))
        loss = contrastive(output, parallel(x.flip(0)))
        loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    assert_same_gradients(module, gradients(reference))


@pytest.mark.parametrize("count", COUNTS)
def test_inputs_that_require_a_gradient_get_it(count: int) -> None:
    module, (x, _) = classifier(16)
    theirs = x.clone().requires_grad_()
    module(theirs * 2).square().sum().backward()
    expected = gradients(module)
    with DataParallel(module, hosts(count)) as parallel:
        for _ in range(6):  # the leaves of the slices are new ones each time
            module.zero_grad()
            mine = x.clone().requires_grad_()
            parallel(mine * 2).square().sum().backward()
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-14)
            assert_same_gradients(module, expected)
        assert parallel(theirs).requires_grad
        with torch.no_grad():
            assert not parallel(theirs).requires_grad


@pytest.mark.parametrize("in_place", [False, True])
def test_networks_may_follow_one_another(in_place: bool) -> None:
    (first, (x, _)), second = classifier(16), nn.Sequential(nn.ReLU(inplace=in_place), nn.Linear(3, 4).double())
    reference = copy.deepcopy(nn.Sequential(first, second))
    contrastive(reference(x), reference(x)).backward()
    with DataParallel(first, TWO) as a, DataParallel(second, TWO) as b:
        for _ in range(5):
            first.zero_grad()
            second.zero_grad()
            contrastive(b(a(x)), b(a(x))).backward()
            assert_same_gradients(nn.Sequential(first, second), gradients(reference))


def test_freezing_between_forward_and_backward_moves_no_gradient_to_another_parameter() -> None:
    module: Any = nn.Sequential(*(nn.Linear(6, 6, dtype=torch.float64) for _ in range(4)))
    module[3].weight.requires_grad_(False)
    x = classifier(16)[1][0]
    wanted = copy.deepcopy(module)
    wanted(x).square().sum().backward()
    with DataParallel(module, TWO) as parallel:
        loss = parallel(x).square().sum()
        module[0].weight.requires_grad_(False)
        module[3].weight.requires_grad_(True)
        loss.backward()
    assert module[0].weight.grad is None
    assert module[3].weight.grad is None
    assert worst_difference(gradients(module)[2:6], gradients(wanted)[2:6]) < 1e-12


def test_a_prediction_between_forward_and_backward_disturbs_no_graph() -> None:
    module = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    x = classifier(16)[1][0]
    reference = copy.deepcopy(module)
    reference(x).square().sum().backward()
    with DataParallel(module, TWO, balance=[1, 0]) as parallel:
        loss = parallel(x).square().sum()
        with torch.no_grad():
            parallel(2 * x)
        loss.backward()
        del loss
        assert not parallel._execution.replicas.graphs
    assert_same_gradients(module, gradients(reference))


@pytest.mark.alone
def test_shares_follow_the_times() -> None:
    module, (x, _) = classifier(64)

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Any) -> Any:
            if on_worker("host:1"):
                time.sleep(len(x) * 1e-3)
            return self.inner(x)

    with DataParallel(Slow(), TWO) as parallel:
        for _ in range(20):
            parallel(x).sum().backward()
        shares = parallel.shares
    assert shares["host:0"] > 2 * shares["host:1"]


def test_nests_keyword_arguments_and_outputs_without_gradient() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3, dtype=torch.float64)

        def forward(self, x: Any, *, factor: float, more: dict[str, Any]) -> Any:
            output = self.linear(x) * factor + more["bias"]
            return {"output": output, "best": output.argmax(1), "pair": (output.sum(1), None)}

    module, (x, _) = Several(), classifier(16)[1]
    bias = torch.randn(16, 3, dtype=torch.float64)
    expected = module(x, factor=2.0, more={"bias": bias})
    (expected["output"].square().sum() + expected["pair"][0].sum()).backward()
    wanted = gradients(module)
    module.zero_grad()
    with DataParallel(module, TWO) as parallel:
        got = parallel(x, factor=2.0, more={"bias": bias})
        assert got["best"].equal(expected["best"])
        assert not got["best"].requires_grad
        assert got["pair"][1] is None
        (got["output"].square().sum() + got["pair"][0].sum()).backward()
    assert_same_gradients(module, wanted)


def test_tensors_outside_of_the_module_get_their_gradient() -> None:
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

    class Scaled(nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x) * outside[0]

    outside = (scale,)
    module, (x, _) = Scaled(6, 3, dtype=torch.float64), classifier(16)[1]
    wanted = torch.autograd.grad(module(x).square().sum(), scale)[0]
    with DataParallel(module, TWO) as parallel:
        parallel(x).square().sum().backward()
    torch.testing.assert_close(scale.grad, wanted)


def test_hooks_of_parameters_see_the_whole_gradient_once() -> None:
    module, (x, _) = classifier(16)
    module(x).square().sum().backward()
    wanted = gradients(module)
    module.zero_grad()
    seen: list[torch.Tensor] = []
    module[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    with DataParallel(module, TWO) as parallel:
        parallel(x).square().sum().backward()
    assert worst_difference(seen, wanted[:1]) < 1e-12


def test_shares_follow_the_balance_and_each_device_runs_one_slice() -> None:
    module, (x, _) = classifier(16)
    sizes: list[int] = []
    module.register_forward_pre_hook(lambda _, arguments: sizes.append(len(arguments[0])))
    with DataParallel(module, TWO, balance=[1, 3]) as parallel:
        parallel(x).sum().backward()
        assert parallel.shares == {"host:0": 4, "host:1": 12}
    assert sorted(sizes) == [4, 12]


def test_without_gradients_it_predicts() -> None:
    module, (x, _) = classifier(16)
    with DataParallel(module, TWO).eval() as parallel:
        with torch.no_grad():
            output = parallel(x)
        assert not output.requires_grad
        torch.testing.assert_close(output, module(x))
        module.requires_grad_(False)
        assert not parallel(x).requires_grad


def test_a_second_backward_and_a_graph_of_gradients_are_errors() -> None:
    module, (x, _) = classifier(16)
    with DataParallel(module, TWO) as parallel:
        with pytest.raises(RuntimeError, match="create_graph=True"):
            parallel(x).sum().backward(create_graph=True)
        loss = parallel(x).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="second time through one forward"):
            loss.backward()


def test_a_module_that_changed_in_between_is_an_error() -> None:
    module, (x, _) = classifier(16)
    with DataParallel(module, TWO) as parallel:
        loss = parallel(x).sum()
        module[2] = nn.Linear(10, 3, dtype=torch.float64)
        with pytest.raises(RuntimeError, match="changed since its forward"):
            loss.backward()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpointing_draws_again_what_the_forward_drew(dropout: float) -> None:
    class Dropping(nn.Module):
        def __init__(self, checkpointed: bool) -> None:
            super().__init__()
            middle = nn.Dropout(dropout) if dropout else nn.Tanh()
            self.inner = nn.Sequential(nn.Linear(6, 8), middle, nn.Linear(8, 3)).double()
            self.checkpointed = checkpointed

        def forward(self, x: Any) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)

    x = classifier(16)[1][0]
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        with DataParallel(Dropping(checkpointed), TWO, balance="even") as parallel:
            for training in (False, True, True):  # a forward that draws nothing comes first
                parallel.train(training)
                parallel(x).square().sum().backward()
            found.append(gradients(parallel.module))
    assert worst_difference(*found) == 0


def test_running_statistics_follow_as_in_training() -> None:
    module = nn.Sequential(nn.BatchNorm1d(6)).double()
    x = classifier(16)[1][0]
    reference = copy.deepcopy(module)
    contrastive(reference(x), reference(2 * x)).backward()
    with DataParallel(module, TWO, balance=[1, 0]) as parallel:
        contrastive(
            parallel(x), parallel(2 * x)
        ).backward()  # the second forward writes statistics that the first has read
    assert_same_gradients(module, gradients(reference))
    torch.testing.assert_close(module[0].running_mean, reference[0].running_mean)
    assert module[0].num_batches_tracked == 2


def contrast(outputs: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """A loss that couples all items."""
    return nn.functional.cross_entropy(outputs @ others.T, torch.arange(len(outputs)))


def synchronised(module: nn.Module, devices: list[str] = TWO, balance: Any = (2, 1)) -> DataParallel:
    return DataParallel(module, devices, balance=list(balance), batch_norm="synchronised")


@pytest.mark.parametrize("kind", ["rows", "images"])
@pytest.mark.parametrize("balance", [[1], [3, 1], [1, 0, 2], [2, 1, 1]], ids=str)
def test_two_forwards_and_a_loss_over_both_are_those_of_one_device(balance: list[float], kind: str) -> None:
    module, (x, _) = case(kind)
    reference = copy.deepcopy(module)
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.01) for one in (module, reference))
    with synchronised(module, hosts(len(balance)), balance) as parallel:
        for _ in range(2):
            wanted = contrast(reference(x), reference(x.flip(1)))
            wanted.backward()
            loss = contrast(parallel(x), parallel(x.flip(1)))
            loss.backward()
            assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
            assert_same(module, reference)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():  # in training mode, without gradients
            torch.testing.assert_close(parallel(x), reference(x), rtol=0, atol=1e-12)
        assert same_buffers(module, reference)


def test_inputs_get_their_gradient_and_the_mode_may_change_before_the_backward() -> None:
    module, (x, _) = case("rows")
    reference = copy.deepcopy(module)
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    reference(theirs).std(0).sum().backward()
    with synchronised(module) as parallel:
        outputs = parallel(mine)
        module.eval()
        torch.testing.assert_close(parallel(x), reference.eval()(x).detach(), rtol=0, atol=1e-12)  # no meeting
        outputs.std(0).sum().backward()
    assert_same_gradients(module, gradients(reference))
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-11, atol=1e-14)


def test_activation_checkpointing_meets_again_in_the_backward() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = rows()

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False)

    torch.manual_seed(0)
    module = Checkpointed().double()
    reference = copy.deepcopy(module)
    x = torch.randn(11, 6).double()
    reference(x).std(0).sum().backward()
    with synchronised(module) as parallel:
        parallel(x).std(0).sum().backward()
    assert_same_gradients(module, gradients(reference))


def adversarial(generator: nn.Module, critic: nn.Module, x: torch.Tensor, noise: torch.Tensor) -> None:
    """One step of each network, as in PyTorch's DCGAN: the critic's second forward on the generator's outputs has both backward."""
    ones, losses = torch.ones(len(x)).double(), nn.BCEWithLogitsLoss()
    critic.zero_grad()
    losses(critic(x)[:, 0], ones).backward()
    fake = generator(noise)
    losses(critic(fake.detach())[:, 0], 0 * ones).backward()
    with torch.no_grad():
        for parameter in critic.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad)
    generator.zero_grad()
    losses(critic(fake)[:, 0], ones).backward()


def test_a_loop_over_two_networks_stays_as_it_is() -> None:
    first, (noise, _) = case("rows")
    generator = nn.Sequential(first, nn.Linear(3, 6).double())
    critic, (x, _) = case("rows")
    twins = [copy.deepcopy(one) for one in (generator, critic)]
    with synchronised(generator) as ours, synchronised(critic, balance=(1, 2)) as theirs:
        for _ in range(2):
            adversarial(ours, theirs, x, noise)
            adversarial(twins[0], twins[1], x, noise)
    for module, twin in zip((generator, critic), twins, strict=True):
        assert_same(module, twin)


class Raising(torch.autograd.Function):
    """Raises in the backward of the slice with a marked item."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, marked: bool) -> torch.Tensor:
        ctx.marked = marked
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.marked:
            raise ArithmeticError("on purpose")
        return gradients[0], None


@pytest.mark.parametrize("item", [0, 12], ids=["first device", "second device"])
def test_a_device_that_fails_in_the_backward_leaves_nobody_waiting(item: int) -> None:
    class Failing(Images):
        def forward(self, x: torch.Tensor) -> Any:
            apply: Any = Raising.apply
            inner = self.norms(self.first(x))
            inner = apply(inner, bool((x > 1e6).any()))
            return self.head(self.branch(inner).mean((2, 3)))

    _, (x, _) = case("images")
    module = Failing().double()
    with synchronised(module) as parallel:
        marked = x.clone()
        marked[item] += 1e7
        outputs = parallel(marked)
        with pytest.raises(ArithmeticError, match="on purpose") as raised:
            outputs.sum().backward()
        assert f"host:{int(item > 0)}" in str(getattr(raised.value, "__notes__", raised.value.__cause__))
        assert gradients(module) == [None] * len(gradients(module))
        reference = copy.deepcopy(module)
        parallel(x).std(0).sum().backward()
    reference(x).std(0).sum().backward()
    assert_same_gradients(module, gradients(reference))
