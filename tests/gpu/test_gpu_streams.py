"""Whatever is late, the step is right: a delay in every place where one stream's work comes before another's."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch

from gpu_cases import queues_of
from gpu_support import Box, LateBackward, delay, delay_stream, equal, synchronize
from paceline.torch import DataParallel
from torch_support import classifier, classify

SECONDS = 0.01  # long against everything else of these steps
STEPS = 4
ITEMS = 48
PLACES = ["nowhere", "batch", "update", "reduction", "copies"]
PLACES += [f"{what} {device}" for what in ("forward", "backward") for device in range(4)]


def delay_streams(trainer: DataParallel, place: str) -> None:
    """Of the streams that bring devices their parameters and what they deliver, or of the one that reduces."""
    queues = queues_of(trainer)
    handles = {queues.home_stream} if place == "reduction" else {*queues.sources} - {None}
    assert handles, f"this box has nothing to delay for {place}"
    with torch.cuda.device(torch.device("cuda", 0)):
        for handle in handles:
            delay_stream(handle, SECONDS)


def why_not_here(place: str, box: Box) -> str:
    if place[-1].isdigit() and int(place[-1]) >= len(box):
        return f"this box has {len(box)} devices"
    if place in ("reduction", "copies") and not box.is_cuda:
        return "about GPUs alone: host devices have no streams"
    if place == "copies" and len({device.memory_space for device in box.devices}) == 1:
        return "one memory space: nothing is copied to another"
    return ""


def train(box: Box, place: str, module: Any, batches: list[Any], trainer: DataParallel | None) -> list[torch.Tensor]:
    """Some steps with a delay at `place`; plain PyTorch without a trainer."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    staging = [torch.empty_like(part) for part in batches[0]]
    late_device = int(place[-1]) if place[-1].isdigit() else -1

    def loss_fn(replica: Any, part: Any) -> Any:
        # Which device this is: its slice is a view into the batch, and shares are even. (A host device beside a GPU has a copy.)
        share = -(-ITEMS // len(box))
        late = part[0].storage_offset() // part[0].stride(0) // share == late_device
        if late and place.startswith("forward"):
            delay(box, SECONDS, part[0])
        if place in ("reduction", "copies") and trainer is not None:
            delay_streams(trainer, place)  # after the parameters came, before what the device delivers
        if late and place.startswith("backward"):
            return classify(lambda x: LateBackward.apply(replica(x), box, SECONDS), part)  # type: ignore[no-untyped-call]
        return classify(replica, part)

    for batch in batches:
        if place == "batch":
            delay(box, SECONDS)
        for there, part in zip(staging, batch, strict=True):
            there.copy_(part)  # the same memory each time: the next batch must not come before this one was read
        if trainer is None:
            loss = classify(module, staging)
            loss.backward()
        else:
            if place == "copies":
                delay_streams(trainer, place)  # before the parameters
            loss = trainer.step(loss_fn, tuple(staging))
        losses.append(loss.detach().clone())
        if place == "update":
            delay(box, SECONDS)
        optimizer.step()
        optimizer.zero_grad()
    synchronize(box)
    return losses


@pytest.mark.parametrize("side_stream", [False, True], ids=["default_stream", "side_stream"])
@pytest.mark.parametrize("place", PLACES)
def test_a_delay_changes_nothing(place: str, side_stream: bool, box: Box) -> None:
    if why_not := why_not_here(place, box):
        pytest.skip(why_not)
    if side_stream and not box.is_cuda:
        pytest.skip("host devices have no streams")
    module, _ = classifier(ITEMS)
    module = box.put(module)
    batches = [box.put(classifier(ITEMS, seed=seed)[1]) for seed in range(STEPS)]
    reference = copy.deepcopy(module)
    wanted = train(box, "nowhere", reference, batches, None)
    stream = torch.cuda.Stream() if side_stream else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        with DataParallel(module, box.devices, balance="even") as trainer:
            losses = train(box, place, module, batches, trainer)
    equal(losses, wanted, 1e-12)
    equal(list(module.parameters()), list(reference.parameters()), 1e-12)


@pytest.mark.needs_cuda
@pytest.mark.boxes("two_unequal_parts", "one_gpu")
def test_a_step_does_not_wait_for_the_gpu(box: Box) -> None:
    module, batch = classifier(ITEMS)
    module, batch = box.put(module), box.put(batch)
    with DataParallel(module, box.devices, balance="even") as trainer:
        trainer.step(classify, batch)
        torch.cuda.synchronize()
        delay(box, 1.0)
        loss = trainer.step(classify, batch)
        behind = torch.cuda.Event()
        behind.record()
        assert not behind.query()
        assert loss.device == box.torch_device
        torch.cuda.synchronize()


@pytest.mark.needs_cuda
def test_the_callers_device_and_stream_are_untouched(box: Box) -> None:
    module, batch = classifier(ITEMS)
    module, batch = box.put(module), box.put(batch)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        with DataParallel(module, box.devices) as trainer:
            for _ in range(3):
                trainer.step(classify, batch)
                trainer.predict(batch[0])
                assert torch.cuda.current_stream() == stream
                assert torch.cuda.current_device() == box.torch_device.index
        assert torch.cuda.current_stream() == stream
    torch.cuda.synchronize()


@pytest.mark.needs_cuda
def test_gradients_may_be_read_at_once_on_the_callers_stream(box: Box) -> None:
    module, batch = classifier(ITEMS)
    module, batch = box.put(module), box.put(batch)
    with DataParallel(module, box.devices) as trainer:
        sums = []
        for _ in range(20):
            trainer.step(classify, batch)
            sums.append(torch.stack([p.grad.sum() for p in module.parameters()]))
            module.zero_grad(set_to_none=True)
            time.sleep(0.001)  # freed memory may be given to another stream now
    for each in sums:
        torch.testing.assert_close(each, sums[0], rtol=1e-9, atol=1e-12)


@pytest.mark.needs_cuda
def test_a_batch_of_the_host_follows_the_callers_stream(box: Box) -> None:
    module, _ = classifier(ITEMS)
    module = box.put(module)
    batches = [classifier(ITEMS, seed=seed)[1] for seed in range(STEPS)]  # pageable memory of the host
    reference = copy.deepcopy(module)
    wanted = train(box, "nowhere", reference, [box.put(batch) for batch in batches], None)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    streams = [torch.cuda.default_stream(), torch.cuda.Stream()]
    losses = []
    with DataParallel(module, box.devices, balance="even") as trainer:
        for step, batch in enumerate(batches):
            here, there = streams[step % 2], streams[(step + 1) % 2]
            here.wait_stream(there)
            with torch.cuda.stream(here):
                delay(box, SECONDS)
                losses.append(trainer.step(classify, batch))
                optimizer.step()
                optimizer.zero_grad()
    synchronize(box)
    equal(losses, wanted, 1e-12)
    equal(list(module.parameters()), list(reference.parameters()), 1e-12)


@pytest.mark.needs_cuda
@pytest.mark.boxes("two_unequal_parts")
def test_shares_follow_speeds_though_nobody_waits(box: Box) -> None:
    module = box.put(torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(6))))
    batch = torch.randn(4096, 2048, device=box.torch_device)
    with DataParallel(module, box.devices) as trainer:
        for _ in range(30):
            trainer.step(lambda one, x: one(x).square().mean(), batch)  # no report(), which would wait
            module.zero_grad()
        shares = list(trainer.shares.values())
    assert shares[0] > 1.5 * shares[1], shares


@pytest.mark.needs_cuda
@pytest.mark.boxes("two_equal_parts", "gpu_and_host")
def test_fused_optimizers_take_the_gradients_of_convolutions_in_any_layout(box: Box) -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten()).double()
    module = box.put(module.to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    reference = copy.deepcopy(module)
    images = torch.randn(16, 3, 8, 8, dtype=torch.float64, device=box.torch_device)
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.1, fused=True) for one in (module, reference)]
    with DataParallel(module, box.devices, balance="even") as trainer:
        for _ in range(3):
            trainer.step(lambda one, x: one(x).square().mean(), images)
            reference(images).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    equal(list(module.parameters()), list(reference.parameters()), 1e-9)


@pytest.mark.needs_cuda
@pytest.mark.boxes("two_equal_parts")
def test_two_trainers_take_turns_on_the_same_devices(box: Box) -> None:
    pairs = [classifier(ITEMS, seed=seed) for seed in (1, 2)]
    modules = [box.put(module) for module, _ in pairs]
    batch = box.put(pairs[0][1])
    references = [copy.deepcopy(module) for module in modules]
    first, second = (DataParallel(module, box.devices, balance="even") for module in modules)
    with first, second:
        for _ in range(3):
            for trainer, module, reference in zip((first, second), modules, references, strict=True):
                module.zero_grad()
                reference.zero_grad()
                loss = classify(reference, batch)
                loss.backward()
                equal([trainer.step(classify, batch)], [loss.detach()], 1e-12)
                equal([p.grad for p in module.parameters()], [p.grad for p in reference.parameters()], 1e-12)
