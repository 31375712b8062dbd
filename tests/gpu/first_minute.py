"""One part of `tests/gpu/run --first-minute`: what several GPUs do when paceline first meets them.

    python tests/gpu/first_minute.py PART [--devices host:0,host:1]

Parts: topology, truth (PyTorch's own copies), exact, nccl, timeline, transformer. Without --devices: all GPUs. With host devices it only tries the
program. Prints one JSON object whose `lines` are for people. The exit status is 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import paceline

Found = dict[str, Any]
STEPS, WARM_UP = 10, 6  # with graphs=True the third step of a size is captured
ROWS = 32  # of the transformer's batch, for each GPU


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--devices", help="host devices, to try the program")
    args = parser.parse_args()
    names = args.devices.split(",") if args.devices else [one.name for one in paceline.devices() if one.kind == "cuda"]
    if len(names) < 2:
        print(json.dumps({"available": False, "why": "there are no two GPUs"}))
        return 0
    try:
        found = PARTS[args.part](names)
    except Exception as error:  # the reason belongs on the page
        found = {"failed": f"{type(error).__name__}: {error}", "lines": []}
    print(json.dumps({"available": True, **found}))
    return 1 if "failed" in found else 0


def topology(names: Sequence[str]) -> Found:
    """What the driver knows, and how long a context takes on each GPU. Without PyTorch, which takes seconds to load."""
    from paceline._core.runtime import DeviceGroup, gpu_facts

    lines = [
        f"{one['device']}: {one['model']}, {one['memory_bytes'] / 2**30:.0f} GiB, PCI {one['pci_bus_id']}, NUMA node {one['numa_node']}, "
        f"peers {', '.join(one['peers']) or 'none'}; driver for CUDA {one['driver']}, built with {one['runtime']}"
        for one in gpu_facts()
    ]
    seconds: list[float] = []
    for name in names:
        begin = time.perf_counter()
        with DeviceGroup([name]):
            seconds.append(time.perf_counter() - begin)
    lines.append(f"seconds for each context: {', '.join(f'{one:.2f}' for one in seconds)}")
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = ["nvidia-smi", "topo", "-m"]
        lines += subprocess.run(asked, capture_output=True, text=True, timeout=2, check=True).stdout.splitlines()[:20]
    return {"lines": lines}


def truth(names: Sequence[str]) -> Found:
    """PyTorch's own copies between each two GPUs, in memory of its allocator, before paceline has looked at the links."""
    import torch

    size = 32 << 20 if torch.cuda.is_available() else 1 << 20
    wrong, rates = [], []
    for source in map(torch_device, names):
        for target in map(torch_device, names):
            if source == target and source.type == "cuda":
                continue
            for _ in range(2):  # the first one may map something
                sent = torch.randint(0, 255, (size,), dtype=torch.uint8)
                there = sent.to(source)
                synchronize(names)
                begin = time.perf_counter()
                arrived = there.to(target, copy=True)
                synchronize(names)
                seconds = time.perf_counter() - begin
                if not torch.equal(arrived.cpu(), sent) and (source, target) not in wrong:
                    wrong.append((source, target))
            rates.append(size / seconds / 1e9)
    lines = [f"PyTorch's own copies: {min(rates):.1f} to {max(rates):.1f} GB/s by the host's clock"]
    lines += [f"WRONG BYTES from {source} to {target} by PyTorch's own copy" for source, target in wrong]
    return {"lines": lines} | ({"failed": "; ".join(lines[1:])} if wrong else {})


def exact(names: Sequence[str]) -> Found:
    return _exact(names, [list(names[:2]), list(names), [*names[:2], "host:0"] if names[0] != "host:0" else []])


def nccl(names: Sequence[str]) -> Found:
    return _exact(names, [list(names[:2]), list(names)], transport="nccl" if names[0] != "host:0" else "auto")


def _exact(names: Sequence[str], groups: Sequence[list[str]], **options: Any) -> Found:
    """Gradients of three accumulated steps in float64, against plain PyTorch on one device."""
    import torch

    from paceline.torch import DataParallel

    lines, wrong = [], []
    for devices in dict.fromkeys(tuple(one) for one in groups if one):
        torch.manual_seed(0)
        home = torch_device(names[0])
        layers = [torch.nn.Linear(257, 257), torch.nn.GELU(), torch.nn.Linear(257, 33)]
        module = torch.nn.Sequential(*layers).to(home, torch.float64)
        batch = torch.randn(96, 257, dtype=torch.float64, device=home)

        def loss(one: Any, x: Any) -> Any:
            return one(x).square().mean()

        begin = time.perf_counter()
        (3 * loss(module, batch)).backward()
        wanted = [parameter.grad for parameter in module.parameters()]
        module.zero_grad()
        with DataParallel(module, list(devices), **options) as trainer:
            for _ in range(3):
                trainer.step(loss, batch)
            how = next((line for line in trainer.explain().splitlines() if line.startswith("Between GPUs")), "")
        worst = max(
            float((parameter.grad - one).abs().max() / one.abs().max())
            for parameter, one in zip(module.parameters(), wanted, strict=True)
            if parameter.grad is not None and one is not None
        )
        line = f"{', '.join(devices)}: gradients differ by {worst:.1e}, {time.perf_counter() - begin:.1f} s. {how}"
        lines.append(line)
        if not worst <= 1e-12:
            wrong.append("WRONG " + line)
    return {"lines": lines} | ({"failed": "; ".join(wrong)} if wrong else {})


def transformer_and_batch(names: Sequence[str], device: Any, rows: int) -> Any:
    import torch

    wide = device.type == "cuda"
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(
        1024 if wide else 16, 16 if wide else 2, 4096 if wide else 32, 0.0, batch_first=True
    )
    module = torch.nn.TransformerEncoder(layer, 8 if wide else 1, enable_nested_tensor=False).to(device)
    return module, torch.randn(rows, 256 if wide else 4, 1024 if wide else 16, device=device)


def transformer_loss(module: Any, x: Any) -> Any:
    import torch

    with torch.autocast(x.device.type, torch.bfloat16):
        return module(x).float().square().mean()


def timeline(names: Sequence[str]) -> Found:
    """A step of a transformer: how long each GPU is idle, which part of the sums is hidden, and how long each worker launches its forward."""
    from paceline.torch import DataParallel

    module, batch = transformer_and_batch(names, torch_device(names[0]), ROWS * len(names))
    launches: dict[str, float] = {}

    def loss(one: Any, x: Any) -> Any:
        begin = time.perf_counter()
        value = transformer_loss(one, x)
        launches[str(x.device)] = 1e3 * (time.perf_counter() - begin)
        return value

    with DataParallel(module, list(names), balance="even") as trainer:

        def step() -> None:
            trainer.step(loss, batch)
            module.zero_grad()

        for _ in range(WARM_UP):
            step()
        lines = [f"launching a forward: {', '.join(f'{one} {ms:.1f} ms' for one, ms in sorted(launches.items()))}"]
        if names[0] != "host:0":
            lines += _idle(names, step)
    return {"lines": lines}


def _idle(names: Sequence[str], step: Callable[[], None]) -> list[str]:
    import torch

    from timeline import OURS, Kernel, hidden, union

    synchronize(names)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        step()
        synchronize(names)
    events = [event for event in profiler.events() or () if event.device_type.name == "CUDA"]
    if not events:
        return ["the profiler saw no kernels"]
    begin, end = min(one.time_range.start for one in events), max(one.time_range.end for one in events)
    lines = [f"a step of {(end - begin) / 1e3:.1f} ms on the GPUs"]
    for index in sorted({event.device_index for event in events}):
        mine = [
            Kernel(one.name, one.time_range.start, one.time_range.end) for one in events if one.device_index == index
        ]
        busy = sum(last - first for first, last in union((one.begin, one.end) for one in mine if OURS not in one.name))
        part = hidden([one for one in mine if not one.name.startswith("Mem")])
        said = "no sums" if part is None else f"{part:.0%} of its sums hidden"
        lines.append(f"cuda:{index}: idle {1 - busy / (end - begin):.0%} of it, {said}")
    return lines


def transformer(names: Sequence[str]) -> Found:
    """Items per second: DDP, paceline in one process (eager, and with graphs), and paceline with a process for each GPU."""
    lines: list[str] = []
    for count in dict.fromkeys((2, len(names))):
        some = list(names[:count])
        rates: dict[str, str] = {}
        rivals: dict[str, Callable[[], float]] = {
            "DDP": lambda some=some: _processes(some, "ddp"),  # type: ignore[misc]
            "eager": lambda some=some: _rate(some, some),  # type: ignore[misc]
            "graphs": lambda some=some: _rate(some, some, graphs=True),  # type: ignore[misc]
            "ranks": lambda some=some: _processes(some, "ranks"),  # type: ignore[misc]
        }
        if names[0] == "host:0":
            del rivals["graphs"]
        for name, rate in rivals.items():
            try:
                rates[name] = f"{rate():.0f}"
            except Exception as error:  # the others go on
                rates[name] = f"failed: {str(error).splitlines()[-1][:120]}"
            line = f"{count} devices, items/s: {', '.join(f'{name} {rate}' for name, rate in rates.items())}"
            # Processes take long to start. If time runs out, this much is known.
            print(json.dumps({"available": True, "lines": [*lines, line]}), flush=True)
        lines.append(line)
    return {"lines": lines} | ({"failed": "; ".join(lines)} if any("failed" in line for line in lines) else {})


def _rate(all_names: Sequence[str], devices: Sequence[str], **options: Any) -> float:
    """Items per second of all `all_names` together, of which this process has `devices`."""
    import torch

    from paceline.torch import DataParallel

    rows = ROWS * len(devices)
    module, batch = transformer_and_batch(devices, torch_device(devices[0]), rows)
    with DataParallel(module, list(devices), balance="even", **options) as trainer:
        optimizer = trainer.optimizer(torch.optim.SGD, lr=1e-4)

        def step() -> None:
            trainer.step(transformer_loss, batch)
            optimizer.step()
            optimizer.zero_grad()

        return _timed(step, devices) * rows * len(all_names) / len(devices)


def _timed(step: Callable[[], None], names: Sequence[str]) -> float:
    """Steps per second."""
    for _ in range(WARM_UP):
        step()
    synchronize(names)
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    synchronize(names)
    return STEPS / (time.perf_counter() - begin)


def _processes(names: list[str], kind: str) -> float:
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory(prefix="first") as folder:
        spawn(_rank, (names, kind, folder), nprocs=len(names))
        return float(Path(folder, "rate").read_text())


def _rank(rank: int, names: list[str], kind: str, folder: str) -> None:
    import torch
    from torch import distributed

    name, device = names[rank], torch_device(names[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = (
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    )  # ranks tell their headers over gloo while backward goes on
    distributed.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=len(names))
    try:
        if kind == "ranks":
            rate = _rate(names, [name], group=distributed.group.WORLD)
        else:
            module, batch = transformer_and_batch(names, device, ROWS)
            ids = [device.index] if device.type == "cuda" else None
            module = torch.nn.parallel.DistributedDataParallel(module, device_ids=ids, gradient_as_bucket_view=True)
            optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)

            def step() -> None:
                transformer_loss(module, batch).backward()
                optimizer.step()
                optimizer.zero_grad()

            rate = _timed(step, [name]) * ROWS * len(names)
        if rank == 0:
            Path(folder, "rate").write_text(str(rate))
    finally:
        distributed.destroy_process_group()


def torch_device(name: str) -> Any:
    import torch

    return torch.device("cpu") if name.startswith("host") else torch.device(name)


def synchronize(names: Sequence[str]) -> None:
    import torch

    for name in names:
        if name.startswith("cuda"):
            torch.cuda.synchronize(name)


PARTS: dict[str, Callable[[Sequence[str]], Found]] = {
    "topology": topology,
    "truth": truth,
    "exact": exact,
    "timeline": timeline,
    "transformer": transformer,
    "nccl": nccl,
}

if __name__ == "__main__":
    sys.exit(main())
