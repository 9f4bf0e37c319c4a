"""A cell as a person would write it outside Elman: right, with a scan of its own. Tests break copies of it."""

from __future__ import annotations

import torch

from elman.cells.base import Cell, Initial, Parameter, StatePart, Step
from elman.cells.primitives import linear
from elman.config import CellConfig


class LeakyConfig(CellConfig):
    leak: float = 0.25


class Leaky(Cell):
    """m_t = (1 - leak) m_{t-1} + leak (W x_t + U h_{t-1} + b);  h_t = tanh(m_t)"""

    Config = LeakyConfig

    def parameters(self):
        return {
            "W": Parameter((self.hidden_size, self.input_size), Initial("uniform", 0.5)),
            "U": Parameter((self.hidden_size, self.hidden_size), Initial("orthogonal")),
            "b": Parameter((self.hidden_size,), Initial("zeros")),
        }

    def state(self):
        return {"h": StatePart((self.hidden_size,)), "m": StatePart((self.hidden_size,), 0.5)}

    def step(self, p, x, state):
        drive = linear(x, p["W"], p["b"]) + linear(state["h"], p["U"])
        m = (1 - self.config.leak) * state["m"] + self.config.leak * drive
        h = m.tanh()
        return Step(h, {"h": h, "m": m}, {"drive": drive})

    def scan(self, p, x, state):
        h, m = state["h"], state["m"]
        outputs = []
        for drive in linear(x, p["W"], p["b"]).unbind(1):
            m = (1 - self.config.leak) * m + self.config.leak * (drive + linear(h, p["U"]))
            h = m.tanh()
            outputs.append(h)
        return torch.stack(outputs, dim=1), {"h": h, "m": m}
