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


def test_the_package_of_pip_goes_before_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    system = _info_search.find_shared_library(_info_search.Wanted("libc.so.6", "", "", "C"))["path"]
    monkeypatch.setattr(_info_search, "installed_nccl", lambda: system)
    found = _info_search.find_shared_library(_info_search.Wanted("libc.so.99", "", "", "NCCL"))
    assert (found["path"], found["source"]) == (system, "pip")
