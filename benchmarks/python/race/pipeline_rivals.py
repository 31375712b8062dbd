"""How each rival trains a transformer that is cut into stages. Each function measures one process.

All train the transformer of examples/python/pipeline.py on the same pieces, in the same micro-batches. Only `data_parallel` chooses its own.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import torch
from torch import distributed, nn

from race import example, model, ranks
from race.job import Job
from race.pipeline_figures import figure_name
from race.rivals import Answer, Variant, cut, paceline_step, plain_step

_EXAMPLE = example.load("pipeline")
_BLOCK_RUNS = 20  # forwards of one block, timed to say whether blocks are long enough for the goals


def network(job: Job) -> nn.Module:
    """Build the transformer with the same weights in every process."""
    torch.manual_seed(0)
    transformer: nn.Module = _EXAMPLE.Transformer(width=job.width, blocks=job.blocks)
    return transformer


def batches(job: Job) -> Iterator[model.Pair]:
    return itertools.cycle([_EXAMPLE.pieces(job.batch, seed) for seed in range(4)])


def even_cuts(blocks: int, stages: int) -> list[int]:
    """The first block of each stage, for stages of equal length."""
    return [stage * blocks // stages for stage in range(stages)]


def single(job: Job) -> Answer:
    """One core alone: the micro-batches one after the other, without a pipeline. Also how long a block takes for one of them."""
    torch.set_num_threads(1)
    whole = network(job)
    variant = Variant(plain_step(whole, lambda batch: cut(batch, job.micro_batches)), job, batches=batches(job))
    tokens, _ = cut(next(batches(job)), job.micro_batches)[0]
    embedded = whole.get_submodule("embedding")(tokens).detach().requires_grad_()
    block = whole.get_submodule("blocks.0")
    mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
    seconds = []
    for _ in range(_BLOCK_RUNS):
        start = time.perf_counter()
        block(embedded, src_mask=mask, is_causal=True)
        seconds.append(time.perf_counter() - start)
    return {"single": [variant.run(job.steps)], "block": [seconds]}, [variant.checked_loss]


def stage_of(whole: nn.Module, job: Job) -> nn.Module:
    """This rank's part of the transformer, which takes tokens or the activations of the rank before."""
    ends = [*even_cuts(job.blocks, job.parts), job.blocks]
    blocks = whole.get_submodule("blocks")
    assert isinstance(blocks, nn.ModuleList)
    whole.blocks = blocks[ends[job.rank] : ends[job.rank + 1]]
    if job.rank > 0:
        whole.embedding = nn.Identity()
    if job.rank < job.parts - 1:
        whole.head = nn.Identity()
    return whole


def torch_pipelining(job: Job) -> Answer:
    """torch.distributed.pipelining over gloo: this process is one rank and has one stage, of the even cut.

    The first rank begins and ends a step, so its times are those of the pipeline. The last one has the loss.
    """
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    torch.set_num_threads(1)
    ranks.meet(job)
    module = stage_of(network(job), job)
    optimizer = model.optimizer(module)
    first, last = job.rank == 0, job.rank == job.parts - 1

    def loss_fn(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, -2), labels.flatten())

    # It divides the sum of the micro-batches' gradients by their number, so all must have the same size.
    schedule = {"pipeline-torch-gpipe": ScheduleGPipe, "pipeline-torch-1f1b": Schedule1F1B}[job.rival](
        PipelineStage(module, job.rank, job.parts, torch.device("cpu")),
        n_microbatches=job.micro_batches,
        loss_fn=loss_fn,
    )

    def step(batch: model.Pair) -> float:
        tokens, labels = batch
        losses: list[torch.Tensor] = []
        schedule.step(*([tokens] if first else []), target=labels if last else None, losses=losses if last else None)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if last else 0.0

    variant = Variant(step, job, batches=batches(job))
    distributed.barrier()
    seconds = variant.run(job.steps)
    return {figure_name(job.rival): [seconds]}, [variant.checked_loss] if last else []


def pipeline(job: Job) -> Answer:
    """paceline's pipeline, at the even cut (`pipeline-even`) or as it is planned (`pipeline-auto`).

    Beside the whole steps: the time inside of `Pipeline.step`, without the optimizer, and what was predicted for it; how many blocks each
    device had in the last step.
    """
    from paceline.torch import Pipeline

    cuts = even_cuts(job.blocks, len(job.devices)) if job.rival == "pipeline-even" else None
    inside: list[float] = []
    with Pipeline(
        network(job),
        devices=list(job.devices),
        blocks="blocks",
        cuts=cuts,
        schedule="auto",
        micro_batches=job.micro_batches,
    ) as trainer:
        optimizer = model.optimizer(trainer.module)

        def step(batch: model.Pair) -> float:
            start = time.perf_counter()
            loss = trainer.step(model.loss_fn, batch)
            inside.append(time.perf_counter() - start)
            optimizer.step()
            optimizer.zero_grad()
            return float(loss)

        variant = Variant(step, job, batches=batches(job))
        seconds: list[float] = []
        predicted: list[float] = []
        for _ in range(job.steps):
            seconds += variant.run(1)
            ran = trainer.report()["pipeline"]
            predicted.append(ran["predicted_seconds"])
    counts = {stage["device"]: stage["blocks"] for stage in ran["stages"]}
    blocks = {
        figure_name(job.rival): [seconds],
        "inside": [inside[job.warm_up :]],
        "predicted": [predicted],
        "placed": [[float(counts.get(device, 0)) for device in job.devices]],
    }
    return blocks, [variant.checked_loss]


def data_parallel(job: Job) -> Answer:
    """paceline's DataParallel, which holds the whole model and splits each batch as it likes."""
    from paceline.torch import DataParallel

    with DataParallel(network(job), list(job.devices)) as trainer:
        variant = Variant(paceline_step(trainer), job, batches=batches(job))
        return {"data_parallel": [variant.run(job.steps)]}, [variant.checked_loss]


RIVALS: dict[str, Callable[[Job], Answer]] = {
    "pipeline-torch-gpipe": torch_pipelining,
    "pipeline-torch-1f1b": torch_pipelining,
    "pipeline-even": pipeline,
    "pipeline-auto": pipeline,
    "pipeline-data-parallel": data_parallel,
    "pipeline-single": single,
}
