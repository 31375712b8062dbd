"""Run the checks of `paceline verify` and combine them into one report that can be shared."""

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
from paceline import Device, InvalidArgument, Unavailable, _verify_checks, _verify_race, info

__all__ = ["anonymous", "verify"]


def verify(devices: Sequence[Device | str] | None = None, *, seconds: float = 20.0, seed: int = 0) -> dict[str, Any]:
    """Check the library's promises on `devices` (default: all GPUs, or all host devices), exact gradients and correct collectives, and run a short race.

    `seconds`: for the race; the checks take a few seconds more. Returns plain values that `json` can write, without the name of the host or the
    user: ``passed``, ``versions``, ``machine``, ``devices``, ``exactness``, ``collectives`` and ``race``. Each of the last three has a ``status``:
    ``passed``, ``failed``, ``skipped`` (``why`` gives the reason) or, for a race that ran, ``measured``, because it has no bound to meet.
    """
    found = _devices(devices)
    begin = time.monotonic()
    # TensorFloat-32 keeps only ten bits of a factor, too few to check exactness.
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
        **_versions_and_machine(),
        "devices": [
            {"name": device.name, "kind": device.kind, "memory_space": device.memory_space} for device in found
        ],
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
    """Run one part. Its failure must not hide the results of the others."""
    try:
        return part()
    except Unavailable as error:
        return {"status": "skipped", "why": str(error)}
    except Exception as error:  # the report says what broke
        return {"status": "failed", "why": f"{type(error).__name__}: {error}"}


def _everywhere(found: Any, change: Callable[[str], str]) -> Any:
    """Copy the report and change every text except the keys, which hold no private names."""
    if isinstance(found, str):
        return change(found)
    if isinstance(found, dict):
        return {key: _everywhere(value, change) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [_everywhere(value, change) for value in found]
    return found


def anonymous(text: str) -> str:
    """Remove the names of this host and this user, and the user's folders, from `text`."""
    names = {os.environ.get("USER", ""), os.environ.get("LOGNAME", ""), Path.home().name}
    hidden = [(str(Path.home()), "~"), (socket.gethostname(), "<host>"), *((name, "<user>") for name in names)]
    for secret, mark in hidden:
        # Whole words only. "root", "/" and "" are not secret.
        if len(secret) > 1 and secret not in ("root", "/root"):
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", mark, text)
    return text


def _versions_and_machine() -> dict[str, Any]:
    facts = info.collect()
    try:
        driver = Path("/proc/driver/nvidia/version").read_text()  # of the kernel module
    except OSError:  # there is none, or a container hides it
        driver = ""
    found = re.search(r"\b\d{3,}(?:\.\d+)+\b", driver)
    return {
        "versions": {
            "paceline": paceline.__version__,
            "python": facts["python"]["version"],
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "driver": found[0] if found else None,
            "nccl": facts["gpu_libraries"].get("NCCL", {}).get("version"),
        },
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "processor": facts["cpu"]["model"],
            "cores": len(facts["cpu"]["affinity"]),
            "gpus": facts["gpus"],
        },
    }
