"""The programs for Triton and KServe in python/guide/servers.md run as they stand there, with stand-ins for these servers."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import server_stand_ins as stand_ins
from paceline import Unavailable
from pool_support import Held, soon
from servers_support import block, program, same, scores, until

X = [0.5] * 8


@pytest.fixture
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in stand_ins.modules().items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def triton(programs: Path, _stand_ins: None) -> Iterator[Any]:
    model = program(programs, "Triton").TritonPythonModel()
    model.initialize({"model_name": "ranker", "model_version": "1", "model_config": "{}"})
    yield model
    model.finalize()
    assert "closed" in repr(model.pool)


def request(*rows: list[float], **options: Any) -> stand_ins.InferenceRequest:
    return stand_ins.InferenceRequest([stand_ins.Tensor("x", torch.tensor(rows).numpy())], **options)


def test_triton_gets_one_response_for_each_request_in_their_order(triton: Any) -> None:
    rows = [[float(k)] * 8 for k in range(6)]
    requests = [request(*rows[:3]), request(rows[3]), request(*rows[4:])]
    responses: list[Any] = []
    with Held(triton.pool):
        running = threading.Thread(target=lambda: responses.extend(triton.execute(requests)))
        running.start()
        assert soon(lambda: triton.pool.waiting == 6)  # all of them wait before the first answer is asked for
    running.join(20)
    assert [one.has_error() for one in responses] == [False] * 3
    for one, part in zip(responses, (rows[:3], rows[3:4], rows[4:]), strict=True):
        (tensor,) = one.output_tensors()
        assert tensor.name() == "scores"
        assert same(tensor.as_numpy(), scores(*part))


def test_triton_gets_the_error_of_a_request_and_answers_of_the_others(triton: Any) -> None:
    requests = [
        request(X, cancelled=True),
        request(X, X, timeout=50_000),  # microseconds
        stand_ins.InferenceRequest([]),
        request(X),
    ]
    responses: list[Any] = []
    with Held(triton.pool) as held:
        running = threading.Thread(target=lambda: responses.extend(triton.execute(requests)))
        running.start()
        assert soon(lambda: triton.pool.report()["outcomes"]["expired"] == 2)
        held.release()
    running.join(20)
    error = stand_ins.TritonError
    codes = [one.error().code() if one.has_error() else None for one in responses]
    assert codes == [error.CANCELLED, error.UNAVAILABLE, error.INTERNAL, None]
    assert same(responses[3].output_tensors()[0].as_numpy(), scores(X))


def test_the_configuration_for_triton_has_the_tensors_of_the_program(programs: Path) -> None:
    named = re.findall(
        r'(input|output) \[{ name: "(\w+)", data_type: TYPE_FP32, dims: \[(\d+)\] }\]', block("Triton", "pbtxt")
    )
    assert named == [("input", "x", str(len(X))), ("output", "scores", str(scores(X).shape[1]))]
    assert 'by_name(request, "x")' in block("Triton")
    assert 'Tensor("scores"' in block("Triton")


@pytest.fixture
def kserve(programs: Path, _stand_ins: None) -> Iterator[Any]:
    model = program(programs, "KServe").Ranker("ranker")
    assert model.load()
    assert model.ready
    yield model
    model.stop()
    assert not model.ready
    assert soon(lambda: "closed" in repr(model.pool))


def test_kserve_predicts_what_the_model_says(kserve: Any) -> None:
    rows = [[float(k)] * 8 for k in range(3)]

    async def run() -> Any:
        return await asyncio.gather(kserve({"instances": rows[:2]}), kserve({"instances": rows[2:]}))

    (two, _), (one, _) = asyncio.run(run())
    assert same(two["predictions"] + one["predictions"], scores(*rows))
    for wrong in ({}, {"instances": [X[1:]]}, {"instances": ["a"]}, {"instances": [[10**400] * 8]}):
        with pytest.raises(stand_ins.InvalidInput):
            asyncio.run(kserve(wrong))


def test_kserve_takes_back_the_whole_request_if_a_part_of_it_is_refused(kserve: Any) -> None:
    from fastapi import HTTPException

    with Held(kserve.pool):
        with pytest.raises(HTTPException) as refused:
            asyncio.run(kserve({"instances": [X] * 9}))
        assert soon(lambda: kserve.pool.waiting == 0)
    assert (refused.value.status_code, refused.value.headers) == (503, {"Retry-After": "1"})


def takes_no_more(pool: Any) -> bool:
    with contextlib.suppress(Unavailable):
        pool.submit(lambda _: None).cancel()
        return False
    return True


def test_kserve_answers_what_was_there_when_it_is_stopped(kserve: Any) -> None:
    from fastapi import HTTPException

    async def run() -> Any:
        with Held(kserve.pool):
            waits = asyncio.ensure_future(kserve({"instances": [X]}))
            await until(lambda: kserve.pool.waiting == 1)
            kserve.stop()
            assert kserve.pool.waiting == 1  # it does not wait
            await until(lambda: takes_no_more(kserve.pool))
            with pytest.raises(HTTPException) as late:
                await kserve({"instances": [X]})
            assert late.value.status_code == 503
        return await waits

    answer, _ = asyncio.run(run())
    assert same(answer["predictions"], scores(X))


def parameters(of: Any) -> list[str]:
    return list(inspect.signature(of).parameters)


@pytest.mark.skipif("KSERVE_SOURCE" not in os.environ, reason="KSERVE_SOURCE names no checkout of kserve")
def test_the_stand_in_for_kserve_has_the_signatures_of_its_source() -> None:
    folder = Path(os.environ["KSERVE_SOURCE"]) / "python" / "kserve" / "kserve"
    found: dict[str, list[str]] = {}
    for name in ("model", "errors", "model_server"):
        classes = [one for one in ast.parse((folder / f"{name}.py").read_text()).body if isinstance(one, ast.ClassDef)]
        for kind in classes:
            for one in kind.body:
                if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    found[f"{kind.name}.{one.name}"] = [argument.arg for argument in one.args.args]
    for name in ("__init__", "__call__", "load", "predict"):
        assert parameters(getattr(stand_ins.Model, name)) == found[f"Model.{name}"], name
    for name in ("start", "stop"):
        assert parameters(getattr(stand_ins.Model, name)) == found[f"BaseKServeModel.{name}"], name
    assert parameters(stand_ins.InvalidInput.__init__) == found["InvalidInput.__init__"]
    assert "workers" in found["ModelServer.__init__"]
    assert found["ModelServer.start"] == ["self", "models"]


@pytest.mark.skipif(
    "PYTHON_BACKEND_SOURCE" not in os.environ, reason="PYTHON_BACKEND_SOURCE names no checkout of Triton's"
)
def test_the_stand_in_for_triton_has_the_names_of_its_source() -> None:
    folder = Path(os.environ["PYTHON_BACKEND_SOURCE"]) / "src"
    binding = (folder / "pb_stub.cc").read_text()
    for kind in (stand_ins.Tensor, stand_ins.InferenceRequest, stand_ins.InferenceResponse, stand_ins.TritonError):
        part = re.search(rf'py::class_<[^;{{]*?"{kind.__name__}"\)(.*?)\n\n', binding, re.DOTALL)
        assert part is not None, kind
        methods = set(re.findall(r'"(\w+)"', part[1] + binding[part.end() :].split("py::class_")[0]))
        assert {name for name in vars(kind) if name[0] != "_"} <= methods, kind
    made = re.search(r'module, "InferenceResponse"\)(.*?)"parameters"\)', binding, re.DOTALL)
    assert made is not None
    assert re.findall(r'arg\("(\w+)"', made[0]) == parameters(stand_ins.InferenceResponse)
    helpers = ast.parse((folder / "resources" / "triton_python_backend_utils.py").read_text())
    (named,) = (one for one in helpers.body if getattr(one, "name", "") == "get_input_tensor_by_name")
    assert isinstance(named, ast.FunctionDef)
    assert [one.arg for one in named.args.args] == parameters(stand_ins.get_input_tensor_by_name)
    assert [f'attr("{name}")' in binding for name in ("initialize", "execute", "finalize")] == [True] * 3
