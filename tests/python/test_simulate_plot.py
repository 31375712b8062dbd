"""`paceline simulate --plot`."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from paceline import _cli_simulate
from paceline._cli import main
from paceline.sim import simulate

needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
WORDS = ["simulate", "--speeds", "1,0.5,1", "--steps", "80", "--throttle", "0:2.0@20-60", "--fail", "2@70"]


@needs_matplotlib
@pytest.mark.parametrize(("name", "begin"), [("picture.svg", b"<?xml"), ("picture.png", b"\x89PNG")])
def test_a_picture_is_written_beside_the_table(
    name: str, begin: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(WORDS) == 0
    table = capsys.readouterr().out
    assert main([*WORDS, "--plot", str(tmp_path / name)]) == 0
    assert capsys.readouterr().out == table
    assert (tmp_path / name).read_bytes().startswith(begin)


def legend(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


@needs_matplotlib
def test_the_picture_has_the_shares_every_policy_and_the_ideal() -> None:
    from paceline._cli_simulate_plot import draw, ideal_seconds
    from paceline._ledger import read

    parser = argparse.ArgumentParser()
    _cli_simulate.add_parser(parser.add_subparsers())
    args = parser.parse_args(WORDS)
    results = {
        policy: simulate(args.speeds, steps=80, policy=policy, throttles=args.throttle, failures=args.fail, ledger=True)
        for policy in ("auto", "even")
    }
    ideal = ideal_seconds(args)
    assert sum(ideal) == pytest.approx(results["auto"].ideal_seconds)
    figure = draw(args, {policy: read(result.ledger.splitlines())[0] for policy, result in results.items()})
    panels: list[Any] = figure.axes
    shares, times = panels
    assert legend(shares) == ["sim:0", "sim:1", "sim:2"]
    assert legend(times) == ["auto", "even", "ideal, no noise"]
    drawn = [patch.get_data().values for patch in shares.patches if hasattr(patch, "get_data")]
    assert [int(values[-1]) for values in drawn] == results["auto"].final_shares
    assert times.lines[2].get_ydata()[30] == pytest.approx(1e3 * ideal[30])


def test_without_matplotlib_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_cli_simulate, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        main([*WORDS, "--plot", str(tmp_path / "picture.png")])
    assert stopped.value.code == 2
    assert "pip install 'paceline[plot]'" in capsys.readouterr().err


@needs_matplotlib
@pytest.mark.parametrize(("name", "message"), [("picture.what", "what"), ("nowhere/picture.png", "No such file")])
def test_a_file_that_cannot_be_written_is_a_wrong_argument(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*WORDS, "--plot", str(tmp_path / name)])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "argument --plot: " in error
    assert message in error
    assert "Traceback" not in error
