"""A cell with parameters drawn from its own distributions, as every test of a cell needs it; oracles of LSTMs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from elman.cells import find_cell
from elman.cells.base import Cell, GatedCell
from elman.models.kinds import model_config

EXACT = {"rtol": 0, "atol": 1e-12}


class Drawn(NamedTuple):
    """A cell, its parameters, an input (B, T, I) and a state that is not the initial one."""

    cell: Cell
    p: dict[str, Tensor]
    x_BTI: Tensor
    state: dict[str, Tensor]


@pytest.fixture
def draw() -> Callable[..., Drawn]:
    def draw_cell(kind: str, input_size: int = 3, hidden_size: int = 4, seed: int = 1, **settings: Any) -> Drawn:
        generator = torch.Generator().manual_seed(seed)
        cell = find_cell(kind)(model_config({"kind": kind, "hidden_size": hidden_size, **settings}), input_size)
        p = {
            name: declared.initial.draw(declared.shape, generator, torch.float64)
            for name, declared in cell.parameters().items()
        }
        x_BTI = torch.randn(2, 6, input_size, generator=generator, dtype=torch.float64)
        state = {
            name: torch.randn(2, *part.shape, generator=generator, dtype=torch.float64)
            for name, part in cell.state().items()
        }
        return Drawn(cell, p, x_BTI, state)

    return draw_cell


@pytest.fixture
def looped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops with gradients by hand in float64 as well, where they can be held against others to the last bits."""
    monkeypatch.setattr(GatedCell, "is_looped", lambda cell, x_BTI: torch.is_grad_enabled())


@pytest.fixture
def draw_reachable(draw: Callable[..., Drawn]) -> Callable[..., Drawn]:
    """The same, with weights that are moved from their start, and a state that the cell has reached by reading."""

    def draw_cell(kind: str, **settings: Any) -> Drawn:
        cell, p, x_BTI, state = draw(kind, **settings)
        generator = torch.Generator().manual_seed(7)
        p = {name: t + 0.2 * torch.randn(t.shape, generator=generator, dtype=t.dtype) for name, t in p.items()}
        initial = {name: torch.full_like(state[name], part.initial) for name, part in cell.state().items()}
        return Drawn(cell, p, x_BTI, dict(cell.readable_scan(p, x_BTI.flip(1), initial)[1]))

    return draw_cell


def sigmoid(value: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-value))


class NumPyLSTM:
    """The equations of an LSTM in NumPy, with the parameters of a cell."""

    def __init__(self, p: Mapping[str, Tensor]) -> None:
        given = {name: tensor.numpy() for name, tensor in p.items()}
        bias = sum(vector for name, vector in given.items() if name.startswith("bias"))
        blocks = (np.split(block, 4) for block in (given["weight_ih"], given["weight_hh"], bias))
        self.W, self.U, self.b = (dict(zip("ifgo", block, strict=True)) for block in blocks)

    def step(self, x: np.ndarray, h: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        i, f, g, o = (x @ self.W[gate].T + h @ self.U[gate].T + self.b[gate] for gate in "ifgo")
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        return sigmoid(o) * np.tanh(c), c


def assert_both_forms_give(drawn: Drawn, outputs: list[np.ndarray], c: np.ndarray) -> None:
    """The scan and the repeated step give these outputs, one for each time, and end with the last of them and c."""
    cell, p, x_BTI, state = drawn
    for scan in (cell.scan, cell.readable_scan):
        found, after = scan(p, x_BTI, state)
        np.testing.assert_allclose(found.numpy(), np.stack(outputs, 1), **EXACT)
        np.testing.assert_allclose(after["h"].numpy(), outputs[-1], **EXACT)
        np.testing.assert_allclose(after["c"].numpy(), c, **EXACT)


def assert_is_torch_nn_lstm(drawn: Drawn) -> None:
    """Both forms give what PyTorch's module gives with the matrices and the two biases of the cell."""
    cell, p, x_BTI, state = drawn
    theirs = torch.nn.LSTM(x_BTI.shape[-1], cell.hidden_size, batch_first=True, dtype=torch.float64)
    theirs.load_state_dict({f"{name}_l0": tensor for name, tensor in p.items() if name[-2:] in ("ih", "hh")})
    with torch.no_grad():
        outputs, (_, c) = theirs(x_BTI, (state["h"].unsqueeze(0), state["c"].unsqueeze(0)))
    assert_both_forms_give(drawn, list(outputs.numpy().swapaxes(0, 1)), c[0].numpy())


def assert_gradients_are_those_of(module: torch.nn.RNNBase, drawn: Drawn) -> None:
    """In training, outputs, last state and all gradients are those of PyTorch's module; second ones are there, too."""
    cell, p, x_BTI, state = drawn
    module.load_state_dict({f"{name}_l0": tensor for name, tensor in p.items()})
    leaves = [tensor.clone().requires_grad_() for tensor in (x_BTI, state["h"], *p.values())]
    x, h = (tensor.clone().requires_grad_() for tensor in (x_BTI, state["h"]))

    def scan(x_BTI: Tensor, h_BH: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        outputs, after = cell.scan(dict(zip(p, parameters, strict=True)), x_BTI, {"h": h_BH})
        return outputs, after["h"]

    ours, (theirs, last) = scan(*leaves), module(x, h.unsqueeze(0))
    for found, expected in zip(ours, (theirs, last[0]), strict=True):
        torch.testing.assert_close(found, expected, **EXACT)
    (ours[0].sin().sum() + ours[1].exp().sum()).backward()
    (theirs.sin().sum() + last.exp().sum()).backward()
    of_module = [module.get_parameter(f"{name}_l0").grad for name in p]
    for leaf, expected in zip(leaves, (x.grad, h.grad, *of_module), strict=True):
        torch.testing.assert_close(leaf.grad, expected, **EXACT)
    assert torch.autograd.gradgradcheck(lambda *given: scan(*given)[0].square(), leaves)
