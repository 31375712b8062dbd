"""The command `paceline`: its output and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

import paceline
from paceline import _cli, info


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline._cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


def test_info_prints_text_for_people_with_aligned_columns() -> None:
    done = run("info")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    start = lines.index("Devices") + 1
    rows = lines[start : start + len(paceline.devices())]
    assert [row.split()[0] for row in rows] == [device.name for device in paceline.devices()]
    columns = {row.index("pinned") for row in rows if "pinned" in row}
    assert len(columns) == 1
    assert "cuda" in done.stdout
    assert info.collect()["backends"]["cuda"]["detail"] in done.stdout


def test_info_prints_one_json_object() -> None:
    done = run("info", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["devices"]
    assert facts["libraries"]
    assert facts["missing"]


def test_version_is_printed() -> None:
    assert run("--version").stdout.strip() == f"paceline {info.collect()['version']}"


def test_without_a_command_it_says_which_there_are() -> None:
    done = run()
    assert done.returncode == 2
    assert "info" in done.stderr + done.stdout or "command" in done.stderr


def test_help_lists_the_commands() -> None:
    text = run("--help").stdout
    assert "info" in text
    assert "simulate" in text


def test_a_mistake_is_one_line_and_not_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*, links: bool) -> None:
        raise paceline.InvalidArgument("host:7 does not exist")

    monkeypatch.setattr(info, "collect", refuse)
    assert _cli.main(["info"]) == 2
    assert capsys.readouterr().err == "paceline info: error: host:7 does not exist\n"


def test_an_interrupt_ends_it_quietly(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*, links: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "collect", interrupt)
    assert _cli.main(["info"]) == 130
    assert capsys.readouterr().err == ""


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m paceline._cli info --json | true"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert done.stderr == ""


def test_submodules_are_there_without_a_further_import() -> None:
    program = (
        "import sys, paceline; paceline.balance.replay, paceline.plan.split_batch, paceline.sim\n"
        "assert 'torch' not in sys.modules\n"
        "try: paceline.DataParallel\n"
        "except AttributeError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "DataParallel is in paceline.torch: from paceline.torch import DataParallel"


def test_the_package_runs_as_the_command_does() -> None:
    command = [sys.executable, "-m", "paceline", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == run("--version").stdout
