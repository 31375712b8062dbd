#!/usr/bin/env python3
"""Checks what CONTRIBUTING says of the C++ rooms: the namespaces of each, which rooms it may include, and that sub-rooms depend one way."""

from __future__ import annotations

import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
USES = {
    "plan": set(),
    "balance": {"plan"},
    "sim": {"plan", "balance"},
    "runtime": {"plan"},
    "comm": {"runtime"},
    "observe": {"runtime"},
}
USES["engine"] = {*USES}
INSIDE = {"plan", "runtime", "comm"}  # the rooms below use their private headers, too
SHARED = {"runtime", "comm", "engine"}  # programs use them without naming a room
# One word of users for two rooms: the engine's options and the balancer's have it.
ALLOWED = {"cpp/include/paceline/balance/balance.hpp", "cpp/src/balance/policy.cpp"}


def namespaces(text: str) -> set[str]:
    """Those that a file opens, without the ones in which it only declares a class."""
    forward = re.sub(r"namespace (paceline[\w:]*) \{\n((class|struct) \w+;\n)+\}", "", text)
    return set(re.findall(r"^namespace (paceline[\w:]*) \{", forward, re.MULTILINE))


def own_classes(text: str) -> list[str]:
    """The classes of namespace paceline that a private header defines, other than members of public ones."""
    blocks = re.findall(r"^namespace paceline \{$(.*?)^\}  // namespace paceline$", text, re.MULTILINE | re.DOTALL)
    pattern = re.compile(r"^(?:class|struct) (\w+)(?: final)?(?: :[^;]*)? \{", re.MULTILINE)
    return [name for block in blocks for name in pattern.findall(block)]


def check(path: Path) -> list[str]:
    name, text = path.relative_to(ROOT).as_posix(), path.read_text()
    public, room = (
        name.startswith("cpp/include"),
        path.relative_to(ROOT).parts[3 if name.startswith("cpp/include") else 2],
    )
    if room not in USES:
        return []
    wanted = {"paceline", "paceline::internal"} if room in SHARED else {f"paceline::{room}"}
    if public and room in SHARED:
        wanted = {"paceline"}
    found = [f"{name}: namespace {one} in the room {room}" for one in namespaces(text) - wanted if name not in ALLOWED]
    if not public and path.suffix == ".hpp":
        found += [f"{name}: {one} is private, so it belongs to paceline::internal" for one in own_classes(text)]
    includes = re.findall(r'^#include [<"](?:paceline/)?(\w+)/', text, re.MULTILINE)
    found += [f"{name}: {room} may not use {one}" for one in includes if one in USES and one not in {room, *USES[room]}]
    private = re.findall(r'^#include "(\w+)/', text, re.MULTILINE)
    found += [
        f"{name}: the private headers of {one} are its own" for one in private if one in {*USES} - {room, *INSIDE}
    ]
    return found


def circles(files: list[Path]) -> list[str]:
    """Sub-rooms that include each other. A public header belongs to the sub-room that has its source."""
    sources = [path.relative_to(ROOT / "cpp/src").parts for path in files if path.suffix == ".cpp"]
    homes = {(parts[0], Path(parts[2]).stem): "/".join(parts[:2]) for parts in sources if len(parts) == 3}

    def home(name: str) -> str | None:
        *folder, stem = name.split("/")
        return "/".join(folder) if len(folder) == 2 else homes.get(("/".join(folder), stem))

    uses: dict[str | None, set[str | None]] = {}
    for path in files:
        here = home(re.sub(r"^(src|include/paceline)/|\..pp$", "", path.relative_to(ROOT / "cpp").as_posix()))
        there = re.findall(r'^#include [<"](?:paceline/)?([\w/]+)\.hpp', path.read_text(), re.MULTILINE)
        uses.setdefault(here, set()).update({home(name) for name in there} - {here, None})
    uses.pop(None, None)
    try:
        TopologicalSorter(uses).prepare()
    except CycleError as error:
        return [f"sub-rooms include each other: {' <- '.join(error.args[1])}"]
    return []


def main() -> int:
    files = sorted(path for path in (ROOT / "cpp").rglob("*.?pp") if len(path.relative_to(ROOT).parts) > 3)
    found = [line for path in files for line in check(path)] + circles(files)
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
