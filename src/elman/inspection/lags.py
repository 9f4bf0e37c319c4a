"""Back-propagation through time, looked at lag by lag: how much of a gradient is left so many steps back, and on which
way it came.

Shape letters: B rows (places of a text), K lags, T time, S numbers of the state.

The unrolled steps are cut apart at every state: each step reads a copy of its own of the state before it, and of every
matrix looked at. The derivative by such a copy is what flows through this state and later steps alone, and what this
one use of the matrix adds to its gradient. Steps are taken up again piece by piece on the way back, so that memory
does not grow with the number of lags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from elman.inspection.jacobians import check_has_gradient
from elman.inspection.watching import Places
from elman.models.contract import LanguageModel, Moment
from elman.models.state import State

_STEPS_AT_ONCE = 20
_NUMBERS_AT_ONCE = 1 << 22
"""Of states kept for one piece on the way back; intermediates take several times as much."""
_TINY = 1e-300


@dataclass(frozen=True)
class MatrixFlow:
    """The gradient of the mean loss by one matrix, as the sum of what its use at each step adds."""

    norm_K: Tensor
    """Of what the use k steps before the loss adds, from k = 0."""
    share_K: Tensor
    """The same, projected on the whole gradient and divided by its length: the shares sum to one.
    All are 0 where nothing uses the matrix."""
    whole: float
    """Norm of the whole gradient."""
    error: float
    """Norm of the difference between the sum and the gradient as training computes it, relative to that."""


@dataclass(frozen=True)
class Flow:
    """The gradient of the loss at B places of a text by the states before it: norms, (K + 1, B).

    Entry k belongs to the state k steps before the loss: all later states, and the loss, are functions of it and of the
    tokens in between. At lag 0 it is the state after the last token, as far as the prediction was computed from it.
    """

    norm: Tensor
    parts: Mapping[str, Tensor]
    """By each part of the state."""
    additive: Tensor | None
    """What comes from lag 1, where it is the whole, by the additive way alone, every gate and candidate held fixed.
    None where the network names no such things."""
    rest: Tensor | None
    """What is left without that: it has passed a gate, a candidate or a matrix at least once."""
    matrices: Mapping[str, MatrixFlow]


def flow(network: LanguageModel, places: Places, matrices: Sequence[str] = ()) -> Flow:
    """Follow the gradient of the loss at each place back through all tokens of the place.

    Args:
        network: best of double precision.
        places: of equal length K.
        matrices: names of parameters that are taken apart.

    Raises:
        UserError: the state of the network has no gradient.
    """
    check_has_gradient(network)
    num_rows, num_lags = places.tokens_BT.shape
    size = sum(tensor[0].numel() for tensor in places.state.tensors.values())
    whole = _whole_gradients(network, places, matrices, _groups(num_rows, num_lags * size))
    groups = _groups(num_rows, _STEPS_AT_ONCE * size)
    starts = range(0, num_lags, _STEPS_AT_ONCE)
    pieces, befores, state = [], [], places.state
    for start in starts:
        pieces.append(places.tokens_BT[:, start : start + _STEPS_AT_ONCE])
        befores.append(state)
        with torch.no_grad():
            _, state = network.features(pieces[-1], state)
    norms: list[dict[str, Tensor]] = []
    matrix_norms: dict[str, list[Tensor]] = {name: [] for name in matrices}
    shares: dict[str, list[Tensor]] = {name: [] for name in matrices}
    left = {name: gradient.clone() for name, gradient in whole.items()}
    arriving: _Arriving | None = None
    for piece_BT, before in zip(reversed(pieces), reversed(befores), strict=True):
        ways = [
            _go_back(network, piece_BT[rows], before.select(rows), places.targets_B[rows], matrices, of_rows)
            for rows in groups
            for of_rows in [None if arriving is None else arriving.select(rows)]
        ]
        for at_one_lag in zip(*(way.arriving for way in ways), strict=True):
            arriving = _Arriving.stack(at_one_lag)
            norms.append(arriving.norms())
        for uses in zip(*(way.uses for way in ways), strict=True):
            for name, gradient in whole.items():
                added = torch.stack([use[name] for use in uses]).sum(0) / num_rows
                left[name] -= added
                matrix_norms[name].append(_length(added.flatten()))
                shares[name].append((added * gradient).sum() / gradient.square().sum().clamp(min=_TINY))
    of_all = {name: torch.stack([at_lag[name] for at_lag in norms]) for name in norms[0]}
    return Flow(
        norm=of_all.pop(_NORM),
        additive=of_all.pop(_ADDITIVE, None),
        rest=of_all.pop(_REST, None),
        parts=of_all,
        matrices={
            name: MatrixFlow(
                torch.stack(matrix_norms[name]),
                torch.stack(shares[name]),
                gradient.norm().item(),
                (left[name].norm() / gradient.norm().clamp(min=_TINY)).item(),
            )
            for name, gradient in whole.items()
        },
    )


_NORM, _ADDITIVE, _REST = "norm", "additive way", "rest"
"""Beside the names of the parts, which begin with a number."""


def _groups(num_rows: int, numbers_per_row: int) -> list[list[int]]:
    """The rows in groups whose states fit into memory together."""
    size = max(1, _NUMBERS_AT_ONCE // max(1, numbers_per_row))
    return [list(range(first, min(first + size, num_rows))) for first in range(0, num_rows, size)]


def _whole_gradients(
    network: LanguageModel, places: Places, matrices: Sequence[str], groups: Sequence[list[int]]
) -> dict[str, Tensor]:
    """The gradient of the mean loss by each matrix, through the form that training uses."""
    leaves = dict(network.named_parameters())
    whole = {name: torch.zeros_like(leaves[name]) for name in matrices}
    for rows in groups if matrices else ():
        some = places.select(rows)
        features_BTF, _ = network.features(some.tokens_BT, some.state)
        loss = network.head.nll(features_BTF[:, -1:], some.targets_B.unsqueeze(1)).sum() / len(places.targets_B)
        (gradients,) = _derivatives([loss], [torch.ones_like(loss)], [{name: leaves[name] for name in matrices}])
        for name, gradient in gradients.items():
            whole[name] += gradient
    return whole


@dataclass(frozen=True)
class _Arriving:
    """The gradient by the state at one time: all of it, and what came by the additive way; states in form."""

    total: State
    additive: State | None

    def select(self, rows: list[int]) -> _Arriving:
        return _Arriving(self.total.select(rows), None if self.additive is None else self.additive.select(rows))

    @staticmethod
    def stack(groups: Sequence[_Arriving]) -> _Arriving:
        additive = [group.additive for group in groups if group.additive is not None]
        return _Arriving(State.stack([group.total for group in groups]), State.stack(additive) if additive else None)

    def norms(self) -> dict[str, Tensor]:
        """Of all and of each part, (B,)."""
        found = {_NORM: _norm(self.total), **{name: _norm(State({name: g})) for name, g in self.total.tensors.items()}}
        if self.additive is None:
            return found
        rest = {name: self.total.tensors[name] - gradient for name, gradient in self.additive.tensors.items()}
        return {**found, _ADDITIVE: _norm(self.additive), _REST: _norm(State(rest))}


def _norm(gradient: State) -> Tensor:
    return _length(torch.cat([tensor.flatten(1) for tensor in gradient.tensors.values()], dim=1))


def _length(vectors: Tensor) -> Tensor:
    """Euclidean, of the last dimension; divided by the largest number first, as squares of tiny ones are zero."""
    if not vectors.shape[-1]:
        return vectors.sum(-1)
    largest = vectors.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, largest, torch.ones_like(largest))
    return (vectors / scale).norm(dim=-1) * scale.squeeze(-1)


class _Way(NamedTuple):
    """The way back through some steps, the last one first."""

    arriving: list[_Arriving]
    """At the state before each token; behind the last step, where the loss is, at the state after it first."""
    uses: list[dict[str, Tensor]]
    """What each step adds to the gradient of each matrix, summed over the rows."""


def _go_back(
    network: LanguageModel,
    tokens_BT: Tensor,
    before: State,
    targets_B: Tensor,
    matrices: Sequence[str],
    arriving: _Arriving | None,
) -> _Way:
    """Take some steps again, and lead what arrives behind them (none: that of the loss) back through them."""
    steps = _unroll(network, tokens_BT, before, matrices)
    after = steps.after()
    if arriving is None:
        loss = network.head.nll(steps.last.features_BF.unsqueeze(1), targets_B.unsqueeze(1)).sum()
        states = [after, *reversed(steps.before)]
        found = _derivatives([loss], [torch.ones_like(loss)], [*states, *reversed(steps.used)])
    else:
        states = [*reversed(steps.before)]
        cotangents = list(arriving.total.tensors.values())
        found = _derivatives(list(after.values()), cotangents, [*states, *reversed(steps.used)])
    totals, uses = found[: len(states)], found[len(states) :]
    if not steps.last.named:
        return _Way([_Arriving(State(total), None) for total in totals], uses)
    if arriving is None or arriving.additive is None:
        tokens_BT, additive, start = tokens_BT[:, :-1], totals[:2], totals[1]
    else:
        additive, start = [], dict(arriving.additive.tensors)
    if tokens_BT.shape[1]:
        closed = _unroll(network, tokens_BT, before, (), closed=True)
        additive += _derivatives(list(closed.after().values()), list(start.values()), list(reversed(closed.before)))
    return _Way([_Arriving(State(t), State(a)) for t, a in zip(totals, additive, strict=True)], uses)


class _Unrolled(NamedTuple):
    """Some steps in a row, with copies to differentiate by."""

    before: list[dict[str, Tensor]]
    """The state that each step reads, without its whole numbers."""
    used: list[dict[str, Tensor]]
    """The matrices that each step uses."""
    last: Moment

    def after(self) -> dict[str, Tensor]:
        """The state after the last step, with the parts of those before."""
        return {name: self.last.state.tensors[name] for name in self.before[0]}


class _Network(nn.Module):
    """A step as a module, so that parameters can be handed in."""

    def __init__(self, network: LanguageModel) -> None:
        super().__init__()
        self.network = network

    def forward(self, token_B: Tensor, state: State) -> Moment:
        return self.network.named_step(token_B, state)


def _unroll(
    network: LanguageModel, tokens_BT: Tensor, state: State, matrices: Sequence[str], *, closed: bool = False
) -> _Unrolled:
    """Take some steps; ``closed``: no gradient passes a gate, a candidate or whatever else a cell names."""
    parameters = dict(network.named_parameters())
    module = _Network(network)
    state = state.map(lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point()))
    before, used = [], []
    for token_B in tokens_BT.unbind(1):
        state = state.map(lambda tensor: tensor.view_as(tensor))
        before.append({name: tensor for name, tensor in state.tensors.items() if tensor.is_floating_point()})
        used.append({name: parameters[name].detach().requires_grad_() for name in matrices})
        own = {f"network.{name}": leaf for name, leaf in used[-1].items()}
        moment: Moment = functional_call(module, own, (token_B, state))
        state = moment.state
        for tensor in moment.named.values() if closed else ():
            if tensor.requires_grad:
                tensor.register_hook(_nothing)
    return _Unrolled(before, used, moment)


def _nothing(gradient: Tensor | None) -> Tensor | None:
    """What passes a closed gate; where nothing arrives, there is nothing to close."""
    return None if gradient is None else torch.zeros_like(gradient)


def _derivatives(
    outputs: Sequence[Tensor], cotangents: Sequence[Tensor], inputs: Sequence[Mapping[str, Tensor]]
) -> list[dict[str, Tensor]]:
    """The derivative by each of the inputs, in their form; zeros where nothing depends on one."""
    leaves = [tensor for group in inputs for tensor in group.values()]
    some = [index for index, output in enumerate(outputs) if output.requires_grad]
    if not some or not leaves:
        return [{name: torch.zeros_like(leaf) for name, leaf in group.items()} for group in inputs]
    found = iter(
        torch.autograd.grad(
            [outputs[index] for index in some], leaves, [cotangents[index] for index in some], materialize_grads=True
        )
    )
    return [{name: next(found) for name in group} for group in inputs]
