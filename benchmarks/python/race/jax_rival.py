"""JAX: one compiled program over one host device per core, with the batch sharded over them and the weights replicated.

The parent sets XLA_FLAGS=--xla_force_host_platform_device_count, which JAX reads when it is loaded.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from race import jax_networks, model
from race.job import Job
from race.rivals import Answer, Variant, take_turns

VERSION = str(jax.__version__)


class Trainer:
    """Weights and AdamW's state on all devices, and the step that updates both."""

    def __init__(self, job: Job) -> None:
        devices = jax.devices("cpu")
        if len(devices) != job.parts:
            raise RuntimeError(f"jax: {len(devices)} devices of the host where the race has {job.parts}")
        mesh = Mesh(np.array(devices), ("batch",))
        everywhere, self._sharded = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("batch"))
        torch.set_num_threads(1)
        module = model.network(job.network)
        self._network = job.network
        state = {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}
        weights = jax_networks.weights_of(job.network, state)
        moments = [{name: np.zeros_like(array) for name, array in weights.items()} for _ in range(2)]
        self._state = jax.device_put((weights, *moments, np.zeros((), np.float32)), everywhere)
        self._step = jax.jit(
            functools.partial(
                _adamw_step, jax_networks.FORWARDS[job.network], options=model.optimizer(module).defaults
            ),
            donate_argnums=0,
            out_shardings=(everywhere, everywhere),
        )

    def prepare(self, batch: model.Pair) -> tuple[Any, Any]:
        """Put a batch onto the devices before the race, as the other rivals have theirs in memory."""
        inputs = jax_networks.inputs_of(self._network, batch[0].numpy())
        placed: tuple[Any, Any] = jax.device_put((inputs, batch[1].numpy().astype(np.int32)), self._sharded)
        return placed

    def step(self, batch: tuple[Any, Any]) -> float:
        self._state, loss = jax.block_until_ready(self._step(self._state, *batch))
        return float(loss)


def _adamw_step(forward: jax_networks.Forward, state: Any, inputs: Any, labels: Any, *, options: dict[str, Any]) -> Any:
    """One step of torch.optim.AdamW with its defaults (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019)."""
    weights, first, second, count = state
    beta1, beta2 = options["betas"]
    rate, decay = options["lr"], options["weight_decay"]
    loss, gradient = jax.value_and_grad(functools.partial(jax_networks.loss, forward))(weights, inputs, labels)
    count = count + 1
    first = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, first, gradient)
    second = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, second, gradient)

    def update(weight: Any, m: Any, v: Any) -> Any:
        denominator = jnp.sqrt(v / (1 - beta2**count)) + options["eps"]
        return weight * (1 - rate * decay) - rate * m / (1 - beta1**count) / denominator

    return (jax.tree.map(update, weights, first, second), first, second, count), loss


def measure(job: Job) -> Answer:
    trainer = Trainer(job)
    variant = Variant(trainer.step, job, trainer.prepare)
    return take_turns({"jax": variant}, job.steps), [variant.checked_loss]
