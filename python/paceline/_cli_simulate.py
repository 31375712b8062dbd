"""The command `paceline simulate`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from paceline import InvalidArgument, _cli_simulate_gpus, _cli_simulate_pipeline, _cli_simulate_pool
from paceline._words import numbers, plural

if TYPE_CHECKING:
    from paceline.sim import Scenario, ScenarioResult, SimulationResult

POLICIES = ("auto", "even", "weighted")
# The attributes of `SimulationResult`, of `ScenarioResult` and of the arguments that --json prints.
_FIGURES = (
    *("loss_to_ideal", "time_over_ideal", "moves", "moves_per_100_steps", "steps_to_recover"),
    *("lost_steps", "final_shares"),
)
_ARGUMENTS = ("speeds", "batch", "steps", "noise", "seed", "fixed_ms", "per_item_ms")
_RESULTS = (
    *("name", "loss", "worst_loss", "even_loss", "optimum_loss", "optimum_source", "regret"),
    *("moves_per_100_steps", "steps_to_recover", "missed"),
)


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the result of `argparse.ArgumentParser.add_subparsers`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "simulate",
        help="how even, weighted and automatic splits would do on given devices",
        description="Runs the balancer on simulated devices: a device of speed s takes (fixed + per-item * n) / s for "
        "n items, times noise. Compares each policy with the ideal, the exact split by the true speeds.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--speeds", type=numbers, metavar="S,S,...", help="relative speed of each device")
    what.add_argument(
        "--suite",
        action="store_true",
        help="instead of one box: every scenario of the library (noise, flapping, drift, warm-up, ...), each beside its "
        "computed optimum and held against its bounds; exits with 1 if one is not kept",
    )
    what.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="what gradients and parameters between N equal GPUs cost beyond computing: in series, as paceline does it, with a "
        "sharded optimizer, as that could do it, and in DDP's ring",
    )
    lasting = "more noise, whose correlation falls by 1/e every STEPS steps: each device's own, or common to all"
    throttled = "the device takes FACTOR times as long in steps FROM to TO-1"
    for option, kind, metavar, text in (
        ("--lasting-noise", noise, "F:STEPS[:common]", lasting),
        ("--throttle", throttle, "DEVICE:FACTOR@FROM-TO", throttled),
        ("--fail", failure, "DEVICE@STEP", "the device stops in that step, which the others repeat"),
    ):
        described = f"{text}; repeatable"
        parser.add_argument(option, type=kind, action="append", default=[], metavar=metavar, help=described)
    options: tuple[tuple[str, Callable[[str], Any], Any, str, str], ...] = (
        ("--seeds", count, 5, "N", "with --suite: runs of each scenario (5)"),
        ("--batch", count, 512, "ITEMS", "items per step (512)"),
        ("--steps", count, 400, "N", "steps to simulate (400)"),
        ("--noise", float, 0.0, "F", "standard deviation of log times, e.g. 0.03"),
        ("--spikes", spikes, (0.0, 1.0), "P:FACTOR", "with probability P a device's step takes FACTOR times as long"),
        ("--seed", count, 0, "N", "of the noise (0)"),
        ("--fixed-ms", float, 4.0, "MS", "fixed time of a step at speed 1 (4)"),
        ("--per-item-ms", float, 0.1, "MS", "time per item at speed 1 (0.1)"),
    )
    for option, parse, default, metavar, text in options:
        parser.add_argument(option, type=parse, default=default, metavar=metavar, help=text)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument(
        "--pipeline",
        action="store_true",
        help="cut a model into stages instead: the plan, plain 1F1B and GPipe beside it, and, with --slow or --noise, how "
        "the balancer moves blocks while steps go by",
    )
    parser.add_argument(
        "--pool",
        action="store_true",
        help="instead of training steps: independent requests on the devices, each way to place them beside the others",
    )
    pipeline = _cli_simulate_pipeline.add_arguments(parser)
    slow: dict[str, Any] = {"dest": "throttle", "type": throttle, "action": "append", "default": []}
    text = f"{throttled}; repeatable, and the same as --throttle"
    pipeline.add_argument("--slow", **slow, metavar="DEVICE:FACTOR@FROM-TO", help=text)
    _cli_simulate_gpus.add_arguments(parser)
    _cli_simulate_pool.add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate all policies and print. Returns the exit status; bad arguments exit with 2."""
    if args.plot and not args.pipeline:
        raise InvalidArgument("--plot draws the schedule of a pipeline: add --pipeline")
    if args.pool:
        if args.pipeline or args.gpus is not None:
            raise InvalidArgument("--pool is not for pipelines or --gpus; --speeds is")
        return _cli_simulate_pool.run(args)
    if args.gpus is not None:
        if args.pipeline:
            raise InvalidArgument("--gpus is not for pipelines; --speeds is")
        return _cli_simulate_gpus.run(args)
    if args.pipeline:
        return _cli_simulate_pipeline.run(args)
    if args.suite:
        return _run_suite(args)
    from paceline.sim import simulate

    results = {
        policy: simulate(
            args.speeds,
            batch_size=args.batch,
            steps=args.steps,
            policy=policy,
            noise=args.noise,
            lasting_noise=args.lasting_noise,
            throttles=args.throttle,
            failures=args.fail,
            spike_probability=args.spikes[0],
            spike_factor=args.spikes[1],
            seed=args.seed,
            fixed_seconds=args.fixed_ms / 1e3,
            per_item_seconds=args.per_item_ms / 1e3,
        )
        for policy in POLICIES
    }
    print(json.dumps(_summary(args, results)) if args.json else _table(args, results))
    return 0


def _run_suite(args: argparse.Namespace) -> int:
    from paceline.sim import run_suite, scenarios

    results = run_suite(seeds=args.seeds)
    library = {scenario.name: scenario for scenario in scenarios()}
    found = [(result, library[result.name]) for result in results]
    if args.json:
        print(json.dumps({"seeds": args.seeds, "scenarios": [_suite_summary(*entry) for entry in found]}))
    else:
        print(_suite_table(args.seeds, found))
    return 1 if any(result.missed for result in results) else 0


def _suite_summary(result: ScenarioResult, scenario: Scenario) -> dict[str, Any]:
    return {
        **_attributes(result, _RESULTS),
        **_attributes(scenario, ("about", "steps")),
        "bounds": {
            "regret": scenario.most_regret,
            "moves_per_100_steps": scenario.most_moves_per_100_steps,
            "steps_to_recover": scenario.most_steps_to_recover or None,
        },
    }


def _attributes(of: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names}


def _suite_table(seeds: int, found: Sequence[tuple[ScenarioResult, Scenario]]) -> str:
    lines = [
        f"{len(found)} scenarios, {seeds} seeds each; losses to an oracle that knows of changes before they come",
        "",
        f"{'scenario':<34}{'even':>10}{'auto':>9}{'worst':>9}{'optimum':>9}{'regret':>9}{'bound':>9}"
        f"{'moves/100':>11}{'recover':>9}",
    ]
    for result, scenario in found:
        recover = "-" if result.steps_to_recover is None else str(result.steps_to_recover)
        lines.append(
            f"{result.name:<34}{result.even_loss:>10.2%}{result.loss:>9.2%}{result.worst_loss:>9.2%}"
            f"{result.optimum_loss:>9.2%}{result.regret:>9.2%}{scenario.most_regret:>9.2%}"
            f"{result.moves_per_100_steps:>11.2f}{recover:>9}"
        )
    lines += [
        "",
        "Optimum: the least that a rule without a crystal ball loses, the better of the exact split one step late and the",
        "best single split in hindsight. Regret: what is lost beyond it, calibration and reaction included.",
    ]
    missed = [f"{result.name}: {text}" for result, _ in found for text in result.missed]
    lines += ["", *(missed or ["Every bound is kept."])]
    return "\n".join(lines)


def _summary(args: argparse.Namespace, results: dict[str, SimulationResult]) -> dict[str, Any]:
    any_result = results[POLICIES[0]]
    return {
        "policies": {
            policy: {**_attributes(result, _FIGURES), "elapsed_ms": result.elapsed_seconds * 1e3}
            for policy, result in results.items()
        },
        "events": [_attributes(event, ("step", "device", "kind")) for event in any_result.events],
        "ideal_ms": any_result.ideal_seconds * 1e3,
        "config": {
            **_attributes(args, _ARGUMENTS),
            "lasting_noise": _named(("deviation", "steps", "common"), args.lasting_noise),
            "throttle": _named(("device", "factor", "from", "to"), args.throttle),
            "fail": _named(("device", "step"), args.fail),
            "spikes": {"probability": args.spikes[0], "factor": args.spikes[1]},
        },
    }


def _named(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(names, row, strict=True)) for row in rows]


def _table(args: argparse.Namespace, results: dict[str, SimulationResult]) -> str:
    any_result = results[POLICIES[0]]
    lines = [
        f"{plural(len(args.speeds), 'device')}, batch {args.batch}, {plural(args.steps, 'step')}, noise {args.noise:.1%}, "
        f"seed {args.seed}; ideal {any_result.ideal_seconds * 1e3 / args.steps:.2f} ms a step",
        "",
        f"{'policy':<10}{'loss to ideal':>15}{'time / ideal':>14}{'moves per 100':>15}  {'steps to recover':<18}"
        "final shares",
    ]
    for policy, result in results.items():
        recover = ", ".join("never" if steps is None else str(steps) for steps in result.steps_to_recover) or "-"
        shares = " ".join(str(share) for share in result.final_shares)
        lines.append(
            f"{policy:<10}{result.loss_to_ideal:>15.2%}{result.time_over_ideal:>14.3f}"
            f"{result.moves_per_100_steps:>15.2f}  {recover:<18}{shares}"
        )
    if any_result.events:
        events = ", ".join(f"{event.kind} of {event.device} at step {event.step}" for event in any_result.events)
        lines += ["", f"Events: {events}. Recovered: within 5 % of the new ideal."]
    lines += ["", "Loss compares shares without noise; time / ideal includes the noise, which no split can avoid."]
    return "\n".join(lines)


# Parsers of option values. `paceline` turns a ValueError into a message with the option and its metavar. `simulate` checks the values'
# meaning.


def count(text: str) -> int:
    """A whole number that fits into C++'s int64."""
    if not (text.isascii() and text.isdigit() and int(text) < 2**62):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2**62 - 1")
    return int(text)


def noise(text: str) -> tuple[float, float, bool]:
    """Parse text like ``0.05:40`` or ``0.05:40:common``."""
    deviation, steps, *scope = text.split(":")
    if scope not in ([], ["common"]):
        raise ValueError
    return float(deviation), float(steps), bool(scope)


def throttle(text: str) -> tuple[int, float, int, int]:
    """Parse text like ``0:2.0@100-300``."""
    device, rest = text.split(":")
    factor, steps = rest.split("@")
    first, last = steps.split("-")
    return count(device), float(factor), count(first), count(last)


def failure(text: str) -> tuple[int, int]:
    """Parse text like ``2@150``."""
    device, step = text.split("@")
    return count(device), count(step)


def spikes(text: str) -> tuple[float, float]:
    """Parse text like ``0.005:1.5``."""
    probability, factor = text.split(":")
    return float(probability), float(factor)
