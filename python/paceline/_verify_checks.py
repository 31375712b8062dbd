"""The checks of `paceline verify` that have a right answer: gradients against one device, and collectives of integers."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline import Communicator, Device, DeviceGroup
from paceline.comm import ReduceOp
from paceline.torch import DataParallel
from paceline.torch._check.probe import distances

# Allowed differences between sums in different orders, relative to a tensor's norm. The bound for float32 is wide because GPUs choose other
# algorithms for other batch sizes. A wrong weight is off by a hundredth or more.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-4}
_SPLITS_PER_NETWORK = 4
_COLLECTIVE_TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)
# Exact; a mean would divide.
_COLLECTIVE_OPS: dict[ReduceOp, Callable[..., torch.Tensor]] = {"sum": torch.sum, "min": torch.amin, "max": torch.amax}
_COLLECTIVE_COUNTS = (1, 1003, 1 << 20)  # one element, a size that 16 bytes do not divide, many blocks


def torch_device(device: Device) -> torch.device:
    """The `torch.device` of a device's tensors."""
    return torch.device("cpu") if device.kind == "host" else torch.device(device.kind, device.index)


def home_of(devices: Sequence[Device]) -> torch.device:
    """The `torch.device` of a group's module: its first GPU, or the CPU."""
    return next((torch_device(device) for device in devices if device.kind != "host"), torch.device("cpu"))


def exactness(devices: Sequence[Device], seed: int) -> dict[str, Any]:
    """Compare several networks under random splits with plain PyTorch: two accumulated steps each, on the module's device.

    `worst_difference` measures the difference, and `TOLERANCES` bounds it.
    """
    rng = random.Random(seed)
    kinds = itertools.product(_NETWORKS, TOLERANCES, range(_SPLITS_PER_NETWORK))
    cases = [_exactness_case(devices, name, dtype, rng) for name, dtype, _ in kinds]
    return {
        "status": "passed" if all(case["passed"] for case in cases) else "failed",
        "reference": f"plain PyTorch on {home_of(devices)}",
        "tolerances": {str(dtype): tolerance for dtype, tolerance in TOLERANCES.items()},
        "worst": {str(dtype): max(c["worst"] for c in cases if c["dtype"] == str(dtype)) for dtype in TOLERANCES},
        "cases": len(cases),
        "failures": [case for case in cases if not case["passed"]],
    }


def _exactness_case(devices: Sequence[Device], network: str, dtype: torch.dtype, rng: random.Random) -> dict[str, Any]:
    torch.manual_seed(rng.randrange(1 << 30))
    home, items = home_of(devices), rng.randint(2 * len(devices), 40 + 2 * len(devices))
    module, item_shape = _NETWORKS[network]
    reference = copy.deepcopy(module).to(home, dtype)
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=0.3)
    trained = copy.deepcopy(reference)
    batches = [
        (torch.randn(items, *item_shape, dtype=dtype, device=home), torch.randint(0, 4, (items,), device=home))
        for _ in range(2)
    ]
    for batch in batches:
        _loss(reference, batch).backward()
    ratios = [rng.choice([0.0, 1.0, rng.uniform(0.1, 5.0)]) for _ in devices]
    ratios[rng.randrange(len(devices))] += 1.0
    balance: Any = rng.choice(["auto", "even", ratios, ratios])
    micro_batch = rng.choice([None, 1, 3])
    with DataParallel(trained, list(devices), balance=balance, micro_batch=micro_batch) as trainer:
        for batch in batches:
            trainer.step(_loss, batch)
        shares = list(trainer.shares.values())
    got, wanted = ([parameter.grad for parameter in module.parameters()] for module in (trained, reference))
    worst = worst_difference(got, wanted)
    return {
        "network": network,
        "dtype": str(dtype),
        "balance": balance,
        "micro_batch": micro_batch,
        "shares": shares,
        "worst": worst,
        "passed": worst <= TOLERANCES[dtype],
    }


def worst_difference(got: Sequence[torch.Tensor | None], wanted: Sequence[torch.Tensor | None]) -> float:
    """The largest of the `distances`. A gradient on one side only counts as infinite, and so do gradients that are all zero."""
    one_sided = any((mine is None) != (theirs is None) for mine, theirs in zip(got, wanted, strict=True))
    if one_sided or not any(bool(tensor.any()) for tensor in wanted if tensor is not None):
        return float("inf")
    return max(distances(wanted, got).values())


def collectives(devices: Sequence[Device], seed: int) -> dict[str, Any]:
    """Check reductions of small integers. Every type can hold their sums, so results must be equal to the bit for any order of additions.

    Each reduction runs once as `all_reduce` and once as `reduce_scatter` plus `all_gather`.
    """
    if len(devices) == 1:
        return {"status": "skipped", "why": "one device has nobody to reduce with"}
    generator = torch.Generator().manual_seed(seed)
    failures = []
    cases = list(itertools.product(_COLLECTIVE_COUNTS, _COLLECTIVE_OPS, _COLLECTIVE_TYPES))
    drawn = {
        count: torch.randint(
            -2, 3, (len(devices), -(-count // len(devices)) * len(devices)), generator=generator, device="cpu"
        )
        for count in _COLLECTIVE_COUNTS
    }
    with DeviceGroup(list(devices)) as group:
        communicator = Communicator(group)
        for count, op, dtype in cases:
            values = drawn[count]
            wanted = _COLLECTIVE_OPS[op](values, 0).to(dtype)
            wholes = [value.to(torch_device(device), dtype) for value, device in zip(values, devices, strict=True)]
            parts = [whole.new_empty(len(whole) // len(devices)) for whole in wholes]
            gathered = [torch.empty_like(whole) for whole in wholes]
            communicator.reduce_scatter(wholes, parts, op)
            communicator.all_gather(parts, gathered)
            communicator.all_reduce(wholes, op)
            for name, tensors in (("all_reduce", wholes), ("reduce_scatter and all_gather", gathered)):
                failures += [
                    f"{name}, {op} of {str(dtype).removeprefix('torch.')} x {count} on {device.name}"
                    for tensor, device in zip(tensors, devices, strict=True)
                    if not torch.equal(tensor.cpu(), wanted)
                ]
        return {
            "status": "failed" if failures else "passed",
            "transport": communicator.description,  # NCCL with its version and path, for example
            "cases": 2 * len(cases),
            "failures": failures,
        }


def _loss(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(module(batch[0]), batch[1])


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        out: torch.Tensor = self.head((x + self.attention(y, y, y, need_weights=False)[0]).mean(1))
        return out


_NETWORKS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Sequential(nn.Linear(12, 33), nn.GELU(), nn.Linear(33, 4, bias=False)), (12,)),
    "convolution": (
        nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 4)
        ),
        (3, 8, 8),
    ),
    "attention": (_Attention(), (7, 16)),
}
