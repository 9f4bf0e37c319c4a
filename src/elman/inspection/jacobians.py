"""The state of a network as one vector, and the map that reading a token makes of it: Jacobians and their products.

Shape letters: B rows, S numbers of the state, M directions, N steps.

Directions are rows: ``push`` maps each row v to J v, ``pull`` each row u to J^T u. A product of many Jacobians is never
multiplied out: its singular values soon span more orders of magnitude than a floating-point number has digits. Every
step is followed by a QR decomposition, and what grows or shrinks is kept in the logarithms of the diagonals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from elman.errors import UserError
from elman.models.contract import LanguageModel
from elman.models.state import State, grows

_ROWS_AT_ONCE = 256
_MAX_SWEEPS = 40
_CONVERGED = 1e-10
"""Change of a logarithm from one sweep to the next that ends the sweeps."""
_NUM_ALIGNMENTS = 2


@dataclass(frozen=True)
class Layout:
    """How the parts of a network's state lie in one vector; whole numbers, such as last tokens, are no part of it."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of each part, without the rows."""

    @classmethod
    def of(cls, network: LanguageModel) -> Layout:
        """The layout of a network.

        Raises:
            UserError: its state has no gradient, or no fixed size.
        """
        initial = network.initial_state(1).tensors
        check_has_gradient(network)
        if growing := [name for name, tensor in initial.items() if grows(tensor)]:
            raise UserError(f"part {growing[0]!r} of the state grows with the text: there is no map of a fixed size")
        return cls({name: tuple(part.shape[1:]) for name, part in initial.items() if part.is_floating_point()})

    @property
    def slices(self) -> dict[str, slice]:
        """Where each part lies."""
        ends = [0]
        for shape in self.shapes.values():
            ends.append(ends[-1] + math.prod(shape))
        return {name: slice(*ends) for name, ends in zip(self.shapes, pairwise(ends), strict=True)}

    @property
    def size(self) -> int:
        """How many numbers S there are."""
        return sum(map(math.prod, self.shapes.values()))

    def vector(self, state: State) -> Tensor:
        """A state as (B, S)."""
        return torch.cat([state.tensors[name].flatten(1) for name in self.shapes], dim=1)

    def state(self, vector_BS: Tensor, around: State) -> State:
        """The state of a vector; what is no part of it is taken from another state."""
        parts = {name: vector_BS[:, place].unflatten(1, self.shapes[name]) for name, place in self.slices.items()}
        return State({**around.tensors, **parts})


def check_has_gradient(network: LanguageModel) -> None:
    """Refuse a network that carries nothing but tokens. Raises UserError."""
    if not any(tensor.is_floating_point() for tensor in network.initial_state(1).tensors.values()):
        raise UserError(
            f"model.kind {network.config.kind!r} carries tokens alone, which have no gradient: "
            "`elman inspect saliency` shows what its predictions rest on"
        )


@dataclass(frozen=True)
class Trajectory:
    """Consecutive steps along a text, each linearised where it passed."""

    network: LanguageModel
    layout: Layout
    tokens: Sequence[Tensor]
    """Each (1,)."""
    states: Sequence[State]
    """Before each token, one row."""

    @classmethod
    def along(cls, network: LanguageModel, tokens_N: Tensor, state: State) -> Trajectory:
        """Read some tokens from a state of one row; a network of double precision keeps small figures exact."""
        tokens, states = tokens_N.split(1), []
        with torch.no_grad():
            for token_B in tokens:
                states.append(state)
                _, state = network.step(token_B, state)
        return cls(network, Layout.of(network), tokens, states)

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, steps: slice) -> Trajectory:
        """Some of the steps."""
        return replace(self, tokens=self.tokens[steps], states=self.states[steps])

    def _step(self, index: int, num_rows: int) -> tuple[Tensor, Tensor]:
        """The state before and after the step of this number, in so many equal rows: a leaf, and a function of it."""
        around = self.states[index].select([0] * num_rows)
        before_BS = self.layout.vector(around).requires_grad_()
        token_B = self.tokens[index].expand(num_rows)
        return before_BS, self.layout.vector(self.network.step(token_B, self.layout.state(before_BS, around))[1])

    def push(self, index: int, directions_MS: Tensor) -> Tensor:
        """J v of each row, J the Jacobian of the step of this number."""
        pushed = []
        for rows in directions_MS.split(_ROWS_AT_ONCE):
            # J^T u is linear in u: its derivative by u, whatever u is, leads v the other way, without forward mode.
            before, after = self._step(index, len(rows))
            cotangent = torch.zeros_like(after).requires_grad_()
            (pulled,) = torch.autograd.grad(after, before, cotangent, create_graph=True, materialize_grads=True)
            (found,) = torch.autograd.grad(pulled, cotangent, rows, materialize_grads=True)
            pushed.append(found)
        return torch.cat(pushed)

    def pull(self, index: int, directions_MS: Tensor) -> Tensor:
        """J^T u of each row."""
        pulled = []
        for rows in directions_MS.split(_ROWS_AT_ONCE):
            before, after = self._step(index, len(rows))
            (found,) = torch.autograd.grad(after, before, rows, materialize_grads=True)
            pulled.append(found)
        return torch.cat(pulled)

    def jacobian(self, index: int) -> Tensor:
        """J, (S, S): row i holds the derivatives of the i-th number after the step."""
        return self.pull(index, torch.eye(self.layout.size, dtype=self.network.dtype, device=self.network.device))


def log_singular_values(trajectory: Trajectory, count: int | None = None) -> Tensor:
    """Natural logarithms of the singular values of the product of all Jacobians of a trajectory, the largest first.

    Args:
        trajectory: of one step or more.
        count: the largest so many, found by iterating on a subspace; none: all, which needs no iteration.
    """
    size = trajectory.layout.size
    count = size if count is None else min(count, size)
    frame, steps = _random_frame(trajectory, count), range(len(trajectory))
    for _ in range(_NUM_ALIGNMENTS if count < size else 0):
        # Pushed to the far end and pulled back, a frame turns to the directions that grow most on the way.
        for index in steps:
            frame, _ = _orthonormal(trajectory.push(index, frame))
        for index in reversed(steps):
            frame, _ = _orthonormal(trajectory.pull(index, frame))
    factors = []
    for index in steps:
        frame, triangle = _orthonormal(trajectory.push(index, frame))
        factors.append(triangle)
    return log_singular_values_of_triangles(factors)


def log_singular_values_of_triangles(factors: Sequence[Tensor]) -> Tensor:
    """The same of a product of upper triangular matrices, the first one applied first.

    The product is decomposed and transposed over and over: P^T = Q R, then R^T, and so on. The factors become diagonal,
    and the logarithms of their diagonals add up. Of values that differ by a factor r, what is left of the mixture falls
    by r squared with every two sweeps, so that only such stay mixed as hardly differ.
    """
    before = None
    for _ in range(_MAX_SWEEPS):
        logs = torch.stack([factor.diagonal().abs().log() for factor in factors]).sum(0)
        if before is not None and torch.allclose(logs, before, rtol=0.0, atol=_CONVERGED):
            break
        before = logs
        frame = torch.eye(len(factors[0]), dtype=factors[0].dtype, device=factors[0].device)
        turned = []
        for factor in reversed(factors):
            frame, triangle = torch.linalg.qr(factor.T @ frame)
            turned.append(triangle)
        factors = turned
    return logs.sort(descending=True).values


def log_growth(trajectory: Trajectory, count: int) -> Tensor:
    """How much each of the fastest growing directions grows at each step: natural logarithms, (N, count).

    Their means over many steps are the Lyapunov exponents of the state map along the text (Benettin et al. 1980,
    https://doi.org/10.1007/BF02128236).
    """
    frame = _random_frame(trajectory, min(count, trajectory.layout.size))
    growth = []
    for index in range(len(trajectory)):
        frame, triangle = _orthonormal(trajectory.push(index, frame))
        growth.append(triangle.diagonal().abs().log())
    return torch.stack(growth)


def _random_frame(trajectory: Trajectory, count: int) -> Tensor:
    """Orthonormal rows, (M, S)."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(count, trajectory.layout.size, generator=generator, dtype=trajectory.network.dtype)
    return _orthonormal(drawn.to(trajectory.network.device))[0]


def _orthonormal(directions_MS: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal rows of the same span, and the triangle R that makes the columns of the directions of them."""
    columns, triangle = torch.linalg.qr(directions_MS.T)
    return columns.T.contiguous(), triangle
