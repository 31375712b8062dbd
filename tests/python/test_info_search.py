"""Where packages and shared libraries are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import _info_search


def test_a_folder_of_the_name_of_a_package_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_package_of_ours").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    package = _info_search.Wanted("a-package-of-ours", "", "", "", "a_package_of_ours")
    assert not _info_search.find_package(package)["found"]
    (tmp_path / "a_package_of_ours" / "__init__.py").write_text("raise RuntimeError('imported')")
    found = _info_search.find_package(package)
    assert found["path"] == str(tmp_path / "a_package_of_ours")
    assert (found["version"], found["source"]) == (None, "Python path")


def test_a_library_is_found_where_the_system_loads_it_from() -> None:
    found = _info_search.find_shared_library(_info_search.Wanted("libc.so.6", "", "", "C"))
    assert (found["found"], found["source"]) == (True, "system")
    assert Path(found["path"]).name.startswith("libc.so")
    assert not _info_search.find_shared_library(_info_search.Wanted("libours.so.1", "", "", "Ours"))["found"]


def test_nccl_is_the_copy_that_the_library_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} was opened, perhaps as a second copy of NCCL")

    monkeypatch.setattr("ctypes.CDLL", refuse)
    monkeypatch.setattr(_info_search, "installed_nccl", lambda: "/pip/libnccl.so.2")
    monkeypatch.setenv("PACELINE_NCCL_LIBRARY", "/mine/libnccl.so.2")
    for path, source in {
        "/mine/libnccl.so.2": "PACELINE_NCCL_LIBRARY",
        "/pip/libnccl.so.2": "pip",
        "/usr/lib/libnccl.so.2": "system",
    }.items():
        found = _info_search.find_nccl({"version": "2.30.7", "path": path, "why_none": ""})
        assert found == {"found": True, "version": "2.30.7", "path": path, "source": source}
    # The named file is used or fails, and the one of pip is not taken instead.
    assert not _info_search.find_nccl({"version": "", "path": "", "why_none": "cannot be loaded"})["found"]


def test_a_build_without_gpus_looks_for_the_file_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_info_search, "installed_nccl", lambda: "/pip/libnccl.so.2")
    found = _info_search.find_nccl(None)
    assert found == {"found": True, "version": None, "path": "/pip/libnccl.so.2", "source": "pip"}
    monkeypatch.setattr(_info_search, "installed_nccl", lambda: None)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    assert not _info_search.find_nccl(None)["found"]
