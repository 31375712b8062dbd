"""An optimizer's step on all workers against the same step on the calling thread, for models of several sizes.

    python optimizer.py             two host devices, alone on the machine

Models are square linear layers. The optimizer is AdamW, fused and as PyTorch's default loop over parameters on the host. Both kinds of
step take turns in one process, each after a step of the trainer, as in training. Figures are medians in milliseconds. Sizes that
``DataParallel.optimizer`` would not divide are measured, too, because its thresholds come from here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch
from torch import nn

from paceline.torch import DataParallel
from paceline.torch._trainer import optimizer as _optimizer
from race import script

SIZES = ((8, 256), (8, 512), (32, 256), (8, 1024), (32, 512), (32, 1024))  # layers, width
BLOCK = 6  # steps of one kind before the other's turn
WARM_UP_STEPS = 12


def main() -> int:
    args = arguments()
    devices = script.cores(2)
    torch.set_num_threads(1)
    _optimizer._LEAST_ELEMENTS = _optimizer._LEAST_ELEMENTS_OF_A_LOOP = 1
    names = [device.name for device in devices]
    rows = [
        measured(names, layers, width, fused, args.steps) for layers, width in args.sizes for fused in (True, False)
    ]
    print(f"{'elements':>10}{'parameters':>12}{'kind':>8}{'one thread':>12}{'workers':>9}{'ratio':>7}   ms")
    for row in rows:
        print(
            f"{row['elements']:>10}{row['parameters']:>12}{row['kind']:>8}{row['one_thread_ms']:>12.2f}{row['workers_ms']:>9.2f}"
            f"{row['ratio']:>7.2f}"
        )
    if args.json:
        print(json.dumps({"rows": rows} | script.facts(devices, torch=torch.__version__)))
    return 0


def measured(names: list[str], layers: int, width: int, fused: bool, steps: int) -> dict[str, Any]:
    """Measure one size and kind."""
    module = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
    batch = torch.randn(32, width)

    def loss_fn(one: Any, part: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(part).mean() for layer in one]).sum()

    with DataParallel(module, names, balance="even") as trainer:
        kinds = (
            torch.optim.AdamW(module.parameters(), lr=1e-6, fused=fused),
            trainer.optimizer(torch.optim.AdamW, lr=1e-6, fused=fused),
        )
        seconds: tuple[list[float], list[float]] = ([], [])
        for number in range(WARM_UP_STEPS + 2 * steps):
            kind = number // BLOCK % 2
            trainer.step(loss_fn, batch)
            start = time.perf_counter()
            kinds[kind].step()
            if number >= WARM_UP_STEPS:
                seconds[kind].append(time.perf_counter() - start)
            kinds[kind].zero_grad()
    one_thread, workers = (1e3 * statistics.median(each) for each in seconds)
    return {
        "elements": layers * width * width,
        "parameters": layers,
        "kind": "fused" if fused else "loop",
        "one_thread_ms": round(one_thread, 3),
        "workers_ms": round(workers, 3),
        "ratio": round(one_thread / workers, 3),
    }


def arguments() -> argparse.Namespace:
    parser = script.parser(__doc__)
    parser.add_argument("--steps", type=int, default=48, help="of each kind and size (default: 48)")
    parser.add_argument("--short", action="store_true", help="the smallest size only")
    args = parser.parse_args()
    if args.steps < BLOCK:
        parser.error(f"--steps must be at least {BLOCK}")
    args.sizes = SIZES[:1] if args.short else SIZES
    return args


if __name__ == "__main__":
    sys.exit(main())
