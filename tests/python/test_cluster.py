"""The guide to clusters and its programs: signals, SLURM with stand-ins for its commands, and two processes in place of two machines."""

from __future__ import annotations

import os
import re
import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.torch._save.folder import newest

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "examples" / "cluster"
RESUMABLE = ROOT / "examples" / "python" / "resumable.py"
ENDLESS = ["--steps", "1000000", "--save-every", "5"]


def finish(command: list[str], **options: Any) -> str:
    done: subprocess.CompletedProcess[str]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def read_until_it_trains(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith("step 5: loss"):
        assert line, "it has ended"


def saved(folder: Path) -> tuple[int, list[torch.Tensor]]:
    """The step of the newest save, and the tensors of the model and the optimizer."""
    _, parts = newest(folder)
    momenta = [state["momentum_buffer"] for state in parts["optimizer"][""]["state"].values()]
    return parts["extra"]["step"], [*parts["model"].values(), *momenta]


def test_a_run_that_was_stopped_continues_on_other_devices_to_the_result_of_a_run_without_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(folder: str, *arguments: str) -> list[str]:
        return [str(RESUMABLE), "--double", "--saves", str(tmp_path / folder), *arguments]

    parts = [sys.executable, *command("parts")]
    with subprocess.Popen([*parts, *ENDLESS, "--devices", "host:0,host:1"], stdout=subprocess.PIPE, text=True) as run:
        read_until_it_trains(run)
        run.send_signal(signal.SIGTERM)
        rest, _ = run.communicate(timeout=60)
    assert run.returncode == os.EX_TEMPFAIL
    stopped, _ = saved(tmp_path / "parts")
    assert f"SIGTERM after step {stopped};" in rest
    end = str(stopped + 20)
    assert f"step {stopped} of {end}, on host:0\n" in finish([*parts, "--steps", end, "--devices", "host:0"])

    monkeypatch.setattr(sys, "argv", command("whole", "--steps", end, "--devices", "host:0,host:1"))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(RESUMABLE), run_name="__main__")
    assert ended.value.code == 0
    (step, ours), (whole, theirs) = saved(tmp_path / "parts"), saved(tmp_path / "whole")
    assert step == whole == stopped + 20
    pairs = list(zip(ours, theirs, strict=True))
    assert len(pairs) == 12
    # Shares differ, so sums are rounded differently, and the more steps there were before the stop, the more it grows.
    assert max((a - b).abs().max().item() for a, b in pairs) < 1e-8


def stand_in(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{script}")
    path.chmod(0o755)


def test_the_slurm_job_requeues_itself_until_the_training_is_done(tmp_path: Path) -> None:
    # srun starts the program, and as with --signal=USR1@90 the signal goes to the program and not to the script.
    stand_in(tmp_path, "srun", '[ "$1" = --cpus-per-task=2 ] || exit 9\nshift\necho $$ >"$PIDS"\nexec "$@"\n')
    stand_in(tmp_path, "scontrol", 'echo "$@" >>"$CALLS"\n')
    stand_in(tmp_path, "python", f'exec {sys.executable} "$@"\n')
    calls, pids = tmp_path / "calls", tmp_path / "pids"
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "PIDS": str(pids),
        "SAVES": str(tmp_path / "run"),
        "SLURM_JOB_ID": "17",
        "SLURM_CPUS_PER_TASK": "2",
    }
    command = ["bash", str(CLUSTER / "job.sbatch")]
    with subprocess.Popen([*command, *ENDLESS], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as job:
        read_until_it_trains(job)
        os.kill(int(pids.read_text()), signal.SIGUSR1)
        rest, _ = job.communicate(timeout=60)
    assert job.returncode == os.EX_TEMPFAIL
    assert calls.read_text() == "requeue 17\n"
    stopped, _ = saved(tmp_path / "run")
    assert f"SIGUSR1 after step {stopped};" in rest
    assert f"step {stopped} of {stopped + 1}" in finish(
        [*command, "--steps", str(stopped + 1)], cwd=ROOT, env=environment
    )
    assert calls.read_text() == "requeue 17\n"


def test_a_failure_is_not_requeued(tmp_path: Path) -> None:
    stand_in(tmp_path, "srun", "exit 3\n")
    stand_in(tmp_path, "scontrol", f"touch {tmp_path}/called\n")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    done = subprocess.run(["bash", str(CLUSTER / "job.sbatch")], env=environment, timeout=60, check=False)
    assert done.returncode == 3
    assert not (tmp_path / "called").exists()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
def test_the_program_for_several_machines_trains_as_one_device_does(tmp_path: Path) -> None:
    guide = (CLUSTER / "README.md").read_text()
    found = re.search(r"## torchrun.*?```python\n(.*?)```", guide, re.DOTALL)
    assert found is not None
    (tmp_path / "train.py").write_text(found[1])
    options = f"--nnodes 2 --nproc-per-node 1 --master-addr 127.0.0.1 --master-port {free_port()}".split()
    environment = {**os.environ, "SAVE": str(tmp_path / "model")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, "--node-rank", str(rank), "train.py"],
            cwd=tmp_path,
            env=environment,
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(20):
        x = torch.randn(96, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
    for rank in range(2):
        theirs = torch.load(tmp_path / f"model{rank}.pt")
        assert max((theirs[name] - value).abs().max().item() for name, value in model.state_dict().items()) < 1e-12
