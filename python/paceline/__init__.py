"""Use all devices of one machine as one: batches split by measured speed, with exactly the gradients of one device.

`paceline.torch.DataParallel` trains a PyTorch module. `paceline.plan` has the planners, `Communicator` the collectives, and `paceline.sim`
the simulator. Importing this package loads neither PyTorch nor NumPy and starts no thread.
"""

from paceline._core import (
    Cancelled,
    DeviceLost,
    Error,
    Expired,
    InvalidArgument,
    OutOfMemory,
    Rejected,
    Timeout,
    Unavailable,
)
from paceline._core.runtime import Device, DeviceGroup, devices, find_device

TYPE_CHECKING = False  # as in typing, whose import would take a third of this one's time
if TYPE_CHECKING:
    from paceline._partition import partition, release_partitions
    from paceline._stop import StopRequest, stop_on
    from paceline.comm import Communicator

__version__: str

__all__ = [
    "Cancelled",
    "Communicator",
    "Device",
    "DeviceGroup",
    "DeviceLost",
    "Error",
    "Expired",
    "InvalidArgument",
    "OutOfMemory",
    "Rejected",
    "StopRequest",
    "Timeout",
    "Unavailable",
    "__version__",
    "devices",
    "find_device",
    "partition",
    "release_partitions",
    "stop_on",
]

# Imported on first use. paceline.torch imports PyTorch, which takes long, and the others modules of Python's that took half of the time.
_SUBMODULES = ("balance", "comm", "info", "plan", "sim", "testing", "torch")
_HOMES = {
    "Communicator": "comm",
    "StopRequest": "_stop",
    "partition": "_partition",
    "release_partitions": "_partition",
    "stop_on": "_stop",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})


def __getattr__(name: str) -> object:
    if name in _SUBMODULES or name in _HOMES:
        from importlib import import_module

        module = import_module(f"paceline.{_HOMES.get(name, name)}")
        return getattr(module, name) if name in _HOMES else module
    # On first use, because importlib.metadata takes half of the import's time.
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("paceline")
        except PackageNotFoundError:  # used from a build tree without installation
            return "0+unknown"
    if name == "DataParallel":
        raise AttributeError("DataParallel is in paceline.torch: from paceline.torch import DataParallel")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
