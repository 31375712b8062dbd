"""The places where packages and shared libraries are searched."""

from __future__ import annotations

import subprocess
import types
from pathlib import Path

import pytest

from paceline import _info_search


def test_a_folder_of_the_name_of_a_package_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_package_of_ours").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    package = _info_search.Package("a_package_of_ours", "a-package-of-ours", "", "")
    assert not _info_search.find_package(package)["found"]
    (tmp_path / "a_package_of_ours" / "__init__.py").write_text("raise RuntimeError('imported')")
    found = _info_search.find_package(package)
    assert found["path"] == str(tmp_path / "a_package_of_ours")
    assert (found["version"], found["source"]) == (None, "Python path")


LIBRARY = _info_search.SharedLibrary("Ours", "libours.so.1", ("ours-wheel",), "", "")


def test_a_shared_library_is_found_in_a_wheel_before_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not _info_search.find_shared_library(LIBRARY)["found"]
    system = tmp_path / "system"
    system.mkdir()
    (system / "libours.so.1").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path / 'nowhere'}:{system}")
    found = _info_search.find_shared_library(LIBRARY)
    assert (found["path"], found["source"]) == (str(system / "libours.so.1"), "LD_LIBRARY_PATH")

    site = tmp_path / "site"
    (site / "ours" / "lib").mkdir(parents=True)
    (site / "ours" / "lib" / "libours.so.1").touch()
    (site / "ours_wheel-2.5.dist-info").mkdir()
    (site / "ours_wheel-2.5.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: ours-wheel\nVersion: 2.5\n"
    )
    (site / "ours_wheel-2.5.dist-info" / "RECORD").write_text("ours/lib/libours.so.1,,\n")
    monkeypatch.syspath_prepend(site)
    found = _info_search.find_shared_library(LIBRARY)
    assert (found["path"], found["version"]) == (str(site / "ours" / "lib" / "libours.so.1"), "2.5")
    assert found["source"] == "wheel ours-wheel"


def test_a_library_of_the_process_is_found_as_loaded() -> None:
    found = _info_search.find_shared_library(_info_search.SharedLibrary("C", "libc.so.6", (), "", ""))
    assert found["source"] == "loaded"
    assert Path(found["path"]).exists()


def test_the_linker_cache_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libours.so.1"
    library.touch()
    listing = (
        f"2 libs found\n\tlibours.so.1x (libc6) => /x\n\tlibours.so.1 (libc6,x86-64) => {library}\n\tbroken line\n"
    )
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: types.SimpleNamespace(stdout=listing))
    found = _info_search.find_shared_library(LIBRARY)
    assert (found["path"], found["source"]) == (str(library), "linker cache")
