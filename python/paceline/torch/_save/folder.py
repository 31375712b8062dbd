"""A folder of saves, of which each is complete or not there.

A save is a folder ``save-00000012`` with files of tensors, ``state.json`` for everything else, and ``manifest.json`` with the sizes and the
checksums of the other files. It is written under another name, brought to the disk, and renamed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from paceline import Error
from paceline.torch._devices.failures import warn_caller
from paceline.torch._save.nest import unpacked
from paceline.torch._save.tensor_file import Image, Stamp, read, write, write_image

VERSION = 1
_SAVE = re.compile(r"save-(\d{8,})")
_UNFINISHED = ".unfinished-"  # what a process has left that was killed while it wrote or removed a save
_STATE, _MANIFEST = "state.json", "manifest.json"


def commit(root: Path, tensors: Mapping[str, Image], state: bytes, keep: int) -> Path:
    """Write a save and bring it to the disk, then remove all but the `keep` newest. Returns the folder of the save.

    OSError: the save cannot be written, or another process writes to `root`. What cannot be removed stays, and is no error.
    """
    with _only_writer(root):
        return _committed(root, tensors, state, keep)


def _committed(root: Path, tensors: Mapping[str, Image], state: bytes, keep: int) -> Path:
    for left in root.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)
    earlier = _saves(root)
    number = 1 + (_number(earlier[-1]) if earlier else 0)
    folder = root / f"save-{number:08}"
    unfinished = _unfinished(folder)
    unfinished.mkdir()
    try:
        stamps = {_STATE: write(unfinished / _STATE, state)}
        for name, image in tensors.items():
            file = unfinished / f"{name}.safetensors"
            stamps[file.name] = write_image(file, image)
            shutil.copymode(unfinished / _STATE, file)  # safetensors makes files that only their owner may read
        manifest = {"version": VERSION, "files": {name: stamp._asdict() for name, stamp in stamps.items()}}
        write(unfinished / _MANIFEST, json.dumps(manifest, indent=1).encode())
        _sync_folder(unfinished)
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)  # it would keep a full disk full
        raise
    _sync_folder(root)
    if not earlier:  # the folder of the saves may be new, and those above it
        for parent in root.parents:
            with contextlib.suppress(PermissionError):
                _sync_folder(parent)
    for old in [*earlier, folder][:-keep]:
        # Without its name it is no save any more, whenever the process ends.
        with contextlib.suppress(OSError):
            shutil.rmtree(old.rename(_unfinished(old)), ignore_errors=True)
    return folder


@contextlib.contextmanager
def _only_writer(root: Path) -> Iterator[None]:
    """Hold the lock of the folder, where the file system has locks."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(
                error.errno,
                "another process writes to this folder, and only one may. If several ranks train together, call save_async on one of them",
                str(root),
            ) from None
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)


def _unfinished(folder: Path) -> Path:
    """A free name for the folder while it is no save."""
    return folder.with_name(f"{_UNFINISHED}{folder.name}-{time.time_ns()}")


def newest(root: Path) -> tuple[Path, dict[str, Any]]:
    """The newest complete save: its folder, and the parts of it by name. Warns of newer ones that are damaged.

    FileNotFoundError: there is no save. Error: all are damaged. OSError: the file system fails in another way, as for too many open files.
    """
    reasons = []
    for folder in reversed(_saves(root)):
        try:
            parts = _parts(folder)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, FileNotFoundError) and not folder.exists():
                return newest(root)  # its writer has replaced it by a newer one
            if isinstance(error, OSError) and error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO):
                raise  # it says nothing about the save
            reasons.append(f"{folder.name}: {error or type(error).__name__}")
            continue
        if reasons:
            warn_caller(
                f"load: {folder} is loaded, since what is newer is not complete. {'; '.join(reasons)}.", UserWarning
            )
        return folder, parts
    if reasons:
        raise Error(
            f"load: no save in {root} is complete. {'; '.join(reasons)}. Load another folder, or start anew with another one: the next saves "
            "would remove these."
        )
    raise FileNotFoundError(
        f"load: there is no save in {root}. save_async(path) makes them, as folders named save-00000001."
    )


def _parts(folder: Path) -> dict[str, Any]:
    manifest = json.loads((folder / _MANIFEST).read_bytes())
    if manifest["version"] > VERSION:
        raise ValueError(f"it has version {manifest['version']}, and this paceline reads up to {VERSION}")
    stamps = {name: Stamp(**stamp) for name, stamp in manifest["files"].items()}
    state = (folder / _STATE).read_bytes()
    if Stamp(len(state), zlib.crc32(state)) != stamps.pop(_STATE):
        raise ValueError(f"{_STATE} is damaged: its size or checksum is another one")
    found: dict[str, dict[str, torch.Tensor]] = {
        name.removesuffix(".safetensors"): read(folder / name, stamp) for name, stamp in stamps.items()
    }
    return {name: unpacked(packed, found.get(name, {})) for name, packed in json.loads(state).items()}


def _saves(root: Path) -> list[Path]:
    """The saves in the folder, oldest first."""
    return sorted((path for path in root.glob("save-*") if _SAVE.fullmatch(path.name) and path.is_dir()), key=_number)


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("save-"))


def _sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk. Without this a new name may be gone after a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
