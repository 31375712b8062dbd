"""Find NCCL where pip installs it: in a package of its own, outside the system loader's directories."""

from __future__ import annotations

from paceline._core import comm as _comm

__all__ = ["find_installed_nccl", "installed_nccl", "nccl_info"]


def installed_nccl() -> str | None:
    """The library in an installed package `nvidia-nccl-cu*`."""
    import importlib.util
    from pathlib import Path

    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # not even the package `nvidia` exists
        return None
    folders = (spec.submodule_search_locations if spec is not None else None) or []
    libraries = [Path(folder) / "lib" / "libnccl.so.2" for folder in folders]
    return next((str(library) for library in libraries if library.exists()), None)


def find_installed_nccl() -> None:
    """Add the NCCL of an installed package to the places to look for NCCL."""
    if library := installed_nccl():
        _comm.set_nccl_path(library)


def nccl_info() -> dict[str, str]:
    """NCCL's ``version`` and ``path``, or ``why_none`` if there is no NCCL. Loads NCCL; needs no GPU."""
    find_installed_nccl()
    return _comm.nccl_info()
