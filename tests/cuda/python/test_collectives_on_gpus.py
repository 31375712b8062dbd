"""What carries parameters and gradients between GPUs: NCCL, also one that fails, or copies; how fast links are, and gradients that travel in another type."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch

import paceline.torch._devices.places as places
from gpu_cases import BOXES, expect_step, gpu_type, home_of, module_and_batch, plain
from paceline import Error, InvalidArgument, Timeout, _cli, info
from paceline._core.engine import DeviceQueues
from paceline.torch import DataParallel
from paceline.torch._devices import cuda
from torch_support import classify

NCCL = pytest.mark.own_gpus("NCCL takes no two ranks of a process on one GPU")
TRANSPORTS = pytest.mark.parametrize("transport", ["auto", pytest.param("nccl", marks=NCCL), "copies"])


def train(trainer: DataParallel, batch: Any) -> None:
    """Three steps, and a prediction."""
    module: Any = trainer.module
    for _ in range(3):
        expect_step(trainer, batch)
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    torch.testing.assert_close(trainer.predict(batch[0]), module(batch[0]).detach())


@TRANSPORTS
@pytest.mark.parametrize("box", ["two", "four", "mixed"])
def test_a_step_has_a_call_of_nccl_for_the_gradients_and_one_for_the_loss(fake: Any, box: str, transport: Any) -> None:
    calls = fake.nccl_calls
    module, batch = module_and_batch()
    with DataParallel(module, BOXES[box], balance="even", micro_batch=4, transport=transport) as trainer:
        before = [calls(name) for name in ("ncclReduce", "ncclBroadcast")]
        train(trainer, batch)
        after = [calls(name) for name in ("ncclReduce", "ncclBroadcast")]
    # And one broadcast for all parameters, whatever their number.
    gpus = sum(name.startswith("cuda") for name in BOXES[box])
    made = [now - then for now, then in zip(after, before, strict=True)]
    assert made == ([3 * 2 * gpus, 4 * gpus] if transport == "nccl" else [0, 0])


@NCCL
def test_explain_says_what_is_used_and_why(fake: Any) -> None:
    module, _ = module_and_batch()
    said = {}
    for transport in ("auto", "nccl"):
        trainer = DataParallel(module, BOXES["two"], transport=transport)
        trainer.close()
        said[transport] = trainer.explain()
    assert "Between GPUs: copies, each bucket while the devices still compute, by PCIe peer access.\n" in said["auto"]
    assert "Between GPUs: NCCL 2.30.7 (" in said["nccl"]
    assert "after the devices' last work.\n" in said["nccl"]
    with DataParallel(module, BOXES["one"]) as trainer:
        assert "Between GPUs" not in trainer.explain()


def test_what_is_no_transport_is_refused() -> None:
    module, _ = module_and_batch()
    with pytest.raises(InvalidArgument, match="transport is 'mpi'; it must be 'auto', 'nccl' or 'copies'"):
        DataParallel(module, ["host:0", "host:1"], transport="mpi")  # type: ignore[arg-type]


@NCCL
@pytest.mark.parametrize("function", ["ncclBroadcast", "ncclReduce"])
def test_a_call_that_fails_discards_the_step_and_names_the_device(fake: Any, function: str) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["two"], balance="even", transport="nccl") as trainer:
        fake.fail_nccl(function, 1)
        with pytest.raises(Error, match=f"cuda:1: {function} failed") as error:
            trainer.step(classify, batch)
        assert error.value.device == "cuda:1"
        assert all(parameter.grad is None for parameter in module.parameters())
        expect_step(trainer, batch)


@NCCL
def test_a_collective_that_hangs_is_told_by_the_next_call(fake: Any) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["two"], balance="even", timeout=3.0, transport="nccl") as trainer:
        trainer.step(classify, batch)
        module.zero_grad()
        fake.hang_nccl("ncclReduce")
        # Waits for nothing. Memory that a GPU has yet to write is PyTorch's to keep, but here it is the host's.
        kept = [trainer.step(classify, batch), *(parameter.grad for parameter in module.parameters())]
        module.zero_grad()
        with pytest.raises(Timeout, match=r"ncclReduce did not end within 1\.5 s"):
            trainer.report()
        expect_step(trainer, batch)
    assert all(tensor is not None for tensor in kept)


@NCCL
def test_trainers_end_their_communicators(fake: Any) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["four"], balance="even", transport="nccl") as trainer:
        trainer.step(classify, batch)
    assert fake.nccl_calls("ncclCommDestroy") == 4


def gradients_of(devices: list[str], dtype: torch.dtype = torch.float32, **options: Any) -> list[torch.Tensor]:
    """Of the last of three steps, the second of which has laid memory out anew."""
    with home_of(devices):
        module, batch = module_and_batch(dtype)
    with DataParallel(module, devices, balance="even", **options) as trainer:
        for _ in range(3):
            module.zero_grad()
            trainer.step(classify, batch)
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("box", ["two", "four", "mixed"])
@pytest.mark.parametrize("micro_batch", [None, 2])
def test_gradients_travel_in_the_type_asked_for(
    fake: Any, box: str, half: torch.dtype, micro_batch: int | None
) -> None:
    module, batch = module_and_batch(torch.float32)
    _, exact = plain(module, batch)
    rounded = gradients_of(BOXES[box], reduce_dtype=half, micro_batch=micro_batch)
    # Each of n parts and the sum are rounded once, each by half a unit of the last place at most. Parts may be larger than their sum.
    tolerance = 4 * torch.finfo(half).eps
    for one, wanted in zip(rounded, exact, strict=True):
        assert wanted is not None
        assert one.dtype == torch.float32
        assert torch.equal(one, one.to(half).float()), "the sum is rounded"
        torch.testing.assert_close(one, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))
    assert any(not torch.equal(one, wanted) for one, wanted in zip(rounded, exact, strict=True) if wanted is not None)


@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0", "host:0"], ["host:0", "host:1"]], ids=str)
def test_nothing_is_rounded_without_a_second_gpu(fake: Any, devices: list[str]) -> None:
    as_ever = gradients_of(devices)
    for one, wanted in zip(gradients_of(devices, reduce_dtype=torch.bfloat16), as_ever, strict=True):
        assert torch.equal(one, wanted)


def test_gradients_of_a_wrapped_module_travel_in_that_type(fake: Any) -> None:
    module, (x, label) = module_and_batch(torch.float32)
    with DataParallel(module, BOXES["two"], balance="even", reduce_dtype=torch.bfloat16) as wrapped:
        classify(wrapped, (x, label)).backward()
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, parameter.grad.bfloat16().float()), "the sum is rounded"


def test_other_types_travel_as_they_are(fake: Any) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["four"], balance="even", reduce_dtype=torch.bfloat16) as trainer:
        expect_step(trainer, batch)


def test_an_overflow_in_float16_is_one_for_the_scaler(fake: Any) -> None:
    module, batch = module_and_batch(torch.float32)
    before = copy.deepcopy(module.state_dict())
    scaler = torch.amp.GradScaler(gpu_type(), init_scale=2.0**24)
    with DataParallel(module, BOXES["two"], balance="even", reduce_dtype=torch.float16) as trainer:
        optimizer = trainer.optimizer(torch.optim.SGD, lr=0.1)
        trainer.step(classify, batch, scaler=scaler)
        assert any(parameter.grad is not None and parameter.grad.isinf().any() for parameter in module.parameters())
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**23
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), "the step was left out"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"reduce_dtype": torch.float64},
            "reduce_dtype is torch.float64; it must be torch.bfloat16, torch.float16 or None",
        ),
        ({"reduce_dtype": "bfloat16"}, "reduce_dtype is 'bfloat16'"),
        ({"reduce_dtype": torch.float16, "transport": "nccl"}, "NCCL would not only send, but add in that type"),
    ],
    ids=["type", "word", "nccl"],
)
def test_what_cannot_travel_is_refused(options: Any, words: str) -> None:
    module, _ = module_and_batch()
    with pytest.raises(InvalidArgument, match=words):
        DataParallel(module, ["host:0", "host:1"], **options)


@pytest.mark.own_gpus("links differ between GPUs")
def test_explain_says_what_travels_and_how_fast_links_are(fake: Any) -> None:
    module, _ = module_and_batch()
    with DataParallel(module, BOXES["two"], reduce_dtype=torch.bfloat16) as trainer:
        lines = trainer.explain().splitlines()
    begin = lines.index(
        "Between GPUs: copies, each bucket while the devices still compute, float32 gradients in bfloat16, by PCIe peer access."
    )
    assert lines[begin + 1].split() == ["GB/s", "to", "cuda:0", "cuda:1"]
    name, first, second = lines[begin + 2].split()[1:]
    assert (name, first) == ("cuda:0", "-")
    assert second == "?" or float(second) > 0
    assert lines[begin + 4].split(maxsplit=2) == ["PCIe", "peer", "all pairs"]


@pytest.mark.parametrize("wrong", [(0, 1), (1, 0)], ids=str)
@pytest.mark.own_gpus("links differ between GPUs")
def test_explain_and_info_name_gpus_whose_direct_copies_arrive_wrong(
    fake: Any, wrong: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    fake.lie(*wrong)
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        expect_step(trainer, batch)
        said = trainer.explain()
    assert "still compute, through the host, because direct copies arrived wrong." in said
    assert _cli.main(["info", "--links"]) == 0
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "through the host, because direct copies arrived wrong cuda:0 and cuda:1" in rows
    assert "PCIe peer cuda:2 and cuda:3" in rows


@pytest.mark.own_gpus("links differ between GPUs")
def test_pytorch_gets_to_know_peers_before_paceline_checks_them(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch enables access once. What paceline then disables stays disabled."""
    order: list[Any] = []

    class Recording(DeviceQueues):
        def __init__(self, *args: Any, **options: Any) -> None:
            order.append("queues")
            super().__init__(*args, **options)

    monkeypatch.setattr(places, "DeviceQueues", Recording)
    monkeypatch.setattr(cuda, "meet_peers", order.append)
    for box in ("two", "four"):
        DataParallel(module_and_batch()[0], BOXES[box]).close()
    DataParallel(module_and_batch()[0], ["cuda:0", "host:0"]).close()
    assert order == [[0, 1], "queues", [0, 1, 2, 3], "queues", "queues"]


def test_peers_are_met_by_a_copy_for_each_ordered_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[tuple[int, int]] = []
    links = {(0, 1), (1, 0), (2, 0)}

    class Tensor:
        def __init__(self, index: int) -> None:
            self.index = index

        def to(self, target: torch.device) -> None:
            copies.append((self.index, target.index))

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda source, target: (source, target) in links)
    monkeypatch.setattr(torch, "zeros", lambda count, device: Tensor(device.index))
    cuda.meet_peers([0, 1, 2])
    assert copies == [(0, 1), (1, 0), (2, 0)]


@pytest.mark.own_gpus("links differ between GPUs")
def test_a_home_with_the_least_memory_is_named(fake: Any) -> None:
    module, _ = module_and_batch()
    with DataParallel(module, BOXES["two"]) as trainer:
        assert "least memory" not in trainer.explain(), "all are alike"
    fake.set_memory(0, 2**28)
    with DataParallel(module, BOXES["two"]) as trainer:
        said = trainer.explain()
    assert "The module is on the GPU with the least memory (cuda:0: 0.25 GiB; cuda:1 has 1 GiB)." in said
    fake.set_memory(0, 2**30)
    fake.set_memory(1, 2**28)
    with DataParallel(module, BOXES["two"]) as trainer:
        assert "least memory" not in trainer.explain()


def test_each_gpus_thread_has_one_thread_of_openmp(fake: Any) -> None:
    module, batch = module_and_batch()
    found: list[int] = []

    def loss(model: Any, items: Any) -> Any:
        found.append(torch.get_num_threads())
        torch.set_num_threads(3)  # what a function leaves set is undone
        return classify(model, items)

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with DataParallel(module, BOXES["two"], balance="even") as trainer:
            for _ in range(2):
                trainer.step(loss, batch)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert found == [1] * 4


def test_auto_measures_links_and_says_what_follows_for_parameters(fake: Any) -> None:
    module, _ = module_and_batch()
    said = {}
    for transport in ("auto", "copies"):
        with DataParallel(module, BOXES["four"], transport=transport) as trainer:
            said[transport] = trainer.explain()
    follows = (
        ", parameters relayed from GPU to GPU.",
        ", all parameters from the first GPU.",
        ", parameters copied to the host once for all GPUs.",
    )
    assert sum(words in said["auto"] for words in follows) == 1
    assert "GB/s to" in said["auto"]
    assert "GB/s to" not in said["copies"], "nothing is measured that nothing follows from"


@pytest.mark.own_gpus("links differ between GPUs")
def test_info_measures_links_if_asked(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert info.collect()["gpu_links"] == []
    _cli.main(["info", "--links", "--json"])
    links = json.loads(capsys.readouterr().out)["gpu_links"]
    assert len(links) == 4 * 3
    assert {link["kind"] for link in links if {link["from"], link["to"]} == {"cuda:2", "cuda:3"}} == {"PCIe peer"}
    assert {link["kind"] for link in links if {link["from"], link["to"]} == {"cuda:1", "cuda:2"}} == {
        "through the host"
    }
    assert all(link["bytes_per_second"] >= 0 for link in links), "0 where a second was too short, on a busy machine"
    _cli.main(["info", "--links"])
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "Links between GPUs" in rows
    assert "PCIe peer cuda:0 and cuda:1, cuda:2 and cuda:3" in rows


@pytest.mark.filterwarnings("ignore:.*each micro-batch is normalised.*")
def test_buffers_are_not_among_what_may_be_relayed(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device writes to its buffers while others would still pull them from it."""
    given: list[tuple[Any, Any]] = []

    class Recording(DeviceQueues):
        def set_copies(self, parameters: Any, buffers: Any = ()) -> None:
            given.append((parameters, buffers))
            super().set_copies(parameters, buffers)

    monkeypatch.setattr(places, "DeviceQueues", Recording)
    module, batch = (
        torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)),
        module_and_batch(torch.float32)[1],
    )
    with DataParallel(module, BOXES["four"], balance="even") as trainer:
        trainer.step(classify, batch)
        replicas = trainer._execution.replicas.list
        far = {buffer.data_ptr() for replica in replicas[1:] for buffer in replica.module.buffers()}
    parameters, buffers = given[-1]
    assert len({to for _, to, *_ in parameters}) == 3 * 6
    ranges = [(to, to + size) for _, to, _, size, _ in buffers]
    assert all(any(begin <= address < end for begin, end in ranges) for address in far)
    assert far.isdisjoint({to for _, to, *_ in parameters})


def test_checks_know_that_gradients_are_rounded(fake: Any) -> None:
    module, batch = module_and_batch(torch.float32)
    with DataParallel(module, BOXES["two"], balance="even", reduce_dtype=torch.bfloat16, verify_every=1) as trainer:
        optimizer = trainer.optimizer(torch.optim.SGD, lr=0.1)
        for _ in range(4):
            trainer.step(classify, batch)  # verified beside one device
            optimizer.step()
            optimizer.zero_grad()
        assert trainer.check(classify, batch).exact


@pytest.mark.own_gpus("links differ between GPUs")
def test_info_says_that_one_gpu_has_no_links(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fake.boot(1)
    assert _cli.main(["info", "--links"]) == 0
    assert "none to measure: there are no two GPUs here" in capsys.readouterr().out
