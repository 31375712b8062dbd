"""Checks the arguments of `DataParallel`, and brings them into the form that it works with."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from paceline import Device, DeviceGroup, InvalidArgument, OutOfMemory
from paceline import devices as all_devices
from paceline._core.runtime import gpu_facts
from paceline._words import plural, require, require_one_of
from paceline.comm import Transport
from paceline.torch._devices import cuda
from paceline.torch._trainer.launched import own_devices

Memory = float | Mapping[str, float]  # bytes, or a fraction if at most 1
_LEAST_FLOAT_BYTES = 10_000  # a float such as 8e9 means bytes; 2.0 and 80.0 are mistakes
Devices = str | Sequence[str | int | Device | torch.device] | DeviceGroup
Balance = Literal["auto", "even"] | Sequence[float]
BatchNorm = Literal["apart", "synchronised"]


def is_whole(value: object) -> bool:
    """Whether `value` is an integer, NumPy's included. True and False are not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether `value` is a real number, NumPy's included. True and False are not."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_module(call: str, module: object) -> None:
    """Raise if `module` is nothing to train."""
    if not isinstance(module, nn.Module):
        raise InvalidArgument(f"{call}: module is a {type(module).__name__}; a torch.nn.Module is needed.")
    if vars(module).get("_lifetime") is not None and vars(module).get("module") is not None:
        raise InvalidArgument(
            f"{call}: module is a {type(module).__name__} already. Give what it wraps: {call}(model.module)."
        )


def _numbers_are() -> str:
    return "cuda" if any(device.kind == "cuda" for device in all_devices()) else "host"


def numbered(devices: Any, module: nn.Module) -> Any:
    """The devices, with names in place of numbers. If there are numbers, a module in host memory is brought to the first GPU."""
    if isinstance(devices, (str, DeviceGroup)) or not isinstance(devices, Sequence) or not any(map(is_whole, devices)):
        return devices
    kind = _numbers_are()
    if kind == "cuda" and is_whole(devices[0]) and all(one.is_cpu for one in module.parameters()):
        module.to(cuda.device(int(devices[0])))
    return [f"{kind}:{device}" if is_whole(device) else device for device in devices]


def output_of(device: Any) -> torch.device | None:
    """Where outputs go, None for where the module is."""
    if device is None:
        return None
    try:
        if is_whole(device):
            return torch.device("cpu") if _numbers_are() == "host" or device < 0 else cuda.device(int(device))
        return torch.device("cpu" if str(device).startswith("host") else device)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument(
            f"DataParallel: output_device is {device!r}; give a number, a name or a torch.device."
        ) from error


def check_devices(call: str, devices: object) -> None:
    """Raise if `devices` does not name devices."""
    known = isinstance(devices, (str, DeviceGroup)) or (
        isinstance(devices, Sequence) and all(isinstance(device, (str, Device, torch.device)) for device in devices)
    )
    names = "give 'auto', a list of names such as ['host:0', 'host:1'], or a DeviceGroup"
    require(known, call, "devices", devices, names)


def check_reduce_dtype(reduce_dtype: object, transport: Transport) -> None:
    """Raise if gradients cannot travel in this type, even if there is nothing to carry."""
    require_one_of("DataParallel", "reduce_dtype", reduce_dtype, torch.bfloat16, torch.float16, None)
    if reduce_dtype is not None and transport == "nccl":
        raise InvalidArgument(
            f"DataParallel: reduce_dtype={reduce_dtype} together with transport='nccl': NCCL would not only send, but add in that type. Leave "
            "transport= out, since copies add in float32, or leave reduce_dtype= out."
        )


def group_of(call: str, devices: Any, module: nn.Module, *, brings: bool = True) -> DeviceGroup:
    """A group of its own for a trainer. `brings`: whether ``"auto"`` brings a module in host memory to the first GPU."""
    if isinstance(devices, DeviceGroup):
        return devices.share()
    if devices == "auto":
        return DeviceGroup(own_devices(call, module, brings=brings))
    if devices == "host":
        return DeviceGroup([device.name for device in all_devices() if device.kind == "host"])
    if isinstance(devices, str):
        return DeviceGroup(devices)
    return DeviceGroup([str(device) if isinstance(device, torch.device) else device for device in devices])


def policy_of(
    balance: Balance, call: str = "DataParallel", unit: str = "device", count: int | None = None
) -> tuple[str, list[float]]:
    """The name of the policy, and its ratios if it has any, for so many devices."""
    if isinstance(balance, str) and balance in ("auto", "even"):
        return balance, []
    fits = not isinstance(balance, str) and isinstance(balance, Sequence) and all(map(is_number, balance))
    require(fits, call, "balance", balance, f"it must be 'auto', 'even' or a list with one ratio per {unit}")
    if count not in (None, len(balance)):
        raise InvalidArgument(
            f"{call}: balance is {balance!r}, which is not one ratio for each of {plural(count, unit)}."
        )
    return "weighted", [float(ratio) for ratio in balance]


def check_hold_back(hold_back: object, policy: str) -> None:
    """Raise if `hold_back` is not a choice, or if nothing may move for it."""
    require_one_of("DataParallel", "hold_back", hold_back, True, False, None)
    if hold_back and policy != "auto":
        raise InvalidArgument("DataParallel: hold_back=True needs balance='auto'; other policies never move work.")


def check_batch_norm(batch_norm: object, **options: Any) -> None:
    """Raise if `batch_norm` is not a choice, or if devices that wait for each other cannot do what `options` say."""
    require_one_of("DataParallel", "batch_norm", batch_norm, *get_args(BatchNorm))
    if batch_norm == "apart":
        return
    for name, value in options.items():
        if value:
            raise InvalidArgument(
                f"DataParallel: batch_norm='synchronised' together with {name}={value!r}. For the statistics of the batch all devices run their shares "
                f"at the same time, each as one micro-batch. Leave {name}= out, or use batch_norm='apart'."
            )


def check_graphs(names: list[str], on_gpu: list[bool]) -> None:
    """Raise if a device has no CUDA graphs."""
    hosts = [name for name, gpu in zip(names, on_gpu, strict=True) if not gpu]
    if hosts:
        raise InvalidArgument(
            f"DataParallel: graphs=True needs GPUs, and {hosts[0]} computes on the host, which has no CUDA graphs. Leave graphs= out, or name "
            "GPUs only: devices=['cuda:0', 'cuda:1']."
        )


def check_trains(call: str, loss_fn: object) -> None:
    """Raise if there would be no gradients, or if `loss_fn` is not a function."""
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        mode = "inference mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise InvalidArgument(
            f"{call}: called under {mode}, so there would be no gradients. Leave it for the step, or use predict()."
        )
    if not callable(loss_fn):
        raise InvalidArgument(
            f"{call}: loss_fn is a {type(loss_fn).__name__}, not a function. It is {call}(loss_fn, batch), with loss_fn(module, slice)."
        )


def check_scaler(call: str, scaler: object) -> None:
    """Raise if `scaler` does not scale losses."""
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise InvalidArgument(f"{call}: scaler is a {type(scaler).__name__}; a torch.amp.GradScaler is needed.")


def check_optimizer(cls: object, parameters: object) -> None:
    """Raise if `cls` is not a class, or if `parameters` cannot be parameters."""
    if not callable(cls):
        raise InvalidArgument(
            f"optimizer: {cls!r} is not a class. Give the class of the optimizer, and then its options by name: "
            "optimizer(torch.optim.SGD, lr=0.1)."
        )
    name = getattr(cls, "__name__", "SGD")
    if isinstance(parameters, nn.Module) and not isinstance(parameters, nn.ParameterList):
        raise InvalidArgument(
            f"optimizer: parameters is a {type(parameters).__name__}. Give its parameters, optimizer({name}, module.parameters(), ...), or "
            "leave them out: the default are those of the trainer's module."
        )
    if isinstance(parameters, str) or not isinstance(parameters, Iterable):
        raise InvalidArgument(
            f"optimizer: parameters is {parameters!r}. Options are given by name, as in optimizer({name}, lr=0.1); parameters come before them "
            "and may be left out."
        )


def check_shard(shard: object) -> None:
    """Raise if `shard` is not one of its values."""
    fits = isinstance(shard, bool) or (isinstance(shard, str) and shard == "auto")
    means = "it must be 'auto' (from three GPUs on, if the first one lacks memory), True (from two on) or False"
    require(fits, "optimizer", "shard", shard, means)


def memory_limits(call: str, memory: Memory | None, group: DeviceGroup) -> list[int | None]:
    """Bytes for each device, None where there is no limit."""
    names = [device.name for device in group.devices]
    given = memory if isinstance(memory, Mapping) else dict.fromkeys(names, memory)
    unknown = [name for name in given if name not in names]
    if unknown:
        raise InvalidArgument(f"{call}: memory names {unknown[0]!r}, which is none of the devices {', '.join(names)}.")
    limits: list[int | None] = []
    for device in group.devices:
        value = given.get(device.name)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 2**62
        ):
            raise InvalidArgument(
                f"{call}: memory is {value!r} for {device.name}; give bytes, or a fraction of its memory such as 0.5."
            )
        if isinstance(value, float) and value > 1 and (value < _LEAST_FLOAT_BYTES or not value.is_integer()):
            raise InvalidArgument(
                f"{call}: memory is {value!r} for {device.name}; a fraction of its memory is at most 1.0. To give bytes, write a whole "
                "number such as 2 * 2**30."
            )
        if value is not None and isinstance(value, float) and value <= 1:
            sharing = sum(other.memory_space == device.memory_space for other in group.devices)
            value = value * _memory_bytes(device) / sharing
        limits.append(None if value is None else max(1, int(value)))
    return limits


def micro_batch_limits(memory: Memory | None, group: DeviceGroup, module: nn.Module) -> list[int | None]:
    """What micro-batches may take of each device's memory: what parameters, buffers and gradients leave of it. None where there is no limit.

    Raises
    ------
    OutOfMemory
        If they leave nothing.
    """
    limits = memory_limits("DataParallel", memory, group)
    if not any(limits):
        return limits
    parameters = [one for one in module.parameters() if not nn.parameter.is_lazy(one)]
    shared = sum(one.nbytes for one in parameters)
    own = sum(one.nbytes for one in parameters if one.requires_grad) + sum(one.nbytes for one in module.buffers())
    for index, (device, limit) in enumerate(zip(group.devices, limits, strict=True)):
        held = own + shared // sum(other.memory_space == device.memory_space for other in group.devices)
        if limit is not None and limit <= held:
            raise OutOfMemory(
                f"DataParallel: memory= allows {device.name} {limit} bytes, and the module's parameters, buffers and gradients take {held} there. Allow "
                "more, or cut the module into stages with Pipeline."
            )
        limits[index] = None if limit is None else limit - held
    return limits


def _memory_bytes(device: Device) -> int:
    if device.kind == "cuda":
        return int(gpu_facts()[device.index]["memory_bytes"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_timeout(call: str, timeout: object) -> None:
    """Raise if `timeout` is no time to wait for."""
    wanted = "it must be a positive number of seconds, or float('inf')"
    require(is_number(timeout) and float(timeout) > 0, call, "timeout", timeout, wanted)  # type: ignore[arg-type]


def check_count(call: str, name: str, value: object, others: str = "") -> None:
    """Raise if `value` is not a positive integer. `others`: what it may be instead, in words."""
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    require(fits, call, name, value, f"it must be an integer of at least 1{others}")


def watchdog_folder(seconds: object, path: str | os.PathLike[str] | None) -> Path | None:
    """Where a watchdog writes; None without a watchdog."""
    if seconds is None:
        if path is not None:
            raise InvalidArgument(
                f"DataParallel: watchdog_path is {os.fspath(path)!r} without watchdog=, so nothing would be written. Give the seconds that a step "
                "may take, such as watchdog=300."
            )
        return None
    fits = isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and 0 < seconds < math.inf
    wanted = "give the seconds that a step may take, or None for no watchdog"
    require(fits, "DataParallel", "watchdog", seconds, wanted)
    folder = Path("." if path is None else path).absolute()
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InvalidArgument(
            f"DataParallel: watchdog_path {folder} is no folder that this process can write to. Make the folder first, or give another one."
        )
    return folder
