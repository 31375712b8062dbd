"""In place of Triton's Python backend and of KServe: what the programs of python/guide/servers.md use of them.

Names, parameters and what is called when are those of python_backend at f9088ff6 and of kserve at aaac4e29. `test_guide_to_servers_stand_ins.py` compares them with
checkouts of the sources: PYTHON_BACKEND_SOURCE=folder KSERVE_SOURCE=folder.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch


class Tensor:
    def __init__(self, name: str, array: np.ndarray[Any, Any]) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray[Any, Any]:
        return self._array

    def to_dlpack(self) -> Any:
        return torch.utils.dlpack.to_dlpack(torch.from_numpy(self._array))  # type: ignore[attr-defined]


class TritonError:
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = message, code

    def code(self) -> int:
        return self._code

    def message(self) -> str:
        return self._message


class InferenceRequest:
    def __init__(self, inputs: list[Tensor], timeout: int = 0, cancelled: bool = False) -> None:
        self._inputs, self._timeout, self._cancelled = inputs, timeout, cancelled

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def timeout(self) -> int:
        return self._timeout

    def is_cancelled(self) -> bool:
        return self._cancelled


class InferenceResponse:
    def __init__(self, output_tensors: Any = (), error: TritonError | None = None, parameters: Any = None) -> None:
        self._tensors, self._error = list(output_tensors), error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    return next((one for one in inference_request.inputs() if one.name() == name), None)


class Model:
    def __init__(self, name: str, return_response_headers: bool = False) -> None:
        self.name, self.ready, self.engine = name, False, False

    async def __call__(self, body: Any, headers: Any = None, verb: Any = None) -> tuple[Any, dict[str, str]]:
        return await self.predict(body, headers), {}

    def load(self) -> bool:
        self.ready = True
        return self.ready

    async def predict(self, payload: Any, headers: Any = None, response_headers: Any = None) -> Any:
        raise NotImplementedError

    def start(self) -> None:
        self.ready = True

    def stop(self) -> None:
        self.ready = False


class InvalidInput(ValueError):
    def __init__(self, reason: str) -> None:
        self.reason = reason


def modules() -> dict[str, ModuleType]:
    """By name, what programs import."""
    triton, kserve, errors = (ModuleType(name) for name in ("triton_python_backend_utils", "kserve", "kserve.errors"))
    for one in (Tensor, TritonError, InferenceRequest, InferenceResponse, get_input_tensor_by_name):
        setattr(triton, one.__name__, one)
    for module, kind in ((kserve, Model), (errors, InvalidInput)):
        setattr(module, kind.__name__, kind)
    return {module.__name__: module for module in (triton, kserve, errors)}
