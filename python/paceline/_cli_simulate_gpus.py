"""What `paceline simulate --gpus` prints."""

from __future__ import annotations

import argparse
import json
from typing import Any

from paceline import InvalidArgument
from paceline._words import plural

LINKS = ("host", "nvlink4", "nvlink5", "pcie4", "pcie5")
_BYTES = {"bfloat16": 2.0, "float32": 4.0}
# Adam reads and writes a parameter, two moments and a gradient in float32, on a memory of 2.7 TB/s.
_UPDATE_SECONDS = 28 / 2.7e12
_WAYS = {
    "serial": "all gradients to the first GPU after backward, all parameters back",
    "buckets": "paceline: buckets summed in slices during backward, parameters in buckets",
    "ranges": "paceline, sharded optimizer: ranges pulled from the first GPU, updated, and pulled back",
    "sharded": "as that could be: each GPU updates the slices that it has summed",
    "ring": "PyTorch's DDP: a ring all-reduce of each bucket during backward; a process for each GPU",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that only --gpus has."""
    group = parser.add_argument_group(
        "with --gpus", "also --parameters (a number, such as 1e9) and --link (one of " + ", ".join(LINKS) + ")"
    )
    tokens = "tokens of a step on each GPU; forward takes 2 and backward 4 operations per token and parameter (8192)"
    latency = "microseconds from the launch of a copy to its first byte (that of --link)"
    dtypes, dtype = sorted(_BYTES), "of parameters and gradients (bfloat16)"
    group.add_argument("--tokens", type=int, default=8192, metavar="N", help=tokens)
    operators = "that a step starts on each GPU; all ways but ring start those of all GPUs in one process. 0: as with CUDA graphs (2000)"
    group.add_argument("--operators", type=int, default=2000, metavar="N", help=operators)
    group.add_argument("--dtype", choices=dtypes, default="bfloat16", help=dtype)
    for option, default, metavar, text in (
        ("--tflops", 400.0, "T", "what a GPU reaches, in 1e12 operations a second (400)"),
        ("--bandwidth", None, "GB/S", "of a GPU's port in one direction (that of --link)"),
        ("--latency", None, "US", latency),
        ("--bucket-mb", 25.0, "MIB", "size of a bucket (25)"),
    ):
        group.add_argument(option, type=float, default=default, metavar=metavar, help=text)


def run(args: argparse.Namespace) -> int:
    """Simulate and print. Returns the exit status."""
    from paceline.sim import simulate_data_path

    link = "nvlink4" if args.link is None else args.link
    if link not in LINKS:
        raise InvalidArgument(f"--link is {link!r}; with --gpus it must be one of {', '.join(LINKS)}")
    parameters = 1e9 if args.parameters is None else args.parameters
    if args.tflops <= 0 or args.tokens <= 0:
        raise InvalidArgument("--tokens and --tflops must be positive")
    forward = 2.0 * parameters * args.tokens / (1e12 * args.tflops)
    ways = simulate_data_path(
        gpus=args.gpus,
        parameters=parameters,
        bytes_each=_BYTES[args.dtype],
        forward_seconds=forward,
        backward_seconds=2.0 * forward,
        update_seconds=parameters * _UPDATE_SECONDS,
        link=link,
        bandwidth=None if args.bandwidth is None else args.bandwidth * 1e9,
        latency_seconds=None if args.latency is None else args.latency * 1e-6,
        bucket_bytes=args.bucket_mb * (1 << 20),
        operators=args.operators,
    )
    config = {
        name: getattr(args, name)
        for name in ("gpus", "tokens", "tflops", "dtype", "bandwidth", "latency", "bucket_mb", "operators")
    }
    config |= {"parameters": parameters, "link": link}
    if args.json:
        print(json.dumps({"config": config, "forward_seconds": forward, "ways": ways}))
    else:
        print(_text(args, config, forward, ways))
    return 0


def _text(args: argparse.Namespace, config: dict[str, Any], forward: float, ways: dict[str, dict[str, float]]) -> str:
    from paceline.sim import launch_rate

    computing = 3.0 * forward + config["parameters"] * _UPDATE_SECONDS
    lines = [
        f"{plural(args.gpus, 'GPU')}, {config['link']}, {config['parameters']:.3g} parameters of type {args.dtype}, "
        f"{args.tokens} tokens each: forward {1e3 * forward:.1f} ms, backward {2e3 * forward:.1f} ms, "
        f"update {1e3 * config['parameters'] * _UPDATE_SECONDS:.1f} ms.",
        "A model with assumed links, not a measurement. Exposed: what a step takes beyond these three; negative where GPUs share the update.",
        f"To start {plural(args.operators, 'operator')} takes a process for each GPU {1e3 * args.operators / launch_rate(1):.1f} ms, and threads of one process "
        f"{1e3 * args.operators * args.gpus / launch_rate(args.gpus):.1f} ms; a step takes at least as long.",
        "",
        f"{'':10}{'step ms':>10}{'exposed ms':>12}{'of DDP':>8}",
    ]
    for way, figures in ways.items():
        of_ring = (computing + figures["exposed_seconds"]) / (computing + ways["ring"]["exposed_seconds"])
        lines.append(
            f"{way:10}{1e3 * figures['step_seconds']:10.1f}{1e3 * figures['exposed_seconds']:12.1f}{of_ring:8.2f}   {_WAYS[way]}"
        )
    return "\n".join(lines)
