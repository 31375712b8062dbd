"""What `paceline simulate --pool` prints."""

from __future__ import annotations

import argparse
import json
from typing import Any

from paceline import InvalidArgument
from paceline._words import numbers, plural

PLACEMENTS = ("auto", "any", "weighted", "least_outstanding", "earliest_finish", "round_robin")
_ARGUMENTS = (  # that --json prints
    *("speeds", "believed", "load", "max_batch", "max_delay_ms", "fixed_ms", "per_item_ms"),
    *("length_variation", "variation", "burst", "deadline_ms", "requests", "seed", "tenants"),
    *("gangs", "stages"),
)


def _tenants(text: str) -> list[tuple[float, float]]:
    pairs = [tuple(map(float, one.split(":"))) for one in text.split(",")]
    if any(len(one) != 2 for one in pairs):
        raise ValueError
    return [(one[0], one[1]) for one in pairs]


def _gangs(text: str) -> tuple[float, int]:
    part, devices = text.split(":")
    return float(part), int(devices)


# What only --pool has, without --day and with it: option, type, default, metavar, help.
_OPTIONS: tuple[tuple[str, Any, Any, str, str], ...] = (
    ("--load", float, 0.7, "PART", "arriving work over what all devices can do in full batches (0.7)"),
    ("--max-batch", int, 1, "N", "largest batch (1: no batches)"),
    ("--max-delay-ms", float, 0.0, "MS", "how long a batch may wait to become larger (0)"),
    (
        "--length-variation",
        float,
        0.0,
        "F",
        "standard deviation of a request's length over its mean; a batch is padded to its longest (0)",
    ),
    ("--believed", numbers, None, "S,S,...", "what the pool takes the speeds to be (the truth)"),
    ("--burst", float, 1.0, "N", "mean number of requests that arrive at once (1)"),
    ("--requests", int, 20000, "N", "requests (20000)"),
    (
        "--tenants",
        _tenants,
        None,
        "W:S,W:S,...",
        "who shares the pool: the weight of each tenant and its share of the requests. Prints their waits and what they are served (nobody has a name)",
    ),
    (
        "--gangs",
        _gangs,
        None,
        "PART:K",
        "this part of the jobs takes K devices at once. Prints what they wait, and what their reservations leave idle (none)",
    ),
    ("--stages", int, 1, "N", "jobs of a request, each after= the one before, and with its deadline (1)"),
)
_DAY_OPTIONS: tuple[tuple[str, Any, Any, str, str], ...] = (
    ("--wait-ms", float, 100.0, "MS", "with --day: mean wait that is aimed at (100)"),
    ("--activation-seconds", float, 5.0, "S", "with --day: until a device that is wanted takes requests (5)"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that only --pool has."""
    group = parser.add_argument_group(
        "with --pool",
        "also --speeds, --fixed-ms, --per-item-ms and --seed. It compares the placements that have names; a function of your own takes paceline.sim.simulate_pool",
    )
    both = (
        ("--variation", float, 0.3, "F", "standard deviation of a batch's time over its mean (0.3)"),
        (
            "--deadline-ms",
            float,
            None,
            "MS",
            "mean deadline of a request; each one's is between half of it and one and a half (none)",
        ),
    )
    day = "devices that come and go over a day of requests, as with Pool(autoscale=)"
    group.add_argument("--day", action="store_true", help=day)
    for option, kind, default, metavar, text in (*both, *_OPTIONS, *_DAY_OPTIONS):
        group.add_argument(option, type=kind, default=default, metavar=metavar, help=text)


def run(args: argparse.Namespace) -> int:
    """Simulate all placements and print. Returns the exit status."""
    from paceline._core.sim import batch_sizes
    from paceline.sim import simulate_pool

    if args.speeds is None:
        raise InvalidArgument("--pool needs --speeds, the relative speed of each device")
    for option, given in (
        ("--fail", args.fail),
        ("--lasting-noise", args.lasting_noise),
        ("--throttle", args.throttle),
    ):
        if given:
            raise InvalidArgument(f"{option} is not for pools; --variation and --believed are")
    for option, _, default, *_ in _OPTIONS if args.day else _DAY_OPTIONS:
        if getattr(args, option[2:].replace("-", "_")) != default:
            raise InvalidArgument(f"{option} is not {'for' if args.day else 'there without'} --day")
    if args.day:
        return _day(args)
    if args.max_batch < 1:
        raise InvalidArgument(f"--max-batch is {args.max_batch}; it must be at least 1")
    sizes = batch_sizes(args.max_batch)
    found = {
        placement: simulate_pool(
            args.speeds,
            placement=placement,
            believed=args.believed,
            fixed_seconds=args.fixed_ms / 1e3,
            per_item_seconds=args.per_item_ms / 1e3,
            sizes=sizes,
            max_delay_seconds=args.max_delay_ms / 1e3,
            length_variation=args.length_variation,
            load=args.load,
            burst=args.burst,
            variation=args.variation,
            deadline_seconds=_deadline(args),
            requests=args.requests,
            seed=args.seed,
            tenants=args.tenants or [],
            gangs=args.gangs,
            stages=args.stages,
        )
        for placement in PLACEMENTS
    }
    if args.json:
        config = {name: getattr(args, name) for name in _ARGUMENTS} | {"sizes": sizes}
        print(json.dumps({"config": config, "placements": found}))
    else:
        print(_text(args, found))
    return 0


def _deadline(args: argparse.Namespace) -> float | None:
    return None if args.deadline_ms is None else args.deadline_ms / 1e3


def _text(args: argparse.Namespace, found: dict[str, dict[str, Any]]) -> str:
    stages = f" of {args.stages} stages" if args.stages > 1 else ""
    lines = [
        f"{plural(len(args.speeds), 'device')}, {plural(args.requests, 'request')}{stages}, load {args.load:g}, batches of at most {args.max_batch}, seed {args.seed}",
        "",
        f"{'placement':<18}{'p50 ms':>10}{'p99 ms':>10}{'batch':>8}"
        + (f"{'in time':>9}{'late':>7}{'refused':>9}{'expired':>9}" if args.deadline_ms is not None else "")
        + "  busy",
    ]
    for placement, one in found.items():
        line = f"{placement:<18}{1e3 * one['p50_seconds']:>10.2f}{1e3 * one['p99_seconds']:>10.2f}{one['mean_batch']:>8.1f}"
        if args.deadline_ms is not None:
            parts = (one["in_time"], one["late"], one["rejected"], one["expired"])
            line += "".join(f"{part:>{width}.1%}" for part, width in zip(parts, (9, 7, 9, 9), strict=True))
        lines.append(f"{line}  {' '.join(f'{busy:.0%}' for busy in one['busy'])}")
    if args.tenants:
        lines += ["", *_tenants_text(args, found)]
    if args.gangs:
        lines += ["", *_gangs_text(args, found)]
    return "\n".join(lines)


def _gangs_text(args: argparse.Namespace, found: dict[str, dict[str, Any]]) -> list[str]:
    columns = f"{'mean':>8}{'p50':>9}{'p99 ms':>9}"
    lines = [
        f"gangs of {args.gangs[1]} devices, {args.gangs[0]:.1%} of the jobs",
        f"{'placement':<18}{'wait:':>6}{columns}{'others wait:':>14}{columns}{'idle for gangs':>16}{'reserved':>10}{'backfilled':>12}",
    ]
    for placement, figures in found.items():
        one = figures["gangs"]
        waits = [
            "".join(
                f"{1e3 * one[of][f'{name}_seconds']:>{width}.2f}"
                for name, width in (("mean", 8), ("p50", 9), ("p99", 9))
            )
            for of in ("waits", "other_waits")
        ]
        lines.append(
            f"{placement:<24}{waits[0]}{'':14}{waits[1]}{one['idle']:>16.1%}{one['reserved']:>10.1%}{one['backfilled']:>12.1%}"
        )
    return [
        *lines,
        "Idle for gangs, reserved: parts of all devices' time. Reserved: other jobs waited, and would have held up a gang.",
    ]


def _tenants_text(args: argparse.Namespace, found: dict[str, dict[str, Any]]) -> list[str]:
    weights, shares = (sum(one[number] for one in args.tenants) for number in (0, 1))
    lines = [
        f"{'placement':<18}{'tenant':>7}{'weight':>8}{'requests':>10}{'wait: mean':>12}{'p50':>9}{'p99 ms':>9}{'served':>8}{'while all wait':>16}{'by weight':>11}"
    ]
    for placement, figures in found.items():
        for number, ((weight, share), one) in enumerate(zip(args.tenants, figures["tenants"], strict=True)):
            waits = [1e3 * one[f"{name}_wait_seconds"] for name in ("mean", "p50", "p99")]
            lines.append(
                f"{placement if number == 0 else '':<18}{number:>7}{weight:>8g}{share / shares:>10.1%}{waits[0]:>12.2f}{waits[1]:>9.2f}{waits[2]:>9.2f}"
                f"{one['served']:>8.1%}{one['served_while_all_wait']:>16.1%}{weight / weights:>11.1%}"
            )
    lines += ["", "How far two tenants who both wait get apart, |W1/w1 - W2/w2|, of the bound l1/w1 + l2/w2:"]
    for placement, figures in found.items():
        part = figures["unfairness"]
        why = (
            "requests are bound to devices when they come"
            if placement not in ("auto", "any")
            else "no two tenants waited"
        )
        if args.gangs is not None:
            why = "gangs wait while others start"
        if args.deadline_ms is not None or args.length_variation:
            why = (
                "requests have deadlines" if args.deadline_ms is not None else "batches are of requests of like lengths"
            )
        said = f"no bound: {why}" if part is None else f"{part:.1%}, {'kept' if part <= 1 + 1e-9 else 'BROKEN'}"
        lines.append(f"{placement:<18}{said}")
    return lines


def _day(args: argparse.Namespace) -> int:
    from paceline.sim import simulate_day

    found = simulate_day(
        args.speeds,
        wait_seconds=args.wait_ms / 1e3,
        activation_seconds=args.activation_seconds,
        job_seconds=(args.fixed_ms + args.per_item_ms) / 1e3,
        variation=args.variation,
        seed=args.seed,
        deadline_seconds=_deadline(args),
    )
    if args.json:
        config = {
            name: getattr(args, name)
            for name in (
                *("speeds", "wait_ms", "activation_seconds", "fixed_ms", "per_item_ms", "variation", "seed"),
                "deadline_ms",
            )
        }
        print(json.dumps({"config": config, "day": found}))
        return 0
    best = found["best_device_hours"]
    print(
        f"{plural(len(args.speeds), 'device')} over 24 hours, seed {args.seed}: a mean wait of at most {args.wait_ms:g} ms in {found['met'] / found['minutes']:.2%} "
        f"of {found['minutes']} minutes, {1e3 * found['mean_wait_seconds']:.3g} ms over the day\n"
        f"device-hours: {found['device_hours']:.1f}, {found['device_hours'] / best if best else 1:.3f} of the best plan in hindsight, {best:.1f}; "
        f"all devices all day: {found['all_device_hours']:.1f}, with the target met in {found['all_met'] / found['minutes']:.2%} of the minutes\n{plural(found['activations'], 'activation')}"
    )
    if args.deadline_ms is not None:
        print(
            f"deadlines: {found['in_time']:.3%} in time, {found['late']:.3%} late, {found['rejected']:.3%} refused, {found['expired']:.3%} expired; "
            f"all devices all day: {found['all_in_time']:.3%} in time"
        )
    return 0
