"""The command `paceline verify`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from paceline._words import numbers, plural


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the result of `argparse.ArgumentParser.add_subparsers`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "verify",
        help="whether the devices of this machine compute what they should, and how fast together; under a minute",
        description="Two checks with a bound and a measurement without one. Exactness: small networks under random splits, whose "
        "gradients must be those of plain PyTorch, within 1e-12 of each tensor's norm in float64 and 1e-4 in float32. "
        "Collectives: reductions of integers, which must come out equal to the bit. Race: automatic shares beside even ones and each "
        "device alone; it only tells their speeds. Exits with 1 if a check fails or anything breaks. The report names "
        "hardware and versions, and neither the host nor the user: please share it.",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--devices", metavar="NAME,NAME,...", help="default: all GPUs, or all host devices; 'paceline info' lists them"
    )
    where.add_argument(
        "--partition",
        type=numbers,
        metavar="R,R,...",
        help="cut the first GPU into parts in these ratios, such as 0.75,0.25, and verify on those",
    )
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="for the race (20)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of networks, batches and splits (0)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Verify and print. Returns the exit status: 0, or 1 if a check failed; bad arguments exit with 2."""
    if not 0 <= args.seconds <= 3600:
        args.parser.error(f"--seconds is {args.seconds:g}; it must be from 0 to 3600")
    if find_spec("torch") is None:
        args.parser.error("PyTorch is not installed, and it trains the networks: pip install 'paceline[torch]'")
    from paceline import partition
    from paceline._verify import verify

    devices: Sequence[Any] | None = args.devices.split(",") if args.devices else None
    if args.partition:
        devices = partition("cuda:0", args.partition)
    report = verify(devices, seconds=args.seconds, seed=args.seed)
    print(json.dumps(report, indent=2) if args.json else render(report))
    return 0 if report["passed"] else 1


def render(report: Mapping[str, Any]) -> str:
    """The report as text for people."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    names = ", ".join(device["name"] for device in report["devices"])
    lines = [f"devices      {names}", f"versions     {versions}"]
    lines += [f"{part:<12} {_line(part, report[part])}" for part in _PARTS]
    verdict = ""
    for status, shown in _SHOWN.items():
        parts = [part for part in _PARTS if report[part]["status"] == status]
        verdict += f"{' and '.join(parts)} {shown}; " if parts else ""
    lines.append(f"\n{verdict}{report['seconds']:.0f} s")
    return "\n".join(lines)


_PARTS = ("exactness", "collectives", "race")
_SHOWN = {"failed": "FAILED", "passed": "passed", "skipped": "skipped", "measured": "measured, against no bound"}


def _line(part: str, found: Mapping[str, Any]) -> str:
    status: str = found["status"]
    if "why" in found:
        return f"{status}: {found['why']}"
    if part == "exactness":
        worst = ", ".join(
            f"{name.removeprefix('torch.')} {value:.1e} (at most {found['tolerances'][name]:.0e})"
            for name, value in found["worst"].items()
        )
        wrong = f"; {len(found['failures'])} of them beyond that" if found["failures"] else ""
        return (
            f"{status}: gradients of {found['cases']} random splits against {found['reference']}; worst difference of a tensor, relative to its "
            f"norm: {worst}{wrong}"
        )
    if part == "collectives":
        return (
            f"{status}: {found['cases']} reductions of integers, each compared to the bit with their result"
            + "".join(f"; wrong: {case}" for case in found["failures"])
        )
    return (
        f"{status}, against no bound: items/s with auto shares {found['auto_over_alone']:.3f} and with even ones "
        f"{found['even_over_alone']:.3f} of the sum of the devices alone; auto / even {found['auto_over_even']:.3f} "
        f"(medians of {plural(found['blocks'], 'block')} each, steps of {found['step_milliseconds']:.0f} ms)"
    )
