"""Text for people from the result of `paceline.info.collect`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any


def render(facts: Mapping[str, Any]) -> str:
    """Format the result of `collect` as text, without a trailing newline."""
    cpu = facts["cpu"]
    limit = cpu["cgroup_limit"]
    python = facts["python"]
    build = facts["build"]
    limited = f"{limit['cores']:g} core{'' if limit['cores'] == 1 else 's'} ({limit['source']})" if limit else "none"
    nodes = "; ".join(f"{node}: {ranges(cores)}" for node, cores in cpu["numa_nodes"].items())
    interpreter = f"{python['version']}{'' if python['gil'] else ' free-threaded'}, {python['executable']}"
    blocks: list[tuple[str | None, list[tuple[str, str]]]] = [
        (None, [("paceline", facts["version"]), ("platform", facts["platform"])]),
        (
            "CPU",
            [
                ("processor", cpu["model"]),
                ("cores we may use", ranges(cpu["affinity"]) or "unknown (no affinity mask)"),
                ("cgroup CPU limit", limited),
                ("NUMA nodes", nodes or "unknown"),
                ("reduction kernels", cpu["reduction_kernels"]),
            ],
        ),
        ("Backends", [(name, entry["detail"]) for name, entry in facts["backends"].items()]),
        ("Devices", [(device["name"], _device_text(device)) for device in facts["devices"]]),
        ("Memory", [("space " + space, ", ".join(names)) for space, names in facts["memory_spaces"].items()]),
        ("GPUs", [*_gpu_rows(facts["gpus"]), *_gpu_library_rows(facts["gpu_libraries"])]),
        ("Links between GPUs", link_rows(facts["gpu_links"])),
        (
            "Build",
            [
                ("built with", f"{build['compiler']} ({build['flags']})"),
                ("fmt, pybind11", f"{build['fmt']}, {build['pybind11']}"),
                (python["implementation"], interpreter),
            ],
        ),
        ("Libraries", [(name, _library_text(entry)) for name, entry in facts["libraries"].items()]),
    ]
    width = max(len(name) for _, block in blocks for name, _ in block)
    lines: list[str] = []
    for title, block in blocks:
        indent = "  " if title else ""
        if title and block:
            lines += ["", title]
        lines += [f"{indent}{name:<{width + 2 - len(indent)}}  {text}" for name, text in block]
    if facts["missing"]:
        lines += ["", "Missing"]
        for entry in facts["missing"]:
            lines.append(f"  {entry['name']}")
            lines += [f"    why it matters: {entry['why']}", f"    how to get it:  {entry['how']}"]
    return "\n".join(lines)


def _device_text(device: Mapping[str, Any]) -> str:
    cores = device["cores"]
    where = f"pinned to core{'s' if len(cores) > 1 else ''} {ranges(cores)}" if cores else "not pinned"
    node = device["numa_node"]
    return where if node is None else f"{where}, NUMA node {node}"


def _gpu_rows(gpus: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for gpu in gpus:
        yield gpu["device"], str(gpu.get("model", ""))
        for key, value in {**gpu, **gpu["health"]}.items():
            label, text = _quantity(key, value)
            if text and key not in ("device", "model", "health"):
                yield f"  {label}", text


def _gpu_library_rows(libraries: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for name, entry in libraries.items():
        parts = [_quantity(key, entry[key]) for key in entry if key not in ("why_none", "version", "path")]
        text = f"{entry.get('version') or 'version unknown'}  ({entry.get('path') or 'path unknown'})"
        if why := entry.get("why_none"):
            text = f"none: {why}"
        yield name, "; ".join([text, *(f"{label}: {value}" for label, value in parts if value)])


_UNITS = {
    "_bytes": (1 / 2**30, "{:.1f} GiB"),
    "_hz": (1e-9, "{:.2f} GHz"),
    "_mhz": (1e-3, "{:.2f} GHz"),
    "_celsius": (1.0, "{:.0f} C"),
    "_watts": (1.0, "{:.0f} W"),
    "_seconds": (1.0, "{:.1f} s"),
}


def _quantity(key: str, value: Any) -> tuple[str, str]:
    """Turn ``("memory_bytes", 85899345920)`` into ``("memory", "80.0 GiB")``; the text is empty for an unknown value."""
    label = key.replace("_", " ")
    if value is None or value == "":
        return label, ""
    if isinstance(value, bool):
        return label, "yes" if value else "no"
    unit = next((suffix for suffix in _UNITS if key.endswith(suffix)), "")
    label = key.removesuffix(unit).replace("_", " ")
    if isinstance(value, Mapping):
        parts = [_quantity(f"{name}{unit}", entry) for name, entry in value.items()]
        return label, "; ".join(f"{name} {text}" for name, text in parts if text)
    if unit:
        factor, text = _UNITS[unit]
        return label, text.format(factor * value)
    if isinstance(value, (list, tuple)):
        return label, ", ".join(str(entry) for entry in value) or "none"
    return label, str(value)


def _library_text(entry: Mapping[str, Any]) -> str:
    if not entry["found"]:
        return "not found"
    return f"{entry['version'] or 'version unknown'}  ({entry['source']}: {entry['path']})"


def ranges(numbers: Iterable[int]) -> str:
    """Turn ``[0, 1, 2, 5]`` into ``0-2,5``."""
    ordered = sorted(numbers)
    begins = [number for number in ordered if number - 1 not in ordered]
    ends = [number for number in ordered if number + 1 not in ordered]
    return ",".join(f"{first}-{last}" if first < last else str(first) for first, last in zip(begins, ends, strict=True))


def link_rows(links: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Labels and texts: for each GPU the speeds to all others, then which pairs are linked how. Empty without links."""
    if not links:
        return []
    names = list(dict.fromkeys(link["from"] for link in links))
    of_way = {True: "push_bytes_per_second", False: "bytes_per_second"}
    speeds = {(link["from"], link["to"]): link[of_way[link["pushed"]]] / 1e9 for link in links}
    width = max(map(len, names)) + 2

    def cell(source: str, target: str) -> str:
        if source == target:
            return "-"
        speed = speeds[source, target]
        return f"{speed:.{0 if speed >= 100 else 1}f}" if speed > 0 else "?"

    table = [("GB/s to", "".join(f"{name:>{width}}" for name in names))]
    table += [(f"from {one}", "".join(f"{cell(one, other):>{width}}" for other in names)) for one in names]
    pairs: dict[str, list[str]] = {}
    for link in links:
        if names.index(link["from"]) < names.index(link["to"]):
            pairs.setdefault(link["kind"], []).append(f"{link['from']} and {link['to']}")
    table += [(kind, "all pairs" if len(pairs) == 1 else ", ".join(of_kind)) for kind, of_kind in pairs.items()]
    pushed = [link for link in links if link["pushed"]]
    if pushed:
        pulls = ", ".join(f"{link['from']} to {link['to']} {link['bytes_per_second'] / 1e9:.1f}" for link in pushed)
        table.append(("pushed, if pulled", pulls))
    return table


def links_text(links: Sequence[Mapping[str, Any]]) -> str:
    """The same as indented lines; empty without links."""
    table = link_rows(links)
    width = max((len(label) for label, _ in table), default=0)
    return "".join(f"  {label:<{width}}  {line}\n" for label, line in table)
