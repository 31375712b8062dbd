"""Checks of a wheel: `wheel FILE` checks its contents, `import FOLDER` times the import of the unpacked wheel."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

SIZE_LIMIT_BYTES = 10_000_000
IMPORT_LIMIT_SECONDS = 0.050
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
threads = len(os.listdir("/proc/self/task"))
start = time.perf_counter()
import paceline
seconds = time.perf_counter() - start
assert paceline.__file__.startswith(sys.argv[1]), paceline.__file__
assert len(os.listdir("/proc/self/task")) == threads, "importing paceline started a thread"
heavy = {"torch", "numpy"} & set(sys.modules)
assert not heavy, f"importing paceline loaded {heavy}"
print(seconds)
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
            for name in ("paceline/__init__.py", "paceline/py.typed", "paceline/_core/__init__.pyi")
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


def check_import(folder: Path) -> list[str]:
    """Return what is wrong with importing the package from `folder`. The fastest of several runs counts, because other programs disturb the
    rest."""
    seconds = []
    for _ in range(IMPORT_RUNS):
        done = subprocess.run(
            [sys.executable, "-I", "-c", IMPORT_PROGRAM, str(folder)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            return [done.stderr]
        seconds.append(float(done.stdout))
    quickest, median = min(seconds), sorted(seconds)[len(seconds) // 2]
    print(f"import paceline: {quickest * 1e3:.1f} ms at best, {median * 1e3:.1f} ms in the median of {IMPORT_RUNS}")
    if quickest > IMPORT_LIMIT_SECONDS:
        return [f"import paceline takes {quickest * 1e3:.1f} ms, more than {IMPORT_LIMIT_SECONDS * 1e3:.0f}"]
    return []


def main() -> int:
    what, where = sys.argv[1], Path(sys.argv[2]).resolve()
    problems = {"wheel": check_wheel, "import": check_import}[what](where)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
