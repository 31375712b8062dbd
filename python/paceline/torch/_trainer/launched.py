"""Processes that a launcher has started together: which devices are this one's, and the group of all."""

from __future__ import annotations

import atexit
import os
import warnings
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from paceline import Device, InvalidArgument
from paceline import devices as all_devices
from paceline.torch._devices import cuda
from paceline.torch._run.group_ranks import GroupRanks
from paceline.torch._run.ranks import Ranks
from paceline.torch._run.reducer import Reducer, ReducerRanks

Group = ProcessGroup | Literal["auto", "alone"] | None


def ranks_of(group: Group, reducer: Reducer | None, module: nn.Module, home: torch.device) -> Ranks | None:
    """The processes that train together, or None if there is one."""
    if reducer is not None and group not in ("auto", "alone"):
        raise InvalidArgument(
            "DataParallel: group= and reducer= are two ways to sum over the same ranks. Leave one of them out."
        )
    if reducer is not None:
        return ReducerRanks(reducer, module, home)
    if group == "auto":
        return GroupRanks(dist.group.WORLD, module, home) if _has_started_together(home) else None
    return None if group == "alone" else GroupRanks(group, module, home)


def check_ranks_meet(ranks: Ranks, module: nn.Module, prove: object) -> None:
    """Raise if the normalisations of a module cannot be over the batch of all ranks."""
    if isinstance(ranks, ReducerRanks):
        raise InvalidArgument(
            "DataParallel: batch_norm='synchronised' together with reducer=, whose ranks come and go and only know sums, so each one would normalise "
            "over its own part of the batch. Use group=, GroupNorm or LayerNorm, or one process."
        )
    if prove not in (None, False):
        raise InvalidArgument(
            f"DataParallel: batch_norm='synchronised' together with group= and prove={prove!r}. A proof runs the batch of this rank on one device, and "
            "there is no device with the batch of all ranks. Leave prove= out. check() compares the devices of one rank."
        )
    for name, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            raise InvalidArgument(
                f"DataParallel: batch_norm='synchronised' together with group=, and {name or 'the module'} is a SyncBatchNorm, which meets other processes by "
                "itself. Use BatchNorm1d, BatchNorm2d or BatchNorm3d: leave convert_sync_batchnorm out."
            )


def _has_started_together(home: torch.device) -> bool:
    """Whether this is one of several processes. Makes their process group if the script has not made it."""
    if not dist.is_available():
        return False
    if not dist.is_initialized():
        needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if any(name not in os.environ for name in needed) or _number("WORLD_SIZE", 1) < 2:
            return False
        nccl = home.type == "cuda" and dist.is_nccl_available()
        options: dict[str, Any] = {"device_id": home} if nccl else {}
        dist.init_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo", **options)
        atexit.register(_leave)
    return dist.get_world_size() > 1


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default


def _has_cores_of_its_own() -> bool:
    """Whether the launcher has divided the cores: it may run on more of them than this process. In a container, `os.cpu_count` would not tell."""
    try:
        return os.sched_getaffinity(0) < os.sched_getaffinity(os.getppid())
    except OSError:  # the launcher has ended
        return False


def own_devices(call: str, module: nn.Module, *, brings: bool) -> list[str]:
    """What ``devices="auto"`` means. With `brings` a module in host memory is brought to the first GPU if there is one.

    One process alone has all GPUs, the module's first, or all host devices. Of several processes on a machine each has its part of the GPUs, or
    of the cores where there is no GPU.
    """
    processes, rank = _number("LOCAL_WORLD_SIZE", 1), _number("LOCAL_RANK", -1)
    found = all_devices()
    gpus = [device for device in found if device.kind == "cuda"]
    parameter = next(module.parameters(), None)
    if processes > 1 and rank < 0:
        raise InvalidArgument(
            f"{call}: devices='auto' in one of {processes} processes on this machine (LOCAL_WORLD_SIZE), which do not know which part of its devices is "
            "theirs: there is no LOCAL_RANK. Name the devices of this process: devices=['cuda:0'] or devices=ray.train.torch.get_devices()."
        )
    if not gpus or (brings and parameter is None):
        found = [device for device in found if device.kind == "host"]
        own = found if processes == 1 or _has_cores_of_its_own() else _part(found, rank, processes)
        return [device.name for device in own]
    if 1 < len(gpus) < processes:
        raise InvalidArgument(
            f"{call}: devices='auto' with {processes} processes on this machine and {len(gpus)} GPUs, which they would share. Start one for each GPU, or name "
            "the devices of this process."
        )
    own = gpus if processes == 1 or len(gpus) == 1 else _part(gpus, rank, processes)
    if parameter is not None and parameter.device.type == "cuda":
        first = parameter.device.index
        if not any(gpu.index == first for gpu in own):
            raise InvalidArgument(
                f"{call}: the module is on cuda:{first}, and this process (LOCAL_RANK {rank}) has {', '.join(gpu.name for gpu in own)}. Call "
                f"torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before the module is moved, leave it in host memory, or name the devices."
            )
        own = sorted(own, key=lambda gpu: gpu.index != first)
    elif brings:
        _bring(call, module, own)
    return [gpu.name for gpu in own]


def _part(devices: list[Device], rank: int, processes: int) -> list[Device]:
    """The devices of one of several processes on this machine. Processes share devices if there are more of them."""
    count = len(devices)
    begin, end = rank * count // processes, (rank + 1) * count // processes
    return devices[begin:end] if count >= processes else [devices[rank % count]]


def _bring(call: str, module: nn.Module, gpus: list[Device]) -> None:
    """Bring a module in host memory to the first GPU, and say so."""
    names = ", ".join(gpu.name for gpu in gpus)
    warnings.warn(
        f"{call}: the module was in host memory, and is on {gpus[0].name} now: devices='auto' means {names}. Its parameters are the same objects. The "
        "state that an optimizer has already and tensors of a criterion stay behind: make the optimizer after the trainer, and move the criterion. "
        "To train on the host say devices='host'.",
        stacklevel=4,
    )
    module.to(cuda.device(gpus[0].index))
