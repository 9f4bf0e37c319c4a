"""What all cells share: how they are found, and how their parameters are first drawn."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import elman.cells
from elman.cells import cell_names, find_cell, is_own_cell
from elman.cells.base import Cell, Initial
from elman.errors import ConfigError
from elman.models.kinds import build_model, model_config

GATED = {"elman": 1, "lstm": 4, "gru": 3}


def test_a_cell_is_a_file_and_the_file_is_its_name():
    files = {path.stem for path in Path(elman.cells.__file__).parent.glob("*.py")} - {"__init__", "base", "primitives"}
    assert set(cell_names()) == files
    for name in cell_names():
        assert issubclass(find_cell(name), Cell)
        assert find_cell(name).__module__ == f"elman.cells.{name}"
        assert find_cell(name).paper.startswith("https://")


def test_an_unknown_name_gets_the_nearest_and_the_list():
    with pytest.raises(ConfigError, match=r"^unknown cell 'lsmt'; did you mean 'lstm'\? accepted: elman, gru, lstm"):
        find_cell("lsmt")


@pytest.mark.parametrize(("kind", "own"), [("lstm", False), ("./a.py:Cell", True), ("a.b:Cell", True)])
def test_a_colon_says_that_the_cell_is_a_persons_own(kind, own):
    assert is_own_cell(kind) == own


@pytest.mark.parametrize("kind", GATED)
def test_each_gates_recurrent_block_is_orthogonal(draw, kind):
    p = draw(kind, hidden_size=16).p
    blocks = p["weight_hh"].chunk(GATED[kind])
    for block in blocks:
        torch.testing.assert_close(block.T @ block, torch.eye(16, dtype=torch.float64), rtol=0, atol=1e-12)
    assert not any(torch.equal(one, other) for i, one in enumerate(blocks) for other in blocks[:i])


def test_orthogonal_matrices_are_uniform_over_the_group():
    # The signs of the diagonal of R decide it: without that correction all draws lie on one side.
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([Initial("orthogonal").draw((2, 2), generator, torch.float64) for _ in range(2000)])
    assert abs(drawn[:, 0, 0].mean().item()) < 0.05
    assert abs((torch.linalg.det(drawn) > 0).double().mean().item() - 0.5) < 0.04


@pytest.mark.parametrize("kind", GATED)
def test_uniform_parameters_fill_their_bounds_and_no_more(draw, kind):
    settings = {"recurrent_init": "uniform", "bias_init": "uniform", "biases": "double"}
    if kind == "lstm":
        settings["forget_bias"] = None
    p = draw(kind, input_size=50, hidden_size=64, **settings).p
    for name, tensor in p.items():
        bound = 1 / math.sqrt(64)
        assert tensor.abs().max() <= bound, name
        # Of n uniform draws the largest misses the bound by 1/n of it; the variance is bound^2 / 3.
        assert tensor.abs().max() > bound * (1 - 10 / tensor.numel()), name
        standard_error = bound / math.sqrt(3 * tensor.numel())
        assert abs(tensor.mean()) < 4 * standard_error, name
        assert tensor.var().item() == pytest.approx(bound**2 / 3, rel=6 / math.sqrt(tensor.numel())), name


@pytest.mark.parametrize("kind", GATED)
def test_one_bias_vector_unless_two_are_asked_for(draw, kind):
    assert set(draw(kind).p) == {"weight_ih", "weight_hh", "bias"}
    assert set(draw(kind, biases="double").p) == {"weight_ih", "weight_hh", "bias_ih", "bias_hh"}


@pytest.mark.parametrize("kind", GATED)
@pytest.mark.parametrize("biases", ["single", "double"])
def test_the_number_of_parameters_is_the_formula_of_the_docstring(draw, kind, biases):
    cell = draw(kind, input_size=3, hidden_size=4, biases=biases).cell
    gates, num_biases = GATED[kind], {"single": 1, "double": 2}[biases]
    assert cell.num_parameters() == gates * 4 * (3 + 4 + num_biases)
    assert cell.operations_per_step() == 2 * gates * 4 * (3 + 4)


@pytest.mark.parametrize("kind", GATED)
@pytest.mark.parametrize("tie", [False, True])
def test_the_cells_own_draw_survives_the_building_of_a_model(kind, tie):
    config = model_config(
        {"kind": kind, "embedding_size": 8, "hidden_size": 8, "num_layers": 2, "biases": "double", "tie_weights": tie}
    )
    network = build_model(config, 5, seed=3, dtype=torch.float64)
    for layer in network.layers:
        for block in layer.weight_hh.detach().chunk(GATED[kind]):
            torch.testing.assert_close(block @ block.T, torch.eye(8, dtype=torch.float64), rtol=0, atol=1e-12)
        assert layer.weight_ih.abs().max() <= 1 / math.sqrt(8)
        bias = (layer.bias_ih + layer.bias_hh).detach()
        expected = torch.zeros_like(bias)
        if kind == "lstm":
            expected[8:16] = 1.0
        assert torch.equal(bias, expected)
    assert not torch.equal(network.layers[0].weight_hh, network.layers[1].weight_hh)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("elman", {"nonlinearity": "tanh"}),
        ("elman", {"biases": "double"}),
        ("lstm", {}),
        ("lstm", {"biases": "double"}),
        ("gru", {"reset_after": True, "biases": "double"}),
        ("gru", {"reset_after": False, "biases": "double"}),
        ("gru", {"reset_after": False}),
    ],
)
def test_the_gradient_of_scan_is_that_of_finite_differences(draw, kind, settings):
    cell, p, x_BTI, state = draw(kind, input_size=2, hidden_size=3, **settings)
    names, parts = list(p), list(state)

    def flat(x, *tensors):
        given = dict(zip(names, tensors[: len(names)], strict=True))
        outputs, after = cell.scan(given, x, dict(zip(parts, tensors[len(names) :], strict=True)))
        return outputs, *after.values()

    leaves = [t.clone().requires_grad_() for t in (x_BTI[:, :3], *p.values(), *state.values())]
    assert torch.autograd.gradcheck(flat, leaves, eps=1e-6, atol=1e-7)
