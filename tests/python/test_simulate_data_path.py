"""`paceline.sim.simulate_data_path` and the command `paceline simulate --gpus`."""

from __future__ import annotations

import json

import pytest

from paceline import InvalidArgument
from paceline._cli import main
from paceline.sim import simulate_data_path

CASE = ["simulate", "--gpus", "8", "--parameters", "1e9", "--tokens", "8192"]


def test_the_table_has_all_ways(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CASE, "--link", "nvlink4"]) == 0
    text = capsys.readouterr().out
    assert (
        "8 GPUs, nvlink4, 1e+09 parameters of type bfloat16, 8192 tokens each: forward 41.0 ms, backward 81.9 ms"
        in text
    )
    assert "not a measurement" in text
    assert [line.split()[0] for line in text.splitlines()[4:]] == ["serial", "buckets", "ranges", "sharded", "ring"]


def test_json_says_what_a_step_takes_beyond_computing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CASE, "--link", "pcie4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    computing = 3 * found["forward_seconds"] + 28e9 / 2.7e12
    for figures in found["ways"].values():
        assert figures["step_seconds"] - figures["exposed_seconds"] == pytest.approx(computing)
    assert found["config"]["link"] == "pcie4"
    steps = {way: figures["step_seconds"] for way, figures in found["ways"].items()}
    assert sorted(steps, key=steps.__getitem__) == ["sharded", "buckets", "ring", "ranges", "serial"]


def test_a_bandwidth_and_a_latency_take_the_place_of_the_links() -> None:
    common = {"gpus": 4, "parameters": 1e8, "forward_seconds": 0.01, "backward_seconds": 0.02}
    usual = simulate_data_path(**common, link="pcie4")
    same = simulate_data_path(**common, link="nvlink4", bandwidth=25e9, latency_seconds=8e-6)
    assert usual == same
    later = simulate_data_path(**common, link="pcie4", latency_seconds=1e-3)
    assert all(later[way]["step_seconds"] > usual[way]["step_seconds"] for way in usual)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--link", "token-ring"], "--link is 'token-ring'; with --gpus it must be one of host, nvlink4"),
        (["--tokens", "0"], "--tokens and --tflops must be positive"),
        (["--bucket-mb", "0.001"], "give larger ones"),
        (["--bandwidth", "-1"], "bandwidth of a link is -1000000000; it must be positive"),
        (["--pipeline"], "--gpus is not for pipelines"),
    ],
)
def test_bad_values_are_refused(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main([*CASE, *words]) == 2
    assert message in capsys.readouterr().err


def test_a_single_gpu_and_a_pipelines_link_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--gpus", "1"]) == 2
    assert "1 GPUs; give 2 to 64" in capsys.readouterr().err
    assert main(["simulate", "--pipeline", "--speeds", "1,1", "--link", "pcie4"]) == 2
    assert "--link is 'pcie4'; with --pipeline it is a number of GB/s" in capsys.readouterr().err
    with pytest.raises(InvalidArgument, match="there is no link 'ring'"):
        simulate_data_path(gpus=2, parameters=1e6, forward_seconds=1.0, backward_seconds=1.0, link="ring")
