"""What the run runs on, and what was carried along for it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_VERSIONS = """
import json, torch
gpu = torch.cuda.is_available()
print(json.dumps({
    "torch": torch.__version__, "torch_cuda": torch.version.cuda, "gpus": torch.cuda.device_count(),
    "gpu": torch.cuda.get_device_name() if gpu else None,
    "capability": ".".join(map(str, torch.cuda.get_device_capability())) if gpu else None,
    "sms": torch.cuda.get_device_properties(0).multi_processor_count if gpu else None,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else None,
}))
"""


def describe(environment: dict[str, str]) -> dict[str, Any]:
    """Hardware and versions; what cannot be found out is None."""

    def line(command: list[str], which: int = 0) -> str | None:
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=True)
            return done.stdout.strip().splitlines()[which]
        except (OSError, IndexError, subprocess.SubprocessError):
            return None

    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "driver": line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "nvcc": line(["nvcc", "--version"], -1),
        "cmake": line(["cmake", "--version"]),
        "ninja": line(["ninja", "--version"]),
        "compiler": line(["c++", "--version"]),
        "compute_sanitizer": shutil.which("compute-sanitizer") is not None,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", _VERSIONS], env=environment, capture_output=True, text=True, timeout=90, check=True
        )
        facts |= json.loads(done.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
        facts["torch"] = f"not usable: {error}"
    return facts


def nccl_library(python_path: str) -> str:
    """The file of the NCCL that came with PyTorch; empty if there is none."""
    folders = [Path(folder) for folder in [*python_path.split(os.pathsep), *sys.path] if folder]
    return next((str(path) for folder in folders for path in folder.glob("nvidia/*/lib/libnccl.so.2")), "")


def newest_nccl(python_path: str) -> str:
    """The file of the newest NCCL among PyPI's packages; empty if there is none. PyTorch's may be older than one that was carried along."""
    folders = {Path(folder) for folder in [*python_path.split(os.pathsep), *sys.path] if folder}
    found = []
    for folder in folders:
        for package in folder.glob("nvidia_nccl_cu*-*.dist-info"):
            version = package.name.removesuffix(".dist-info").partition("-")[2]
            libraries = folder.glob("nvidia/nccl/lib/libnccl.so.2")
            found += [
                ([int(one) for one in version.split(".") if one.isdigit()], str(library)) for library in libraries
            ]
    return max(found)[1] if found else ""


@dataclass
class Carried:
    """Wheels and Debian packages unpacked into one folder; nothing of the machine is changed."""

    environment: dict[str, str]
    cmake: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @classmethod
    def unpack(cls, folder: Path, into: Path) -> Carried:
        found = cls(dict(os.environ))
        # The machine's own CMake may be too old. The CUDA toolkit's installers change no PATH.
        places = [into / "site" / "bin", Path(sys.executable).parent, os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
        found.environment["PATH"] = os.pathsep.join(map(str, places))
        shutil.rmtree(into, ignore_errors=True)
        wheels, packages = sorted(folder.glob("*.whl")), sorted(folder.glob("*.deb"))
        if wheels:
            found._try(
                [
                    sys.executable,
                    "-m",
                    "pip",
                    "install",
                    "-q",
                    "--no-index",
                    "--no-deps",
                    "--target",
                    str(into / "site"),
                ]
                + [str(wheel) for wheel in wheels]
            )
            found.environment["PYTHONPATH"] = os.pathsep.join(
                filter(None, [str(into / "site"), os.environ.get("PYTHONPATH", "")])
            )
        for package in packages:
            found._try(["dpkg-deb", "-x", str(package), str(into / "packages")])
        for config in into.glob("packages/usr/lib/**/GTestConfig.cmake"):
            found.cmake.append(f"-DGTest_DIR={config.parent}")
        return found

    def _try(self, command: list[str]) -> None:
        try:
            subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            self.problems.append(f"{error} {getattr(error, 'stderr', '') or ''}".strip())
