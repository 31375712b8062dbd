"""What each version of a model has answered, by `Batcher.versions`, `Pool.report`, `explain`, Prometheus and pages."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import InvalidArgument
from paceline._cli import main
from paceline._pool_figures import RECENT, Seconds, VersionFigures, text_of
from paceline.torch._pool import routing
from page_support import Reader
from pool_support import Held, pool_of, soon
from versions_support import adds, ask

NONE = {"completed": 0, "failed": 0, "rejected": 0, "expired": 0, "cancelled": 0}


def ends(batcher: Any) -> dict[int, dict[str, int]]:
    """How the requests of each version ended, without the zeros."""
    return {
        one["number"]: {name: count for name, count in one["outcomes"].items() if count} for one in batcher.versions
    }


def fails(x: torch.Tensor) -> torch.Tensor:
    if bool((x < 0).any()):
        raise ValueError("below zero")
    return x + 20


def test_versions_count_what_they_were_asked_and_what_warms_them_counts_nowhere() -> None:
    with pool_of(1) as pool:
        batcher = pool.serve(adds(10), max_batch=4)
        assert all(float(one.result()) == 10 for one in ask(batcher, 3))
        assert pool.report()["versions"] == {}, "there is one version"
        assert "version" not in pool.explain()
        batcher.publish(fails, weight=0.5, idempotent=True)
        assert ends(batcher) == {1: {"completed": 3}, 2: {}}
        with Held(pool) as held:
            answers = ask(batcher, 8)
            bad = [batcher(torch.tensor(-1.0)) for _ in range(2)]
            gone = ask(batcher, 2)
            assert all(one.cancel() for one in gone)
            late = ask(batcher, 2, deadline=0.01)
            assert all(one.exception(20) is not None for one in late)
        assert sorted(float(one.result()) for one in answers) == [10.0] * 4 + [20.0] * 4
        assert sorted(one.exception() is None for one in bad) == [False, True]
        found = batcher.versions
        assert found == next(iter(pool.report()["versions"].values()))
        assert [one["role"] for one in found] == ["live", "candidate"]
        assert held.jobs[0].result()
        counts = {number: Counter(one) for number, one in ends(batcher).items()}
        assert [one.pop("expired", 0) + one.pop("rejected", 0) for one in counts.values()] == [1, 1]
        assert counts == {1: {"completed": 8, "cancelled": 1}, 2: {"completed": 4, "failed": 1, "cancelled": 1}}
        # Those of both, and no job of another kind.
        whole = pool.report()["outcomes"]
        assert {name: sum(one["outcomes"][name] for one in found) for name in NONE} == {**whole, "completed": 12}
        for one, ran in zip(found, (8, 5), strict=True):
            assert one["wait"]["counts"][-1] == (math.inf, ran)
            assert one["run"]["counts"][-1] == (math.inf, one["batches"])
            assert one["batches"] <= one["outcomes"]["completed"]
            assert 0 < one["wait"]["p50"] <= one["wait"]["p99"]
            assert one["run"]["mean"] * one["batches"] == pytest.approx(one["run"]["seconds_sum"])
        runs = pool.report()["devices"]["host:0"]["runs"]
        assert sum(one["batches"] for one in found) == runs - 1  # without the job that held it


def test_copies_in_the_shadow_count_as_its_own_also_those_that_were_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    with pool_of(1) as pool:
        batcher = pool.serve(adds(10), max_batch=4)
        ask(batcher, 1)[0].result()
        batcher.publish(adds(20), shadow=True)
        for one in ask(batcher, 6):
            one.result()
        assert soon(lambda: not pool._jobs.copies)
        assert ends(batcher) == {1: {"completed": 7}, 2: {"completed": 6}}
        assert batcher.versions[1]["wait"]["counts"][-1][1] == 6
        monkeypatch.setattr(routing, "_COPIES", 0)
        ask(batcher, 1)[0].result()
        assert ends(batcher) == {1: {"completed": 8}, 2: {"completed": 6, "rejected": 1}}
        assert pool.report()["outcomes"] == {**NONE, "completed": 8}
        batcher.promote()
        ask(batcher, 1)[0].result()
        assert ends(batcher) == {2: {"completed": 7, "rejected": 1}, 1: {"completed": 8}}


def test_the_figures_of_a_version_go_with_it() -> None:
    with pool_of(1) as pool:
        batcher = pool.serve(adds(10), max_batch=4)
        second = batcher.publish(adds(20), weight=0.5)
        known = weakref.ref(batcher._versions._state.candidates[0][0].figures)
        assert isinstance(known(), VersionFigures)
        with Held(pool):
            answers = ask(batcher, 4)
            batcher.retire(second)
            assert [one["number"] for one in batcher.versions] == [1]
        for one in answers:
            one.result()
        assert pool.report()["versions"] == {}
        assert soon(lambda: known() is None)


def test_means_and_quantiles_are_of_the_last_ones() -> None:
    seconds = Seconds()
    assert seconds.recent() == {"mean": None, "p50": None, "p99": None}
    for number in range(2 * RECENT):
        seconds.add(float(number))
    assert seconds.recent() == {"mean": 1499.5, "p50": 1500.0, "p99": 1990.0}
    assert (sum(seconds.counts), seconds.sum) == (2000, 1999000.0)


def test_explain_and_the_samples_have_a_line_for_each_version() -> None:
    with pool_of(1) as pool:
        pool.serve(adds(1), max_batch=4)
        batcher = pool.serve(adds(10), max_batch=4)
        ask(batcher, 1)[0].result()
        name = next(one for one, known in pool._jobs.endpoints.items() if known is batcher._versions)
        assert not any("version" in one.name for one in pool.prometheus().collect())
        batcher.publish(adds(20), weight=0.25)
        for one in ask(batcher, 8):
            one.result()
        families = {one.name: one for one in pool.prometheus(service="a").collect()}
        with pytest.raises(InvalidArgument, match="labels endpoint, version already"):
            pool.prometheus(endpoint="x", version="y")
        text, versions = pool.explain(), pool.report()["versions"]
    requests = {
        (one.labels["endpoint"], one.labels["version"]): one.value
        for one in families["paceline_pool_version_requests"].samples
        if one.labels["outcome"] == "completed"
    }
    assert requests == {(name, "1"): 7, (name, "2"): 2}
    for kind, counted in (
        ("wait", {"1": 7, "2": 2}),
        ("run", {str(one["number"]): one["batches"] for one in versions[name]}),
    ):
        samples = families[f"paceline_pool_version_{kind}_seconds"].samples
        assert {one.labels["version"]: one.value for one in samples if one.labels.get("le") == "+Inf"} == counted
    assert text_of(name, versions[name]) in text
    assert f"{name}, version 1 (live, 75 %): 7 completed in " in text
    assert f"{name}, version 2 (candidate, 25 %): 2 completed in " in text


def test_pages_have_a_row_for_each_version(tmp_path: Path) -> None:
    path, own, made = (tmp_path / name for name in ("pool.jsonl", "own.html", "ledger.html"))
    with pool_of(1) as pool:
        pool.write_ledger(path)
        batcher = pool.serve(adds(10), max_batch=4)
        ask(batcher, 1)[0].result()
        pool.page(own)
        assert "Versions" not in Reader(own.read_text(encoding="utf-8")).tables
        batcher.publish(fails, weight=0.5, idempotent=True)
        for one in [*ask(batcher, 4), *(batcher(torch.tensor(-1.0)) for _ in range(2))]:
            one.exception()
        with Held(pool):
            assert ask(batcher, 1)[0].cancel()
        pool.page(own)
    assert main(["page", str(path), "-o", str(made)]) == 0
    rows = [Reader(one.read_text(encoding="utf-8")).tables["Versions"][1:] for one in (own, made)]
    assert [row[1] for row in rows[0]] == ["live, 50 %", "candidate, 50 %"]
    assert [row[2:5] for row in rows[0]] == [["4", "0", "1"], ["2", "1", "0"]]
    assert [[row[0], *row[2:6]] for row in rows[0]] == [[row[0], *row[2:6]] for row in rows[1]]
    assert {row[1] for row in rows[1]} == {"–"}
