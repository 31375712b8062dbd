"""`paceline verify`: its checks pass here, it notices errors, and its report can be shared."""

from __future__ import annotations

import getpass
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
import paceline.torch
from paceline import _cli, _cli_verify, _verify, _verify_checks, _verify_race
from paceline.torch._devices.places import Places
from torch_support import TWO


def first(devices: list[str]) -> list[paceline.Device]:
    return [paceline.find_device(name) for name in devices]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One split per network and steps of a hundredth of a second, because the race's figures are not tested."""
    monkeypatch.setattr(_verify_checks, "_SPLITS_PER_NETWORK", 1)
    monkeypatch.setattr(_verify_race, "_STEP_SECONDS", 0.01)
    monkeypatch.setattr(_verify_race, "_WARM_UP_STEPS", 2)
    monkeypatch.setattr(_verify_race, "_LEAST_BLOCKS", 1)


def test_host_devices_pass_and_the_report_can_be_written_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_verify_race, "_STEP_SECONDS", 0.01)
    report = _verify.verify(TWO, seconds=0)
    assert report["passed"], report
    assert json.loads(json.dumps(report)) == report
    assert [device["name"] for device in report["devices"]] == TWO
    assert report["exactness"]["cases"] == len(_verify_checks._NETWORKS) * 2 * 4
    assert report["collectives"] == {"status": "passed", "transport": "the host's memory", "cases": 108, "failures": []}
    assert report["exactness"]["reference"] == "plain PyTorch on cpu"
    assert report["race"]["status"] == "measured"
    assert report["race"]["blocks"] == 3
    assert 0 < report["race"]["auto_over_alone"] < 10
    assert sum(report["race"]["shares"].values()) == report["race"]["batch"]
    assert report["versions"]["torch"] == torch.__version__


def test_a_gradient_that_is_slightly_wrong_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(paceline.torch.DataParallel):
        def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().step(*args, **kwargs)
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter.grad *= 1.001
            return loss

    monkeypatch.setattr(_verify_checks, "DataParallel", Wrong)
    found = _verify_checks.exactness(first(TWO), 0)
    assert found["status"] == "failed"
    assert len(found["failures"]) == found["cases"]


def test_missing_and_undefined_gradients_are_as_wrong_as_can_be() -> None:
    one = torch.ones(3)
    assert _verify_checks.worst_difference([one, None], [one, one]) == float("inf")
    assert _verify_checks.worst_difference([one * float("nan")], [one]) == float("inf")
    assert _verify_checks.worst_difference([one], [one]) == 0.0
    assert _verify_checks.worst_difference([one * 0], [one * 0]) == float("inf")  # no gradient could be compared


def test_a_sum_that_is_wrong_on_one_device_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(paceline.Communicator):
        def all_reduce(self, buffers: Any, op: Any = "sum") -> None:
            super().all_reduce(buffers, op)
            buffers[1][-1] += 1

    monkeypatch.setattr(_verify_checks, "Communicator", Wrong)
    found = _verify_checks.collectives(first(TWO), 0)
    assert found["status"] == "failed"
    assert found["failures"][0] == "all_reduce, sum of float32 x 1 on host:1"


@pytest.mark.usefixtures("quick")
def test_one_device_has_nobody_to_reduce_or_to_race_with() -> None:
    report = _verify.verify(["host:0"], seconds=0)
    assert report["passed"]
    assert [report[part]["status"] for part in ("exactness", "collectives", "race")] == ["passed", "skipped", "skipped"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("error", "status"), [(paceline.Unavailable("no such library"), "skipped"), (RuntimeError("broke"), "failed")]
)
def test_what_cannot_run_is_told_apart_from_what_breaks(
    error: Exception, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: object) -> None:
        raise error

    monkeypatch.setattr(_verify_race, "race", raises)
    report = _verify.verify(["host:0"], seconds=0)
    assert report["race"]["status"] == status
    assert str(error) in report["race"]["why"]
    assert report["passed"] == (status == "skipped")
    assert report["exactness"]["status"] == "passed"  # one failed part does not stop the others


@pytest.mark.usefixtures("quick")
def test_the_report_names_neither_host_nor_user_nor_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    true_names = {socket.gethostname(), getpass.getuser()} - {"root", "localhost"}
    monkeypatch.setenv("HOME", "/home/jane")
    monkeypatch.setenv("USER", "jane")
    monkeypatch.setattr(socket, "gethostname", lambda: "lab-17")

    def raises(*_: object) -> None:
        raise OSError("/home/jane/x.so on lab-17 is not jane's; janet's is")

    monkeypatch.setattr(_verify_checks, "collectives", raises)
    text = json.dumps(_verify.verify(TWO, seconds=0))
    assert "OSError: ~/x.so on <host> is not <user>'s; janet's is" in text
    for name in {"/home/jane", "lab-17", str(Path.cwd()), sys.prefix} | true_names:
        assert name not in text


@pytest.mark.usefixtures("quick")
def test_a_library_below_the_users_folder_is_named_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = "NCCL 2.28.9 (/home/jane/venv/lib/libnccl.so.2)"
    monkeypatch.setenv("HOME", "/home/jane")
    monkeypatch.setenv("USER", "jane")
    monkeypatch.setattr(paceline.Communicator, "description", nccl)
    monkeypatch.setattr(Places, "explain", lambda places: f"Between GPUs: {nccl}.\n")
    report = _verify.verify(TWO, seconds=0)
    assert report["collectives"]["transport"] == "NCCL 2.28.9 (~/venv/lib/libnccl.so.2)"
    assert "Between GPUs: NCCL 2.28.9 (~/venv/lib/libnccl.so.2)." in report["race"]["explain"]
    assert "jane" not in json.dumps(report)


@pytest.mark.usefixtures("quick")
def test_the_command_prints_and_says_by_its_status_whether_all_passed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["verify", "--devices", "host:0,host:1", "--seconds", "0"]
    assert _cli.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True
    assert _cli.main(command) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[2].startswith(
        "exactness    passed: gradients of 6 random splits against plain PyTorch on cpu; worst difference of a tensor, relative to its norm: "
    )
    assert " (at most 1e-12), float32 " in lines[2]
    assert lines[2].endswith(" (at most 1e-04)")
    assert lines[3] == "collectives  passed: 108 reductions of integers, each compared to the bit with their result"
    assert lines[4].startswith("race         measured, against no bound: items/s with auto shares ")
    assert "(medians of 1 block each, " in lines[4]
    assert lines[6].startswith("exactness and collectives passed; race measured, against no bound; ")
    monkeypatch.setattr(_verify_checks, "TOLERANCES", dict.fromkeys(_verify_checks.TOLERANCES, -1.0))
    assert _cli.main(command) == 1
    text = capsys.readouterr().out
    assert "(at most -1e+00); 6 of them beyond that" in text
    assert "\nexactness FAILED; collectives passed; race measured, against no bound; " in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "host:x"], "'host:x' is not the name of a device"),
        (["--devices", "host:0,cuda:4096"], "there is no device 'cuda:4096': "),
        (["--devices", "host:0,cuda:4096"], "name some of the devices of this machine: "),
        (["--devices", "host:0,"], "'' is not the name of a device"),
        (["--devices", "host:0,host:0"], "host:0 is named twice"),
        (["--devices", "host:0", "--partition", "1,1"], "not allowed with argument --devices"),
        (["--seconds", "-1"], "--seconds"),
        (["--partition", "much"], "argument --partition: 'much' is not of the form R,R,..."),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = _cli.main(["verify", *arguments])
    except SystemExit as end:  # raised by argparse
        status = int(end.code or 0)
    assert status == 2
    assert message in capsys.readouterr().err


def test_without_pytorch_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_cli_verify, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        _cli.main(["verify"])
    assert "pip install 'paceline[torch]'" in capsys.readouterr().err


def test_other_commands_do_not_load_pytorch_for_it() -> None:
    program = "import sys; from paceline import _cli; _cli._parser(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.usefixtures("quick")
def test_pytorch_settings_are_given_back() -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = True
    try:
        _verify.verify(["host:0"], seconds=0)
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
