"""Compile kernels with NVRTC, CUDA's device compiler as a library: nvrtc_check.py NVIDIA_PACKAGES SOURCE.cu sm_90.

It needs neither a GPU nor nvcc. The file may contain device code only. NVRTC has no host headers, so this script contains the two
headers that kernels use.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

HEADERS = {
    b"cstddef": b"#pragma once\nnamespace std { using size_t = decltype(sizeof(0)); }\nusing std::size_t;\n",
    b"cstdint": b"#pragma once\n#include <cuda/std/cstdint>\nnamespace std { using uintptr_t = decltype(sizeof(0)); }\n",
}


def compile_kernels(packages: Path, source: Path, architecture: str) -> str:
    """Compile and return the compiler's messages; empty if there are none."""
    directory = packages / "cuda_nvrtc" / "lib"
    # NVRTC opens its built-in functions by their plain name, so load them into the process first.
    for builtins in sorted(directory.glob("libnvrtc-builtins.so.*")):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(str(directory / "libnvrtc.so.12"))
    program = ctypes.c_void_p()
    texts = (ctypes.c_char_p * len(HEADERS))(*HEADERS.values())
    names = (ctypes.c_char_p * len(HEADERS))(*HEADERS)
    name = str(source).encode()
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), name, len(HEADERS), texts, names)
    if status != 0:
        return f"nvrtcCreateProgram: error {status}"
    options = [f"--gpu-architecture={architecture}", "--std=c++20", f"--include-path={source.parent}"]
    options += [f"--include-path={packages / part / 'include'}" for part in ("cuda_runtime", "cuda_nvcc", "cuda_cccl")]
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    said = log.value.decode().strip()
    if status == 0:
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        if size.value == 0:
            return "no machine code came out"
    return said if said or status == 0 else f"nvrtcCompileProgram: error {status}"


def main() -> int:
    packages, source, architecture = sys.argv[1:]
    said = compile_kernels(Path(packages), Path(source), architecture)
    if said:
        print(said, file=sys.stderr)
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
