"""The command `paceline top`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

_BAR = 20  # columns
_NONE = 'No program shows itself. It does with observe="socket": DataParallel(model, observe="socket"), Pool(observe="socket").'


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the result of `argparse.ArgumentParser.add_subparsers`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "top",
        help="shares, speeds, busy, queue and memory of running trainers and pools, live",
        description='Looks at the trainers and pools of your running programs that were made with observe="socket". On a terminal it looks again and again, until '
        "Ctrl-C; that needs rich (pip install 'paceline[progress]'). Elsewhere it prints once. Exits with 1 if there is nothing to show.",
    )
    parser.add_argument("pid", type=int, nargs="?", metavar="PID", help="only this process")
    parser.add_argument("--once", action="store_true", help="print once, on a terminal too")
    parser.add_argument("--json", action="store_true", help="one JSON object, once")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="how often to look (default: 1)")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Look and print. Returns the exit status."""
    from paceline._observe import reports

    if not args.every > 0:
        args.parser.error("--every must be above 0")
    found = reports(args.pid)
    if args.json:
        print(json.dumps({"processes": found}, indent=2))
    elif args.once or not sys.stdout.isatty() or not found or not _live(args, found):
        print(text_of(found, args.pid))
    return 0 if found else 1


def _live(args: argparse.Namespace, found: list[dict[str, Any]]) -> bool:
    """Look until Ctrl-C. Returns whether that can be done here."""
    try:
        from rich.live import Live
        from rich.text import Text
    except ImportError:
        print("(once, since rich is not installed: pip install 'paceline[progress]')", file=sys.stderr)
        return False
    from paceline._observe import reports

    try:
        with Live(auto_refresh=False, vertical_overflow="crop") as display:
            while True:
                display.update(Text(text_of(found, args.pid), no_wrap=True, overflow="ellipsis"), refresh=True)
                time.sleep(args.every)
                found = reports(args.pid)
    except KeyboardInterrupt:
        return True


def text_of(processes: Sequence[Mapping[str, Any]], pid: int | None = None) -> str:
    """What is shown of them."""
    if not processes:
        return _NONE if pid is None else f"Process {pid} does not show itself, or has ended. {_NONE}"
    lines = []
    for process in processes:
        lines.append(f"{process.get('pid')} {process.get('program')}")
        for one in process.get("observed", ()):
            try:
                lines += [f"  {one['error']}"] if "error" in one else _lines(one)
            except (KeyError, TypeError, ValueError, AttributeError):
                lines.append(f"  what paceline {process.get('paceline')} shows, this version cannot read")
    return "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in lines)


def _lines(one: Mapping[str, Any]) -> list[str]:
    """A trainer or a pool: a line for all, and one for each device."""
    pool = "waiting" in one
    if pool:
        backlog = one["backlog_seconds"]
        late = "" if backlog is None else f", served in {1e3 * backlog:.0f} ms"
        lost = "".join(f", {count} {name}" for name, count in one["outcomes"].items() if count)
        head = f"{one['waiting']} wait{late}, {one['running']} run{lost}"
    elif one["steps"]:
        head = f"step {one['steps']}, {1e3 * one['step_seconds']:.1f} ms a step"
        if one["since_seconds"] is not None and one["since_seconds"] > max(1.0, 3 * one["step_seconds"]):
            head += f", none has ended for {one['since_seconds']:.0f} s"
    else:
        head = "no step yet"
    lines = [
        f"  {one['kind']} {one['name']}: {head}; process {_size(one['host_bytes'])}",
        f"    {'device':<10}{'jobs' if pool else 'share':>8}{'jobs/s' if pool else 'items/s':>10}{'busy':>7}",
    ]
    for name, device in one["devices"].items():
        amount, rate = (device[key] for key in (("jobs", "jobs_per_second") if pool else ("share", "items_per_second")))
        bar = "#" * round(_BAR * device["busy"])
        memory = "" if device["memory_bytes"] is None else f"{_size(device['memory_bytes'])} "
        if device["limit_bytes"] is not None:
            memory += f"limit {_size(device['limit_bytes'])}"
        state = "  retired" if device["retired"] else ""
        lines.append(
            f"    {name:<10}{amount:>8.0f}{rate:>10,.{0 if rate >= 100 else 1}f}{device['busy']:>7.0%}  {bar:<{_BAR}}  {memory.strip()}{state}".rstrip()
        )
    return lines


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
