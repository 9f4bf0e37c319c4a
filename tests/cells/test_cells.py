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
MINIMAL = {"mingru": 2, "minlstm": 3}


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
        ("mingru", {}),
        ("minlstm", {}),
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


@pytest.mark.parametrize("kind", MINIMAL)
@pytest.mark.parametrize("steps", [1, 2, 3, 513])
@pytest.mark.parametrize("from_zero", [True, False])
def test_the_scan_of_a_minimal_cell_is_its_step_from_any_state(draw, kind, steps, from_zero):
    cell, p, _, state = draw(kind)
    if from_zero:
        state = {"h": torch.zeros_like(state["h"])}
    generator = torch.Generator().manual_seed(2)
    x_BTI = torch.randn(2, steps, 3, generator=generator, dtype=torch.float64)
    results = []
    for scan in (cell.scan, cell.readable_scan):
        leaves = {**p, "x": x_BTI, "h": state["h"]}
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in leaves.items()}
        outputs, after = scan({name: leaves[name] for name in p}, leaves["x"], {"h": leaves["h"]})
        gradients = torch.autograd.grad(outputs.tanh().sum() + after["h"].square().sum(), leaves.values())
        results.append((outputs, after["h"], *gradients))
    for fast, readable in zip(*results, strict=True):
        torch.testing.assert_close(fast, readable, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", MINIMAL)
def test_a_minimal_cell_has_the_size_and_the_draw_of_its_docstring(draw, kind):
    cell, p, _, _ = draw(kind, input_size=50, hidden_size=64)
    blocks = MINIMAL[kind]
    assert cell.num_parameters() == blocks * 64 * (50 + 1)
    assert cell.operations_per_step() == 2 * blocks * 64 * 50
    assert 0.99 * 3 / math.sqrt(50) < p["weight_ih"].abs().max() <= 3 / math.sqrt(50)
    assert p["weight_ih"].var().item() == pytest.approx(3 / 50, rel=0.05)
    assert not p["bias"].any()


@pytest.mark.parametrize("kind", MINIMAL)
def test_minimal_cells_start_with_the_variance_of_their_input(draw, kind):
    cell, p, _, state = draw(kind, input_size=64, hidden_size=256)
    generator = torch.Generator().manual_seed(3)
    x_BTI = 0.1 * torch.randn(2, 400, 64, generator=generator, dtype=torch.float64)  # small: the gates stay near 1/2
    outputs, _ = cell.scan(p, x_BTI, {"h": torch.zeros_like(state["h"])})
    assert outputs[:, 20:].var().item() == pytest.approx(x_BTI.var().item(), rel=0.1)
