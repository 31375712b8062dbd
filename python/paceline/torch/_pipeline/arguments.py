"""Checks the arguments of `Pipeline`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from paceline import DeviceGroup, InvalidArgument
from paceline.torch._trainer.arguments import is_whole


def check_cuts(cuts: Any, blocks: int) -> None:
    """Raise if cuts are not the first blocks of stages."""
    if cuts is None:
        return
    if isinstance(cuts, str) or not isinstance(cuts, Sequence):
        raise InvalidArgument(f"Pipeline: cuts is {cuts!r}; give a list of the first blocks of the stages: [0, 3].")
    if (
        not all(map(is_whole, cuts))
        or not cuts
        or cuts[0] != 0
        or any(b <= a for a, b in pairwise(cuts))
        or cuts[-1] >= blocks
    ):
        raise InvalidArgument(
            f"Pipeline: cuts is {list(cuts)!r} for {blocks} blocks. Give the number of the first block of each stage, beginning with 0, each "
            f"greater than the one before and less than {blocks}."
        )


def check_whole_gpus(group: DeviceGroup) -> None:
    """Raise for parts of GPUs."""
    for device in group.devices:
        if device.part is not None:
            raise InvalidArgument(
                f"Pipeline: {device.name} is a part of a GPU. A tensor that a stage reaches by closure may come from another part. It lies in the "
                "same memory, so no operator fails, and nothing tells that this part has to wait for it. Use whole GPUs, or DataParallel on parts."
            )


def check_on_host(call: str, group: DeviceGroup) -> None:
    """Raise if a device is a GPU."""
    gpus = [device.name for device in group.devices if device.kind != "host"]
    if gpus:
        raise InvalidArgument(
            f"{call}: {gpus[0]} is a GPU, and this runs on host devices only so far. Use Pipeline or DataParallel on GPUs."
        )
