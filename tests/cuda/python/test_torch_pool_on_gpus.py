"""`Pool` on GPUs: requests and jobs on streams, memory on several GPUs, and what happens when a GPU fails."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from gpu_cases import AS_PARTS, BOXES, GPUS, gpu_type, home_of, number_of
from paceline import DeviceLost, InvalidArgument, Unavailable
from paceline.torch import DataParallel, Pool
from pool_support import Held, served_by, soon
from torch_support import classify


class Net(nn.Module):
    """Has parameters, a buffer, and a tensor that is neither."""

    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.register_buffer("shift", torch.zeros(3))
        self.factor = torch.tensor(2.0)

    def forward(self, x: torch.Tensor) -> Any:
        assert torch.is_inference_mode_enabled()
        return {"y": self.layers(x) * self.factor.to(x.device) + self.shift, "n": torch.ones(len(x))}


def answers_of(net: Net, items: list[torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = net(torch.stack(items).to(net.shift.device))["y"].cpu()
    return found


def copies_of(batcher: Any) -> list[Any]:
    """What each device has of a served module."""
    return list(served_by(batcher)._copies.values())


def expect_answers(batcher: Any, net: Net, items: list[torch.Tensor]) -> None:
    found = list(batcher.map(items))
    assert all(one["y"].device.type == "cpu" and not one["y"].is_inference() for one in found)
    assert all(one["y"].untyped_storage().nbytes() == one["y"].nbytes for one in found)
    torch.testing.assert_close(torch.stack([one["y"] for one in found]), answers_of(net, items), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("devices", BOXES.values(), ids=BOXES)
@pytest.mark.parametrize("where", ["host", "gpu", "last gpu"])
def test_requests_are_answered_on_every_device_and_follow_the_users_module(
    streams: Any, devices: list[str], where: str
) -> None:
    gpus = [one for one in devices if one.startswith("cuda")]
    place = torch.device("cpu") if where == "host" else home_of(gpus[:1] if where == "gpu" else gpus[-1:])
    net = Net().eval().to(place)
    items = list(torch.randn(60, 6))
    with Pool(devices) as pool:
        batcher = pool.serve(net, max_batch=4)
        expect_answers(batcher, net, items)
        with torch.no_grad():
            next(net.parameters()).mul_(3)
            net.shift.add_(1)
        expect_answers(batcher, net, items)
        net.load_state_dict({name: torch.randn_like(one) for name, one in net.state_dict().items()}, assign=True)
        expect_answers(batcher, net, items)
        list(net.parameters())[2].data = torch.randn(3, 8, device=place)
        net.shift = torch.full((3,), -1.0, device=place)
        expect_answers(batcher, net, items)
        report = pool.report()
        assert not any(one["retired"] for one in report["devices"].values())
        assert report["outcomes"]["completed"] == 240


def test_the_devices_of_a_memory_share_a_copy_of_the_parameters(streams: Any) -> None:
    net = Net().eval()
    with Pool(GPUS) as pool:
        batcher = pool.serve(net, max_batch=1)
        with Held(pool, 4):
            answers = [batcher(one) for one in torch.randn(32, 6)]
        for one in answers:
            one.result()
        copies = copies_of(batcher)
        found = {one.replica.parameters[0].data_ptr() for one in copies if one.generation}
        assert len(found) == sum(one.generation > 0 for one in copies)
        assert next(net.parameters()).data_ptr() not in found


@pytest.mark.parametrize("devices", BOXES.values(), ids=BOXES)
def test_a_job_computes_on_the_stream_of_its_device_and_its_result_may_be_used_on_the_default_one(
    streams: Any, devices: list[str]
) -> None:
    def job(device: torch.device, x: torch.Tensor) -> Any:
        y = x.to(device) * 2
        return y, nn.Linear(6, 6).to(device), threading.current_thread().name

    with Pool(devices) as pool:
        for name in devices:
            x = torch.randn(4, 6)
            y, layer, _ = pool.submit(job, x, needs=name).result()
            assert y.device == home_of([name])
            assert layer.weight.device == home_of([name])
            torch.testing.assert_close((y + 1).cpu(), x * 2 + 1)
            del y, layer
            pool.submit(job, x, needs=name).result()


def test_a_job_waits_for_what_computes_its_arguments_on_whatever_gpu(streams: Any) -> None:
    here = torch.ones(1000, device=home_of(GPUS[:1]))
    there = torch.ones(1000, device=home_of(GPUS[-1:]))

    def job(device: torch.device, one: torch.Tensor, *, both: dict[str, torch.Tensor]) -> float:
        return float((one.to(device) + both["x"].to(device)).sum().cpu())

    with Pool(GPUS) as pool:
        for name in GPUS:
            here, there = here * 1, there * 1
            assert pool.submit(job, here, both={"x": there}, needs=name).result() == 2000.0
            here = here * 1
            many = pool.submit(lambda device, all: float(all[-1].to(device).sum().cpu()), [here] * 20_000, needs=name)
            assert many.result() == 1000.0


def test_a_gang_has_the_streams_of_its_devices(streams: Any) -> None:
    def job(devices: list[torch.device]) -> list[torch.Tensor]:
        return [torch.ones(4, device=one) * 3 for one in devices]

    with Pool(BOXES["mixed"]) as pool:
        found = pool.submit(job, gang=4).result()
        assert sorted(one.device.type for one in found) == sorted(["cpu", "cpu", gpu_type(), gpu_type()])
        assert [float((one + 1).sum().cpu()) for one in found] == [16.0] * 4


def test_a_result_is_handed_over_when_the_stream_has_done_its_work(fake: Any) -> None:
    hang = fake.hang
    with Pool(GPUS[:2]) as pool:
        stream = pool._jobs.engine.stream(GPUS[0])
        ran = threading.Event()
        hang(stream)
        job = pool.submit(lambda _: ran.set(), needs=GPUS[0])
        batcher = pool.serve(lambda x: x + 1)
        assert ran.wait(20)
        assert float(batcher(torch.ones(1)).result(20)) == 2.0, "the other GPU answers"
        assert not job.done()
        assert job.running()
        fake.go_on(stream)
        job.result(20)
        assert job.seconds >= 0


def test_cancel_does_not_end_what_a_gpu_is_at_and_close_waits_for_it(fake: Any) -> None:
    hang = fake.hang
    pool = Pool(GPUS[:1])
    stream = pool._jobs.engine.stream(GPUS[0])
    hang(stream)
    ran = threading.Event()
    job = pool.submit(lambda _: ran.set())
    waits = pool.submit(lambda _: 1, kind="other")
    assert ran.wait(20)
    assert not job.cancel()
    closing = threading.Thread(target=lambda: pool.close(cancel=True))
    closing.start()
    assert isinstance(waits.exception(20), paceline.Cancelled)
    assert closing.is_alive()
    assert not job.done()
    fake.go_on(stream)
    closing.join(20)
    assert job.done()
    assert fake.leftovers == 0


@pytest.mark.own_gpus("a poisoned GPU takes all of its parts along")
@pytest.mark.parametrize("idempotent", [True, False])
def test_a_gpu_that_fails_after_the_call_is_lost_and_batches_run_elsewhere_if_they_may(
    fake: Any, idempotent: bool
) -> None:
    poison = fake.poison
    ran: list[int] = []

    def answer(x: torch.Tensor) -> torch.Tensor:
        ran.append(fake.streams[-1][0])
        if len(ran) == 1:
            poison(1)
        return x + 1

    with Pool(GPUS[1:3]) as pool:
        batcher = pool.serve(answer, idempotent=idempotent)
        pool.retire(GPUS[2])
        first = batcher(torch.ones(1))
        assert soon(lambda: ran)
        if idempotent:
            pool.restore(GPUS[2])
            assert float(first.result(20)) == 2.0
            assert first.device == GPUS[2]
        else:
            pool.restore(GPUS[2])
            with pytest.raises(DeviceLost, match="may not run again"):
                first.result(20)
        assert ran == ([1, 2] if idempotent else [1])
        assert pool.report()["devices"][GPUS[1]]["retired"]
        with pytest.raises(paceline.Rejected, match="too few devices"):
            pool.submit(lambda _: 1, needs=GPUS[1]).result()
        assert pool.submit(lambda _: 1).result() == 1


@pytest.mark.own_gpus("a poisoned GPU takes all of its parts along")
def test_a_job_on_a_gpu_that_fails_has_its_own_error_or_that_of_the_gpu(fake: Any) -> None:
    poison = fake.poison

    def silent(_: torch.device) -> None:
        poison(0)

    def loud(_: torch.device) -> None:
        poison(1)
        raise RuntimeError("CUDA error: device-side assert triggered")

    with Pool(GPUS[:3]) as pool:
        with pytest.raises(DeviceLost, match="cuda:0"):
            pool.submit(silent, needs=GPUS[0]).result()
        with pytest.raises(RuntimeError, match="device-side assert"):
            pool.submit(loud, needs=GPUS[1]).result()
        retired = [one["retired"] for one in pool.report()["devices"].values()]
        assert retired == [True, True, False]
        job = pool.submit(lambda _: 1)
        assert (job.result(), job.device) == (1, GPUS[2])


def test_out_of_memory_halves_batches_and_gives_back_what_pytorch_keeps(fake: Any) -> None:
    sizes: list[int] = []

    def answer(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        if len(x) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x + 1

    assert not fake.released
    with Pool(GPUS[:1]) as pool:
        batcher = pool.serve(answer, max_batch=8, idempotent=True)
        with Held(pool):
            answers = [batcher(torch.tensor(float(k))) for k in range(8)]
        assert [float(one.result()) for one in answers] == [k + 1.0 for k in range(8)]
        assert fake.released == sum(size > 2 for size in sizes) > 0

        def job(_: torch.device) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        released = fake.released
        with pytest.raises(torch.OutOfMemoryError):
            pool.submit(job).result()
        assert fake.released == released + 1
        assert pool.submit(lambda _: 1).result() == 1


def test_requests_on_gpus_and_modules_without_a_place_are_refused(streams: Any) -> None:
    net = Net().eval()
    with Pool(GPUS[:2]) as pool:
        batcher = pool.serve(net)
        with pytest.raises(InvalidArgument, match=r"a tensor on \w+:\d+\. It must be a tensor in host memory"):
            batcher(torch.ones(6, device=home_of(GPUS[:1])))
        with pytest.raises(InvalidArgument, match="is on meta, and has no values"):
            pool.serve(nn.Linear(2, 2, device="meta").eval())
        mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device=home_of(GPUS[:1]))).eval()
        with pytest.raises(InvalidArgument, match=r"0.weight is on cpu, and 1.weight on"):
            pool.serve(mixed)
        with pytest.raises(InvalidArgument, match=rf"no copies, and this one is on cpu, so {GPUS[0]} cannot call it"):
            pool.serve(torch.jit.trace(nn.Linear(2, 2).eval(), torch.ones(1, 2)))
        found = pool.serve(lambda state, x: state(x), initializer=lambda device: nn.Linear(6, 2).eval().to(device))
        assert found(torch.ones(6)).result().shape == (2,)


def test_the_callers_default_device_changes_nothing(streams: Any) -> None:
    net = Net().eval()
    items = list(torch.randn(20, 6))
    torch.set_default_device(home_of(GPUS[:1]))
    try:
        with Pool(BOXES["mixed"]) as pool:
            batcher = pool.serve(net, max_batch=4)
            found = torch.stack([batcher(one).result()["y"] for one in items])
            assert pool.submit(lambda _: torch.ones(1).device.type).result() == "cpu"
    finally:
        torch.set_default_device(None)
    torch.testing.assert_close(found, answers_of(net, items), rtol=1e-5, atol=1e-5)


def test_devices_join_with_every_served_module_and_work(streams: Any) -> None:
    net, items = Net().eval(), list(torch.randn(40, 6))
    with Pool(["host:0", GPUS[0]]) as pool:
        batcher = pool.serve(net, max_batch=2)
        expect_answers(batcher, net, items)
        for name in GPUS[1], "host:1", GPUS[2]:
            pool.add(name)
            pool.serve(net)
        assert [one.name for one in pool.devices] == ["host:0", GPUS[0], GPUS[1], "host:1", GPUS[2]]
        for one in pool.devices:
            job = pool.submit(lambda device: device, needs=one.name)
            assert job.result() == home_of([one.name])
            assert job.device == one.name
        for name in "host:0", GPUS[0]:
            pool.retire(name)
        expect_answers(batcher, net, items)
        pool.retire(GPUS[1])
        pool.restore("host:0")
        with torch.no_grad():
            next(net.parameters()).mul_(2)
        expect_answers(batcher, net, items)
        report = pool.report()["devices"]
        assert sum(one["jobs"] for one in report.values()) == 3 * 40 + 5
        assert report[GPUS[1]]["jobs"] + report["host:1"]["jobs"] + report[GPUS[2]]["jobs"] > 3
        for name in GPUS[1], "host:0":
            with pytest.raises(InvalidArgument, match=f"the pool has {name} already"):
                pool.add(name)
        with pytest.raises(InvalidArgument, match="cuda:99"):
            pool.add("cuda:99")
    with pytest.raises(Unavailable, match="closed"):
        pool.add(GPUS[3])


def test_a_device_that_joins_takes_what_waits_and_the_last_ones_may_go(fake: Any) -> None:
    with Pool(GPUS[:1]) as pool:
        with Held(pool):
            jobs = [pool.submit(lambda _, k=k: k, kind="work") for k in range(5)]
            pool.add(GPUS[1])
            assert [job.result(20) for job in jobs] == list(range(5))
            assert {job.device for job in jobs} == {GPUS[1]}
        assert pool.submit(lambda places: len(places), gang=2).result() == 2
    assert fake.leftovers == 0


def test_a_device_that_cannot_have_a_served_module_does_not_join(streams: Any) -> None:
    with Pool(["host:0"]) as pool:
        pool.served = pool.serve(torch.jit.trace(nn.Linear(2, 2).eval(), torch.ones(1, 2)))  # type: ignore[attr-defined]
        with pytest.raises(InvalidArgument, match="has no copies"):
            pool.add(GPUS[0])
        assert [one.name for one in pool.devices] == list(pool.report()["devices"]) == ["host:0"]
        assert pool.submit(lambda _: 1).result() == 1


def test_by_default_a_pool_has_the_gpus(fake: Any) -> None:
    everything = [one.name for one in paceline.devices()]
    gpus = [one for one in everything if one.startswith("cuda")]
    hosts = [one for one in everything if one.startswith("host")]
    for given, names in (("auto", gpus), ("cuda", gpus), ("host", hosts), (["host", "cuda"], [*hosts, *gpus])):
        with Pool(given) as pool:
            assert [one.name for one in pool.devices] == names
            assert pool.submit(lambda _: 1).result() == 1


@pytest.mark.usefixtures("whole_afterwards")
@pytest.mark.own_gpus("these are parts themselves")
def test_parts_of_a_gpu_share_the_parameters_and_are_given_back(fake: Any) -> None:
    names = [one.name for one in paceline.partition("cuda:0", [0.75, 0.25])]
    net, items = Net().eval(), list(torch.randn(40, 6))
    pool = Pool(names)
    batcher = pool.serve(net, max_batch=2)
    expect_answers(batcher, net, items)
    assert len({one.replica.parameters[0].data_ptr() for one in copies_of(batcher)}) == 1
    with pytest.raises(InvalidArgument, match="still in use"):
        paceline.release_partitions("cuda:0")
    pool.close()
    pool.close()
    assert (fake.released, fake.streams_ended) == (1, 0), (
        "a trainer on the parts may have graphs with workspaces of cuBLAS"
    )
    paceline.release_partitions("cuda:0")


@pytest.mark.parametrize("devices", [BOXES["two"], BOXES["mixed"]], ids=str)
def test_requests_beside_training_change_no_bit_of_it(fake: Any, devices: list[str]) -> None:
    items = list(torch.randn(20, 6))
    x, labels = torch.randn(64, 6), torch.randint(0, 3, (64,))
    found: list[list[torch.Tensor]] = []
    for busy in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        with DataParallel(module, devices, balance="even", micro_batch=4) as trainer, Pool(trainer) as pool:
            optimizer = trainer.optimizer(torch.optim.SGD, lr=0.1)
            batcher = pool.serve(Net().eval(), max_batch=4)
            answers = []
            for _ in range(10):
                if busy:
                    answers += [batcher(one) for one in items]
                trainer.step(classify, (x, labels))
                optimizer.step()
                optimizer.zero_grad()
            for one in answers:
                one.result()
        found.append([one.detach().clone() for one in module.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_numbers_of_gpus_are_those_of_their_names() -> None:
    assert number_of("cuda:0/3") == 0
    assert AS_PARTS or number_of(GPUS[3]) == 3
