"""Makes torchvision importable beside a PyTorch for CPUs, and ends with a table of the differences to one device."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from frameworks_support import differences

# PyPI's torchvision is built for CUDA. A PyTorch for CPUs cannot load its operators, and the import fails at the first two, which it wants to
# describe. Nothing here runs them. Users of such a PyTorch take torchvision from PyTorch's own index.
OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
if torch.version.cuda is None and find_spec("torchvision") is not None:
    for name in ("nms", "qnms"):
        OPERATORS.define(f"{name}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The largest difference of a parameter to the run on one device, by test."""
    if differences:
        terminalreporter.section("differences to one device")
        for test, difference in sorted(differences.items()):
            terminalreporter.write_line(f"{difference:8.1e}  {test}")
