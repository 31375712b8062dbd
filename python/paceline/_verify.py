"""What `paceline verify` does: runs the checks on the given devices and makes one report of them that can be passed on."""

from __future__ import annotations

import os
import platform
import re
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch

import paceline
from paceline import Device, InvalidArgument, Unavailable, _verify_checks, _verify_race
from paceline._core.runtime import host_facts

__all__ = ["anonymous", "verify"]


def verify(devices: Sequence[Device | str] | None = None, *, seconds: float = 20.0, seed: int = 0) -> dict[str, Any]:
    """Check on `devices` what the library promises: exact gradients, right collectives; and race them for a moment.

    Parameters
    ----------
    devices
        Default: all GPUs, or where there is none all host devices.
    seconds
        For the race; the checks take a few more.
    seed
        Of the networks, the batches and the splits.

    Returns
    -------
    dict
        ``passed``; ``versions``, ``machine``, ``devices``; ``exactness``, ``collectives`` and ``race`` with ``status`` each, which is
        ``passed``, ``failed`` or ``skipped`` (then ``why`` says the reason), or of a race that ran ``measured``: its figures are held
        against no bound. ``passed`` is whether no part failed. Plain values that `json` can write, with no name of the host or the user
        in them.

    Raises
    ------
    InvalidArgument
        If there is no such device.
    """
    found = _devices(devices)
    begin = time.monotonic()
    # TensorFloat-32 keeps ten bits of a factor: no measure of whether anything is exact.
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        parts = {
            "exactness": _guarded(lambda: _verify_checks.exactness(found, seed)),
            "collectives": _guarded(lambda: _verify_checks.collectives(found, seed)),
            "race": _guarded(lambda: _verify_race.race(found, seconds, seed)),
        }
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32
    report = {
        "passed": all(part["status"] != "failed" for part in parts.values()),
        "seconds": round(time.monotonic() - begin, 1),
        "versions": _versions(),
        "machine": _machine(),
        "devices": [_device(device) for device in found],
        **parts,
    }
    return cast(dict[str, Any], _everywhere(report, anonymous))


def _devices(devices: Sequence[Device | str] | None) -> list[Device]:
    if devices is None:
        every = paceline.devices()
        return [device for device in every if device.kind == "cuda"] or every
    found = [device if isinstance(device, Device) else paceline.find_device(device) for device in devices]
    if not found:
        raise InvalidArgument("verify: no device is named.")
    twice = [device.name for device in found if found.count(device) > 1]
    if twice:
        raise InvalidArgument(f"verify: {twice[0]} is named twice. Name each device once.")
    return found


def _guarded(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """One part's failure must not hide what the others found."""
    try:
        return part()
    except Unavailable as error:
        return {"status": "skipped", "why": str(error)}
    except Exception as error:  # a report of what broke is what this is for
        return {"status": "failed", "why": f"{type(error).__name__}: {error}"}


def _everywhere(found: Any, change: Callable[[str], str]) -> Any:
    """A copy with every text changed but the keys, which are the report's own words and devices."""
    if isinstance(found, str):
        return change(found)
    if isinstance(found, dict):
        return {key: _everywhere(value, change) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [_everywhere(value, change) for value in found]
    return found


def anonymous(text: str) -> str:
    """`text` without the names of this host and this user, and without folders of theirs."""
    names = {os.environ.get("USER", ""), os.environ.get("LOGNAME", ""), Path.home().name}
    hidden = [(str(Path.home()), "~"), (socket.gethostname(), "<host>"), *((name, "<user>") for name in names)]
    for secret, mark in hidden:
        # Whole words, of which "root", "/" and "" say nothing.
        if len(secret) > 1 and secret not in ("root", "/root"):
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", mark, text)
    return text


def _versions() -> dict[str, Any]:
    return {
        "paceline": paceline.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": _driver_version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
    }


def _driver_version() -> str | None:
    """Of NVIDIA's kernel module: "580.159.04"."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"\b(\d{3,}(?:\.\d+)+)\b", text)
    return match[1] if match else None


def _machine() -> dict[str, Any]:
    facts = host_facts()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": facts["cpu_model"] or platform.processor(),
        "cores": len(facts["affinity"]),
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
    }


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "peers": [
            other
            for other in range(torch.cuda.device_count())
            if other != index and torch.cuda.can_device_access_peer(index, other)
        ],
    }


def _device(device: Device) -> dict[str, Any]:
    return {"name": device.name, "kind": device.kind, "memory_space": device.memory_space}
