"""The example of a search over the devices of a pool: what a trial computes, where it runs, and that no trial harms another. Speeds are not tested."""

from __future__ import annotations

import copy
import importlib
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from paceline import DeviceLost, InvalidArgument, Unavailable

torch = pytest.importorskip("torch")
optuna = pytest.importorskip("optuna")
pytest.importorskip("sklearn")
from pool_support import pool_of, soon  # noqa: E402

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "python"
RUNGS = (1, 2, 3)
TRIALS = 6
BAD = 2  # the trial that has the fault, in its second rung
Train = Callable[..., Any]


@pytest.fixture(scope="module")
def trials() -> Iterator[Any]:
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module("trials")
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def search(trials: Any) -> Any:
    return importlib.import_module("trial_search")


@pytest.fixture(scope="module")
def train(trials: Any) -> Train:
    """Real training, of some milliseconds."""
    data = trials.cancer()
    return lambda device, config, epochs, state: trials.train(data, device, config, epochs, state)


@pytest.fixture(scope="module")
def experiment(trials: Any, search: Any) -> Callable[..., Any]:
    """Makes an experiment whose trials are the same each time."""

    def propose(trial: Any) -> Any:
        return trials.Config(
            "mlp", trial.suggest_int("width", 1, 4), trial.suggest_float("rate", 1e-4, 1e-2), 0.01, trial.number
        )

    def make(train: Train, pruner: Any = None, propose: Any = propose, **options: Any) -> Any:
        sampler = optuna.samplers.RandomSampler(seed=1)
        study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner or optuna.pruners.NopPruner())
        return search.Experiment(
            study, TRIALS, RUNGS, propose, train, lambda _: "kind", lambda one: one.width, **options
        )

    return make


@pytest.fixture(scope="module")
def alone(search: Any, experiment: Callable[..., Any], train: Train) -> list[list[float]]:
    """The values of each trial's rungs, on one device and without a fault."""
    with pool_of(1) as pool:
        run = search.Search(pool, [experiment(train)])
        run.run()
    return [one.values for one in run.all]


def outcomes(run: Any) -> list[str]:
    """As the search and the study have them."""
    found = [one.outcome.name for one in run.all]
    assert found == [one.state.name for one in run.all[0].experiment.study.trials]
    return found


def same(left: Any, right: Any) -> bool:
    """Whether two states are equal, to the last bit."""
    if isinstance(left, torch.Tensor):
        return bool(torch.equal(left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_a_trial_is_the_same_to_the_last_bit_whatever_devices_it_ran_on(trials: Any, model: str) -> None:
    data, config, over = trials.digits(), trials.Config(model, 2, 1e-2, 1e-2, 7), threading.Event()

    def rung(device: Any, *given: Any) -> Any:
        return trials.train(data, device, config, *given)

    def draw(_: Any) -> None:  # from the generator that all jobs share
        while not over.is_set():
            torch.rand(1000)

    def run(pool: Any, *devices: str) -> list[Any]:
        found, state = [], None
        for epochs, device in zip(RUNGS, devices, strict=True):
            before: Any = copy.deepcopy(state)
            found.append(pool.submit(rung, epochs, state, needs=device).result(60))
            assert same(before, state)  # a rung does not change what it begins with
            state = found[-1][0]
        return found

    with pool_of(3) as pool:
        try:
            noise = pool.submit(draw, needs="host:2")
            stays = run(pool, "host:0", "host:0", "host:0")
            moves = run(pool, "host:1", "host:0", "host:1")
            whole = pool.submit(rung, RUNGS[-1], None, needs="host:1").result(60)
        finally:
            over.set()
        noise.result(60)
    assert same(stays, moves)
    assert same(stays[-1], whole)
    assert 0.0 < whole[1] <= 1.0


def test_trials_have_seeds_of_their_own(trials: Any, train: Train) -> None:
    values = [train(torch.device("cpu"), trials.Config("mlp", 2, 1e-3, 0.01, seed), 1, None) for seed in (1, 1, 2)]
    assert same(values[0], values[1])
    assert not same(values[0][0]["module"], values[2][0]["module"])


def test_a_search_on_two_devices_gives_every_value_of_one_device(
    search: Any, experiment: Callable[..., Any], train: Train, alone: list[list[float]]
) -> None:
    with pool_of(2) as pool:
        run = search.Search(pool, [experiment(train)])
        assert run.run() > 0
    assert [one.values for one in run.all] == alone
    assert outcomes(run) == ["COMPLETE"] * TRIALS
    assert {device for one in run.all for device in one.devices} == {"host:0", "host:1"}
    assert sum(run.busy.values()) == pytest.approx(sum(one.seconds for one in run.all))
    assert [one.value for one in run.all[0].experiment.study.trials] == [one[-1] for one in alone]
    assert all(one.state is None for one in run.all)


def test_a_trial_moves_with_its_state_to_the_faster_device(search: Any, experiment: Callable[..., Any]) -> None:
    slow: list[int] = []

    def sleeps(_: Any, config: Any, epochs: int, state: Any) -> Any:
        time.sleep(0.5 if threading.get_ident() in slow else 0.01)
        return (state or 0) + 10**epochs, float(state or 0)

    with pool_of(2) as pool:
        slow.append(pool.submit(lambda _: threading.get_ident(), needs="host:1").result(20))
        run = search.Search(pool, [experiment(sleeps)])
        run.run()
    moved = [one for one in run.all if one.devices[0] == "host:1"]
    assert [one.devices for one in moved] == [["host:1", "host:0", "host:0"]]
    assert [one.values for one in run.all] == [[0.0, 10.0, 110.0]] * TRIALS


def raises(_: Any) -> Any:
    raise ZeroDivisionError("planted")


def takes_all_memory(_: Any) -> Any:
    return torch.empty(1 << 60, dtype=torch.uint8)


FAULTS: list[tuple[Callable[[Any], Any], str]] = [
    (raises, "ZeroDivisionError: planted"),
    (takes_all_memory, "memory"),
    (lambda _: None, "TypeError"),  # no state with a value
    (lambda ended: (ended[0], "much"), "ValueError"),
    (lambda ended: (ended[0], float("nan")), "The value is nan"),
]


@pytest.mark.parametrize(("fault", "told"), FAULTS, ids=["raises", "memory", "nothing", "no number", "nan"])
def test_a_trial_that_fails_harms_no_other(
    search: Any,
    experiment: Callable[..., Any],
    train: Train,
    alone: list[list[float]],
    fault: Callable[[Any], Any],
    told: str,
) -> None:
    def faulty(device: Any, config: Any, epochs: int, state: Any) -> Any:
        ended = train(device, config, epochs, state)
        return fault(ended) if (config.seed, epochs) == (BAD, 2) else ended

    with pool_of(2) as pool:
        (run := search.Search(pool, [experiment(faulty)])).run()
        assert not any(one["retired"] for one in pool.report()["devices"].values())
    assert outcomes(run) == ["FAIL" if number == BAD else "COMPLETE" for number in range(TRIALS)]
    assert told in run.all[BAD].error
    assert run.all[BAD].values[:1] == alone[BAD][:1]
    others = [number for number in range(TRIALS) if number != BAD]
    assert [run.all[number].values for number in others] == [alone[number] for number in others]


def test_a_trial_that_hangs_harms_no_other(
    search: Any, experiment: Callable[..., Any], train: Train, alone: list[list[float]]
) -> None:
    over = threading.Event()

    def hangs(device: Any, config: Any, epochs: int, state: Any) -> Any:
        if (config.seed, epochs) == (BAD, 2):
            over.wait(60)
        return train(device, config, epochs, state)

    try:
        with pool_of(2, hang_seconds=3.0) as pool:
            run = search.Search(pool, [experiment(hangs)])
            with pytest.warns(RuntimeWarning, match=r"'kind' has run on host:\d for more than hang_seconds=3 s.*wait"):
                run.run()
            again = [pool.submit(lambda _: 1, needs=name).result(20) for name in ("host:0", "host:1")]
    finally:
        over.set()
    assert again == [1, 1]
    assert outcomes(run) == ["FAIL" if number == BAD else "COMPLETE" for number in range(TRIALS)]
    assert "Timeout" in run.all[BAD].error
    others = [number for number in range(TRIALS) if number != BAD]
    assert [run.all[number].values for number in others] == [alone[number] for number in others]


def test_a_trial_that_ran_out_of_memory_keeps_none(search: Any, experiment: Callable[..., Any], train: Train) -> None:
    known: list[weakref.ref[Any]] = []
    gone: list[bool] = []

    def runs_out(device: Any, config: Any, epochs: int, state: Any) -> Any:
        gone.extend(one() is None for one in known)
        if config.seed == BAD:
            activations = torch.zeros(1000)
            known.append(weakref.ref(activations))
            takes_all_memory(activations)
        return train(device, config, epochs, state)

    with pool_of(1) as pool:
        run = search.Search(pool, [experiment(runs_out)])
        run.run()
    assert outcomes(run).count("FAIL") == 1
    assert gone[-1]


def test_trials_are_pruned_by_the_study_and_by_themselves(
    search: Any, experiment: Callable[..., Any], train: Train, alone: list[list[float]]
) -> None:
    def gives_up(device: Any, config: Any, epochs: int, state: Any) -> Any:
        if (config.seed, epochs) == (BAD, 2):
            raise optuna.TrialPruned
        return train(device, config, epochs, state)

    with pool_of(2) as pool:
        run = search.Search(pool, [experiment(gives_up)])
        run.run()
        assert pool.report()["outcomes"]["failed"] == 0
        halved = search.Search(
            pool, [experiment(train, optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2))], 0.5
        )
        halved.run()
    assert outcomes(run) == ["PRUNED" if number == BAD else "COMPLETE" for number in range(TRIALS)]
    assert not run.all[BAD].error
    assert set(outcomes(halved)) == {"PRUNED", "COMPLETE"}
    for one, values in zip(halved.all, alone, strict=True):
        assert one.values == values[: len(one.values)]
        assert (one.outcome.name == "COMPLETE") == (one.values == values)


def test_a_trial_whose_device_is_lost_goes_on_elsewhere(
    search: Any, experiment: Callable[..., Any], train: Train, alone: list[list[float]]
) -> None:
    lost: list[bool] = []

    def loses(device: Any, config: Any, epochs: int, state: Any) -> Any:
        if (config.seed, epochs) == (BAD, 2) and not lost:
            lost.append(True)
            raise DeviceLost("planted")
        return train(device, config, epochs, state)

    with pool_of(2) as pool:
        run = search.Search(pool, [experiment(loses)])
        run.run()
        assert [one["retired"] for one in pool.report()["devices"].values()].count(True) == 1
    assert lost
    assert [one.values for one in run.all] == alone
    assert outcomes(run) == ["COMPLETE"] * TRIALS


def test_a_rung_that_waits_for_a_device_that_is_retired_moves(
    search: Any, experiment: Callable[..., Any], train: Train, alone: list[list[float]]
) -> None:
    over = threading.Event()
    with pool_of(2) as pool, ThreadPoolExecutor(1) as beside:
        try:
            held = pool.submit(lambda _: over.wait(60), needs="host:1")
            assert soon(held.running)
            run = search.Search(pool, [experiment(train)])
            ended = beside.submit(run.run)
            assert soon(lambda: pool.waiting == 1)
            pool.retire("host:1")
            ended.result(60)
        finally:
            over.set()
            pool.restore("host:1")  # else a search that still waits for it never ends
    assert [one.values for one in run.all] == alone
    assert {device for one in run.all for device in one.devices} == {"host:0"}


def test_a_search_without_devices_ends(search: Any, experiment: Callable[..., Any], train: Train) -> None:
    with pool_of(1) as pool:
        pool.retire("host:0")
        run = search.Search(pool, [experiment(train)])
        with pytest.raises(Unavailable, match="every device is retired or lost"):
            run.run()
    assert outcomes(run) == ["FAIL"] * TRIALS


@pytest.mark.parametrize("devices", [1, 2])
def test_a_search_in_a_job_is_refused(search: Any, experiment: Callable[..., Any], train: Train, devices: int) -> None:
    with pool_of(devices) as pool:
        run = search.Search(pool, [experiment(train)])
        job = pool.submit(lambda _: run.run())
        try:
            with pytest.raises(InvalidArgument, match="this search is in a job"):
                job.result(60)
        finally:
            for one in pool.devices:  # else a search that waits for its own device never ends
                pool.retire(one.name)
    assert outcomes(run) == ["FAIL"] * TRIALS


def test_an_interrupt_leaves_no_trial_open(search: Any, experiment: Callable[..., Any], train: Train) -> None:
    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    with pool_of(2) as pool:
        run = search.Search(pool, [experiment(train)])
        with pytest.raises(KeyboardInterrupt):
            run.run(interrupt)
    assert sorted(outcomes(run)) == ["COMPLETE"] + ["FAIL"] * (TRIALS - 1)


def test_trials_that_cannot_be_told_leave_no_other_open(
    search: Any, experiment: Callable[..., Any], train: Train
) -> None:
    made = experiment(train)
    tell = made.study.tell

    def full(trial: Any, *given: Any, **options: Any) -> Any:
        if trial.number == 1:
            raise OSError("planted: the disk is full")
        return tell(trial, *given, **options)

    made.study.tell = full
    with pool_of(1) as pool:
        pool.retire("host:0")
        run = search.Search(pool, [made])
        with pytest.raises(OSError, match="planted"):
            run.run()
    assert [one.state.name for one in made.study.trials] == ["FAIL", "RUNNING", *["FAIL"] * (TRIALS - 2)]


def test_goals_are_those_of_the_default_seed(
    trials: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = optuna.create_study(study_name="digits", direction="maximize")
    study.tell(study.ask(), 0.5)
    made = trials.Experiment(study, 1, RUNGS, None, None, None, None)
    for seed, status in ((0, 1), (5, 0)):
        monkeypatch.setattr(sys, "argv", ["trials.py", "--devices", "host:0", "--seed", str(seed)])
        assert trials.best_of(made, trials.arguments()) == status
    assert capsys.readouterr().err.count("which this search reaches") == 1


def test_a_sampler_that_learns_is_asked_for_a_few_trials_at_a_time(
    trials: Any, search: Any, experiment: Callable[..., Any], train: Train
) -> None:
    known = []

    def propose(trial: Any) -> Any:
        running = [one.state.name for one in trial.study.trials].count("RUNNING")
        known.append((running, trial.number + 1 - running))
        if trial.number < 2:  # both that are open
            raise optuna.TrialPruned
        return trials.Config("mlp", 1, 1e-3, 0.0, trial.number)

    with pool_of(2) as pool:
        (run := search.Search(pool, [experiment(train, propose=propose, ahead=2)])).run()
    assert outcomes(run) == ["PRUNED", "PRUNED", *["COMPLETE"] * (TRIALS - 2)]
    assert (len(known), max(running for running, _ in known)) == (TRIALS, 2)
    assert all(ended >= number - 1 for number, (_, ended) in enumerate(known))


@pytest.mark.parametrize("options", [{"ahead": 0}, {"trials": 0}, {"rungs": ()}, {"rungs": (0, 1)}, {"rungs": (2, 2)}])
def test_an_experiment_without_trials_is_refused(search: Any, options: dict[str, Any]) -> None:
    known = {"study": None, "trials": 1, "rungs": (1,), "propose": None, "train": None, "kind": None, "cost": None}
    with pytest.raises(ValueError, match=r"must be at least 1, and there must be a rung|must be epochs from 1 on"):
        search.Experiment(**known | options)


def test_the_program_of_the_guide_finds_what_it_looks_for(search: Any, capsys: pytest.CaptureFixture[str]) -> None:
    guide = (EXAMPLES.parents[1] / "python" / "guide" / "trials.md").read_text()
    program = re.findall(r"^```python\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(compile(program.replace("Pool(", "Pool(['host:0', 'host:1'], "), "<guide>", "exec"), names)
    assert names["study"].best_value < 0.1
    assert {one.state.name for one in names["study"].trials} == {"COMPLETE", "PRUNED"}
    assert capsys.readouterr().out.startswith(str(names["study"].best_value))
