"""NCCL as pip installs it: in a package of its own, where the system's loader does not look."""

from __future__ import annotations

from paceline._core import comm as _comm

__all__ = ["find_installed_nccl", "nccl_info"]


def find_installed_nccl() -> None:
    """Name the NCCL of the package `nvidia-nccl-cu*`, if it is installed, as one to look at."""
    import importlib.util
    from pathlib import Path

    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # not even `nvidia`
        return
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        library = Path(folder) / "lib" / "libnccl.so.2"
        if library.exists():
            _comm.set_nccl_path(str(library))
            return


def nccl_info() -> dict[str, str]:
    """NCCL's ``version`` and ``path``, or ``why_none``; the rest is empty. Loads it; needs no GPU."""
    find_installed_nccl()
    return _comm.nccl_info()
