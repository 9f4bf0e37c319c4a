"""A cell with parameters drawn from its own distributions, as every test of a cell needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from elman.cells import find_cell
from elman.cells.base import Cell
from elman.models.kinds import model_config


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
def draw_reachable(draw: Callable[..., Drawn]) -> Callable[..., Drawn]:
    """The same, with weights that are moved from their start, and a state that the cell has reached by reading."""

    def draw_cell(kind: str, **settings: Any) -> Drawn:
        cell, p, x_BTI, state = draw(kind, **settings)
        generator = torch.Generator().manual_seed(7)
        p = {name: t + 0.2 * torch.randn(t.shape, generator=generator, dtype=t.dtype) for name, t in p.items()}
        initial = {name: torch.full_like(state[name], part.initial) for name, part in cell.state().items()}
        return Drawn(cell, p, x_BTI, dict(cell.readable_scan(p, x_BTI.flip(1), initial)[1]))

    return draw_cell
