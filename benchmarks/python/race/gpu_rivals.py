"""(e) With several GPUs: nn.DataParallel and DistributedDataParallel beside paceline on all of them."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.multiprocessing.spawn import spawn

from paceline import Device
from race import gpu_networks as networks
from race.figures import spread
from race.gpu_clock import Clock
from race.gpu_field import Paced, batch_size
from race.gpu_networks import MAKERS, Network
from race.gpu_parts import STEP_SECONDS, WARM_UP_STEPS, Length


def several_gpus(network: Network, devices: Sequence[Device], length: Length) -> dict[str, Any]:
    """Items per second of each rival with the same global batch, in turns, round by round."""
    clock = Clock(network.device)
    items, size = batch_size(network, clock, len(devices), STEP_SECONDS)
    rates: dict[str, list[float]] = {"auto": [], "even": [], "ddp": []}
    for _ in range(length.rounds):
        for balance in ("auto", "even"):
            with Paced(network, devices, items, balance) as paced:
                clock.block(paced, WARM_UP_STEPS)
                rates[balance].append(items * length.steps / clock.block(paced, length.steps))
        if network.device.type == "cuda":
            rates.setdefault("nn.DataParallel", []).append(_data_parallel(network, len(devices), items, length))
        rates["ddp"].append(_ddp(network, len(devices), items, length))
    medians = {name: round(statistics.median(values), 1) for name, values in rates.items()}
    return {
        "fraction_of_ideal": None,  # on unequal GPUs DDP is no ideal
        "auto_over": {name: round(medians["auto"] / rate, 4) for name, rate in medians.items()},
        "items_per_second": medians,
        "spread": {name: round(spread(values), 4) for name, values in rates.items()},
        **size,
    }


def _data_parallel(network: Network, gpus: int, items: int, length: Length) -> float:
    clock = Clock(network.device)
    module = nn.DataParallel(network.module(), list(range(gpus)))
    step = _step(module, network, items)
    clock.block(step, WARM_UP_STEPS)
    return items * length.steps / clock.block(step, length.steps)


def _step(module: nn.Module, network: Network, items: int) -> Any:
    optimizer, batch = networks.optimizer(module), network.batch(items)

    def step() -> None:
        networks.loss_fn(module, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _ddp(network: Network, ranks: int, items: int, length: Length) -> float:
    """DDP with one process per device and an even part of the batch per process."""
    with tempfile.TemporaryDirectory(prefix="ddp") as folder:
        arguments = (ranks, network.name, network.device.type, items, length, folder)
        spawn(_rank, arguments, nprocs=ranks)
        return float(Path(folder, "rate").read_text())


def _rank(rank: int, ranks: int, name: str, kind: str, items: int, length: Length, folder: str) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    with contextlib.closing(_Group()):
        network = Network(name, MAKERS[name], device)
        module = nn.parallel.DistributedDataParallel(
            network.module(), device_ids=[rank] if kind == "cuda" else None, gradient_as_bucket_view=True
        )
        step = _step(module, network, items // ranks)
        clock = Clock(device)
        clock.block(step, WARM_UP_STEPS)
        distributed.barrier()
        begin = time.perf_counter()
        clock.block(step, length.steps)
        distributed.barrier()
        if rank == 0:
            rate = items // ranks * ranks * length.steps / (time.perf_counter() - begin)
            Path(folder, "rate").write_text(str(rate))


class _Group:
    """The process group, which closes in every case."""

    def close(self) -> None:
        distributed.destroy_process_group()
