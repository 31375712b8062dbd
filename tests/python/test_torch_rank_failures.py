"""`DataParallel(group=)` if a rank fails, dies, is interrupted, or does something else than the others; and how ranks end."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DeviceLost, Error, InvalidArgument, Timeout
from paceline.torch._run.buckets import Layout
from paceline.torch._run.gradients import UserGradients
from program_server import SERVER
from rank_processes import DEAD, Processes, Run, error_of, part_of, trainer_of
from torch_support import classifier, classify, gradients, plain, worst_difference

SIZES = [[14, 6], [9, 0, 8], [0, 12, 5]]


def failing(rank: int, sizes: list[int], call: str) -> Any:
    """One good step, one that fails on rank 1, and one good step."""
    module, batch = classifier(sum(sizes))
    part = part_of(batch, rank, sizes)
    fails = False

    def loss_fn(m: Any, b: Any) -> Any:
        if fails and rank == 1:
            raise KeyError("bad item")
        return classify(m, b)

    with trainer_of(module, rank) as trainer:
        trainer.step(loss_fn, part)
        before = gradients(module)
        fails = True
        bad = (part[0].tolist(), part[1]) if call == "batch" and rank == 1 else part
        run = trainer.loss if call == "loss" else trainer.step
        error = error_of(lambda: run(loss_fn, bad))
        kept = all(torch.equal(a, b) for a, b in zip(before, gradients(module), strict=True))  # type: ignore[arg-type]
        fails = False
        trainer.step(loss_fn, part)
        return error, kept, gradients(module)


@pytest.mark.parametrize("call", ["step", "loss", "batch"])
@pytest.mark.parametrize("sizes", [[14, 6], [0, 9, 8]])
def test_if_one_rank_fails_no_rank_commits_and_all_name_it(on_ranks: Run, sizes: list[int], call: str) -> None:
    module, batch = classifier(sum(sizes))
    wanted = [2 * gradient for gradient in plain(module, classify, batch)[1] if gradient is not None]
    kind = "InvalidArgument: batch" if call == "batch" else "KeyError: 'bad item'"
    for rank, ((error, text), kept, found) in enumerate(on_ranks(len(sizes), failing, sizes, call)):
        if rank == 1:
            assert error is (InvalidArgument if call == "batch" else KeyError)
            assert "raised on rank 1; no rank has committed anything" in text
        else:
            assert error is Error
            assert f"rank 1: {kind}" in text
        assert kept
        assert worst_difference(found, wanted) < 1e-12


def batch_that_fails(rank: int) -> Any:
    module, batch = classifier(16)
    with trainer_of(module, rank) as trainer:
        return error_of(lambda: trainer.batch("nothing" if rank else part_of(batch, 0, [8, 8])))


def test_a_batch_that_one_rank_cannot_use_is_an_error_on_all(on_ranks: Run) -> None:
    (first, text), (second, _) = on_ranks(2, batch_that_fails)
    assert first is Error
    assert "rank 1: InvalidArgument: batch: no tensor" in text
    assert second is InvalidArgument


def disagreeing(rank: int, how: str) -> Any:
    module, batch = classifier(16)
    part = part_of(batch, rank, [8, 8])
    if how == "module":
        module = nn.Sequential(*module, nn.Linear(3, 3 + rank).double())
        return error_of(lambda: trainer_of(module, rank).close())
    with trainer_of(module, rank) as trainer:
        if how == "frozen":
            module[0].bias.requires_grad_(rank == 0)
        if how == "call" and rank:
            error = error_of(lambda: trainer.loss(classify, part))
        else:
            error = error_of(lambda: trainer.step(classify, part, total=16 + rank if how == "total" else None))
        module[0].bias.requires_grad_(True)
        trainer.step(classify, part)
    return error


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("module", "rank 1 has other parameters than rank 0"),
        ("frozen", "rank 1 has other parameters than rank 0"),
        ("call", "rank 1 has called something else than rank 0"),
        ("total", "rank 1 has total=17.0, rank 0 has total=16.0"),
    ],
)
def test_what_ranks_do_not_agree_on_is_an_error_on_all(on_ranks: Run, how: str, message: str) -> None:
    for kind, text in on_ranks(2, disagreeing, how):
        assert kind is InvalidArgument
        assert message in text


def refused(rank: int, what: str) -> Any:
    module, batch = classifier(16)
    part = part_of(batch, rank, [8, 8])
    head = torch.ones(3, dtype=torch.float64, requires_grad=True)
    loss_fn: Any = classify
    if what == "hook":
        module[0].weight.register_hook(lambda gradient: gradient)
    if what == "outside":
        loss_fn = lambda m, b: nn.functional.cross_entropy(m(b[0]) * head, b[1])  # noqa: E731
    if what == "sparse":
        module = nn.Sequential(nn.EmbeddingBag(6, 3, sparse=True, mode="sum")).double()
        part = (part[0].argsort(1), part[1])
    if what == "weight":
        part = None
    with trainer_of(module, 0) as trainer:
        return (*error_of(lambda: trainer.step(loss_fn, part)), gradients(module), head.grad)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("hook", "has a gradient hook"),
        ("outside", r"reaches a tensor of shape (3,) outside of the module"),
        ("sparse", "the gradient of parameter 0.weight is sparse"),
        ("weight", "the weights of all ranks sum to 0"),
    ],
)
def test_what_cannot_be_summed_over_ranks_is_refused(on_ranks: Run, what: str, message: str) -> None:
    for kind, text, found, outside in on_ranks(2, refused, what):
        assert kind is InvalidArgument
        assert message in text
        assert outside is None
        assert all(gradient is None for gradient in found)


def dying(rank: int, sizes: list[int], when: str) -> Any:
    """The last rank dies in the second step, in its forward or before the gradients are summed."""
    module, batch = classifier(sum(sizes))
    part = part_of(batch, rank, sizes)
    with trainer_of(module, rank) as trainer:
        trainer.step(classify, part)
        before = gradients(module)
        last = rank == len(sizes) - 1

        def loss_fn(m: Any, b: Any) -> Any:
            if last and when == "forward":
                os.kill(os.getpid(), signal.SIGKILL)
            return classify(m, b)

        if last and when == "sum":
            dist.all_reduce = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        errors = []
        for _ in range(2):
            try:
                trainer.step(loss_fn, part)
            except Error as error:
                errors.append((type(error), error.device, str(error)))
        return errors, all(torch.equal(a, b) for a, b in zip(before, gradients(module), strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(("sizes", "when"), [([14, 6], "forward"), ([14, 6], "sum"), ([9, 0, 8], "forward")])
def test_if_a_rank_dies_the_others_raise_an_error_that_names_it_and_keep_their_gradients(
    on_ranks: Run, sizes: list[int], when: str
) -> None:
    *alive, dead = on_ranks(len(sizes), dying, sizes, when)
    assert dead == DEAD
    gone = f"rank {len(sizes) - 1}"
    for errors, kept in alive:
        assert [error[:2] for error in errors] == [(DeviceLost, gone)] * 2
        assert all(f"{gone} is gone" in text for _, _, text in errors)
        assert kept


def late(rank: int) -> Any:
    module, batch = classifier(16)
    with trainer_of(module, rank) as trainer:
        return (None, None) if rank else (error_of(lambda: trainer.step(classify, batch)), gradients(module))


def test_a_rank_that_makes_no_call_is_a_timeout(processes: Processes, tmp_path: Path) -> None:
    ((kind, text), found), _ = processes.results(2, tmp_path / "store", late, seconds=8)
    assert kind is Timeout
    assert "rank 1 did not answer in time" in text
    assert found == [None] * 4


def interrupted(rank: int, sizes: list[int]) -> Any:
    """Ctrl-C comes on rank 0 when all ranks have agreed to commit, before the gradients are written."""
    module, batch = classifier(sum(sizes))
    commit, calls = UserGradients.commit, []

    def interrupt(self: Any, totals: Any) -> None:
        calls.append(self)
        if len(calls) == 1:
            raise KeyboardInterrupt
        commit(self, totals)

    with trainer_of(module, rank) as trainer, pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(UserGradients, "commit", interrupt)
            with pytest.raises(KeyboardInterrupt):
                trainer.step(classify, part_of(batch, rank, sizes))
        else:
            trainer.step(classify, part_of(batch, rank, sizes))
        trainer.step(classify, part_of(batch, rank, sizes))
    return gradients(module)


@pytest.mark.parametrize("sizes", [[14, 6], [0, 20]])
def test_a_step_that_all_ranks_have_agreed_on_is_committed_on_an_interrupted_rank_too(
    on_ranks: Run, sizes: list[int]
) -> None:
    module, batch = classifier(20)
    wanted = [2 * gradient for gradient in plain(module, classify, batch)[1] if gradient is not None]
    for found in on_ranks(2, interrupted, sizes):
        assert worst_difference(found, wanted) < 1e-12


# What one rank alone knows


def left_in_the_middle(rank: int) -> Any:
    """On rank 0 an interrupt comes after all ranks have exchanged what they need to commit the step, and before rank 0 has it."""
    module, batch = classifier(20)

    def interrupt(*args: Any) -> Any:
        raise KeyboardInterrupt

    with trainer_of(module, rank) as trainer, pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(Layout, "gradients", interrupt)
            with pytest.raises(KeyboardInterrupt):
                trainer.step(classify, part_of(batch, rank, [14, 6]))
            return error_of(lambda: trainer.step(classify, part_of(batch, rank, [14, 6])))
        trainer.step(classify, part_of(batch, rank, [14, 6]))
    return None


def test_a_rank_that_has_left_a_step_in_the_middle_does_not_go_on(on_ranks: Run) -> None:
    (kind, text), _ = on_ranks(2, left_in_the_middle)
    assert kind is DeviceLost
    assert "has left step in the middle (KeyboardInterrupt)" in text


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise TypeError("no words")


def failing_with(rank: int, error: Exception) -> Any:
    module, batch = classifier(20)

    def loss_fn(one: Any, part: Any) -> Any:
        if rank == 0:
            raise error
        return classify(one, part)

    with trainer_of(module, rank) as trainer:
        try:
            trainer.step(loss_fn, part_of(batch, rank, [14, 6]))
        except Exception as caught:
            kind = type(caught)
        trainer.step(classify, part_of(batch, rank, [14, 6]))
    return kind


@pytest.mark.parametrize("error", [ValueError("cannot decode /data/\udcff.jpg"), Unspeakable()], ids=["text", "none"])
def test_an_error_that_cannot_be_told_is_an_error_on_all(on_ranks: Run, error: Exception) -> None:
    first, second = on_ranks(2, failing_with, error)
    assert first is type(error)
    assert second is Error


def resumed(rank: int, folder: Path, other: Path) -> Any:
    module, batch = classifier(20)
    part = part_of(batch, rank, [14, 6])
    with trainer_of(module, rank) as trainer:
        for path in (other, folder):
            trainer.step(classify, part)
            if rank == 0:
                trainer.save_async(path).wait()
        trainer.step(classify, part)
        trainer.load(folder)
        drawn = torch.rand(4)
        trainer.step(classify, part)
        trainer.load(other if rank else folder)
        return drawn, *error_of(lambda: trainer.step(classify, part))


def test_ranks_that_load_different_saves_are_told_and_draw_different_numbers(on_ranks: Run, tmp_path: Path) -> None:
    (first, kind, text), (second, *_) = on_ranks(2, resumed, tmp_path / "a", tmp_path / "b")
    assert not torch.equal(first, second)
    assert kind is InvalidArgument
    assert "rank 1 has trained 1 steps before, rank 0 2" in text


THREADS_AT_THE_END = """
import atexit, contextlib, time
from pathlib import Path
import torch.distributed as dist
from paceline.torch import BalancedRanks

def threads():
    found = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has been joined stays there for a moment
            found += (task / "comm").read_text() == "pt_gloo_runloop\\n"
    return found

def reached(there):
    until = time.monotonic() + 30
    while there != (threads() > 0) and time.monotonic() < until:  # they begin and end in the background
        time.sleep(0.01)
    return there == (threads() > 0)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ranks = BalancedRanks(8, batch_size=2)
dist.destroy_process_group()
print(reached(True))
atexit._run_exitfuncs()
print(reached(False))
"""


def test_no_thread_of_gloo_outlives_the_interpreter() -> None:
    """Such a thread would abort the process when it frees a tensor of Python."""
    done = SERVER.run(THREADS_AT_THE_END, timeout=120)
    assert (done.stdout, done.returncode) == ("True\nTrue\n", 0), done.stderr
