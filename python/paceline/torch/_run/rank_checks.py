"""What ranks refuse."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline import InvalidArgument


def check_module(module: nn.Module) -> None:
    """Raise for a module that sums gradients by itself, or whose parameters have no shape yet."""
    for name, part in module.named_modules():
        if isinstance(part, nn.parallel.DistributedDataParallel):
            raise InvalidArgument(
                f"DataParallel: {name or 'the module'} is a DistributedDataParallel, which sums gradients over the ranks, and so does the trainer. Pass "
                "its .module."
            )
        if any(isinstance(one, nn.parameter.UninitializedParameter) for one in part._parameters.values()):
            raise InvalidArgument(
                f"DataParallel: {name or 'the module'} has parameters without a shape, which cannot be brought to all ranks. Run its forward "
                "once before."
            )


def check_group(group: Any, home: torch.device) -> None:
    """Raise for what is no process group, and for one that cannot carry the gradients."""
    if not dist.is_available():
        raise InvalidArgument(
            "DataParallel: group= needs torch.distributed, which this build of PyTorch does not have."
        )
    if group is None:
        raise InvalidArgument(
            "DataParallel: group is None, as dist.group.WORLD is before torch.distributed.init_process_group(). Call that first. To train "
            "on this machine alone leave group= out."
        )
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidArgument(
            f"DataParallel: group is {group!r}; a torch.distributed.ProcessGroup is needed: dist.group.WORLD, or what new_group() returns on a member."
        )
    config = dist.get_backend_config(group)
    if f"{home.type}:" not in config:
        raise InvalidArgument(
            f"DataParallel: the module is on {home}, and the group's backends are {config}, none for {home.type} memory. Use "
            f"init_process_group('{'gloo' if home.type == 'cpu' else 'cpu:gloo,cuda:nccl'}')."
        )
    bound = getattr(group, "bound_device_id", None)
    if home.type == "cuda" and bound is not None and bound != home:
        raise InvalidArgument(
            f"DataParallel: the group is bound to {bound}, and the module is on {home}. Give init_process_group the module's GPU: device_id={home}."
        )
