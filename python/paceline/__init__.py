"""Use all devices of one machine as one: batches split by measured speed, with exactly the gradients of one device.

`paceline.torch.DataParallel` trains a PyTorch module. `paceline.plan` has the planners, `Communicator` the collectives, and `paceline.sim`
the simulator. Importing this package loads neither PyTorch nor NumPy and starts no thread.
"""

from paceline._core import Cancelled, DeviceLost, Error, InvalidArgument, OutOfMemory, Timeout, Unavailable
from paceline._core.runtime import Device, DeviceGroup, devices, find_device
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
    "InvalidArgument",
    "OutOfMemory",
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


_SUBMODULES = ("balance", "comm", "info", "plan", "sim", "testing", "torch")


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:  # on first use, because paceline.torch imports PyTorch, which takes long
        from importlib import import_module

        return import_module(f"paceline.{name}")
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
