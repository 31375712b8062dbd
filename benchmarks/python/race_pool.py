"""Race servers of one model on two cores: `paceline.torch.Pool`, an executor, batches with a fixed delay, and packages that batch, some over HTTP.

    python race_pool.py --busy            run it alone on the machine; a busy loop halves the last core
    python race_pool.py                   both cores free

Requests come at random moments that are drawn beforehand, the same for all rivals: a rival that falls behind gets no rest. Each rival runs in a
process of its own, while the others do not exist; each round begins with another one. The cores' sum is what each core answers alone in
batches of 64, under the same load. Counted from when a request was due:

- the highest rate of which 99 % are answered within ten times what one request takes on the fastest core (by bisection, in parts of the sum);
- the median and the 99 % quantile at 0.5, 0.7 and 0.9 of the cores' sum;
- at 1.2 of it, the part that is answered within that time ("-" and 0: its queue would only grow);
- all at once, as when a data set is run through the model: requests a second.

`batched` and torchrl (with tensordict) take part if they are installed; both run an instance on each core, behind the least outstanding one.

LitServe and mosec, if they are installed, answer over HTTP on loopback, with a process for each core. They are compared with a pool behind Starlette and
uvicorn, on which LitServe is built, too. All three get the same bytes from the same client, which runs on the same cores. What HTTP costs is shown apart, not
subtracted: the same server with a model that returns what it is given, for a request alone, and for requests that come all at once. LitServe and mosec
collect for 10 ms, for a request alone, too.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from race import command, http_rivals
from race.command import Command
from race.pool_rivals import RIVALS
from race.processes import FOLDER, busy_loop, end
from race.worker import MARK

LABELS = {
    "paceline": "paceline.torch.Pool",
    "executor": "ThreadPoolExecutor, one by one",
    "delayed": "batches, 10 ms delay, one queue",
    "batched": "batched, least outstanding",
    "torchrl": "torchrl, least outstanding",
    "http:paceline": "Pool, Starlette, uvicorn",
    "http:litserve": "LitServe",
    "http:mosec": "mosec",
}
HTTP = [f"http:{server}" for server in http_rivals.SERVERS]
PARTS = (0.5, 0.7, 0.9)
OVERLOAD = 1.2
WITHIN = 10  # times a single request
HALVINGS = 6  # of the interval in which the highest rate lies
REQUESTS_AT_ONCE = 1500
REQUESTS_ALONE = 200
_PROCESS_SECONDS = 240.0


class Served:
    """A rival's process."""

    def __init__(self, name: str, cores: list[int]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
        self._name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "race.pool_rivals", name, json.dumps(cores)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._watchdog = threading.Timer(_PROCESS_SECONDS, self._process.kill)
        self._watchdog.daemon = True
        self._watchdog.start()
        self.first = self._answer()

    def ask(self, **what: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise RuntimeError(f"{self._name}: its process ended without an answer (or ran out of time)")

    def end(self) -> None:
        self._watchdog.cancel()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.stdin.close()  # it ends what it has started
            self._process.wait(10)
        end(self._process)


@contextlib.contextmanager
def served(name: str, cores: list[int]) -> Iterator[Served]:
    process = Served(name, cores)
    try:
        yield process
    finally:
        process.end()


class Race:
    """The rivals on some cores of this machine."""

    def __init__(self, run: Command) -> None:
        self._cores = [device.cores[0] for device in run.devices]
        self._seconds = run.args.seconds
        self.rates: list[float] = []  # by round: of all cores alone
        self.singles: list[float] = []
        self.found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.missing: dict[str, str] = {}

    def round(self, number: int) -> None:
        alone = []
        for core in self._cores:
            with served("alone", [core]) as process:
                alone.append(process.first)
        self.rates.append(sum(one["rate"] for one in alone))
        self.singles.append(min(one["single"] for one in alone))
        command.in_turn([functools.partial(self._race, name, number) for name in (*RIVALS, *HTTP)], number)

    def _race(self, name: str, number: int) -> None:
        whole, most = self.rates[-1], WITHIN * self.singles[-1]
        with served(name, self._cores) as process:
            if "missing" in process.first:
                self.missing[name] = process.first["missing"]
                return
            found = self.found[name]

            def at(part: float) -> Any:
                seed = 1000 * number + round(1000 * part)
                return process.ask(rate=part * whole, seconds=self._seconds, seed=seed)

            hopeless: Any = {
                "p50": _PROCESS_SECONDS,
                "p99": _PROCESS_SECONDS,
                "requests": 1,
                "times": [_PROCESS_SECONDS],
            }
            requests = REQUESTS_AT_ONCE // (10 if name == "executor" else 1)  # which takes ten times as long for each
            found["at_once"].append(requests / process.ask(all=requests)["seconds"])
            most_part = 1.2 * found["at_once"][-1] / whole  # beyond that its queue only grows
            for part in PARTS:
                answer = at(part) if part <= most_part else hopeless
                for quantile in ("p50", "p99"):
                    found[f"{quantile}_at_{part}"].append(answer[quantile])
            late = at(OVERLOAD) if most_part >= PARTS[0] else hopeless
            found["in_time_overloaded"].append(sum(one <= most for one in late["times"]) / late["requests"])
            low, high = 0.0, min(1.5, most_part)
            for _ in range(HALVINGS):
                middle = (low + high) / 2
                low, high = (middle, high) if at(middle)["p99"] <= most else (low, middle)
            found["highest_part"].append(low)
        if name in HTTP:
            with served(name.replace("http:", "empty:"), self._cores) as process:
                found["p50_of_http_alone"].append(process.ask(alone=REQUESTS_ALONE)["seconds"])
                found["http_at_once"].append(REQUESTS_AT_ONCE / process.ask(all=REQUESTS_AT_ONCE)["seconds"])

    def summary(self) -> dict[str, Any]:
        """Medians over rounds; times in milliseconds."""
        rows: dict[str, Any] = {}
        for name, found in self.found.items():
            row = {what: statistics.median(values) for what, values in found.items()}
            rows[name] = {
                what: round(1e3 * value, 2) if what.startswith("p") else round(value, 3) for what, value in row.items()
            }
            rows[name]["at_once_of_sum"] = round(row["at_once"] / statistics.median(self.rates), 3)
        inside = [name for name in rows if name not in ("paceline", *HTTP)]
        over = over_best(rows, "paceline", [name for name in inside if name != "executor"])
        over["highest_rate_over_delay"] = ratio(rows["paceline"]["highest_part"], rows["delayed"]["highest_part"])
        over["at_once"] = ratio(rows["paceline"]["at_once"], max(rows[name]["at_once"] for name in inside))
        return {
            "rivals": rows,
            "ours_over_best": over,
            "ours_over_best_http": over_best(rows, HTTP[0], [name for name in HTTP[1:] if name in rows]),
            "cores_alone": round(statistics.median(self.rates), 1),
            "single_ms": round(1e3 * statistics.median(self.singles), 2),
        }


def over_best(rows: dict[str, Any], ours: str, others: list[str]) -> dict[str, float | None]:
    """Ours over the best of the others; nothing if one of them is not there."""
    if ours not in rows or not others:
        return {}
    return {
        "highest_rate": ratio(rows[ours]["highest_part"], max(rows[name]["highest_part"] for name in others)),
        "p99_at_0.7": ratio(rows[ours]["p99_at_0.7"], min(rows[name]["p99_at_0.7"] for name in others)),
        "at_once": ratio(rows[ours]["at_once"], max(rows[name]["at_once"] for name in others)),
    }


def ratio(ours: float, best: float) -> float | None:
    return round(ours / best, 3) if best > 0 else None


def text(found: dict[str, Any]) -> str:
    columns = [*(f"{part}" for part in PARTS)]
    lines = [f"{'':<34}{'highest':>9}" + "".join(f"{f'p50/p99 at {one}':>18}" for one in columns)]
    lines[0] += f"{'in time at 1.2':>16}{'at once, of sum':>17}"
    for name, row in found["rivals"].items():
        pairs = (
            f"{row[f'p50_at_{one}']:.1f}/{row[f'p99_at_{one}']:.1f} ms"
            if row[f"p99_at_{one}"] < 1e3 * _PROCESS_SECONDS
            else "-"
            for one in columns
        )
        lines.append(f"{LABELS[name]:<34}{row['highest_part']:>9.2f}" + "".join(f"{pair:>18}" for pair in pairs))
        lines[-1] += f"{row['in_time_overloaded']:>16.2f}{row['at_once_of_sum']:>17.3f}"
    lines.append(
        f"The cores' sum is {found['cores_alone']:.0f} requests/s in batches of 64; one request takes {found['single_ms']:.1f} ms on the fastest core."
    )
    lines.append(f"ours over the best rival: {found['ours_over_best']}")
    for name in HTTP:
        if name in found["rivals"]:
            row = found["rivals"][name]
            lines.append(
                f"{LABELS[name]}, over HTTP; with an empty model: {row['p50_of_http_alone']:.2f} ms a request alone, {row['http_at_once']:.0f} requests/s"
            )
    if found["ours_over_best_http"]:
        lines.append(f"ours over the best rival, over HTTP: {found['ours_over_best_http']}")
    return "\n".join(lines)


def main() -> int:
    args = arguments()
    run = Command(args)
    race = Race(run)
    with busy_loop([run.devices[-1].cores[0]] if args.busy else []):
        run.rounds(race.round)
    found = race.summary()
    print(f"requests to one model, {run.place()}\n\n{text(found)}")
    for name, why in race.missing.items():
        print(f"{LABELS[name]} is not installed: skipped ({why})")
    if args.json:
        print(json.dumps(found | {"seconds_of_a_rate": args.seconds} | run.record(versions())))
    return 0


def versions() -> dict[str, str]:
    """Of what takes part, as far as it is installed."""
    found = {}
    for name in ("torch", "batched", "torchrl", "starlette", "uvicorn", "litserve", "mosec"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def arguments() -> argparse.Namespace:
    parser = command.parser(__doc__, steps=(0, "not used here"), time_limit=1200.0)
    parser.add_argument("--seconds", type=float, default=2.5, help="of requests at each rate (default: 2.5)")
    parser.set_defaults(rounds=3)
    args = parser.parse_args()
    if args.rounds < 1 or args.cores < 2 or not args.seconds > 0:
        parser.error("--rounds must be at least 1, --cores at least 2, and --seconds positive")
    return args


if __name__ == "__main__":
    command.finish("race_pool", main)
