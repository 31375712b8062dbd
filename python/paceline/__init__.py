"""All the devices of one machine as one: batches split by measured speed, gradients exactly those of one device.

`paceline.torch.DataParallel` trains a PyTorch module. `paceline.plan` holds the planners alone, `Communicator` the collectives,
`paceline.sim` the simulator. Importing this package loads neither PyTorch nor NumPy and starts no thread.
"""

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version

from paceline._core import Cancelled, Error, InvalidArgument, OutOfMemory, Timeout, Unavailable
from paceline._core.runtime import Device, DeviceGroup, devices, find_device
from paceline.comm import Communicator

try:
    __version__ = _version("paceline")
except _PackageNotFoundError:  # used from a build tree, without being installed
    __version__ = "0+unknown"

__all__ = [
    "Cancelled",
    "Communicator",
    "Device",
    "DeviceGroup",
    "Error",
    "InvalidArgument",
    "OutOfMemory",
    "Timeout",
    "Unavailable",
    "__version__",
    "devices",
    "find_device",
]
