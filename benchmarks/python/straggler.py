"""A straggler that comes and goes: shares and step times with automatic and with even shares.

    python straggler.py --plot straggler.svg --json

Trains the network of the races on two host devices or more, first with automatic, then with even shares. In the middle third a busy loop
holds the last core. Prints the time of a step before, during and after, and draws both runs. A step is forward, backward and the optimizer.

Then the busy loop comes and goes several times (--onsets). For each time that it comes, this prints how many steps automatic shares needed
until they were within five percent of their later speed. It also prints how long after the ideal the first slow step ended, in units of its
longest micro-batch. In the ideal all devices finish together, at the speeds that they had in that step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.torch import DataParallel
from race import data, model, recovery, script
from race.figures import steps_to_recover
from race.processes import busy_loop

WARM_UP_STEPS = 15
POLICIES = ("auto", "even")
ONSET_STEPS = 12  # number of calm steps and then of slow steps, per onset
_WINDOW = 5  # the plotted step time is the median of so many steps


@dataclass
class Run:
    """The measurements of one way to split."""

    shares: list[dict[str, int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    onsets: list[int] = field(default_factory=list)  # the steps in which the busy loop came
    hits: list[recovery.Hit] = field(default_factory=list)  # these steps' details

    def summary(self, slow: range) -> dict[str, Any]:
        """Medians over the second half of each third, when shares have had time to adapt."""
        thirds = (range(slow.start), slow, range(slow.stop, len(self.seconds)))
        before, during, after = (self.seconds[(third.start + third.stop) // 2 : third.stop] for third in thirds)
        ends = ((slow.start, slow.stop), (slow.stop, len(self.seconds)))
        return {
            **{
                f"{name}_ms": round(1e3 * statistics.median(seconds), 2)
                for name, seconds in (("before", before), ("during", during), ("after", after))
            },
            "steps_to_recover": [steps_to_recover(self.seconds, *end) for end in ends],
        }


def train(policy: Any, names: list[str], batches: list[model.Pair], phases: list[int], cores: list[int]) -> Run:
    """Steps per phase after the warm-up, alternately calm and with the busy loop."""
    run = Run()
    network = model.network()
    with DataParallel(network, names, balance=policy) as trainer:
        optimizer = model.optimizer(network)
        endless: Iterator[model.Pair] = itertools.cycle(batches)

        def steps(count: int) -> None:
            for batch in itertools.islice(endless, count):
                start = time.perf_counter()
                trainer.step(model.loss_fn, batch)
                optimizer.step()
                optimizer.zero_grad()
                run.seconds.append(time.perf_counter() - start)
                run.shares.append(trainer.shares)

        steps(WARM_UP_STEPS)
        run.seconds.clear()
        run.shares.clear()
        for number, count in enumerate(phases):
            if number % 2 == 0:
                steps(count)
                continue
            run.onsets.append(len(run.seconds))
            with busy_loop(cores):
                steps(1)
                run.hits.append(recovery.last_step(trainer.events()))
                steps(count - 1)
    return run


def recoveries(names: list[str], batches: list[model.Pair], onsets: int, cores: list[int]) -> dict[str, Any]:
    """Measure automatic shares with a straggler that comes several times."""
    run = train("auto", names, batches, [ONSET_STEPS, ONSET_STEPS] * onsets, cores)
    steps = [steps_to_recover(run.seconds, onset, onset + ONSET_STEPS) for onset in run.onsets]
    return recovery.summary(steps, run.hits)


def draw(runs: dict[str, Run], slow: range, straggler: str, path: Path) -> None:
    """Write a small file that is the same every time: text stays text, and there is no date."""
    import matplotlib

    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "straggler"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    count = len(runs["auto"].seconds)
    for name in runs["auto"].shares[0]:
        shares = [step[name] for step in runs["auto"].shares]
        above.stairs(shares, [step + 0.5 for step in range(count + 1)], baseline=None, lw=1.5, label=f"{name}, auto")
    above.axhline(
        sum(runs["even"].shares[0].values()) / len(runs["even"].shares[0]), color="0.6", ls="--", label="even"
    )
    above.set(ylabel="items of a step", ylim=(0, None))
    highest = 0.0
    for policy, color in (("even", "0.6"), ("auto", "black")):
        calm = [1e3 * seconds for seconds in running_median(runs[policy].seconds)]
        highest = max(highest, *calm)
        below.plot(range(1, count + 1), calm, color=color, lw=1.5, label=policy)
    # Also draw each step of auto, because the line is a median and would hide the slow step.
    each = [1e3 * seconds for seconds in runs["auto"].seconds]
    below.plot(range(1, count + 1), each, "o", color="black", ms=2.5, alpha=0.4, mew=0, label="auto, each step")
    below.set(ylabel="time of a step (ms)", xlabel="step", ylim=(0, 1.2 * highest), xlim=(0.5, count + 0.5))
    for axes in (above, below):
        axes.axvspan(slow.start + 0.5, slow.stop + 0.5, color="tab:red", alpha=0.12, lw=0)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        axes.grid(alpha=0.3)
    above.set_title(f"In the shaded steps another program computes on the core of {straggler}", fontsize="medium")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=100)


def running_median(values: list[float]) -> list[float]:
    half = _WINDOW // 2
    return [statistics.median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def main() -> int:
    args = arguments()
    devices = script.cores(args.cores, pinned=True)
    slow = range(args.steps // 3, 2 * args.steps // 3)
    with tempfile.TemporaryDirectory(prefix="straggler") as folder:
        data.save(Path(folder))
        batches = model.batches(folder, args.batch)
    names, cores = [device.name for device in devices], list(devices[-1].cores)
    phases = [slow.start, len(slow), args.steps - slow.stop]
    runs = {policy: train(policy, names, batches, phases, cores) for policy in POLICIES}
    summaries = {policy: run.summary(slow) for policy, run in runs.items()}
    recovered = recoveries(names, batches, args.onsets, cores)
    for policy, summary in summaries.items():
        print(f"{policy}: " + ", ".join(f"{name} {value}" for name, value in summary.items()))
    print(recovery.text(recovered))
    if args.plot:
        draw(runs, slow, devices[-1].name, args.plot)
    if args.json:
        setting = {"batch": args.batch, "steps": args.steps, "slow_steps": [slow.start, slow.stop]}
        print(
            json.dumps(summaries | {"recovery": recovered} | setting | script.facts(devices, torch=torch.__version__))
        )
    return 0


def arguments() -> argparse.Namespace:
    parser = script.parser(__doc__)
    parser.add_argument("--steps", type=int, default=150, help="of each way to split (default: 150)")
    parser.add_argument("--onsets", type=int, default=7, help="further times that the straggler comes (default: 7)")
    parser.add_argument("--batch", type=int, default=512, help="items of a step (default: 512)")
    parser.add_argument("--cores", type=int, default=2, help="how many devices (default: 2)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it, as .svg, .png or .pdf")
    args = parser.parse_args()
    if args.steps < 9 or min(args.onsets, args.batch, args.cores) < 1:
        parser.error("--steps must be at least 9, --onsets, --batch and --cores at least 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
