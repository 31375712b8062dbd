"""A process that is killed at any moment while it trains and saves."""

from __future__ import annotations

import os
import re
from pathlib import Path

from torch_support import run_script

# The moments of a kill are random, so more of them find more: PACELINE_KILLS=50 pytest -k kill
KILLS = int(os.environ.get("PACELINE_KILLS", "10"))

# One process imports PyTorch and forks the ones that are killed. It has no thread but its own until the end.
KILLED = """
import ctypes, os, random, signal, sys, time, warnings
os.environ |= {{"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}}  # NumPy's threads
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
from torch import nn
from paceline.torch import DataParallel
import save_cases as t
from torch_support import TWO

root, log, kills, seed = {root!r}, {log!r}, {kills}, random.randrange(10**6)
warnings.simplefilter("error")  # a save that is not complete would be a warning

def note(*words):
    line = " ".join(map(str, words)) + "\\n"
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)

def run(only_load):
    module = nn.Sequential(nn.Linear(6, 2000), nn.Dropout(0.5), nn.Linear(2000, 3)).double()
    t.seeded(module)
    with DataParallel(module, TWO, balance="even") as trainer:
        optimizer = trainer.optimizer(torch.optim.Adam, lr=0.01)
        try:
            step = trainer.load(root, optimizer=optimizer)["step"]
        except FileNotFoundError:
            step = 0
        note("loaded", step, t.states(module, optimizer))
        while not only_load:
            note("state", step, t.states(module, optimizer))
            trainer.save_async(root, optimizer=optimizer, extra={{"step": step}}, keep=2)
            note("begun", step)
            t.train(trainer, optimizer, t.batches(1))
            step += 1

def lines():
    return Path(log).read_text().splitlines() if os.path.exists(log) else []

# What PyTorch imports at the first step of an optimizer takes a second, so it is not left to every child.
weight = nn.Parameter(torch.ones(2))
weight.grad = torch.ones(2)
torch.optim.Adam([weight]).step()
assert len(os.listdir("/proc/self/task")) == 1, "only a process with one thread may fork"
random.seed(seed)
for kill in range(kills):
    seen = len(lines())
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the parent, whatever happens to it
        try:
            run(False)
        finally:
            os._exit(1)
    wanted = seen + 1 + random.randrange(10)
    while len(lines()) < wanted:
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child has failed by itself"
        time.sleep(0.002)
    time.sleep(random.uniform(0.0, 0.06))
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, "the child has failed by itself"
    note("killed", kill)
run(True)
print("seed", seed)
"""


def test_a_process_killed_at_any_moment_loses_at_most_the_steps_since_the_last_commit(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = KILLED.format(tests=str(Path(__file__).parent), root=str(tmp_path / "saves"), log=str(log), kills=KILLS)
    done = run_script(program, timeout=60 + 5 * KILLS, preamble=False, fork=False)
    assert done.returncode == 0, done.stdout + done.stderr
    digests: dict[str, str] = {}
    loaded, committed, reached, kills = 0, 0, 0, 0
    for line in log.read_text().splitlines():
        word, *rest = line.split()
        step = int(rest[0])
        if word == "killed":
            kills += 1
        elif word == "begun":  # then the save before is complete
            committed = max(loaded, step - 1)
        else:
            assert digests.setdefault(rest[0], rest[1]) == rest[1], f"step {step} has other bits; {done.stdout}"
            if word == "loaded":
                assert committed <= step <= reached, done.stdout
                loaded = committed = step
            reached = step
    assert kills == KILLS
    assert loaded > 0
    assert re.fullmatch(r"seed \d+", done.stdout.strip())
