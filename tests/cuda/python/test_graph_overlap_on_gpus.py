"""A replay seals each bucket of gradients by an event behind its last gradient, so that sums begin while replays go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import paceline
from gpu_cases import AS_PARTS, BOXES, Shared, expect_same, expect_step, flat_of, module_and_batch, plain, queues_of
from paceline.torch import DataParallel
from paceline.torch._devices import cuda
from paceline.torch._run import flat_gradients
from torch_support import classify

SEVERAL = {"two": BOXES["two"], "four": BOXES["four"]}
if not AS_PARTS:
    SEVERAL["parts"] = ["cuda:0/0", "cuda:0/1", "cuda:1"]


pytestmark = pytest.mark.usefixtures("small_buckets")


def train(trainer: DataParallel, module: nn.Module, steps: range) -> None:
    """Each step has a batch of its own, and the gradient of one device."""
    x, y = module_and_batch()[1]
    for step in steps:
        expect_step(trainer, (x + step, y))


class Partly(nn.Module):
    """Some parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.never, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.used(x)))
        return out


@pytest.mark.usefixtures("whole_afterwards")
@pytest.mark.parametrize("devices", SEVERAL.values(), ids=SEVERAL)
@pytest.mark.parametrize("micro_batch", [None, 2, 5])
def test_the_last_replay_of_each_device_seals_its_buckets(devices: list[str], micro_batch: int | None) -> None:
    module = Partly().double()
    if not AS_PARTS:
        paceline.partition("cuda:0", [0.5, 0.5])
    with DataParallel(module, devices, balance="even", micro_batch=micro_batch, graphs=True) as trainer:
        train(trainer, module, range(6))
        assert flat_of(trainer).early == 4
        assert (
            "Gradients: 4 of 6 buckets were final on all devices before the last backward ended." in trainer.explain()
        )


def test_a_sum_waits_for_its_bucket_and_not_for_the_end_of_the_replay(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = fake.hang
    module, (x, y) = module_and_batch()
    with DataParallel(module, BOXES["two"], balance="even", graphs=True) as trainer:
        train(trainer, module, range(4))
        slow = queues_of(trainer).streams[1]
        graph_type: Any = cuda.Graph
        record = graph_type.func.record_event

        def then_hang(graph: Any, event: int) -> None:
            record(graph, event)
            if fake.streams[-1][1] == slow:
                hang(slow)  # all that the replay enqueues later

        monkeypatch.setattr(graph_type.func, "record_event", then_hang)
        _, gradients = plain(module, (x + 4, y))
        module.zero_grad()
        trainer.step(classify, (x + 4, y))
        pairs = zip(module.parameters(), gradients, strict=True)
        there = [parameter.grad is not None and torch.allclose(parameter.grad, right) for parameter, right in pairs]  # type: ignore[arg-type]
        fake.go_on(slow)
        queues_of(trainer).drain()
        assert [index for index, found in enumerate(there) if found] == [
            piece.index for piece in flat_of(trainer)._layout.buckets[0].pieces
        ]
        expect_same(module, gradients)


def test_no_replay_but_the_last_seals(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = module_and_batch()
    sealed: list[tuple[int, int]] = []

    class Watched:
        """The queues of a trainer, with a look at what is sealed."""

        def __init__(self, queues: Any) -> None:
            self._queues = queues

        def __getattr__(self, name: str) -> Any:
            return getattr(self._queues, name)

        def seal(self, device: int, k: int, *where: int) -> None:
            sealed.append((device, k))
            self._queues.seal(device, k, *where)

    with DataParallel(module, BOXES["two"], balance="even", micro_batch=3, graphs=True) as trainer:
        train(trainer, module, range(2))
        with monkeypatch.context() as patch:
            patch.setattr(trainer._execution.places, "queues", Watched(queues_of(trainer)))
            train(trainer, module, range(2, 3))
        assert sorted(sealed) == [(device, k) for device in range(2) for k in range(4)]


def test_a_bucket_that_is_written_again_is_sealed_in_the_end(fake: Any) -> None:
    module = Shared().double()
    with DataParallel(module, BOXES["two"], balance="even", graphs=True) as trainer:
        train(trainer, module, range(6))
        assert flat_of(trainer).early == 4


def test_events_go_with_their_graphs(fake: Any) -> None:
    count = fake.library.paceline_fake_leftovers
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["two"], balance="even", graphs=True) as trainer:
        train(trainer, module, range(4))
        before = count()
        module[1] = nn.Sigmoid()  # type: ignore[operator]
        trainer.step(classify, batch)
        assert count() == before - 2 * 4


class Backwards(nn.Module):
    """Registers its layers in another order than it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.middle = nn.Linear(8, 3), nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        return out


def test_graphs_go_with_the_layout_of_gradients(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch gives out memory again that was just given back, so a new layout may begin at the old addresses."""
    monkeypatch.setattr(flat_gradients, "MOST_BYTES", 1 << 20)
    kept: dict[int, Any] = {}
    memory_of = flat_gradients.FlatGradients._memory_of

    def at_the_same_addresses(self: Any, device: int, replica: Any) -> Any:
        made = memory_of(self, device, replica)
        made.buckets = kept.setdefault(device, made.buckets)
        views = self._layout.gradients(made.buckets)
        made.views = [views.get(index) for index in range(len(replica.parameters))]
        return made

    monkeypatch.setattr(flat_gradients.FlatGradients, "_memory_of", at_the_same_addresses)
    module = Backwards().double()
    x, y = torch.randn(42, 6, dtype=torch.float64), torch.randint(0, 3, (42,))
    with DataParallel(module, BOXES["two"], balance="even", micro_batch=4, graphs=True) as trainer:
        # Replays end the first steps. The third one ends with an eager micro-batch, and shows the order of the backward.
        for items in (40, 40, 42, 40, 40):
            expect_step(trainer, (x[:items], y[:items]))
        assert flat_of(trainer).layouts == 2
