"""Makes torchvision importable beside a PyTorch for CPUs."""

from importlib.util import find_spec

import torch

# PyPI's torchvision is built for CUDA. A PyTorch for CPUs cannot load its operators, and the import fails at the first two, which it wants to
# describe. Nothing here runs them. Users of such a PyTorch take torchvision from PyTorch's own index.
OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
if torch.version.cuda is None and find_spec("torchvision") is not None:
    for name in ("nms", "qnms"):
        OPERATORS.define(f"{name}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
