"""`layout`: which way to train a module, from what its blocks take, and the trainers that it makes."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from paceline import InvalidArgument, OutOfMemory  # noqa: E402
from paceline.torch import DataParallel, Layout, Pipeline, PipelineReplicas, layout  # noqa: E402
from pipeline_cases import steady  # noqa: E402
from torch_support import TWO, held, hosts, module_of, output_of, worst_difference  # noqa: E402

WIDTH, BLOCKS, ITEMS = 8, 6, 24
ADAM = 4  # parameters, gradients and two states
HELD = BLOCKS * (WIDTH * WIDTH + WIDTH) * 8 * ADAM


@pytest.fixture(autouse=True)
def no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    steady(monkeypatch)


def counted(m: Any, x: Any) -> Any:
    """Counts forwards, in an attribute and in a buffer."""
    m.calls += 1
    m.seen += 1
    return torch.tanh(m.linear(nn.functional.dropout(x, 0.1, m.training)))


def chain(blocks: int = BLOCKS) -> Any:
    torch.manual_seed(0)
    linears = [nn.Linear(WIDTH, WIDTH) for _ in range(blocks)]
    return nn.Sequential(*(module_of(counted, linear=one, calls=0, seen=torch.zeros(())) for one in linears))


def squares(module: Any, batch: Any) -> Any:
    return module(batch).square().mean()


def inputs() -> Any:
    return torch.randn(ITEMS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def found(devices: list[str], *, share: float | None = None) -> tuple[Any, Layout]:
    """A module without dropout and its layout, on devices that hold this share of it each."""
    module = chain().eval()
    memory = None if share is None else int(share * HELD)
    return module, layout(module, squares, inputs(), devices, memory=memory, optimizer=torch.optim.Adam)


def differs_from(module: Any, plain: Any) -> float:
    return worst_difference([p.grad for p in module.parameters()], [p.grad for p in plain.parameters()])


def state_of(module: Any) -> list[Any]:
    parts = [(part.calls, part.seen.clone()) for part in module]
    return [*parts, *(None if p.grad is None else p.grad.clone() for p in module.parameters()), torch.get_rng_state()]


def test_a_layout_leaves_no_trace() -> None:
    module = chain()
    squares(module, inputs()).backward()
    module[0].linear.bias.grad = None
    before = state_of(module)
    assert layout(module, squares, inputs(), TWO).best.kind
    for one, other in zip(before, state_of(module), strict=True):
        assert type(one) is type(other)
        pairs = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
        assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def test_data_parallel_is_best_where_the_module_fits_each_device() -> None:
    module, ways = found(TWO)
    assert next(one.kind for one in ways.candidates) == "data parallel"
    assert set(ways.best.items) == set(TWO)
    assert sum(ways.best.items.values()) == ITEMS
    pipeline = next(one for one in ways.candidates if one.kind == "pipeline")
    assert pipeline.seconds > ways.best.seconds
    assert "bubble" in ways.best.reason
    with ways.trainer() as trainer:
        assert isinstance(trainer, DataParallel)
        trainer.step(squares, inputs())
    assert module[0].linear.weight.grad is not None


def test_a_pipeline_is_best_where_no_device_holds_the_module() -> None:
    module, ways = found(TWO, share=0.8)
    plain = copy.deepcopy(module)
    assert ways.best.kind == "pipeline"
    assert not next(one for one in ways.candidates if one.kind == "data parallel").fits
    assert all(0 < count <= 0.8 * HELD for count in ways.best.bytes.values())
    assert sorted(block for stage in ways.best.stages.values() for block in range(stage[0], stage[1] + 1)) == list(
        range(BLOCKS)
    )
    with ways.trainer() as trainer:
        assert isinstance(trainer, Pipeline)
        trainer.step(squares, inputs())
        assert not trainer.report()["pipeline"]["measuring"]
        cuts = {one["device"]: one["blocks"] for one in trainer.report()["pipeline"]["stages"]}
    assert cuts == {name: last - first + 1 for name, (first, last) in ways.best.stages.items()}
    squares(plain, inputs()).backward()
    assert differs_from(module, plain) < 1e-12


# With 0.3 the parameters do not fit. With 0.501 they do, but not what an item saves.
@pytest.mark.parametrize("share", [0.3, 0.501])
def test_where_nothing_fits_an_error_names_device_and_bytes(share: float) -> None:
    with pytest.raises(OutOfMemory, match=r"needs \d+ bytes on host:[01], which has \d+") as error:
        found(TWO, share=share)
    assert "memory limits" in str(error.value)


def test_the_table_has_the_numbers_of_all_ways_and_what_does_not_fit_is_refused() -> None:
    _, ways = found(TWO, share=0.9)
    text = str(ways)
    for one in ways.candidates:
        line = next(line for line in text.splitlines() if line.startswith(one.kind))
        assert (f"{1e3 * one.seconds:.1f}" if one.fits else "does not fit") in line
        assert one.reason in text
    assert f"{int(0.9 * HELD) / 1024:.1f} KiB" in text
    with pytest.raises(InvalidArgument, match=r"data parallel does not fit.*Choose 'pipeline'"):
        ways.trainer("data parallel")
    with pytest.raises(InvalidArgument, match="there is no layout 'zero'"):
        ways.trainer("zero")  # type: ignore[arg-type]
    module, ways = found(TWO, share=1.5)
    with ways.trainer("data parallel") as trainer:  # gets what the limit leaves beside the optimizer's state
        trainer.step(squares, inputs())
        limits = {name: one["limit_bytes"] for name, one in trainer.report()["memory"].items() if "limit_bytes" in one}
    state = HELD - 2 * sum(one.nbytes for one in module.parameters())
    assert limits == dict.fromkeys(TWO, int(1.5 * HELD) - state - held(module, 2))


def replicas() -> tuple[Any, PipelineReplicas]:
    """Two pipelines of two devices each."""
    module, ways = found(hosts(4), share=0.9)
    trainer = ways.trainer("replicas of pipelines")
    assert isinstance(trainer, PipelineReplicas)
    return module, trainer


def test_replicas_of_pipelines_train_as_one_device() -> None:
    module, trainer = replicas()
    plain = copy.deepcopy(module)
    with trainer:
        for optimizer in (optimizers := [torch.optim.SGD(one.parameters(), lr=0.1) for one in (module, plain)]):
            optimizer.zero_grad()
        for items in (ITEMS, 7, 1, ITEMS):
            batch = inputs()[:items]
            loss = trainer.step(squares, batch)
            wanted = squares(plain, batch)
            wanted.backward()
            assert abs(loss - wanted) < 1e-12
            assert differs_from(module, plain) < 1e-12
            assert torch.allclose(trainer.predict(batch), plain(batch), atol=1e-12)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        report = trainer.report()
    stages = report["pipeline"]["stages"]
    assert len({stage["device"] for stage in stages}) == 4
    assert sum(stage["blocks"] for stage in stages) == 2 * BLOCKS
    assert sum(report["micro_batches"]) == ITEMS
    assert "Pipeline 1:" in trainer.explain()


def test_norms_over_a_micro_batch_are_warned_of_where_pipelines_share_a_batch() -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(6))).double()
    held = sum(parameter.nbytes for parameter in module.parameters()) * 4
    ways = layout(module, squares, inputs(), hosts(4), memory=int(0.9 * held))
    told = pytest.warns(UserWarning, match="normalised by its own mean")
    with ways.trainer("replicas of pipelines") as trainer, told:
        trainer.step(squares, inputs())


def test_a_failure_in_one_pipeline_commits_nothing() -> None:
    module, trainer = replicas()
    batch = inputs()
    with trainer:
        trainer.step(squares, batch)
        before = [p.grad.clone() for p in module.parameters()]

        def fail(module: Any, part: Any) -> Any:
            if bool((part == batch[-1]).all(1).any()):
                raise RuntimeError("the last item is bad")
            return squares(module, part)

        with pytest.raises(RuntimeError, match="the last item is bad") as error:
            trainer.step(fail, batch)
        assert "pipeline 1" in "".join(error.value.__notes__)
        assert all(torch.equal(p.grad, one) for p, one in zip(module.parameters(), before, strict=True))
        module.zero_grad()
        trainer.step(squares, batch)
    assert worst_difference([p.grad for p in module.parameters()], before) < 1e-12


def test_shares_follow_the_times_of_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    _, trainer = replicas()
    with trainer:
        trainer.step(squares, inputs())
        monkeypatch.undo()
        planner = trainer._planner
        first = planner.shares(ITEMS)
        for _ in range(30):  # the stages of the first pipeline take three times as long as planned
            plan = planner.plan_step(ITEMS)
            record = [
                [(kind, one, 0.0, (3, 1)[number] * (end - start)) for kind, one, start, end in stage]
                for number, part in plan.parts
                for stage in part.actions() or ()
            ]
            planner.note(plan, record, evidence=True)
        assert planner.shares(ITEMS)[0] < first[0]
        assert sum(planner.shares(ITEMS)) == ITEMS


def test_a_pipeline_whose_devices_are_retired_gets_no_items() -> None:
    module, trainer = replicas()
    with trainer:
        trainer.step(squares, inputs())
        wanted = [p.grad.clone() for p in module.parameters()]
        idle = [stage["device"] for stage in trainer.report()["pipeline"]["stages"]][:2]
        for name in idle:
            trainer.retire(name)
        module.zero_grad()
        trainer.step(squares, inputs())
        assert [trainer.shares[name] for name in idle] == [0, 0]
        assert worst_difference([p.grad for p in module.parameters()], wanted) < 1e-12
        for name in idle:
            trainer.restore(name)
        trainer.step(squares, inputs())
        assert all(trainer.shares[name] for name in idle)


def test_ctrl_c_ends_the_step_of_all_pipelines_and_the_next_one_works() -> None:
    program = """
import copy
from paceline.torch import layout
torch.manual_seed(0)
module = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6))).double()
batch = torch.randn(24, 8, dtype=torch.double)
plain = copy.deepcopy(module)
mean_of_squares(plain, batch).backward()
parameters = sum(parameter.nbytes for parameter in module.parameters())
ways = layout(module, mean_of_squares, batch, [f"host:{k}" for k in range(4)], memory=int(3.6 * parameters))
trainer = ways.trainer("replicas of pipelines")
threads, once = set(), threading.Lock()

def slow(replica, part):
    threads.add(threading.get_ident())
    if len(threads) >= 2 and once.acquire(blocking=False):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    time.sleep(0.5)
    return mean_of_squares(replica, part)

try:
    trainer.step(slow, batch)
except KeyboardInterrupt:
    pass
else:
    raise SystemExit("no KeyboardInterrupt")
assert len(threads) >= 2, threads
assert all(parameter.grad is None for parameter in module.parameters())
trainer.step(mean_of_squares, batch)
print(all(torch.allclose(a.grad, b.grad, rtol=1e-12) for a, b in zip(module.parameters(), plain.parameters())))
"""
    assert output_of(program) == "True"
