"""Jacobians against autograd's, products against closed forms and against a hundred digits."""

from __future__ import annotations

import math

import mpmath  # comes with torch
import numpy as np
import pytest
import torch

from elman.errors import UserError
from elman.inspection.jacobians import (
    Layout,
    Trajectory,
    log_growth,
    log_singular_values,
    log_singular_values_of_triangles,
)
from elman.models.contract import LanguageModel
from elman.models.kinds import build_model, kind_names, model_config
from elman.models.laws import small_configs
from elman.models.state import State


def trajectory(network: LanguageModel, num_steps: int, seed: int = 0) -> Trajectory:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, network.vocab_size, (num_steps + 3,), generator=generator)
    with torch.no_grad():
        _, state = network.features(tokens[None, :3], network.initial_state(1))
    return Trajectory.along(network, tokens[3:], state)


FIXED = [kind for kind in kind_names() if kind not in ("ngram", "window", "transformer")]


@pytest.mark.parametrize("kind", FIXED)
def test_jacobians_are_those_of_autograd(kind):
    network = build_model(small_configs(kind)[0], 5, seed=1, dtype=torch.float64)
    path = trajectory(network, 2)
    layout, state = path.layout, path.states[1]
    torch.testing.assert_close(layout.vector(layout.state(layout.vector(state), state)), layout.vector(state))

    def step(vector_S: torch.Tensor) -> torch.Tensor:
        after = network.step(path.tokens[1], layout.state(vector_S[None], state))[1]
        return torch.cat([after.tensors[name].flatten() for name in layout.shapes])

    expected = torch.autograd.functional.jacobian(step, layout.vector(state)[0])
    identity = torch.eye(layout.size, dtype=torch.float64)
    torch.testing.assert_close(path.jacobian(1), expected)
    torch.testing.assert_close(path.push(1, identity), expected.T)
    torch.testing.assert_close(path.pull(1, identity), expected)
    assert expected.abs().max() > 1e-3


@pytest.mark.parametrize(("w", "h"), [(0.9, 0.00515377), (1.0, 1.0), (1.1, 117.391)])
def test_the_scalar_network_over_fifty_steps(linear_network, w, h):
    network = linear_network([[w]])
    path = Trajectory.along(network, torch.ones(50, dtype=torch.int64), network.initial_state(1))
    (log_value,) = log_singular_values(path).tolist()
    assert math.exp(log_value) == pytest.approx(h, rel=1e-5)
    assert log_growth(path, 1).mean().item() == pytest.approx(math.log(w), abs=1e-12)


def test_products_of_a_linear_network_in_closed_form(linear_network):
    # W = U D U^T: every power is U D^n U^T, whose singular values lie too far apart for one matrix of float64.
    values = torch.tensor([1.1, 0.9, 0.5, 0.01], dtype=torch.float64)
    basis, _ = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
    network = linear_network((basis @ values.diag() @ basis.T).tolist())
    path = trajectory(network, 300)
    torch.testing.assert_close(log_singular_values(path), 300 * values.log(), rtol=1e-9, atol=1e-8)
    torch.testing.assert_close(log_growth(path, 4)[100:].mean(0), values.log(), rtol=1e-6, atol=1e-6)
    leading = log_singular_values(path, 2)
    torch.testing.assert_close(leading, 300 * values[:2].log(), rtol=1e-9, atol=1e-8)


@pytest.mark.parametrize("seed", range(3))
def test_products_of_matrices_that_share_no_directions(seed):
    rng = np.random.default_rng(seed)
    matrices = [rng.normal(size=(5, 5)) * np.exp(-1.5 * np.arange(5)) for _ in range(30)]
    with mpmath.workdps(150):
        product = mpmath.eye(5)
        for matrix in matrices:
            product = mpmath.matrix(matrix.tolist()) * product
        expected = [float(mpmath.log(value)) for value in mpmath.svd_r(product, compute_uv=False)]
    assert max(expected) - min(expected) > 140
    frame, triangles = torch.eye(5, dtype=torch.float64), []
    for matrix in matrices:
        frame, triangle = torch.linalg.qr(torch.from_numpy(matrix) @ frame)
        triangles.append(triangle)
    assert log_singular_values_of_triangles(triangles).tolist() == pytest.approx(expected, abs=1e-9)


def test_the_largest_alone_are_those_of_all():
    network = build_model(model_config({"kind": "lstm", "hidden_size": 6, "embedding_size": 4}), 5, seed=2,
                          dtype=torch.float64)  # fmt: skip
    path = trajectory(network, 40)
    torch.testing.assert_close(log_singular_values(path, 3), log_singular_values(path)[:3], rtol=0.0, atol=0.01)
    one = path.part(slice(5, 6))
    torch.testing.assert_close(
        log_singular_values(one).exp(), torch.linalg.svdvals(one.jacobian(0)), rtol=1e-6, atol=0.02
    )


@pytest.mark.parametrize("kind", ["ngram", "window"])
def test_tokens_have_no_gradient(kind):
    with pytest.raises(UserError, match=f"'{kind}' carries tokens alone.*inspect saliency"):
        Layout.of(build_model(model_config({"kind": kind}), 5, seed=1, dtype=torch.float64))


def test_a_state_that_grows_has_no_map():
    network = build_model(small_configs("transformer")[0], 5, seed=1, dtype=torch.float64)
    with pytest.raises(UserError, match="grows with the text"):
        Layout.of(network)


def test_whole_numbers_of_a_state_stay_as_they_are():
    network = build_model(small_configs("seq2seq")[0], 5, seed=1, dtype=torch.float64)
    layout = Layout.of(network)
    assert "phase" not in layout.shapes
    state = State({**network.initial_state(2).tensors, "phase": torch.tensor([0, 1])})
    again = layout.state(layout.vector(state) + 1, state)
    assert again.tensors["phase"].tolist() == [0, 1]
    assert list(again.tensors) == list(state.tensors)
