"""The networks of the races are the same in every framework."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest

pytest.importorskip("torch", reason="the races need torch")
if find_spec("sklearn") is None:  # importing it takes seconds
    pytest.skip("the digits come from scikit-learn", allow_module_level=True)

import torch

from race import data, model
from race.job import Network


@pytest.mark.parametrize("network", get_args(Network))
def test_a_network_gives_a_loss_for_its_data(network: Network, tmp_path: Path) -> None:
    data.save(tmp_path, network)
    first, *others = model.batches(str(tmp_path), 8)
    assert len(others) == 3
    assert all(len(part) == 8 for part in first)
    loss = model.loss_fn(model.network(network), first)
    labels = 10 if network == "convolution" else 256
    assert float(loss.detach()) == pytest.approx(float(torch.tensor(labels).log()), rel=0.1)  # the network is untrained


@pytest.mark.parametrize("network", get_args(Network))
def test_jax_computes_what_torch_computes(network: Network, tmp_path: Path) -> None:
    pytest.importorskip("jax", reason="JAX, a rival of the races, is not installed")
    from race import jax_networks

    data.save(tmp_path, network)
    batch = model.batches(str(tmp_path), 8)[0]
    module = model.network(network)
    weights = jax_networks.weights_of(
        network, {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}
    )
    inputs, labels = jax_networks.inputs_of(network, batch[0].numpy()), batch[1].numpy()
    forward = jax_networks.FORWARDS[network]
    torch.testing.assert_close(
        torch.tensor(forward(weights, inputs).tolist()), module(batch[0]).detach(), rtol=1e-4, atol=1e-5
    )
    loss = float(jax_networks.loss(forward, weights, inputs, labels))
    assert loss == pytest.approx(float(model.loss_fn(module, batch).detach()), rel=1e-5)
