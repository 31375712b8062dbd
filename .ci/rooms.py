#!/usr/bin/env python3
"""Checks what CONTRIBUTING says of the C++ rooms: the namespaces of each, and which rooms it may include."""

from __future__ import annotations

import re
import sys
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
SHARED = {"runtime", "comm", "engine"}  # programs use them without naming a room
# One word of users for two rooms: the engine's options and the balancer's have it.
ALLOWED = {"cpp/include/paceline/balance/balance.hpp", "cpp/src/balance/policy.cpp"}
# Found when this check began; take a name out when its class has moved.
STRAYS = {"TrainerMemory", "TrainerStep", "HealthLog", "GroupWorkers", "CoreTicks", "HostCounters", "PreferredNode"}


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
        found += [
            f"{name}: {one} is private, so it belongs to paceline::internal"
            for one in own_classes(text)
            if one not in STRAYS
        ]
    includes = re.findall(r'^#include [<"](?:paceline/)?(\w+)/', text, re.MULTILINE)
    found += [f"{name}: {room} may not use {one}" for one in includes if one in USES and one not in {room, *USES[room]}]
    return found


def main() -> int:
    files = sorted(path for path in (ROOT / "cpp").rglob("*.?pp") if len(path.relative_to(ROOT).parts) > 3)
    found = [line for path in files for line in check(path)]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
