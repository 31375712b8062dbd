"""Find NCCL where pip installs it: in a package of its own, outside the system loader's directories."""

from __future__ import annotations

from paceline._core import comm as _comm

__all__ = ["find_installed_nccl", "nccl_info"]


def find_installed_nccl() -> None:
    """Add the NCCL of an installed package `nvidia-nccl-cu*` to the places to look for NCCL."""
    import importlib.util
    from pathlib import Path

    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # not even the package `nvidia` exists
        return
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        library = Path(folder) / "lib" / "libnccl.so.2"
        if library.exists():
            _comm.set_nccl_path(str(library))
            return


def nccl_info() -> dict[str, str]:
    """NCCL's ``version`` and ``path``, or ``why_none`` if there is no NCCL. Loads NCCL; needs no GPU."""
    find_installed_nccl()
    return _comm.nccl_info()
