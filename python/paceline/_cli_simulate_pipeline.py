"""What `paceline simulate --pipeline` prints."""

from __future__ import annotations

import argparse
import json
from typing import Any

from paceline import InvalidArgument, Unavailable
from paceline._words import numbers, plural

_GIB = 1 << 30
_BOUNDARY_PART = 16  # of what a block saves of an item; transformers save 10 to 20 times the input of a block
_USUAL = (("1F1B on the even cut", "one_f_one_b"), ("GPipe on the even cut", "gpipe"))
_ARGUMENTS = (  # that --json prints
    *("speeds", "blocks", "memory", "batch", "micro_batches", "steps", "noise", "seed"),
    *("fixed_ms", "per_item_ms", "parameters", "activations", "link"),
)
# The model, unless the command line says otherwise. It fits no device of 8 GiB.
_PARAMETERS_GIB = 12.0
_ACTIVATIONS_GIB = 24.0


def add_arguments(parser: argparse.ArgumentParser) -> Any:
    """Add the options that only --pipeline has. Returns their group."""
    group = parser.add_argument_group("with --pipeline")
    link = "each device has its own memory, and sends and moves of blocks take time (one memory for all)"
    parameters = f"parameters, gradients and optimizer state of the model ({_PARAMETERS_GIB:g})"
    activations = f"what the whole model keeps of a whole batch until its backward ({_ACTIVATIONS_GIB:g})"
    for option, kind, default, metavar, text in (
        ("--blocks", int, 24, "N", "equal blocks of the model (24)"),
        ("--memory", numbers, None, "GIB,GIB,...", "memory of each device (no limit)"),
        ("--micro-batches", int, None, "N", "micro-batches of a step (planned)"),
        ("--parameters", float, None, "GIB", parameters),
        ("--activations", float, _ACTIVATIONS_GIB, "GIB", activations),
        ("--link", str, None, "GB/S", link),
    ):
        group.add_argument(option, type=kind, default=default, metavar=metavar, help=text)
    group.add_argument("--plot", metavar="FILE", help="draw the schedule; needs matplotlib")
    return group


def run(args: argparse.Namespace) -> int:
    """Plan, simulate and print. Returns the exit status."""
    from paceline.sim import simulate_pipeline

    args.parameters = _PARAMETERS_GIB if args.parameters is None else args.parameters
    args.link = _bandwidth(args.link)
    unused = (("--suite", args.suite), ("--fail", args.fail), ("--lasting-noise", args.lasting_noise))
    for option, given in unused:
        if given:
            raise InvalidArgument(f"{option} is not for pipelines; --slow and --noise are")
    if args.memory is not None and len(args.memory) != len(args.speeds):
        raise InvalidArgument(
            f"--memory has {plural(len(args.memory), 'value')} for {plural(len(args.speeds), 'device')}: give one for each of --speeds"
        )
    saved = round(args.activations * _GIB / max(1, args.batch))
    found = simulate_pipeline(
        args.speeds,
        blocks=args.blocks,
        batch_size=args.batch,
        micro_batches=args.micro_batches,
        steps=args.steps if args.throttle or args.noise else 0,
        fixed_seconds=args.fixed_ms / 1e3,
        per_item_seconds=args.per_item_ms / 1e3,
        memory_bytes=None if args.memory is None else [round(gib * _GIB) for gib in args.memory],
        parameter_bytes=round(args.parameters * _GIB),
        saved_bytes_per_item=saved,
        boundary_bytes_per_item=saved // max(1, args.blocks) // _BOUNDARY_PART,
        link_bytes_per_second=args.link * 1e9,
        noise=args.noise,
        throttles=args.throttle,
        seed=args.seed,
    )
    print(json.dumps(_summary(args, found)) if args.json else _text(args, found))
    if args.plot:
        _draw(args.plot, found["planned"])
    return 0


def _bandwidth(given: str | None) -> float:
    try:
        return 0.0 if given is None else float(given)
    except ValueError:
        raise InvalidArgument(f"--link is {given!r}; with --pipeline it is a number of GB/s") from None


def _summary(args: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    config = {name: getattr(args, name) for name in _ARGUMENTS}
    slow = [dict(zip(("device", "factor", "from", "to"), one, strict=True)) for one in args.throttle]
    return {**found, "config": {**config, "slow": slow}}


def _text(args: argparse.Namespace, found: dict[str, Any]) -> str:
    planned = found["planned"]
    ideal, bound = planned["ideal_seconds"], planned["bound_seconds"]
    lines = [
        f"{plural(len(args.speeds), 'device')}, {plural(args.blocks, 'block')}, batch {args.batch} in "
        f"{plural(len(planned['sizes']), 'micro-batch', 'micro-batches')}, noise {args.noise:.1%}",
        f"ideal, if no device ever waited: {ideal * 1e3:.2f} ms a step; no schedule beats {bound * 1e3:.2f} ms with the "
        "planned cuts",
        "",
        f"{'':<24}{'ms a step':>10}{'/ ideal':>9}{'bubble':>9}  blocks",
        _row("planned", planned, args.blocks),
    ]
    lines += [_row(title, found[name], args.blocks) for title, name in _USUAL]
    lines += ["", f"{'stage':<7}{'device':<9}{'blocks':<10}{'in flight':>10}{'busy':>8}{'needs':>11}{'has':>11}"]
    limits = [None] * len(args.speeds) if args.memory is None else args.memory
    last = max(action[3] for stage in planned["stages"] for action in stage["actions"])
    for number, stage in enumerate(planned["stages"]):
        end = _ends(planned, args.blocks)[number]
        busy = sum(finish - start for _, _, start, finish in stage["actions"]) / last
        limit = limits[int(stage["device"].rpartition(":")[2])]
        blocks = f"{stage['first_block']} to {end - 1}"
        lines.append(
            f"{number:<7}{stage['device']:<9}{blocks:<10}{stage['in_flight']:>10}{busy:>8.1%}"
            f"{stage['bytes'] / _GIB:>7.2f} GiB" + ("  no limit" if limit is None else f"{limit:>7.2f} GiB")
        )
    return "\n".join(lines + (_run_lines(found["run"]) if found["run"] else []))


def _ends(plan: dict[str, Any], blocks: int) -> list[int]:
    return [*(stage["first_block"] for stage in plan["stages"][1:]), blocks]


def _row(title: str, plan: dict[str, Any] | None, blocks: int) -> str:
    if plan is None:
        return f"{title:<24}{'-':>10}: there are fewer blocks than devices"
    counts = [end - stage["first_block"] for end, stage in zip(_ends(plan, blocks), plan["stages"], strict=True)]
    cut = ", ".join(f"{n} on {stage['device']}" for n, stage in zip(counts, plan["stages"], strict=True))
    seconds, ideal = plan["seconds"], plan["ideal_seconds"]
    line = f"{title:<24}{seconds * 1e3:>10.2f}{seconds / ideal:>9.3f}{plan['bubble']:>9.1%}  {cut}"
    if plan["does_not_fit"]:
        line += f"\n{'':<24}does not fit: {plan['does_not_fit'].split(': ')[0]}"
    return line


def _run_lines(run: dict[str, Any]) -> list[str]:
    steps = len(run["step_seconds"])
    elapsed = run["elapsed_seconds"]
    lines = [
        "",
        f"{plural(steps, 'step')}: {elapsed:.3f} s, {elapsed / run['oracle_seconds'] - 1:+.1%} against the best plan for "
        f"the true speeds at each step, {elapsed / run['unmoved_seconds'] - 1:+.1%} against the first plan kept",
    ]
    for move in run["moves"]:
        was, now = move["seconds_before"], move["seconds_after"]
        what = "other micro-batches or depth"
        if move["kind"] != "depth":
            what = f"cuts {_cuts(move, 'from')} to {_cuts(move, 'to')}"
        cost = f", for {move['cost_seconds']:.3f} s" if move["cost_seconds"] else ""
        gain = f", {was * 1e3:.2f} to {now * 1e3:.2f} ms a step" if was else ""
        lines.append(f"step {move['step']:>4}: {what}{gain}{cost}; {move['reason']}")
    return lines


def _cuts(move: dict[str, Any], side: str) -> str:
    devices = " ".join(str(device) for device in move[f"{side}_order"])
    return f"[{' '.join(str(cut) for cut in move[f'{side}_cuts'])}] on devices [{devices}]"


def _draw(path: str, plan: dict[str, Any]) -> None:
    from paceline._plot_schedule import ScheduleRow, ScheduleSpan, draw_schedule

    rows = [
        ScheduleRow(stage["device"], number, [ScheduleSpan(*action) for action in stage["actions"]])
        for number, stage in enumerate(plan["stages"])
    ]
    try:
        draw_schedule(path, rows, title=f"a step as planned, {plan['seconds'] * 1e3:.2f} ms")
    except ImportError as error:
        raise Unavailable(str(error)) from error
