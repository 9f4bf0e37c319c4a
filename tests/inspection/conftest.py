"""A network made by hand, whose units are known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from elman.models.contract import LanguageModel
from elman.models.file import Bundle
from elman.models.kinds import build_model, model_config
from elman.text.tokenizers import CharTokenizer


class Planted:
    """One unit is on inside quotes, one rises along the line, and the output listens to them."""

    QUOTES, LINE = 3, 5
    LETTERS = "abcdefg "

    @staticmethod
    def text(num_lines: int = 60) -> str:
        """Lines of letters of chance, some of them within quotes."""
        rng = np.random.default_rng(5)
        lines = []
        for _ in range(num_lines):
            words = ["".join(rng.choice(list(Planted.LETTERS), rng.integers(4, 16))) for _ in range(2)]
            quoted = "".join(rng.choice(list(Planted.LETTERS), rng.integers(3, 14)))
            lines.append(f"{words[0]}“{quoted}”{words[1]}\n")
        return "".join(lines)

    @staticmethod
    def bundle(*, listens: bool = True) -> Bundle:
        """The network with the text's characters.

        Args:
            listens: whether the output looks at the two units; if not, they know and change nothing.
        """
        tokenizer = CharTokenizer(Planted.LETTERS + "“”\n")
        size = tokenizer.size
        config = model_config({"kind": "elman", "hidden_size": 12, "embedding_size": size})
        network = build_model(config, size, seed=3, dtype=torch.float32)
        opens, closes, line_end = tokenizer.encode("“”\n").tolist()
        layer = network.layers[0]
        with torch.no_grad():
            network.embedding.copy_(torch.eye(size))
            layer.weight_ih.normal_(0, 0.5, generator=torch.Generator().manual_seed(1))
            layer.weight_hh.mul_(0.3)
            quotes, line = Planted.QUOTES, Planted.LINE
            for unit in (quotes, line):
                layer.weight_ih[unit] = 0
                layer.weight_hh[unit] = 0
                layer.weight_hh[:, unit] = 0
            layer.weight_hh[quotes, quotes] = 5  # keeps what it is
            layer.bias[quotes] = -1
            layer.weight_ih[quotes, opens], layer.weight_ih[quotes, closes] = 12, -12
            layer.weight_hh[line, line] = 1  # rises slowly from where a line end puts it
            layer.bias[line] = 0.02
            layer.weight_ih[line, line_end] = -6
            network.head.weight.mul_(0.1)
            network.head.weight[:, [quotes, line]] = 0
            if listens:
                network.head.weight[closes, quotes] = 3
                network.head.weight[line_end, line] = 3
        return Bundle(network, tokenizer)

    @classmethod
    def tokens(cls, of: Bundle, num_lines: int = 60) -> np.ndarray:
        """The text, the boundary first."""
        return np.concatenate([[0], of.tokenizer.encode(cls.text(num_lines))])


@pytest.fixture(scope="session")
def planted() -> type[Planted]:
    """The network and its text."""
    return Planted


LINEAR_CELL = '''
from elman.cells.base import Cell, Initial, Parameter, StatePart, Step
from elman.cells.primitives import linear


class Linear(Cell):
    """h_t = W h_{t-1} + V x_t."""

    def parameters(self):
        H, I = self.hidden_size, self.input_size
        return {"W": Parameter((H, H), Initial("zeros")), "V": Parameter((H, I), Initial("zeros"))}

    def state(self):
        return {"h": StatePart((self.hidden_size,), initial=1.0)}

    def step(self, p, x_BI, state):
        of_state = linear(state["h"], p["W"])
        h = of_state + linear(x_BI, p["V"])
        return Step(h, {"h": h}, {"of_state": of_state})
'''


@pytest.fixture
def linear_network(tmp_path: Path) -> Callable[[list[list[float]]], LanguageModel]:
    """A function from a matrix W to the network h_t = W h_{t-1} in float64, whose state is at first all ones."""

    def build(matrix: list[list[float]]) -> LanguageModel:
        path = tmp_path / "linear.py"
        path.write_text(LINEAR_CELL, encoding="utf-8")
        sizes = {"hidden_size": len(matrix), "embedding_size": 1}
        network = build_model(model_config({"kind": f"{path}:Linear", **sizes}), 3, seed=1, dtype=torch.float64)
        network.get_parameter("layers.0.W").data.copy_(torch.tensor(matrix, dtype=torch.float64))
        return network

    return build
