"""The networks of the race in JAX, with the weights of the torch modules and the same results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from race.job import Network

Weights = dict[str, Any]
Forward = Callable[[Weights, Any], Any]  # (weights, inputs) -> logits over the last axis


def weights_of(network: Network, state: Mapping[str, np.ndarray]) -> Weights:
    """A torch module's state with its axes in the order of `FORWARDS`: with channels last, XLA on CPUs takes two thirds of the time."""
    weights = {name: np.array(array) for name, array in state.items()}
    if network == "convolution":
        for name in ("0.weight", "2.weight"):
            weights[name] = weights[name].transpose(2, 3, 1, 0)
        # After Flatten, torch's columns go by channel, row, column. Here they go by row, column, channel.
        flat = weights["6.weight"]
        weights["6.weight"] = flat.reshape(len(flat), 64, 4, 4).transpose(0, 2, 3, 1).reshape(flat.shape)
    return weights


def inputs_of(network: Network, inputs: np.ndarray) -> np.ndarray:
    return inputs.transpose(0, 2, 3, 1) if network == "convolution" else inputs.astype(np.int32)


def loss(forward: Forward, weights: Weights, inputs: Any, labels: Any) -> Any:
    """The mean cross entropy over the labels."""
    logits = jax.nn.log_softmax(forward(weights, inputs))
    return -jnp.take_along_axis(logits, labels[..., None], axis=-1).mean()


def convolution(weights: Weights, x: Any) -> Any:
    for layer in ("0", "2"):
        x = jax.lax.conv_general_dilated(
            x, weights[f"{layer}.weight"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + weights[f"{layer}.bias"])
    count, height, width, channels = x.shape
    # The gradient of reduce_window is slow on CPUs and would nearly double the time of a step. Ties are zeros, whose gradient ReLU drops.
    x = x.reshape(count, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4)).reshape(count, -1)
    return _linear(weights, "8", jax.nn.relu(_linear(weights, "6", x)))


def transformer(weights: Weights, tokens: Any) -> Any:
    """The transformer of examples/python/text.py: normalized first, causal, four heads."""
    x = weights["tokens.weight"][tokens] + weights["positions.weight"][: tokens.shape[1]]
    layers = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("layers.layers."))
    for layer in range(layers):
        name = f"layers.layers.{layer}"
        x = x + _attention(weights, f"{name}.self_attn", _norm(weights, f"{name}.norm1", x), heads=4)
        hidden = jax.nn.relu(_linear(weights, f"{name}.linear1", _norm(weights, f"{name}.norm2", x)))
        x = x + _linear(weights, f"{name}.linear2", hidden)
    return _linear(weights, "head", x)


def _attention(weights: Weights, name: str, x: Any, *, heads: int) -> Any:
    count, length, width = x.shape
    projected = x @ weights[f"{name}.in_proj_weight"].T + weights[f"{name}.in_proj_bias"]
    query, key, value = (part.reshape(count, length, heads, -1) for part in jnp.split(projected, 3, axis=-1))
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return _linear(weights, f"{name}.out_proj", mixed.reshape(count, length, width))


def _linear(weights: Weights, name: str, x: Any) -> Any:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _norm(weights: Weights, name: str, x: Any) -> Any:
    centred = x - x.mean(axis=-1, keepdims=True)
    scale = jax.lax.rsqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)  # torch's default
    return centred * scale * weights[f"{name}.weight"] + weights[f"{name}.bias"]


FORWARDS: dict[Network, Forward] = {"convolution": convolution, "transformer": transformer}
