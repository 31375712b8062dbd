"""What can be read about the steps of a trainer: figures, rows, events, words and pictures."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

import torch

from paceline.torch._batch.extras import explain_large
from paceline.torch._run.rank_shares import explain_shares
from paceline.torch._run.workload import Workload
from paceline.torch._trainer.asks import Asks
from paceline.torch._trainer.exports import Collector, Scalars
from paceline.torch._trainer.figures import Report, WorkFigures
from paceline.torch._trainer.lifetime import alive
from paceline.torch._trainer.memory_log import MemoryLog
from paceline.torch._trainer.pages import ShownReport
from paceline.torch._trainer.parts import Core
from paceline.torch._trainer.passes import Passes
from paceline.torch._trainer.step_gaps import StepGaps
from paceline.torch._trainer.works import kind_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from paceline._progress import Progress

_T = TypeVar("_T")


class Reports(Asks):
    """Everything that can be read about a trainer. Nothing here changes what its steps do.

    Figures, rows, events, pictures and `what_if` are about `step`. `report` and `explain` are also about `predict` and the runs of `batch`, by name.
    """

    def __init__(self, core: Core, gaps: StepGaps) -> None:
        super().__init__(core)
        self.loss: torch.Tensor | None = None  # of the last step; the trainer sets it
        self.passes: Passes | None = None  # of a trainer that can be called, which sets it
        self._module = core.execution.module
        self._gaps = gaps
        self.memory = MemoryLog(core.lifetime.group.devices)
        self._scalars = Scalars()

    def note_step(self, began: float, *, timed: bool) -> None:
        """A step was committed that has begun then. `timed`: whether it is in the history."""
        if timed:
            self.memory.after_step(self._works.steps.step_loop.committed - 1)
        self._gaps.end(began, timed=timed)

    def report(self) -> Report:
        """Figures for a dashboard.

        Returns
        -------
        dict
            ``devices``: by name ``share`` (items of the last step), ``planned`` (its share of a batch of the usual size, as
            `paceline.balance.Balancer.report` says it; not after a step with `cost`, and not of a `Pipeline`), ``items``, ``busy_seconds`` and ``idle_seconds`` (totals),
            ``items_per_second`` (recent, while busy) and ``speed`` (the same, relative to the fastest device). After a step with `cost` also
            ``cost`` (total) and ``cost_per_second`` (0 while recent steps had no costs), and ``speed`` then compares the latter. ``retired``:
            whether it gets no work since `retire`. ``lent_part``, where it is not 0: the part of its time in a step that it lends to requests of a pool.

            ``imbalance``: the slowest device's busy time over the mean, minus 1 (recent). ``moves``: the number of changes of shares.
            ``steps``: the number of steps. ``proved``: how many of them one device ran, as proofs. No time of these is counted. ``step_counts``: for bounds from 0.001 to 300 seconds how many steps took at most as long:
            a list of pairs (bound, steps). ``compute_seconds`` and ``step_seconds``: totals, without and with the reduction. The reduction on
            GPUs is not timed; there ``step_seconds`` counts the call of `step` or the devices' computing, whichever took longer.

            ``recent_moves``: the last 16 changes of shares that promised a gain, oldest first. Each has ``step`` (how many steps were recorded
            before it), ``batch_size``, the shares ``from`` and ``to``, ``promised_gain`` and ``measured_gain`` (the saved part of a step's time,
            as promised and by the clock), ``resolution`` (smaller differences are noise) and ``outcome``. Outcomes: ``"pending"`` until 8
            steps have run with the new shares, then ``"kept"`` or ``"taken back"`` (it measured worse); ``"overtaken"`` by another move or a
            change of speed; ``"unjudged"`` where nothing comparable ran before. Unless a move was judged, measured gain and resolution are 0.
            ``taken_back``: how many moves were. Like `explain`, both are about the kind of steps, with `cost` or without, that was
            planned last. With `cost`, batches and shares are work.

            ``ranks``, with `group`: for each rank ``items`` and ``seconds`` of its own part of the last step. All else is about this process.

            ``rank_shares``, on rank 0 after `batch_sampler`: how global batches are dealt out to the ranks, as `paceline.balance.Balancer.report` says
            it. Here ``devices`` are ranks. ``unit``: what shares count, ``"items"`` or with lengths ``"units of work"``, of which an average batch has 1,000,000.

            ``out_of_memory``: how often a step ran again in smaller pieces because memory had run out.

            ``sizes``: for each device the sizes of micro-batches that ever ran, in items.

            ``memory``: for each device with a limit ``limit_bytes``, and once measured ``fixed_bytes``, ``bytes_per_item`` and
            ``largest_micro_batch`` (for steps with `cost` ``fixed_bytes_with_costs``, ``bytes_per_cost`` and ``largest_padded_cost``). For
            each GPU ``pool_peak_bytes``: the most that paceline's own pool had given out at once to all trainers of the process, while there
            were any. Memory of PyTorch and NCCL is not included.

            ``runs``: all of this except ``sizes``, ``memory`` and ``runs``, for each run of `batch` by its name. ``predictions``: the same for `predict`, once it was called.
            ``calls``: the same for the forward of the trainer's calls as a module.

            ``items``, after a step (or run) with `cost`: ``cost`` of all items; ``padded_cost`` of the micro-batches that ran (the count of
            each times its largest cost); ``contiguous_cost``, the same for micro-batches of these sizes cut from the batch as it came;
            ``padding_saved`` (the saved part of the latter's padding). Once measured, also the time of a micro-batch on the devices of the
            ``device_class`` that ran most: ``fixed_seconds``, ``seconds_per_cost``, ``seconds_per_squared_cost``, its relative ``error``, and
            ``measure``: whether it follows the ``"padded"`` cost, the ``"sum"`` or the ``"count"`` alone.
        """
        runs = {name: _metrics_of(work) for name, work in self._works.runs().items()}
        figures: Any = _metrics_of(self._works.steps)
        if self._works.predictions is not None:
            figures["predictions"] = _metrics_of(self._works.predictions)
        if self._works.calls is not None:
            figures["calls"] = _metrics_of(self._works.calls)
        if self._execution.ranks is not None and self._execution.ranks.last:
            figures["ranks"] = list(self._execution.ranks.last)
        dealt = self._dealt
        if dealt is not None:
            figures["rank_shares"] = dealt.report()
        report = {
            **figures,
            "out_of_memory": self._execution.out_of_memory,
            "sizes": self._sizes(),
            "memory": self._memory(),
            "runs": runs,
        }
        return cast(Report, ShownReport(report))

    def _sizes(self) -> dict[str, list[int]]:
        """By device, the sizes of micro-batches that ever ran."""
        return {name: sorted(ran) for name, ran in zip(self._works.names, self._works.steps.seen.ever, strict=True)}

    def _memory(self) -> dict[str, dict[str, float]]:
        """What steps know of each device with a limit, and of each GPU the peak of the pool."""
        result = self._works.steps.step_loop.memory
        for space, peak in self._execution.places.pool_peaks().items():
            result.setdefault(space, {})["pool_peak_bytes"] = peak
        return result

    def scalars(self, prefix: str = "paceline/") -> dict[str, float]:
        """Some figures of `report` by flat names, for TensorBoard, W&B, MLflow or ``self.log_dict``.

        ``step_seconds`` and ``compute_seconds`` are means over the steps since the last call. By device, as in ``share/host_0``: ``share``, ``items_per_second``
        and ``busy_ratio``, the part of the devices' common time in which it computed. By rank, as in ``share/rank_0``, on rank 0 after
        `batch_sampler`: ``share``, ``items_per_second``, and ``seconds`` of its own work in the last step. With lengths ``share`` is work, and its speed
        is ``work_per_second``.

        Examples
        --------
        >>> wandb.log(trainer.scalars(), step=step)                                  # doctest: +SKIP
        """
        return self._scalars.of(self.report(), prefix)

    def prometheus(self, /, **labels: str) -> Collector:
        """A collector of ``prometheus_client`` with the figures of `report`, which you register. It starts no server.

        Parameters
        ----------
        labels
            Labels of your own for all samples: ``prometheus(run="a")``. Several trainers in one registry need different ones.

        Raises
        ------
        InvalidArgument
            For labels that the samples have already: ``device``, ``pci_bus_id``, ``uuid``, ``rank``, ``kind``, ``le``, ``version``.

        Examples
        --------
        >>> prometheus_client.REGISTRY.register(trainer.prometheus())                # doctest: +SKIP
        """
        return Collector(self.report, self._lifetime.group, labels)

    def progress(
        self, batches: Iterable[_T], *, total: int | None = None, every: float = 10.0, file: TextIO | None = None
    ) -> Progress[_T]:
        """Loop over `batches` and show step, loss, step time, imbalance, moves, and each device's share (items, or their cost) and busy time.

        On a terminal it is redrawn in place if rich is installed (``pip install 'paceline[progress]'``), at most four times a second.
        Everywhere else (files, notebooks, terminals that log handlers write to) it prints a plain line after the first batch, every `every`
        seconds, and at the end. No thread is started. Ctrl-C, ``break`` and exceptions leave the terminal as it was.

        Parameters
        ----------
        batches
            Any iterable, such as a DataLoader. Its elements come unchanged.
        total
            The number of batches. Default: ``len(batches)``, if it has a length.
        every
            Seconds between two plain lines; 0: one after each batch.
        file
            Where to write; default ``sys.stderr``.

        Notes
        -----
        All figures are about `step`, or before the first one about `predict`. A loop that only runs `batch` shows its batches and no steps. Shares, busy and step times are means
        since the last figures. Reading them and the loss waits for GPUs, and happens only when something is shown. The trainer remembers
        how long the loop waits for batches, and `explain` says so if it is long.

        Examples
        --------
        >>> for batch in trainer.progress(loader):                                   # doctest: +SKIP
        ...     loss = trainer.step(loss_fn, batch)
        ...     optimizer.step(); optimizer.zero_grad()
        """
        from paceline._progress import Progress

        def loss() -> float | None:
            return None if self.loss is None else float(self.loss)

        def figures() -> dict[str, Any]:
            found: Any = self.report()
            other = next((kind for kind in ("calls", "predictions") if kind in found and not found["steps"]), None)
            return dict(found) if other is None else {**found, **found[other], "of": other}

        return Progress(batches, figures, loss, total=total, every=every, file=file, watched=self._gaps.watched)

    @property
    def shares(self) -> dict[str, int]:
        """By device, the items of the last step, or of the last prediction if there was no step yet."""
        predictions = self._works.predictions
        if self._execution.steps or predictions is None:
            return dict(zip(self._works.names, self._execution.items, strict=True))
        return {name: device["share"] for name, device in predictions.step_loop.metrics["devices"].items()}

    def events(self) -> list[dict[str, Any]]:
        """The last events, oldest first, at most 4096. Reading them waits for GPUs.

        Returns
        -------
        list of dict
            ``kind``: ``"step"``, ``"micro_batch"``, ``"reduction"`` or ``"move"``; ``device``: its name, None for the group; ``step``: how many
            steps had succeeded before; ``begin`` and ``end``: items of the batch, with `cost` in the order in which they were dealt out;
            ``start_seconds``, since the trainer was made; ``duration_seconds``. A step that failed leaves no event. With GPUs a
            ``"reduction"`` lasts 0 seconds, since it is not timed, and a ``"step"`` lasts as `report` says.
        """
        return list(self._works.steps.step_loop.events)

    def history(self) -> list[dict[str, Any]]:
        """The whole run in at most 1024 rows, oldest first. A row is one step, or in a longer run the sum of equally many steps.

        Returns
        -------
        list of dict
            ``first_step`` (from 0), ``steps`` (in this row), ``items`` and ``busy_seconds`` (sums, by name of a device), ``costs`` (like
            ``items``; None unless all of these steps had costs), ``planned`` (the same of the planned shares, which devices may take from each other; None if
            one of these steps had costs, and for a `Pipeline`, whose rows have ``blocks`` by device instead), ``step_seconds`` (sum, with the reduction; with GPUs as in `report`),
            ``longest_step_seconds`` (of one step), ``moves``, and what was lost of ``step_seconds``: ``launching_seconds`` (devices that had not begun; the
            mean weighted by their speeds) and ``reduction_seconds`` (None with GPUs; both None for a `Pipeline`). ``reason``: of the last of its moves ('' for a `Pipeline`). Reading it waits for GPUs, as `report` does.
        """
        return list(self._works.steps.step_loop.history)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw the run so far: shares with their moves, speeds, and step times, by cost if all steps had `cost`. Works after `close`, too.

        Parameters
        ----------
        path
            A file to write, as .png, .svg, .pdf or another format of matplotlib. None: only make the figure.

        Returns
        -------
        matplotlib.figure.Figure
            A figure to add to and to save. Its three axes count steps from 1. No window opens, and pyplot is not used.

        Raises
        ------
        ImportError
            If matplotlib is not installed. ``pip install 'paceline[plot]'`` brings it.
        Unavailable
            Before the first step.
        """
        from paceline._plot import draw_run, save

        names = ", ".join(self._works.names) if len(self._works.names) <= 4 else f"{len(self._works.names)} devices"
        title = f"{type(self._module).__name__} on {names}, balance {self._works.options['balance']}"
        return save(draw_run(self.history(), title=title), path)

    def explain(self) -> str:
        """Say in words what was seen, what was decided and why, and what a move would gain: for `step`, and for each run of `batch` by name.

        If host devices wait much between two steps, the text says how long, and in a loop over `progress` how much of that for the next
        batch. If one device, or plain PyTorch, would be faster for steps as small as these, the text says so. It knows that from steps that
        one device ran alone.

        Waits for GPUs. Works after `close`, too.
        """
        named = {f"run {name}": work for name, work in self._works.runs().items()}
        if self._works.predictions is not None:
            named["predict"] = self._works.predictions
        if self._works.calls is not None:
            named["calls"] = self._works.calls
        texts = [f"{name}: {_explained(work)}" for name, work in named.items() if work.step_loop.metrics["steps"]]
        if self._works.steps.step_loop.metrics["steps"] or not texts:
            texts.insert(0, _explained(self._works.steps))
        texts[0] += self._execution.places.explain() + self._execution.explain()
        texts[0] += "".join(shards.explain() for shards in alive(self._lifetime.shards))
        unsharded = self._lifetime.unsharded
        texts[0] += "".join(unsharded[optimizer] for optimizer in alive(unsharded))
        texts[0] += explain_large(self._execution.extras)
        texts[0] += "" if self.passes is None else self.passes.clock.explain()
        if not any(self._execution.places.on_gpu):
            texts[0] += self._gaps.explain()
        if self._dealt is not None:
            texts.append(explain_shares(self._dealt))
        return "\n".join(texts)

    def write_ledger(self, path: str | os.PathLike[str], *, run: str | None = None) -> None:
        """Write every measurement and decision of `step` to a file of JSON lines, and what each device really ran.

        `paceline.balance.replay` reproduces the decisions, `replay_claims` the steps themselves. Steps with `cost` and steps without are decided by a
        balancer each. Lines of the one that decided second have ``"balancer": 1``, and each counts its own steps.

        Parameters
        ----------
        path
            The file. An existing file is replaced.
        run
            The name of a run of `batch`, as in ``report()["runs"]``, to write its ledger. Default: the ledger of `step`.

        Raises
        ------
        InvalidArgument
            If the first step, or the first run of that name, has begun already (an incomplete ledger cannot be replayed), or if the file cannot
            be written.
        """
        with self._lifetime.exclusive("write_ledger"):
            self._works.of(kind_of(run)).step_loop.write_ledger(os.fspath(path))


def _explained(work: Workload) -> str:
    """What was seen and decided for one kind of work, and what limits it."""
    busy = [entry["busy_seconds"] for entry in work.step_loop.metrics["devices"].values()]
    alone = "" if work.alone is None else work.alone.explain(list(work.step_loop.metrics["devices"]))
    return work.step_loop.explain() + work.launches.explain(busy) + alone


def _metrics_of(work: Workload) -> WorkFigures:
    """The metrics of one kind of work, with the costs of its items if some had costs."""
    metrics: Any = {**work.step_loop.metrics}
    metrics["proved"] = work.proved
    metrics["steps"] += work.proved
    return cast(WorkFigures, metrics if work.step_loop.items is None else metrics | {"items": work.step_loop.items})
