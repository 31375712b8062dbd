"""Search hyper-parameters on all devices of this machine, however unequal: two data sets and two kinds of models at once, with Optuna.

    python trials.py                        all devices; about 20 seconds on two cores
    python trials.py --slow host:1          a busy loop takes half of host:1 away
    python trials.py --trace trials.json    also writes which device ran what, for https://ui.perfetto.dev

Optuna says what to try and which trials to prune; the devices of a `paceline.torch.Pool` train. trial_search.py brings them together: the longest trial starts first, by
what its configuration costs and by what was measured. After 1 and 3 epochs a trial is pruned if it is not among the best third of those that came so far.
Otherwise its state, as a `state_dict`, waits for the device that will have ended it soonest.

Each trial has a seed of its own, so it gives the same result whatever device it runs on, to the last bit on cores of the host. Which
trials are pruned may differ from run to run, since that depends on which trials were there before.

The data are scikit-learn's handwritten digits and its breast cancer data (Wolberg et al., 1995), which ship with it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import optuna
import torch
from optuna.trial import TrialState
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import paceline
from paceline.torch import Pool
from pipeline import busy_loop
from trial_search import Experiment, Progress, Search

RUNGS = (1, 3, 9)  # epochs
REDUCTION = 3  # of the trials of a rung one goes on
GOALS = {"digits": 0.95, "cancer": 0.93}  # accuracy that the best trial of the default search reaches
BATCH = 32
TRIALS, WIDTH, SEED = 24, 32, 0
STEP_COST = 5e6  # what a step costs beside its multiplications, in these; about right for a core


class Data(NamedTuple):
    """Inputs and labels, for training and for validation."""

    inputs: torch.Tensor
    labels: torch.Tensor
    test_inputs: torch.Tensor
    test_labels: torch.Tensor


class Config(NamedTuple):
    """What a trial tries."""

    model: str  # "mlp" or "cnn"
    width: int
    rate: float
    decay: float
    seed: int


def digits() -> Data:
    images, labels = load_digits(return_X_y=True)
    return parts(torch.tensor(images, dtype=torch.float32).div(16).reshape(-1, 1, 8, 8), labels)


def cancer() -> Data:
    features, labels = load_breast_cancer(return_X_y=True)
    inputs = torch.tensor(features, dtype=torch.float32)
    return parts((inputs - inputs.mean(0)) / inputs.std(0), labels)


def parts(inputs: torch.Tensor, labels: Any) -> Data:
    """A quarter is for validation."""
    train, test = train_test_split(range(len(inputs)), test_size=0.25, random_state=0, stratify=labels)
    answers = torch.tensor(labels, dtype=torch.int64)
    return Data(inputs[train], answers[train], inputs[test], answers[test])


def layers(config: Config, data: Data) -> list[nn.Module]:
    width, classes = config.width, int(data.labels.max()) + 1
    if config.model == "cnn":
        return [
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 16, classes),
        ]
    hidden = 16 * width
    flat = math.prod(data.inputs.shape[1:])
    return [
        nn.Flatten(),
        nn.Linear(flat, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    ]


def network(config: Config, data: Data, draws: torch.Generator) -> nn.Sequential:
    """The parameters are drawn by the trial's generator. PyTorch's own would do it by the default generator, which all jobs share."""
    with torch.device("meta"):
        module = nn.Sequential(*layers(config, data))
    module.to_empty(device="cpu")
    for layer in module:
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu", generator=draws)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
    return module


def train(
    data: Data, device: torch.device, config: Config, epochs: int, state: dict[str, Any] | None
) -> tuple[dict[str, Any], float]:
    """Train up to so many epochs, from `state` on, which is not changed. Returns the state then, and the accuracy."""
    draws = torch.Generator().manual_seed(config.seed)
    module = network(config, data, draws)
    if state is not None:
        module.load_state_dict(state["module"])
        draws.set_state(state["draws"])
    module.to(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=config.rate, weight_decay=config.decay)
    if state is not None:
        optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # which would go on to use these tensors
    inputs, labels = data.inputs.to(device), data.labels.to(device)
    for _ in range(0 if state is None else state["epochs"], epochs):
        for rows in torch.randperm(len(inputs), generator=draws).split(BATCH):
            rows = rows.to(device)
            nn.functional.cross_entropy(module(inputs[rows]), labels[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        answers = module(data.test_inputs.to(device)).argmax(1).cpu()
    now = {
        "module": on_host(module.state_dict()),
        "optimizer": on_host(optimizer.state_dict()),
        "draws": draws.get_state(),
        "epochs": epochs,
    }
    return now, float((answers == data.test_labels).float().mean())


def on_host(state: Any) -> Any:
    """The same with every tensor in host memory."""
    if isinstance(state, torch.Tensor):
        return state.cpu()
    if isinstance(state, dict):
        return {key: on_host(value) for key, value in state.items()}
    return [on_host(value) for value in state] if isinstance(state, list) else state


def cost(data: Data, config: Config) -> float:
    """Of an epoch: its multiplications, and what its steps cost beside these."""
    with torch.device("meta"):
        all_layers = layers(config, data)
    pixels = math.prod(data.inputs.shape[2:])
    work = 0
    for layer in all_layers:
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            work += layer.weight.numel() * (pixels if isinstance(layer, nn.Conv2d) else 1)
    return len(data.inputs) * work + math.ceil(len(data.inputs) / BATCH) * STEP_COST


def experiment(name: str, data: Data, models: list[str], trials: int, args: argparse.Namespace) -> Experiment:
    def propose(trial: optuna.Trial) -> Config:
        return Config(
            trial.suggest_categorical("model", models),
            trial.suggest_int("width", 4, args.width, log=True),
            trial.suggest_float("rate", 1e-4, 3e-2, log=True),
            trial.suggest_float("decay", 1e-4, 1e-1, log=True),
            args.seed * 1_000_003 + trial.number,
        )

    sampler = optuna.samplers.RandomSampler(seed=args.seed)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=RUNGS[0], reduction_factor=REDUCTION)
    return Experiment(
        optuna.create_study(study_name=name, direction="maximize", sampler=sampler, pruner=pruner),
        trials,
        RUNGS,
        propose=propose,
        train=functools.partial(train, data),
        kind=lambda config: f"{name} {config.model}",
        cost=functools.partial(cost, data),
    )


HEAD = f"{'study':<7} {'trial':>5}  {'model':<5} {'width':>5}  {'outcome':<8} {'value':>5} {'epochs':>6} {'seconds':>8}  devices"


def row(one: Progress) -> str:
    assert one.outcome is not None
    value = f"{one.values[-1]:.3f}" if one.values else "-"
    epochs = one.experiment.rungs[len(one.values) - 1] if one.values else 0
    why = f"  {one.error.splitlines()[-1]}" if one.error else ""
    return (
        f"{one.experiment.study.study_name:<7} {one.trial.number:>5}  {one.config.model:<5} {one.config.width:>5}  "
        f"{one.outcome.name.lower():<8} {value:>5} {epochs:>6} {one.seconds:>8.2f}  {', '.join(one.devices)}{why}"
    )


def main() -> int:
    args = arguments()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    experiments = [
        experiment("digits", digits(), ["mlp", "cnn"], args.trials, args),
        experiment("cancer", cancer(), ["mlp"], args.trials // 2, args),
    ]
    print(HEAD)
    with Pool(args.devices, hang_seconds=args.hang_seconds) as pool, contextlib.ExitStack() as neighbour:
        if args.slow:
            neighbour.enter_context(busy_loop(args.slow))
        search = Search(pool, experiments, reach=1 / REDUCTION)
        makespan = search.run(lambda one: print(row(one), flush=True))
        names = [one.name for one in pool.devices]
        if args.trace:
            pool.trace(args.trace)
    print()
    for name in names:
        print(f"{name}: {search.busy[name]:.1f} s of rungs, {search.busy[name] / makespan:.0%} of the time")
    ideal = search.schedule.ideal_seconds(search.busy)
    moved = sum(len(set(one.devices)) > 1 for one in search.all)
    if ideal:  # a rung has ended
        print(
            f"makespan {makespan:.1f} s, {makespan / ideal:.2f} times the ideal {ideal:.1f} s, in which no device is ever idle"
        )
    print(f"{moved} of {len(search.all)} trials moved from one device to another")
    return max([best_of(one, args) for one in experiments])


def best_of(experiment: Experiment, args: argparse.Namespace) -> int:
    """Print the best trial. 1 if there is none, or if it is worse than it should be."""
    name, all_trials = experiment.study.study_name, experiment.study.trials
    if not any(one.state == TrialState.COMPLETE for one in all_trials):
        print(f"no trial of {name} is complete", file=sys.stderr)
        return 1
    best, value = experiment.study.best_trial, experiment.study.best_value
    print(f"best of {name}: {value:.3f}, trial {best.number}, {best.params}")
    if any(one.state == TrialState.FAIL for one in all_trials):
        return 1
    if args.seed == SEED and args.trials >= TRIALS and args.width >= WIDTH and value < GOALS[name]:
        print(f"that is less than {GOALS[name]}, which this search reaches", file=sys.stderr)
        return 1
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--devices", help="names with commas between them (default: every GPU, or every host device if there is none)"
    )
    parser.add_argument("--slow", metavar="DEVICE", help="hold a busy loop on this device's core")
    parser.add_argument(
        "--trials", type=int, default=TRIALS, help=f"of digits; of cancer half as many (default: {TRIALS})"
    )
    parser.add_argument("--width", type=int, default=WIDTH, help=f"of models at most (default: {WIDTH})")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument(
        "--hang-seconds", type=float, default=120.0, help="a rung that takes longer has failed (default: 120)"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write which device ran what, for https://ui.perfetto.dev"
    )
    args = parser.parse_args()
    args.devices = args.devices.split(",") if args.devices else "auto"
    if args.trials < 2 or args.width < 4 or not args.hang_seconds > 0:
        parser.error("--trials must be at least 2, --width at least 4, and --hang-seconds positive")
    with Pool(args.devices) as pool:
        names = [one.name for one in pool.devices]
    if args.slow and (args.slow not in names or not paceline.find_device(args.slow).cores):
        parser.error(
            f"--slow {args.slow}: not a device of this run with cores of its own; there are {', '.join(names)}"
        )
    return args


if __name__ == "__main__":
    sys.exit(main())
