"""Where the tests of this folder run: on the first GPU whole and in parts, or on the devices that --devices names.

pytest tests/gpu                              on the GPU; skipped, with the reason, where there is none
pytest tests/gpu --devices host:0,host:1      what does not need a GPU, on host devices
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpu_support import BOXES, Box, no_gpu

FOLDER = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--devices", help="run on these devices alone, such as host:0,host:1, instead of the first GPU")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "box" not in metafunc.fixturenames:
        return
    named = metafunc.config.getoption("--devices")
    boxes = [Box("named", names=tuple(named.split(",")))] if named else BOXES
    wanted = {name for marker in metafunc.definition.iter_markers("boxes") for name in marker.args}
    chosen = [each for each in boxes if named or not wanted or each.name in wanted]
    metafunc.parametrize("box", chosen, ids=[each.name for each in chosen], indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = config.getoption("--devices")
    why_not = no_gpu()
    for item in items:
        if FOLDER not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        on_host = named and not any(name.startswith("cuda") for name in named.split(","))
        if on_host and item.get_closest_marker("needs_cuda"):
            item.add_marker(pytest.mark.skip(reason=f"about GPUs alone, and --devices is {named}"))
        elif why_not and not on_host:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {why_not}"))


@pytest.fixture
def box(request: pytest.FixtureRequest) -> Iterator[Box]:
    """A set of devices, whose parts nothing may hold afterwards."""
    chosen: Box = request.param
    chosen.open()
    yield chosen
    chosen.close()


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """TensorFloat-32 keeps ten bits of a factor: no measure of whether anything is exact."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
