"""Loops over time whose gradient is written by hand, for cells whose gates look at their own state.

PyTorch's own gradient of such a loop adds to the gradient of every matrix once for each step. By hand, what the steps
give is laid side by side, and a matrix gets its gradient from one product.

Shape letters: B rows, T time, I cell input, O output, H hidden, G gates side by side. What a loop fills in step by step
has T first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

Tensors: TypeAlias = Mapping[str, Tensor]
"""Parameters or parts of a state, by name."""


class Given(NamedTuple):
    """The arguments of a loop, or the gradient of each."""

    p: Tensors
    x_BTI: Tensor
    state: Tensors


class Looped(NamedTuple):
    """What a loop gives."""

    outputs_BTO: Tensor
    state: Tensors
    kept: tuple[Tensor, ...]
    """What the gradient needs beside the arguments."""


class LoopedCell(Protocol):
    """A cell with a loop and its gradient; ``readable_scan`` gives the same, and PyTorch can differentiate it."""

    def readable_scan(self, p: Tensors, x_BTI: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        """The step, once for each time."""

    def loop(self, given: Given) -> Looped:
        """The same, without a gradient."""

    def loop_gradients(
        self, given: Given, kept: tuple[Tensor, ...], of_outputs_BTO: Tensor, of_state: Tensors
    ) -> Given:
        """The gradients of the arguments, from what the loop kept and the gradients of outputs and last state."""


def scan_by_hand(cell: LoopedCell, p: Tensors, x_BTI: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
    """Run the loop of a cell: outputs and state after the last step, with gradients of any order."""
    outputs_BTO, *after = _ByHand.apply(cell, tuple(p), tuple(state), x_BTI, *p.values(), *state.values())
    return outputs_BTO, dict(zip(state, after, strict=True))


class _ByHand(torch.autograd.Function):
    """A loop as one operation. Arguments and results are flat: x, the parameters, the parts of the state."""

    @staticmethod
    def forward(ctx: Any, cell: LoopedCell, of_p: tuple[str, ...], of_state: tuple[str, ...], *tensors: Tensor) -> Any:
        ctx.cell, ctx.names, ctx.num_arguments = cell, (of_p, of_state), len(tensors)
        with torch.autocast(tensors[0].device.type, enabled=False):  # its gradient is written for one dtype
            outputs_BTO, after, kept = cell.loop(_named(tensors, ctx.names))
        ctx.save_for_backward(*tensors, *kept)
        return outputs_BTO, *(after[name] for name in of_state)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        names, saved = ctx.names, ctx.saved_tensors  # once: where activations are computed again, it gives them once
        tensors, kept = saved[: ctx.num_arguments], saved[ctx.num_arguments :]
        if torch.is_grad_enabled():  # the gradient is to be differentiated itself
            return None, None, None, *_by_pytorch(ctx.cell, names, tensors, gradients)
        of_outputs_BTO = gradients[0].transpose(0, 1).contiguous().transpose(0, 1)  # each step's in one piece
        of_state = dict(zip(names[1], gradients[1:], strict=True))
        of = ctx.cell.loop_gradients(_named(tensors, names), kept, of_outputs_BTO, of_state)
        return None, None, None, of.x_BTI, *(of.p[name] for name in names[0]), *(of.state[name] for name in names[1])


_Names: TypeAlias = tuple[tuple[str, ...], tuple[str, ...]]


def _named(tensors: tuple[Tensor, ...], names: _Names) -> Given:
    """The flat arguments as a cell takes them."""
    of_p, of_state = names
    x_BTI, *others = tensors
    p, state = others[: len(of_p)], others[len(of_p) :]
    return Given(dict(zip(of_p, p, strict=True)), x_BTI, dict(zip(of_state, state, strict=True)))


def _by_pytorch(
    cell: LoopedCell, names: _Names, tensors: tuple[Tensor, ...], gradients: tuple[Tensor, ...]
) -> list[Tensor | None]:
    """The gradient of the readable form, which has gradients of its own."""
    # Views, because one argument may have been computed from another, and the way between them is not of this loop.
    views = tuple(tensor.view_as(tensor) for tensor in tensors)
    outputs_BTO, after = cell.readable_scan(*_named(views, names))
    results = [outputs_BTO, *(after[name] for name in names[1])]
    wanted = [view for view in views if view.requires_grad]
    found = iter(torch.autograd.grad(results, wanted, gradients, create_graph=True, allow_unused=True))
    return [next(found) if view.requires_grad else None for view in views]


class LSTMSteps:
    """The steps of an LSTM, from the sums inside its gates.

    Args:
        sums_TBG: the sums; each step turns its own into the gates i, f, g, o, in place.
        c_BH: c before the first step.
    """

    def __init__(self, sums_TBG: Tensor, c_BH: Tensor) -> None:
        num_steps, shape = len(sums_TBG), c_BH.shape
        self.gates_TBG = sums_TBG
        self.c_TBH = c_BH.new_empty(1 + num_steps, *shape)
        self.c_TBH[0] = c_BH
        self.tanh_c_TBH, self.h_TBH = c_BH.new_empty(num_steps, *shape), c_BH.new_empty(num_steps, *shape)

    def step(self, time: int) -> Tensor:
        """One step: the new h."""
        i, f, g, o = self.gates_TBG[time].chunk(4, dim=-1)
        for gate in (i, f, o):
            gate.sigmoid_()
        c_BH = torch.addcmul(f * self.c_TBH[time], i, g.tanh_(), out=self.c_TBH[time + 1])
        tanh_c_BH = torch.tanh(c_BH, out=self.tanh_c_TBH[time])
        return torch.mul(o, tanh_c_BH, out=self.h_TBH[time])

    def looped(self, kept: tuple[Tensor, ...]) -> Looped:
        """What the loop gives after the last step: beside what its cell has kept, gates, all c, and their tanh."""
        after = {"h": self.h_TBH[-1].clone(), "c": self.c_TBH[-1].clone()}
        return Looped(self.h_TBH.transpose(0, 1), after, (*kept, self.gates_TBG, self.c_TBH, self.tanh_c_TBH))


class LSTMGradient:
    """The gradient of :class:`LSTMSteps`, from the last step to the first; the arguments are the last that it keeps."""

    def __init__(self, gates_TBG: Tensor, c_TBH: Tensor, tanh_c_TBH: Tensor) -> None:
        self._gates_TBG, self._c_TBH, self._tanh_c_TBH = gates_TBG, c_TBH, tanh_c_TBH
        self.of_sums_TBG = torch.empty_like(gates_TBG)

    def step(self, time: int, of_h_BH: Tensor, of_c_BH: Tensor) -> tuple[Tensor, Tensor]:
        """From the gradients of h and c after a step: those of the sums inside its gates, and of c before it."""
        i, f, g, o = self._gates_TBG[time].chunk(4, dim=-1)
        tanh_c_BH, c_BH = self._tanh_c_TBH[time], self._c_TBH[time]
        of_c_BH = of_c_BH + of_h_BH * o * (1 - tanh_c_BH.square())
        of_sums_BG = self.of_sums_TBG[time]
        of_i, of_f, of_g, of_o = of_sums_BG.chunk(4, dim=-1)
        torch.mul(of_c_BH * g, i * (1 - i), out=of_i)
        torch.mul(of_c_BH * c_BH, f * (1 - f), out=of_f)
        torch.mul(of_c_BH * i, 1 - g.square(), out=of_g)
        torch.mul(of_h_BH * tanh_c_BH, o * (1 - o), out=of_o)
        return of_sums_BG, of_c_BH * f


def transposed(weight_OI: Tensor) -> Tensor:
    """A matrix as ``h W^T`` is quickest with: copied once, where every step's product would go through it crosswise."""
    return weight_OI.mT.contiguous()


def before_each_step(first_BH: Tensor, after_TBH: Tensor) -> Tensor:
    """What a part of the state was before each step, from its first value and those after each step."""
    return torch.cat([first_BH.unsqueeze(0), after_TBH[:-1]])


def of_matrix(of_outputs_TBO: Tensor, inputs_TBI: Tensor) -> Tensor:
    """The gradient of the matrix W of ``outputs = inputs W^T`` at every step: one product."""
    return of_outputs_TBO.flatten(0, 1).mT @ inputs_TBI.flatten(0, 1)
