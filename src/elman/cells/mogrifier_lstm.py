"""Mogrifier long short-term memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import NonNegativeInt

from elman.cells.base import CellState, Initial, Parameter, Step
from elman.cells.lstm import LSTM, LSTMConfig
from elman.cells.primitives import linear
from elman.config import CellConfig
from elman.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from elman.scan.loops import Given, Looped


class MogrifierLSTMConfig(LSTMConfig):
    """Settings of the Mogrifier LSTM."""

    mogrifier_rounds: NonNegativeInt = 5
    """Number of times that input and state gate each other before each step; 0: an LSTM."""
    mogrifier_rank: NonNegativeInt = 0
    """Rank of the matrices of the rounds, each a product of two; 0: each is one full matrix."""


class MogrifierLSTM(LSTM):
    """An LSTM whose input and state gate each other in turn before each step.

    With x = x_t and h = h_{t-1} at first, for the rounds i = 1 ... r:

        x <- 2 sigmoid(Q_i h) * x          i odd
        h <- 2 sigmoid(R_i x) * h          i even

    The LSTM reads the last x and h in the places of x_t and h_{t-1}. What an input means can so depend on what came
    before. With r = 0 it is the LSTM.

    State: h and c, each (B, H).
    Parameters: those of the LSTM and r I H, or r k (I + H) for matrices of rank k.
    Initialisation: each matrix uniform within +-1/sqrt(width of its input), so that the gates are near one; the rest
    as in the LSTM.
    Paper: Melis et al. 2020, https://arxiv.org/abs/1909.01792.
    """

    Config = MogrifierLSTMConfig
    config: MogrifierLSTMConfig
    paper = "https://arxiv.org/abs/1909.01792"

    def __init__(self, config: CellConfig, input_size: int) -> None:
        super().__init__(config, input_size)
        rank, smallest = self.config.mogrifier_rank, min(input_size, self.hidden_size)
        if rank and not self.config.mogrifier_rounds:
            raise ConfigError(f"model.mogrifier_rank {rank} has no meaning without rounds: set model.mogrifier_rounds")
        if rank >= smallest:
            raise ConfigError(
                f"model.mogrifier_rank is {rank}; accepted: less than the narrower of input and state ({smallest}), "
                "or 0 for full matrices"
            )

    @property
    def _rounds(self) -> range:
        return range(1, self.config.mogrifier_rounds + 1)

    def parameters(self) -> Mapping[str, Parameter]:
        rank, parameters = self.config.mogrifier_rank, dict(super().parameters())
        for i in self._rounds:
            rows, columns = (self.input_size, self.hidden_size) if i % 2 else (self.hidden_size, self.input_size)
            shapes = {f"round_{i}": (rows, columns)}
            if rank:
                shapes = {f"round_{i}_left": (rows, rank), f"round_{i}_right": (rank, columns)}
            for name, shape in shapes.items():
                parameters[name] = Parameter(shape, Initial("uniform", 1 / math.sqrt(shape[1])))
        return parameters

    def step(self, p: Mapping[str, Tensor], x_BI: Tensor, state: CellState) -> Step:
        x, h = x_BI, state["h"]
        for i in self._rounds:
            if i % 2:
                x = 2 * _product(p, i, h).sigmoid() * x
            else:
                h = 2 * _product(p, i, x).sigmoid() * h
        output, after, named = super().step(p, x, {"h": h, "c": state["c"]})
        return Step(output, after, {"gated_input": x, "gated_state": h, **named})

    def scan(self, p: Mapping[str, Tensor], x_BTI: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        from elman.scan.loops import scan_by_hand  # here, because it brings in torch

        if not self._rounds:
            return super().scan(p, x_BTI, state)
        if x_BTI.shape[1] == 1:  # a product of two narrow matrices is dearer than two products with a few rows
            return self.readable_scan(p, x_BTI, state)
        p = self.with_one_bias(p)
        for i in self._rounds if self.config.mogrifier_rank else ():
            p[f"round_{i}"] = p.pop(f"round_{i}_left") @ p.pop(f"round_{i}_right")
        return scan_by_hand(self, p, x_BTI, state)

    def loop(self, given: Given) -> Looped:
        """The scan, without a gradient."""
        import torch

        from elman.scan.loops import LSTMSteps, transposed

        p, x_BTI, state = given
        num_rows, num_steps, _ = x_BTI.shape
        weight_ZG, h = transposed(self._joined(p)), state["h"]
        of_rounds = [transposed(p[f"round_{i}"]) for i in self._rounds]
        lstm = LSTMSteps(x_BTI.new_empty(num_steps, num_rows, len(p["bias"])), state["c"])
        values, gates = [], []
        for time, x_BI in enumerate(x_BTI.unbind(1)):
            of_time, gates_of_time = [x_BI, h], []
            for i in self._rounds:
                gates_of_time.append(2 * (of_time[i] @ of_rounds[i - 1]).sigmoid_())
                of_time.append(gates_of_time[-1] * of_time[i - 1])
            torch.addmm(p["bias"], torch.cat(of_time[-2:], dim=1), weight_ZG, out=lstm.gates_TBG[time])
            h = lstm.step(time)
            values.append(of_time)
            gates.append(gates_of_time)
        return lstm.looped((*_over_time(values), *_over_time(gates)))

    def loop_gradients(
        self, given: Given, kept: tuple[Tensor, ...], of_outputs_BTO: Tensor, of_state: CellState
    ) -> Given:
        """The gradients of the scan's arguments."""
        import torch

        from elman.scan.loops import Given, LSTMGradient, of_matrix

        p, num_rounds, lstm = given.p, len(self._rounds), LSTMGradient(*kept[-3:])
        values, gates = kept[: num_rounds + 2], kept[num_rounds + 2 : -3]
        widths = [values[-2].shape[-1], values[-1].shape[-1]]
        weight_GZ, of_h_BH, of_c_BH = self._joined(p), of_state["h"], of_state["c"]
        of_x, of_sums = [], []
        for time in reversed(range(given.x_BTI.shape[1])):
            of_gates_BG, of_c_BH = lstm.step(time, of_h_BH + of_outputs_BTO[:, time], of_c_BH)
            of_gating, of_gated = (of_gates_BG @ weight_GZ).split(widths, dim=1)
            sums_of_time = []
            for i in reversed(self._rounds):
                gate = gates[i - 1][time]
                sums_of_time.append(of_gated * values[i - 1][time] * gate * (1 - gate / 2))
                of_gating, of_gated = of_gated * gate, torch.addmm(of_gating, sums_of_time[-1], p[f"round_{i}"])
            of_x.append(of_gating)
            of_h_BH = of_gated
            of_sums.append(sums_of_time[::-1])
        of_weight_GZ = of_matrix(lstm.of_sums_TBG, torch.cat(values[-2:], dim=-1))
        of_last_two = of_weight_GZ.split(widths, dim=1)
        of_p = {
            **{f"round_{i}": of_matrix(of, values[i]) for i, of in enumerate(_over_time(of_sums[::-1]), 1)},
            **dict(zip(self._read(), of_last_two, strict=True)),
            "bias": lstm.of_sums_TBG.sum((0, 1)),
        }
        return Given(of_p, torch.stack(of_x[::-1], dim=1), {"h": of_h_BH, "c": of_c_BH})

    def _read(self) -> tuple[str, str]:
        """The LSTM's matrices for the last two values of the rounds, in their order."""
        return ("weight_hh", "weight_ih") if len(self._rounds) % 2 else ("weight_ih", "weight_hh")

    def _joined(self, p: Mapping[str, Tensor]) -> Tensor:
        """Both matrices side by side, so that they take one product."""
        import torch

        return torch.cat([p[name] for name in self._read()], dim=1)


def _product(p: Mapping[str, Tensor], i: int, value: Tensor) -> Tensor:
    """A round's matrix times a value."""
    if f"round_{i}" in p:
        return linear(value, p[f"round_{i}"])
    return linear(linear(value, p[f"round_{i}_right"]), p[f"round_{i}_left"])


def _over_time(steps: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """What each step lists, each entry stacked over the steps."""
    import torch

    return [torch.stack(one) for one in zip(*steps, strict=True)]
