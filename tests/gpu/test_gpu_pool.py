"""`Pool` on a GPU, whole and in parts: whatever is late, requests and jobs have the right answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpu_support import Box, delay, equal, synchronize
from paceline import find_device
from paceline.torch import Pool
from torch_support import output_of, run_script

SECONDS = 0.02  # long against everything else here


class Net(nn.Module):
    """Has parameters, and statistics as buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 8))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


def answers_of(net: Net, items: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = net(items.to(next(net.parameters()).device)).cpu()
    return found


def names_of(box: Box) -> list[str]:
    return [device.name for device in box.devices]


@pytest.mark.parametrize("at_home", [True, False], ids=["on the GPU", "on the host"])
def test_requests_are_answered_as_the_module_answers_and_follow_it(box: Box, at_home: bool) -> None:
    net = Net().eval()
    if at_home:
        box.put(net)
    items = torch.randn(300, 16)
    with Pool(box.devices) as pool:
        batcher = pool.serve(net, max_batch=16)
        for round in range(3):
            found = torch.stack(list(batcher.map(items)))
            equal([found], [answers_of(net, items)], 1e-4)
            with torch.no_grad():
                next(net.parameters()).add_(0.1 * (round + 1))
                next(net.buffers()).add_(0.1)
        assert not any(one["retired"] for one in pool.report()["devices"].values())


@pytest.mark.needs_cuda
def test_replays_of_graphs_answer_as_the_module_and_follow_it(box: Box) -> None:
    net = box.put(Net().eval())
    items = torch.randn(100, 16)
    with Pool(box.devices) as pool:
        batcher = pool.serve(net, max_batch=4, graphs=True)
        for round in range(4):
            found = torch.stack(list(batcher.map(items)))
            equal([found], [answers_of(net, items)], 1e-4)
            with torch.no_grad():
                next(net.parameters()).add_(0.1 * (round + 1))
                if round == 2:
                    last = list(net.parameters())[-2]
                    last.data = last.data.clone()
        assert "CUDA graphs: 0 captured" not in pool.explain()


def test_a_request_sees_weights_that_the_default_stream_has_not_written_yet(box: Box) -> None:
    net = box.put(nn.Linear(16, 4).eval())
    with Pool(box.devices) as pool:
        batcher = pool.serve(net)
        batcher(torch.ones(16)).result()
        for value in (1.0, 2.0, 3.0):
            delay(box, SECONDS)
            with torch.no_grad():
                net.weight.fill_(value)
                net.bias.zero_()
            equal([batcher(torch.ones(16)).result()], [torch.full((4,), 16 * value)], 1e-4)


def test_a_job_ends_when_the_device_has_done_its_work(box: Box) -> None:
    def job(device: torch.device, x: torch.Tensor) -> torch.Tensor:
        y = x.to(device)
        delay(box, SECONDS, y)
        return y * 2

    with Pool(box.devices) as pool:
        x = torch.randn(1000)
        for name in names_of(box):
            done = pool.submit(job, x, needs=name)
            equal([done.result().cpu()], [x * 2], 1e-6)
            assert done.seconds >= 0.9 * SECONDS


def test_a_job_waits_for_its_arguments(box: Box) -> None:
    with Pool(box.devices) as pool:
        for name in names_of(box):
            x = torch.zeros(1000, device=box.torch_device)
            delay(box, SECONDS, x)
            x += 3
            job = pool.submit(lambda device, x: float(x.to(device).sum().cpu()), x, needs=name)
            assert job.result() == 3000.0


@pytest.mark.needs_cuda
def test_memory_of_a_result_is_not_reused_while_the_default_stream_reads_it(box: Box) -> None:
    size = 1 << 20

    def job(device: torch.device, value: float) -> torch.Tensor:
        return torch.full((size,), value, device=device)

    name = next(one.name for one in box.devices if one.kind == "cuda")
    with Pool(box.devices) as pool:
        kept = []
        for k in range(5):
            result = pool.submit(job, float(k), needs=name).result()
            delay(box, SECONDS)
            kept.append(result.clone())
            del result
            pool.submit(job, -1.0, needs=name).result()
        synchronize(box)
        assert [float(one.min()) for one in kept] == [float(one.max()) for one in kept] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_gang_ends_when_all_of_its_devices_have_done_their_work(box: Box) -> None:
    def job(devices: Any) -> list[torch.Tensor]:
        found = []
        for device in devices if isinstance(devices, list) else [devices]:
            x = torch.ones(1000, device=device)
            delay(box, SECONDS, x)
            found.append(x * 2)
        return found

    with Pool(box.devices) as pool:
        for one in pool.submit(job, gang=len(box)).result():
            assert float(one.sum().cpu()) == 2000.0


def test_out_of_memory_halves_batches(box: Box) -> None:
    if not box.is_cuda:
        pytest.skip("about GPUs alone: the host would swap")
    free, _ = torch.cuda.mem_get_info()

    def hungry(x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            torch.empty(len(x) * free // 5, dtype=torch.uint8, device=x.device)
        return x + 1

    with Pool(names_of(box)[:1]) as pool:
        batcher = pool.serve(hungry, max_batch=16, idempotent=True)
        assert [float(one) for one in batcher.map(torch.arange(64.0))] == [k + 1.0 for k in range(64)]


def test_a_device_joins(box: Box) -> None:
    net, items = box.put(Net().eval()), torch.randn(100, 16)
    first, *others = box.devices
    with Pool([first]) as pool:
        batcher = pool.serve(net, max_batch=8)
        for device in [*others, find_device("host:3")]:
            pool.add(device)
            pool.retire(pool.devices[-2].name)
            equal([torch.stack(list(batcher.map(items)))], [answers_of(net, items)], 1e-4)
            assert pool.report()["devices"][device.name]["jobs"] == 100


PROGRAM = """
from paceline.torch import Pool
def job(device):
    x = torch.ones(1000, device=device)
    if x.is_cuda:
        torch.cuda._sleep(500_000_000)
    (x * 2).sum()
pool = Pool(devices)
batcher = pool.serve(nn.Linear(4, 4).eval())
answers = [batcher(torch.ones(4)) for _ in range(8)]
jobs = [pool.submit(job) for _ in range(4)]
print("ends", flush=True)
"""


def test_a_program_may_end_while_the_gpu_is_at_it(box: Box) -> None:
    assert output_of(box.program + PROGRAM, timeout=60, fork=False) == "ends"


BREAKS = """
from paceline import DeviceLost
from paceline.torch import Pool
def breaks(x):
    if x.is_cuda:
        x[torch.full((1,), 1 << 30, device=x.device)]  # a device-side assertion, after the call
    return x + 1
pool = Pool([*devices, "host:0"])
for device in devices[1:]:
    pool.retire(device if isinstance(device, str) else device.name)
pool.retire("host:0")
answer = pool.serve(breaks, idempotent=True)(torch.ones(4))
while not answer.running():
    time.sleep(0.001)
pool.restore("host:0")
print(answer.result(30).tolist(), answer.device)
job = pool.submit(lambda device: str(device))
print(job.result(30))
print([name for name, one in pool.report()["devices"].items() if one["retired"]] != [])
pool.close()
print("end", flush=True)
"""


@pytest.mark.needs_cuda
@pytest.mark.boxes("one_gpu")
def test_a_batch_runs_elsewhere_when_its_gpu_fails_after_the_call(box: Box) -> None:
    done = run_script(box.program + BREAKS, timeout=60, fork=False)
    lines = done.stdout.splitlines()  # its status is not ours to promise
    assert lines[:4] == ["[2.0, 2.0, 2.0, 2.0] host:0", "cpu", "True", "end"], done.stdout + done.stderr
