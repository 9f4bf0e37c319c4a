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
LINEAR = [
    ("mingru", {}),
    ("minlstm", {}),
    ("qrnn", {}),
    ("qrnn", {"qrnn_pooling": "f", "qrnn_window": 1}),
    ("qrnn", {"qrnn_pooling": "ifo", "qrnn_window": 4}),
]
BY_HAND = [
    ("elman", {}),
    ("elman", {"biases": "double"}),
    ("gru", {}),
    ("gru", {"biases": "double"}),
    ("multiplicative_lstm", {}),
    ("multiplicative_lstm", {"biases": "double"}),
    ("mogrifier_lstm", {}),
    ("mogrifier_lstm", {"mogrifier_rounds": 2, "biases": "double"}),
    ("mogrifier_lstm", {"mogrifier_rounds": 3, "mogrifier_rank": 1}),
]


def test_a_cell_is_a_file_and_the_file_is_its_name():
    files = {path.stem for path in Path(elman.cells.__file__).parent.glob("*.py")} - {"__init__", "base", "primitives"}
    assert set(cell_names()) == files
    for name in cell_names():
        assert issubclass(find_cell(name), Cell)
        assert find_cell(name).__module__ == f"elman.cells.{name}"
        assert find_cell(name).paper.startswith("https://")


def test_an_unknown_name_gets_the_nearest_and_the_list():
    names = ", ".join(cell_names())
    with pytest.raises(ConfigError, match=rf"^unknown cell 'lsmt'; did you mean 'lstm'\? accepted: {names}$"):
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


def test_each_distribution_is_what_it_is_called():
    generator = torch.Generator().manual_seed(0)

    def drawn(initial, *shape):
        return initial.draw(shape, generator, torch.float64)

    assert not drawn(Initial("zeros"), 2, 3).any()
    assert torch.equal(drawn(Initial("ones"), 2, 3), torch.ones(2, 3, dtype=torch.float64))
    normal = drawn(Initial("normal", 0.3), 100, 200)
    assert abs(normal.mean().item()) < 4 * 0.3 / math.sqrt(normal.numel())
    assert normal.std().item() == pytest.approx(0.3, rel=0.03)
    assert normal.pow(4).mean().item() == pytest.approx(3 * 0.3**4, rel=0.1)
    rows = drawn(Initial("orthogonal", 2.0), 3, 5)
    torch.testing.assert_close(rows @ rows.T, 4 * torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-12)
    matrices = drawn(Initial("orthogonal", 2.0, parts=2), 2, 3, 5)
    assert matrices.shape == (2, 3, 5)
    assert 0.1 < drawn(Initial("uniform", 5.0)).abs() <= 5.0  # a single number


def test_a_distribution_of_ones_own_is_drawn_block_by_block_with_shape_generator_and_dtype():
    calls = []

    def draw_own(shape, generator, dtype):
        calls.append((shape, dtype))
        return torch.rand(shape, generator=generator, dtype=dtype) + len(calls)

    initial = Initial("own", parts=3, constants={1: 7.0}, draw_own=draw_own)
    drawn = initial.draw((6, 2), torch.Generator().manual_seed(0), torch.float64)
    assert calls == [((2, 2), torch.float64)] * 2
    assert torch.equal(drawn[2:4], torch.full((2, 2), 7.0, dtype=torch.float64))
    assert ((drawn[:2] >= 1) & (drawn[:2] < 2)).all()
    assert (drawn[4:] >= 2).all()


@pytest.mark.parametrize(
    ("initial", "shape", "message"),
    [
        (
            Initial("gauss"),
            (2, 3),
            r"unknown initial distribution 'gauss'; accepted: normal, ones, orthogonal, own, un",
        ),
        (Initial("own"), (2, 3), r"draw_own belongs to the distribution 'own' and to no other"),
        (Initial("zeros", draw_own=lambda *_: None), (2, 3), r"draw_own belongs to the distribution 'own' and to no"),
        (
            Initial("orthogonal"),
            (3,),
            r"an orthogonal start needs two dimensions, its shape is \[3\]: take zeros or uni",
        ),
        (Initial("ones", parts=2), (3,), r"its shape \[3\] cannot be cut into 2 equal parts along the first dimension"),
    ],
)
def test_what_cannot_be_drawn_is_refused(initial, shape, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        initial.draw(shape, torch.Generator(), torch.float64)


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
        *LINEAR,
        *BY_HAND,
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


def outputs_and_gradients(scan, p, x_BTI, state):
    """Outputs, the state after the last step, and the gradients of all three arguments."""
    given = {**p, **{f"state {name}": part for name, part in state.items()}, "x": x_BTI}
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
    outputs, after = scan(
        {name: leaves[name] for name in p}, leaves["x"], {name: leaves[f"state {name}"] for name in state}
    )
    of_state = sum(part.square().sum() for part in after.values())
    return outputs, *after.values(), *torch.autograd.grad(outputs.tanh().sum() + of_state, leaves.values())


@pytest.mark.parametrize(("kind", "settings"), LINEAR)
@pytest.mark.parametrize("steps", [1, 2, 3, 513])
@pytest.mark.parametrize("earlier", [0, 5])
@pytest.mark.parametrize("backend", ["sequential", "parallel", "compiled"])
def test_a_linear_recurrence_is_its_step_from_any_state(draw, monkeypatch, kind, settings, steps, earlier, backend):
    monkeypatch.setattr("elman.scan.linear.backend_for", lambda _: backend)
    cell, p, _, state = draw(kind, **settings)
    generator = torch.Generator().manual_seed(2)
    x_BTI = torch.randn(2, earlier + steps, 3, generator=generator, dtype=torch.float64)
    state = {name: torch.zeros_like(part) for name, part in state.items()}
    if earlier:
        _, state = cell.readable_scan(p, x_BTI[:, :earlier], state)
    results = (outputs_and_gradients(scan, p, x_BTI[:, earlier:], state) for scan in (cell.scan, cell.readable_scan))
    for fast, readable in zip(*results, strict=True):
        torch.testing.assert_close(fast, readable, rtol=0, atol=1e-10)


@pytest.mark.usefixtures("looped")
@pytest.mark.parametrize(("kind", "settings"), BY_HAND)
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_a_gradient_by_hand_is_that_of_pytorch(draw, kind, settings, steps):
    cell, p, _, state = draw(kind, bias_init="uniform", **settings)
    x_BTI = torch.randn(2, steps, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    results = (outputs_and_gradients(scan, p, x_BTI, state) for scan in (cell.scan, cell.readable_scan))
    for fast, readable in zip(*results, strict=True):
        torch.testing.assert_close(fast, readable, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("looped")
@pytest.mark.parametrize(("kind", "settings"), BY_HAND)
def test_a_gradient_by_hand_can_be_differentiated(draw, kind, settings):
    # The state is computed from the input, so that the way between these two arguments must not be counted twice.
    cell, p, x_BTI, _ = draw(kind, **settings)
    seconds = []
    for scan in (cell.scan, cell.readable_scan):
        x, weight = x_BTI.clone().requires_grad_(), p["weight_hh"].clone().requires_grad_()
        state = {name: torch.cat([x[:, 0], x[:, 1, :1]], dim=1) for name in cell.state()}
        outputs, _ = scan({**p, "weight_hh": weight}, x, state)
        firsts = torch.autograd.grad(outputs.square().sum(), (x, weight), create_graph=True)
        seconds.append(torch.autograd.grad(sum(first.square().sum() for first in firsts), (x, weight)))
    for fast, readable in zip(*seconds, strict=True):
        torch.testing.assert_close(fast, readable, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["elman", "gru"])
def test_the_loop_by_hand_is_for_training_in_float32(draw, kind):
    cell, p, x_BTI, state = draw(kind)

    def last_operation(dtype: torch.dtype | None = None) -> str:
        given = {name: tensor.float().requires_grad_() for name, tensor in p.items()}
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            outputs, _ = cell.scan(given, x_BTI.float(), {"h": state["h"].float()})
        return outputs.grad_fn.name()

    assert last_operation() == "_ByHandBackward"
    assert last_operation(torch.bfloat16) != "_ByHandBackward"
    assert cell.is_looped(x_BTI.float())
    assert not cell.is_looped(x_BTI[:, :1].float())
    assert not cell.is_looped(x_BTI)
    with torch.no_grad():
        assert not cell.is_looped(x_BTI.float())


@pytest.mark.parametrize(
    ("input_size", "hidden_size"), [(96, 160), (128, 1000), (128, 1024), (1056, 1032), (1088, 1024), (1160, 1056)]
)
@pytest.mark.parametrize("kind", ["lstm", "gru", "elman"])
def test_gradients_in_half_the_bits_are_those_in_float32(draw, kind, input_size, hidden_size):
    """Libraries choose their kernels by size; one for an LSTM of 1,024 units and more is wrong by 100 %."""
    cell, p, x_BTI, state = draw(kind, input_size=input_size, hidden_size=hidden_size)

    def gradients(dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        arguments = {**p, "x": x_BTI, **{f"state_{name}": part for name, part in state.items()}}
        leaves = {name: tensor.float().requires_grad_() for name, tensor in arguments.items()}
        before = {name: leaves[f"state_{name}"] for name in state}
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            outputs, after = cell.scan({name: leaves[name] for name in p}, leaves["x"], before)
        assert outputs.shape[-1] == hidden_size
        loss = sum(
            (part.float() * torch.linspace(-1, 2, part.numel()).view_as(part)).sum()
            for part in (outputs, *after.values())
        )
        found = torch.autograd.grad(loss, list(leaves.values()))
        return {"outputs": outputs.detach().float(), **dict(zip(leaves, found, strict=True))}

    exact, half = gradients(None), gradients(torch.bfloat16)
    errors = {name: ((half[name] - exact[name]).norm() / exact[name].norm()).item() for name in exact}
    assert max(errors.values()) < 0.03, errors


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
