"""Compiles the reduction kernels for a GPU and checks their machine code: no test without a GPU sees how they load.

    python tests/cuda/reduction_sass.py --nvcc NVCC --cuobjdump CUOBJDUMP [--arch sm_90]

Every kernel has to load and store 16 bytes at a time, to have two such loads under way at once but for the rest of a buffer, and to spill
nothing. cuobjdump calls nvdisasm, which has to be on the PATH or beside it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
KERNELS = ["float32", "float64", "float16", "bfloat16", "int32", "int64"]
# An instruction, its predicate left out: "LDG.E.128", "R8, desc[UR4][R2.64]".
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);")


def machine_code(nvcc: str, cuobjdump: str, arch: str) -> str:
    """What cuobjdump prints for the kernels."""
    with tempfile.TemporaryDirectory() as folder:
        binary = str(Path(folder) / "reduce.cubin")
        includes = [f"-I{PROJECT / 'cpp' / 'include'}", f"-I{PROJECT / 'cuda'}"]
        source = str(PROJECT / "cuda" / "reduce.cu")
        subprocess.run(
            [nvcc, "-std=c++20", "-O3", f"-arch={arch}", "-cubin", *includes, source, "-o", binary], check=True
        )
        path = f"{Path(cuobjdump).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        environment = {**os.environ, "PATH": path}
        return subprocess.run(
            [cuobjdump, "-sass", binary], check=True, capture_output=True, text=True, env=environment
        ).stdout


def instructions(code: str) -> dict[str, list[tuple[str, str]]]:
    """For each element type: the name and the operands of each instruction of its kernel."""
    kernels: dict[str, list[tuple[str, str]]] = {}
    for function in code.split("Function : ")[1:]:
        name = re.match(r"\S*?paceline_reduce_([a-z]+\d+)E", function)
        if name:
            kernels[name[1]] = INSTRUCTION.findall(function)
    return kernels


def registers(first: str) -> set[str]:
    """The four registers that a load of 16 bytes into `first` (R8, for example) fills."""
    number = int(first[1:])
    return {f"R{number + k}" for k in range(4)}


def loads_at_once(kernel: list[tuple[str, str]]) -> list[int]:
    """The numbers of loads of 16 bytes that begin before an instruction uses what one of them loads, in the order of the code."""
    groups, count, under_way = list[int](), 0, set[str]()
    for name, operands in kernel:
        target, _, rest = operands.partition(",")
        uses = bool(under_way.intersection(re.findall(r"\bR\d+\b", rest)))
        if count and (uses or name.startswith(("BRA", "EXIT", "CALL", "RET", "ST"))):
            groups.append(count)
            count, under_way = 0, set()
        if name.startswith("LDG.E.128"):
            count += 1
            under_way |= registers(target.strip())
    return groups


def faults(kernel: list[tuple[str, str]]) -> list[str]:
    """What is wrong with a kernel."""
    names = [name for name, _ in kernel]
    found = [
        f"it has no {wanted}"
        for wanted in ("LDG.E.128", "STG.E.128")
        if not any(name.startswith(wanted) for name in names)
    ]
    found += [f"it spills: {name}" for name in sorted(set(names)) if name.startswith(("LDL", "STL"))]
    groups = loads_at_once(kernel)
    if groups.count(1) * 4 > sum(groups):  # the rest of a buffer, less than two packs for each thread, goes one by one
        found.append(f"{groups.count(1)} of {sum(groups)} loads of 16 bytes are alone: their thread waits for each")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvcc", required=True)
    parser.add_argument("--cuobjdump", required=True)
    parser.add_argument("--arch", default="sm_90")
    given = parser.parse_args()
    kernels = instructions(machine_code(given.nvcc, given.cuobjdump, given.arch))
    wrong = [f"there is no kernel for {name}" for name in KERNELS if name not in kernels]
    wrong += [f"{name}: {fault}" for name, kernel in kernels.items() for fault in faults(kernel)]
    for sentence in wrong:
        print(sentence)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
