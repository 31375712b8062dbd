"""What people look at: the page of a run, and tables in notebooks."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from paceline import InvalidArgument, Unavailable
from paceline._page.document import page_of_runs, write
from paceline._page.ledger import known, runs_of
from paceline._page.run import Move, Row, Run, Table, because, ideal_seconds, milliseconds
from paceline._words import plural
from paceline.torch._trainer.memory_log import MemoryLog
from paceline.torch._trainer.parts import Part
from paceline.torch._trainer.thinned import Thinned

if TYPE_CHECKING:
    from paceline._progress import Progress

_T = TypeVar("_T")
_CAUSE = "what may slow it: "  # of explain()
_SPEED = re.compile(r", speed ([0-9.]+) of the fastest ")  # of explain()
_SLOW = 0.9  # of the fastest device's speed
_NO_MEMORY = "No device has a limit of memory (memory=), so what micro-batches take was not measured."


class Pages(Part):
    """What people look at. Figures and words come from the calls of `Reports`."""

    def page(self, path: str | os.PathLike[str]) -> None:
        """Write the run so far as one page of HTML, which needs no network and opens by a double click. Works after `close`, too.

        At the top it says how good the split was, what cost most, and what to change. Charts show shares with their moves, speeds, the time of a step beside
        its ideal, and memory; for a `Pipeline` also the schedules of the last steps, the last one beside its plan. Tables have the same figures, and memory and ranks if
        something is known of them. The ideal is the time in which the devices would have done the same work if each had worked until the end, at the speed
        that it had. `paceline page` makes such a page from ledgers, and compares runs.

        Parameters
        ----------
        path
            The file. An existing one is replaced when the new one is complete. It has less than 1 MB for 10,000 steps: long runs are thinned, as in `history`.

        Raises
        ------
        Unavailable
            Before the first step.
        OSError
            If the file cannot be written.

        Examples
        --------
        >>> trainer.page("run.html")                                                 # doctest: +SKIP
        """
        runs = self._runs()
        if not runs[0].rows:
            raise Unavailable(
                "page: no step has run yet, so there is nothing to show. Calls of the trainer as a module are in explain() and report()['calls']."
            )
        write(path, page_of_runs(runs[0].title, runs))

    def live(self, batches: Iterable[_T], *, total: int | None = None) -> Progress[_T]:
        """Loop over `batches` and show what `progress` shows. In a notebook it is a table that is drawn again in place, at most four times a second.

        Elsewhere this is `progress`.

        Parameters
        ----------
        batches, total
            As for `progress`.

        Examples
        --------
        >>> for batch in trainer.live(loader):                                       # doctest: +SKIP
        ...     trainer.step(loss_fn, batch)
        """
        from paceline._progress_html import html_display

        reports: Any = self
        progress: Progress[_T] = reports.progress(batches, total=total)
        progress.display = html_display() or progress.display
        return progress

    def _runs(self) -> list[Run]:
        """What the page shows: this run, and the ranks' if this process has decided on their shares and kept a ledger."""
        reports: Any = self
        waited, memory, report = copy(reports._gaps.waited), copy(reports.memory), reports.report()
        history = [{**row, **self._beside(row, waited, memory)} for row in reports.history()]
        runs = [self._run(history, report, reports.explain())]
        dealt = reports._dealt
        if dealt is not None:
            runs[0].tables.append(_ranks(report, dealt.report()))
            try:
                runs += runs_of("The ranks", [f"{line}\n" for line in dealt.ledger().split("\n") if line])
            except InvalidArgument as error:  # such as: it keeps none
                runs[0].lacks.append(f"The ranks' shares over time are not known: {error}")
        return runs

    def _run(self, history: Sequence[Mapping[str, Any]], report: Mapping[str, Any], explained: str) -> Run:
        names = self._works.names
        by_cost = bool(history) and all(row.get("costs") for row in history)
        blocks = bool(history) and all("blocks" in row for row in history)
        reports: Any = self
        run = Run(
            f"{type(reports._module).__name__} on {', '.join(names) if len(names) <= 4 else f'{len(names)} devices'}, balance {self._works.options['balance']}",
            names,
            [replace(_row(row, names, by_cost, blocks), input=row["input"], memory=row["memory"]) for row in history],
            [_move(move) for move in report["recent_moves"]],
            unit="cost" if by_cost else "items",
            share_of="blocks" if blocks else "",
            pipeline=blocks,
            even=self._works.options["balance"] in ("even", "weighted"),
            words=explained,
            usual=[one["planned"] for one in report["devices"].values() if "planned" in one],
            memory_of=reports.memory.names,
        )
        run.advice = self._advice(report, explained)
        if self._on_gpus and not blocks:
            run.lacks.append("On GPUs reductions are not timed. What they take counts as waiting.")
        together = max((row.steps for row in run.rows), default=1)
        if not (self._on_gpus or reports._gaps.watches):
            run.lacks.append("A loop over progress or live also tells how long it waits for its input.")
        if together > 1 and not blocks and len(names) > 1:
            run.lacks.append(
                f"The ideal is known of {together} steps together: a device that had work in only some of them counts with its full speed, so less may have been lost."
            )
        run.moves = _all_moves(run.moves, history)
        if report["moves"] > len(run.moves):
            run.lacks.append(
                f"Shares changed {plural(report['moves'], 'time')}. Of changes within {plural(together, 'step')} a trainer keeps the last reason; a ledger has all."
            )
        if gone := [name for name, device in report["devices"].items() if device["retired"]]:
            run.lacks.append(f"Retired, and without work in the end: {', '.join(gone)}.")
        run.tables += [one for one in (_memory(report), self._between(), _others(report)) if one is not None]
        if not report["memory"]:
            run.lacks.append(_NO_MEMORY)
        return run

    def _beside(self, row: Mapping[str, Any], waited: Thinned, memory: MemoryLog) -> dict[str, Any]:
        """What the loop's steps had beside the devices' work: waits for batches, and memory. Both were read before the history, whose rows are as long or longer."""
        reports: Any = self
        first, steps = row["first_step"], row["steps"]
        knows = reports._gaps.watches and not self._on_gpus
        return {
            "input": waited.of(first, steps) or 0.0 if knows else None,
            "memory": memory.of(first, steps),
        }

    def _advice(self, report: Mapping[str, Any], explained: str) -> str:
        """What to change, in the words of what has measured it: the loop's gaps, the workers' launches, trials of one device, causes of a slow device."""
        reports: Any = self
        work = self._works.steps
        texts = ["" if self._on_gpus else reports._gaps.explain()]
        busy = [device["busy_seconds"] for device in report["devices"].values()]
        texts.append(work.launches.explain(busy))
        if work.alone is not None:
            texts.append(work.alone.explain(self._works.names))
        device, speed = "", 1.0
        for line in explained.splitlines():
            named = line.strip().partition(": ")[0]
            if named in report["devices"]:  # its speed as the text has it, which joins devices that nothing tells apart
                said = _SPEED.search(line)
                device, speed = named, float(said[1]) if said else report["devices"][named].get("speed", 1.0)
            if line.strip().startswith(_CAUSE) and speed < _SLOW:
                texts.append(f"Free {device}, the slower device: {line.strip().removeprefix(_CAUSE)}.")
                break
        return next((text.strip() for text in texts if text), "")

    @property
    def _on_gpus(self) -> bool:
        """Whether the loop runs ahead of the devices, so that its times are not theirs."""
        return any(self._execution.places.on_gpu)

    def _between(self) -> Table | None:
        reports: Any = self
        medians = None if self._on_gpus else reports._gaps.medians()
        if medians is None:
            return None
        between, waited, inside = medians
        rows = [
            ("between two steps", milliseconds(between)),
            ("of that, waiting for the next batch", milliseconds(waited) if waited else "not seen"),
            ("in a call of step", milliseconds(inside)),
        ]
        note = "medians of the last steps; waiting for batches is seen in a loop over progress or live"
        return Table("Input and the rest of the loop", ("what", "time"), rows, note)

    def _repr_html_(self) -> str:
        reports: Any = self
        return small_table(reports.report())


class ShownReport(dict[str, Any]):
    """What `report` returns, which notebooks show as a small table."""

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (list(self.items()),)  # a dictionary that torch.load knows (weights_only)

    def _repr_html_(self) -> str:
        return small_table(self)


def small_table(report: Mapping[str, Any]) -> str:
    """HTML of a report for notebooks: a row for each device."""
    from paceline._page.document import table

    seconds = report["step_seconds"]
    timed = report["steps"] - report["proved"]
    rows = [
        (
            f"{name} (retired)" if device["retired"] else name,
            f"{device.get('planned', device['share'])}",
            f"{device['items']}",
            f"{device['items_per_second']:.5g}",
            f"{device['speed']:.2f}",
            f"{min(1.0, device['busy_seconds'] / seconds):.0%}" if seconds > 0 else "–",
        )
        for name, device in report["devices"].items()
    ]
    mean = f", {milliseconds(seconds / timed)} in the mean" if timed > 0 else ""
    caption = f"{report['steps']} steps{mean}, {plural(report['moves'], 'move')}, imbalance {report['imbalance']:.1%}"
    return table(Table(caption, ("device", "share", "items", "items/s", "speed", "busy"), rows))


def _row(row: Mapping[str, Any], names: Sequence[str], by_cost: bool, blocks: bool) -> Row:
    amounts = [row["costs" if by_cost else "items"][name] for name in names]
    busy = [row["busy_seconds"][name] for name in names]
    seconds = row["step_seconds"]
    # In a pipeline every device runs all items. There the ideal is that all devices with a stage always compute.
    ideal = sum(busy) / (sum(one > 0 for one in busy) or 1) if blocks else ideal_seconds(amounts, busy)
    shares = [row["blocks"][name] * row["steps"] for name in names] if blocks else None
    if shares is None and not by_cost and row["planned"] is not None:
        shares = [row["planned"][name] for name in names]
    longest = row["longest_step_seconds"]
    return Row(
        row["first_step"],
        row["steps"],
        amounts,
        busy,
        seconds,
        min(ideal, seconds),
        longest,
        longest if row["steps"] == 1 else None,
        shares,
        row["reduction_seconds"],
        row["launching_seconds"],
    )


def _move(move: Mapping[str, Any]) -> Move:
    if "kind" in move:  # of a pipeline
        what = "micro-batches or depth"
        if move["kind"] != "depth":
            what = f"cuts {move['from_cuts']} on {move['from_order']} to {move['to_cuts']} on {move['to_order']}"
        was, now = move["seconds_before"], move["seconds_after"]
        gain = f"; promises {milliseconds(was)} to {milliseconds(now)} a step" if was else ""
        return Move(move["step"], what, f"{move['reason']}{gain}")
    why = f"promised {move['promised_gain']:.1%} shorter steps"
    if move["outcome"] in ("kept", "taken back"):
        why += f", measured {move['measured_gain']:.1%} (noise {move['resolution']:.1%})"
    return Move(move["step"], f"{move['from']} to {move['to']}", f"{why}: {move['outcome']}")


def _all_moves(known: Sequence[Move], history: Iterable[Mapping[str, Any]]) -> list[Move]:
    """With a move for each row of the history that has no known one, if shares moved in it, or if a device lost all work or got some again."""
    steps = {move.step for move in known}
    moves = list(known)
    before: Mapping[str, Any] = {"steps": 0}
    for row in history:
        first, last = row["first_step"], row["first_step"] + row["steps"] - 1
        shares = _shares(before, row)
        turned = [
            f"{name} has {'work again' if has else 'no more work'}"
            for name, had, has in shares
            if (had > 0) != (has > 0)
        ]
        if (row["moves"] or turned) and not any(first <= step <= last for step in steps):
            what = f"{[had for _, had, _ in shares]} to {[has for *_, has in shares]}" if shares else "shares changed"
            if last > first:
                what += f" {plural(row['moves'], 'time')} up to step {last + 1}"
            reason = row["reason"] or ("" if turned else "the reason is not kept")
            moves.append(Move(first, what, because(turned, reason)))
        before = row
    return sorted(moves, key=lambda move: move.step)


def _shares(before: Mapping[str, Any], row: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """Each device's planned items in a step and in the next one, of as many. Empty for rows of several steps, and for other batches."""
    if (before["steps"], row["steps"]) != (1, 1) or not (before.get("planned") and row.get("planned")):
        return []
    if sum(before["planned"].values()) != sum(row["planned"].values()):
        return []
    return [(name, before["planned"].get(name, 0), items) for name, items in row["planned"].items()]


def _bytes(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value / 2**30:.4g} GiB" if value >= 2**30 else f"{value / 2**20:.4g} MiB"


def _memory(report: Mapping[str, Any]) -> Table | None:
    if not report["memory"]:
        return None

    rows = []
    for name, known_bytes in report["memory"].items():
        rows.append(
            (
                name,
                _bytes(known_bytes.get("limit_bytes")),
                _bytes(known_bytes.get("fixed_bytes")),
                _bytes(known_bytes.get("bytes_per_item")),
                f"{known_bytes['largest_micro_batch']:.0f}" if "largest_micro_batch" in known_bytes else "–",
                _bytes(known_bytes.get("pool_peak_bytes")),
            )
        )
    head = ("device", "cap", "fixed", "per item", "largest micro-batch", "peak of paceline's pool")
    note = f"memory ran out {report['out_of_memory']} times" if report["out_of_memory"] else ""
    return Table("Memory", head, rows, note)


def _others(report: Mapping[str, Any]) -> Table | None:
    """Work beside the steps."""
    kinds = {f"run {name}": one for name, one in report["runs"].items()}
    kinds |= {name: report[name] for name in ("predictions", "calls") if name in report}
    rows = [
        (
            name,
            str(one["steps"]),
            str(sum(device["items"] for device in one["devices"].values())),
            milliseconds(one["step_seconds"]),
            f"{one['imbalance']:.1%}",
        )
        for name, one in kinds.items()
        if one["steps"] > one["proved"]
    ]
    return Table("Beside the steps", ("work", "calls", "items", "time in all", "imbalance"), rows) if rows else None


def _ranks(report: Mapping[str, Any], dealt: Mapping[str, Any]) -> Table:
    """The ranks, by rank."""
    own = report.get("ranks") or [{}] * len(dealt["devices"])
    made = known(dealt)
    rows = [
        (
            *row,
            f"{device['share']}",
            f"{one['items']:.0f}" if "items" in one else "–",
            milliseconds(one["seconds"]) if "seconds" in one else "–",
        )
        for row, device, one in zip(made.rows, dealt["devices"], own, strict=True)
    ]
    return Table("Ranks", (*made.head, f"share ({dealt['unit']})", "items of the last step", "its time"), rows)
