"""The results for people: one Markdown file with what ran where, and a table for each stage."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_MOST_FIGURES = 60  # per stage, outside of tables; readers would not read more
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}  # the names that Google Benchmark writes
# Google Benchmark's own columns. All others are the benchmark's own counters.
_GOOGLE = {
    "name",
    "family_index",
    "per_family_instance_index",
    "run_name",
    "run_type",
    "repetitions",
    "repetition_index",
    "threads",
    "aggregate_name",
    "aggregate_unit",
    "iterations",
    "real_time",
    "cpu_time",
    "time_unit",
    "label",
}
# Left out of a script's result: what the head has already, and what is too long. The JSON has everything.
_LEFT_OUT = {"hardware", "versions", "rates", "malloc", "tables", "batches"}


def markdown(record: Mapping[str, Any]) -> str:
    """The whole file."""
    machine, versions = record["machine"], record["versions"]
    lines = [
        f"# All benchmarks, {record['date']}",
        "",
        *(["**A quick run: it shows that they work. The figures mean nothing.**", ""] if record["quick"] else []),
        f"{', '.join(f'{name} {version}' for name, version in versions.items() if version)}. {machine['processor']}, "
        f"{machine['cores']} cores, {machine['system']}{', ' + machine['gpu'] if machine['gpu'] else ''}. Load average before: "
        f"{machine['load_before']:g}.",
        "",
        "```sh",
        record["command"],
        "```",
        "",
        "| stage | | seconds | revision | |",
        "| --- | --- | --- | --- | --- |",
    ]
    for entry in record["stages"]:
        status = entry["status"] if entry["status"] in ("passed", "skipped") else f"**{entry['status']}**"
        made_at = entry.get("revision") or ""
        lines.append(
            f"| {entry['stage']} | {status} | {entry['seconds']:.0f} | {made_at} | {_cell(entry.get('why', ''))} |"
        )
    for entry in record["stages"]:
        lines += _section(entry, record)
    return "\n".join(lines) + "\n"


def _section(entry: Mapping[str, Any], record: Mapping[str, Any]) -> list[str]:
    if entry["status"] == "skipped":
        return []
    lines = ["", f"## {entry['stage']}", ""]
    if entry["status"] != "passed":
        tail = entry.get("tail", "").strip().splitlines()[-12:]
        return [*lines, f"{entry['status'].capitalize()}. It said last:", "", "```", *tail, "```"]
    if entry["stage"] == "straggler" and record.get("picture"):
        lines += [f"![shares and step times while another program comes and goes]({Path(record['picture']).name})", ""]
    result = entry.get("result")
    file = f"benchmarks-{record['date']}.json"
    if not isinstance(result, dict):
        return [*lines, f"Its JSON is no object; it is in [{file}]({file})."]
    if "benchmarks" in result:
        lines += [*_table(("", "time", "processor", "spread"), list(google_rows(result["benchmarks"]))), ""]
    else:
        lines += _of_script(result, file)
    return [*lines, f"`{shlex.join(_short(entry['command']))}`"]


def _of_script(result: Mapping[str, Any], file: str) -> list[str]:
    """All of its tables. Of the other figures, as many as people may read, and where to find the rest."""
    lines = []
    for title, (head, *body) in tables(result).items():
        lines += [f"{title}:", "", *_table(head, body), ""]
    rows = list(figures(result))
    if rows:
        lines += [*_table(("", ""), rows[:_MOST_FIGURES]), ""]
    if len(rows) > _MOST_FIGURES:
        lines += [f"{len(rows) - _MOST_FIGURES} more figures of this stage are in [{file}]({file}).", ""]
    return lines


def tables(result: Mapping[str, Any]) -> dict[str, list[Sequence[str]]]:
    """The tables of a result, and its lists of records as tables: title, head and rows."""
    found: dict[str, list[Sequence[str]]] = dict(result.get("tables", {}))
    for key, value in result.items():
        if key not in _LEFT_OUT and _are_records(value):
            head = [name.replace("_", " ") for name in value[0]]
            body = ([_number(cell) if cell is not None else "" for cell in each.values()] for each in value)
            found[key.replace("_", " ")] = [head, *body]
    return found


def _are_records(value: object) -> bool:
    """Whether these are mappings with the same keys and without nesting, like the rows of a table."""
    if not isinstance(value, list) or not value or not all(isinstance(each, Mapping) for each in value):
        return False
    nested = any(isinstance(cell, (Mapping, list)) for each in value for cell in each.values())
    return not nested and all(list(each) == list(value[0]) for each in value)


def google_rows(benchmarks: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Per benchmark, the median and spread of its repetitions, or the value if there is only one."""
    spreads = {each["run_name"]: each["real_time"] for each in benchmarks if each.get("aggregate_name") == "cv"}
    for each in benchmarks:
        if each.get("error_occurred"):
            yield each["run_name"], f"failed: {each.get('error_message', '')}", "", ""
        elif each.get("aggregate_name") == "median" or each.get("run_type") == "iteration":
            spread = f"{spreads[each['run_name']]:.1%}" if each["run_name"] in spreads else ""
            details = [each["label"]] if each.get("label") else []
            details += [f"{key} {value:.3g}" for key, value in each.items() if key not in _GOOGLE]
            name = f"{each['run_name']} ({', '.join(details)})" if details else each["run_name"]
            yield name, _time(each, "real_time"), _time(each, "cpu_time"), spread


def figures(result: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """A result's numbers outside of tables, each with the keys that lead to it."""
    for key, value in result.items():
        name = f"{above}{key}".replace("_", " ")
        if key in _LEFT_OUT or value is None or (not above and _are_records(value)):
            continue
        if isinstance(value, Mapping):
            yield from figures(value, f"{name}: ")
        elif isinstance(value, list) and all(isinstance(each, Mapping) for each in value):
            for number, each in enumerate(value, start=1):
                yield from figures(each, f"{name} {number}: ")
        elif isinstance(value, list):
            yield name, ", ".join(map(_number, value))
        else:
            yield name, _number(value)


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _time(each: Mapping[str, Any], key: str) -> str:
    seconds = each[key] * _UNITS[each["time_unit"]]
    unit = next((unit for unit in ("s", "ms", "us") if seconds >= _UNITS[unit]), "ns")
    return f"{seconds / _UNITS[unit]:.3g} {unit.replace('us', 'µs')}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_row(head), f"|{' --- |' * len(head)}", *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _short(command: Sequence[str]) -> list[str]:
    """Remove the folders of the measuring machine."""
    return [Path(word).name if word.startswith("/") else word for word in command]
