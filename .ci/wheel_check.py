"""Checks of a wheel: `wheel FILE` checks its contents. `import FOLDER` checks what importing the package there costs, and `gpus FOLDER` which
GPUs its library has code for."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

SIZE_LIMIT_BYTES = 10_000_000
# Machine code for the GPUs that cmake/PacelineCuda.cmake names, and intermediate code for later ones.
GPU_CODE = {*(f"sm_{number}.cubin" for number in (75, 80, 90, 100, 120)), "sm_120.ptx"}

# Processor time of an import, in units of an interpreter that does nothing: 0.6 when this was set, and 2.6 with typing and four others of
# Python's modules. Time by the clock would depend on what else runs on the machine.
IMPORT_LIMIT = 1.5
IMPORT_RUNS = 15

# Libraries that every Linux system has. A user's machine without GPU and driver may lack any other library.
SYSTEM_LIBRARIES = {
    "libc.so.6",
    "libm.so.6",
    "libstdc++.so.6",
    "libgcc_s.so.1",
    "libpthread.so.0",
    "libdl.so.2",
    "librt.so.1",
}

IMPORT_PROGRAM = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
threads, modules = len(os.listdir("/proc/self/task")), set(sys.modules)
start, cpu_start = time.perf_counter(), time.process_time()
import paceline
seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
assert paceline.__file__.startswith(sys.argv[1]), paceline.__file__
assert len(os.listdir("/proc/self/task")) == threads, "importing paceline started a thread"
others = sorted(name for name in set(sys.modules) - modules if name.partition(".")[0] != "paceline")
assert others in ([], ["atexit"]), f"importing paceline loaded {others}"
print(seconds, cpu_seconds)
"""


def check_wheel(wheel: Path) -> list[str]:
    """Return what is wrong with the file."""
    problems = []
    size = wheel.stat().st_size
    if size > SIZE_LIMIT_BYTES:
        problems.append(f"{wheel.name} has {size} bytes, more than {SIZE_LIMIT_BYTES}")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = archive.namelist()
        libraries = [name for name in names if "libpaceline" in name]
        if libraries != ["paceline/libpaceline.so"]:
            problems.append(f"one paceline/libpaceline.so was expected, there is {libraries}")
        problems += [
            f"{name} is missing"
            for name in (
                "paceline/__init__.py",
                "paceline/py.typed",
                "paceline/_core/__init__.pyi",
                "paceline/_page/page.css",
                "paceline/_page/page.js",
                "paceline/_page/uPlot.LICENSE",
                "paceline/_page/uPlot.min.css",
                "paceline/_page/uPlot.min.js",
            )
            if name not in names
        ]
        binaries = [name for name in names if name.endswith(".so")]
        for name in binaries:
            shown = subprocess.run(
                ["readelf", "-d", archive.extract(name, folder)], capture_output=True, text=True, check=True
            ).stdout
            needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", shown))
            allowed = SYSTEM_LIBRARIES | {"libpaceline.so"}
            foreign = {library for library in needed - allowed if not library.startswith("ld-linux")}
            if foreign:
                problems.append(f"{name} needs {sorted(foreign)}")
    print(f"{wheel.name}: {size / 1e6:.2f} MB, {len(names)} files, binaries {binaries}")
    return problems


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Without site-packages, because another package's .pth file may import anything."""
    return subprocess.run([sys.executable, "-I", "-S", *arguments], capture_output=True, text=True, check=False)


def check_import(folder: Path) -> list[str]:
    """Return what is wrong with importing the package from `folder`. The fastest of several runs counts, because other programs disturb the
    rest."""
    clock, cpu, bare = [], [], []
    for _ in range(IMPORT_RUNS):
        done = run_python("-c", IMPORT_PROGRAM, str(folder))
        if done.returncode != 0:
            return [done.stderr]
        by_clock, by_cpu = map(float, done.stdout.split())
        clock.append(by_clock)
        cpu.append(by_cpu)
        bare.append(float(run_python("-c", "import time; print(time.process_time())").stdout))
    ratio = min(cpu) / min(bare)
    print(
        f"import paceline: {min(clock) * 1e3:.1f} ms at best of {IMPORT_RUNS}, {min(cpu) * 1e3:.1f} ms of processor time,"
        f" {ratio:.2f} times a bare interpreter's"
    )
    if ratio > IMPORT_LIMIT:
        return [
            f"import paceline takes {ratio:.2f} times the processor time of a bare interpreter, more than {IMPORT_LIMIT}"
        ]
    return []


def check_gpus(folder: Path) -> list[str]:
    """Return what GPU code the library of the package in `folder` lacks."""
    library = folder / "paceline" / "libpaceline.so"
    pip_s = [str(path) for entry in sys.path for path in Path(entry).glob("nvidia/cu*/bin/cuobjdump")]
    cuobjdump = shutil.which("cuobjdump") or next(iter(pip_s), "cuobjdump")
    listed = subprocess.run(
        [cuobjdump, "--list-elf", "--list-ptx", str(library)], capture_output=True, text=True, check=False
    ).stdout
    found = set(re.findall(r"sm_\d+\.(?:cubin|ptx)", listed))
    print(f"code for GPUs: {', '.join(sorted(found))}")
    return [f"{library} has no {code}" for code in sorted(GPU_CODE - found)]


def main() -> int:
    what, where = sys.argv[1], Path(sys.argv[2]).resolve()
    problems = {"wheel": check_wheel, "import": check_import, "gpus": check_gpus}[what](where)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
