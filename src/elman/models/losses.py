"""What predicted targets cost, and the gradient of it, in pieces of rows: the logits of a whole batch are never held.

Shape letters: B rows, T time, R positions one below the other, F features, V vocabulary, N tokens drawn as negatives,
K softmaxes of a mixture.

A batch has B x T positions, and its logits B x T x V numbers, for words the largest tensor of a training by far. Here
they are made for some positions at a time, turned into their own gradient where they lie, and multiplied into the
gradients of features and parameters at once. So forward and backward together need one piece, and the vocabulary's
matrix is multiplied by three times, as it has to be.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

FEW_NUMBERS = 2**20
"""Logits of a whole batch that PyTorch's own operations take as they are: 4 MiB of float32."""
_NUMBERS_AT_ONCE = 2**22
"""Logits of a piece: 16 MiB of float32."""
_MIN_ROWS = 256
"""With fewer rows in a piece, the product with a large matrix would wait for memory."""


class Positions(NamedTuple):
    """Where something is predicted, one position below the other."""

    x_RF: Tensor
    """Features."""
    targets_R: Tensor
    """What is predicted."""
    weight_R: Tensor
    """What each of them counts; has no gradient."""

    def rows(self, rows: slice | Tensor) -> Positions:
        """Some of them."""
        return Positions(self.x_RF[rows], self.targets_R[rows], self.weight_R[rows])


class Costs(NamedTuple):
    """What each position costs."""

    objective: Tensor
    """What training lowers."""
    nats: Tensor
    """The negative log-likelihood of the target, without a gradient; an estimate where not all of it is computed."""


class Negatives(NamedTuple):
    """Tokens drawn to stand for all that are not the target."""

    ids_N: Tensor
    log_expected_N: Tensor
    """The logarithm of how often each was expected among them."""


@dataclass(frozen=True)
class Objective:
    """What training lowers in place of the cost of the targets."""

    label_smoothing: float = 0.0
    """As :func:`costs_of` has it."""
    negatives: Negatives | None = None
    """Stand for the vocabulary, as in :func:`sampled_costs`; none: all of it counts."""
    sparse_rows: bool = False
    """Rows that are looked up may have a gradient of these rows alone."""
    dtype: torch.dtype | None = None
    """That the softmax is taken in; none: that of the logits."""


class RowCost(ABC):
    """The cost of positions as a function of their features, their targets and some parameters."""

    @abstractmethod
    def costs(self, positions: Positions, parameters: tuple[Tensor, ...]) -> Costs:
        """Without their weights, by operations of PyTorch, which has gradients of any order for them."""

    @abstractmethod
    def numbers_per_row(self, parameters: tuple[Tensor, ...]) -> int:
        """How many numbers a position takes."""

    def add_gradients(
        self, positions: Positions, parameters: tuple[Tensor, ...], of_parameters: tuple[Tensor, ...], beta: int
    ) -> tuple[Costs, Tensor]:
        """The costs and the gradient of the features; ``of_parameters`` becomes beta times itself and theirs.

        The gradient is that of the objective's sum, each position times its weight. Where beta is 0, what was there
        before is not read.
        """
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in (positions.x_RF, *parameters)]
            costs = self.costs(positions._replace(x_RF=leaves[0]), tuple(leaves[1:]))
            of_x_RF, *found = torch.autograd.grad(costs.objective, leaves, positions.weight_R)
        for total, one in zip(of_parameters, found, strict=True):
            total.add_(one) if beta else total.copy_(one)
        return Costs(costs.objective.detach(), costs.nats.detach()), of_x_RF


@dataclass(frozen=True)
class LinearCost(RowCost):
    """``-log softmax(W x + b)`` at the target; parameters W (V, F) and, if there is one, b (V)."""

    smoothing: float = 0.0
    """Label smoothing, as :func:`costs_of` has it."""
    dtype: torch.dtype | None = None
    """That the softmax is taken in; none: that of the logits."""

    def numbers_per_row(self, parameters: tuple[Tensor, ...]) -> int:
        return len(parameters[0])

    def costs(self, positions: Positions, parameters: tuple[Tensor, ...]) -> Costs:
        log_probs_RV = functional.linear(positions.x_RF, *parameters).log_softmax(-1, dtype=self.dtype)
        return costs_of(log_probs_RV, positions.targets_R, self.smoothing)

    def add_gradients(
        self, positions: Positions, parameters: tuple[Tensor, ...], of_parameters: tuple[Tensor, ...], beta: int
    ) -> tuple[Costs, Tensor]:
        x_RF, targets_R, weight_R = positions
        matrix_VF, *biases = parameters
        logits_RV = x_RF @ matrix_VF.T
        logits_RV = logits_RV if self.dtype is None else logits_RV.to(self.dtype)
        for bias_V in biases:
            logits_RV.add_(bias_V)  # quicker than a product that is added to it, which first fills all rows with it
        top_R1 = logits_RV.amax(1, keepdim=True)
        of_target_R = logits_RV.gather(1, targets_R.unsqueeze(1)).squeeze(1)
        mean_R = logits_RV.mean(1) if self.smoothing else of_target_R
        exp_RV = logits_RV.sub_(top_R1).exp_()
        total_R = exp_RV.sum(1)
        log_total_R = total_R.log() + top_R1.squeeze(1)
        nats_R = log_total_R - of_target_R
        objective_R = (1 - self.smoothing) * nats_R + self.smoothing * (log_total_R - mean_R)
        # The gradient of the logits is weight * (exp / total - what the target is to have). Its two parts are
        # multiplied apart: the second has one number for each position, and nothing passes through all logits again.
        dtype = matrix_VF.dtype
        scale_R = weight_R.to(dtype) / total_R.to(dtype)
        if self.smoothing:
            share = self.smoothing / exp_RV.shape[1]
            exp_RV.sub_(share * total_R.unsqueeze(1))
        exp_RV = exp_RV.to(dtype)
        of_matrix_VF, *of_biases = of_parameters
        taken_R1 = ((1 - self.smoothing) * weight_R.to(dtype)).unsqueeze(1)
        of_matrix_VF.addmm_(exp_RV.T, (x_RF * scale_R.unsqueeze(1)).to(dtype), beta=beta)
        of_matrix_VF.index_add_(0, targets_R, (x_RF * taken_R1).to(dtype), alpha=-1)
        for of_bias_V in of_biases:
            of_bias_V.addmv_(exp_RV.T, scale_R, beta=beta)
            of_bias_V.index_add_(0, targets_R, taken_R1.squeeze(1), alpha=-1)
        of_x_RF = (exp_RV @ matrix_VF).mul_(scale_R.unsqueeze(1)).sub_(matrix_VF[targets_R] * taken_R1)
        return Costs(objective_R, nats_R), of_x_RF.to(x_RF.dtype)


@dataclass(frozen=True)
class MixtureCost(RowCost):
    """A mixture of K softmaxes; parameters as :func:`mixture_log_probs` takes them."""

    smoothing: float = 0.0
    dtype: torch.dtype | None = None

    def numbers_per_row(self, parameters: tuple[Tensor, ...]) -> int:
        prior_KF, *_, bias_V = parameters
        return 3 * len(prior_KF) * len(bias_V)

    def costs(self, positions: Positions, parameters: tuple[Tensor, ...]) -> Costs:
        log_probs_RV = mixture_log_probs(positions.x_RF, parameters, self.dtype)
        return costs_of(log_probs_RV, positions.targets_R, self.smoothing)


def costs_of(log_probs_RV: Tensor, targets_R: Tensor, smoothing: float) -> Costs:
    """What targets cost under these distributions.

    With label smoothing s the target is to have the probability 1 - s + s/V and every other token s/V:

        objective = (1 - s) * nats - s * mean over v of log p_v

    Paper: Szegedy et al. 2016, https://arxiv.org/abs/1512.00567.
    """
    nats_R = -log_probs_RV.gather(1, targets_R.unsqueeze(1)).squeeze(1)
    if not smoothing:
        return Costs(nats_R, nats_R.detach())
    return Costs((1 - smoothing) * nats_R - smoothing * log_probs_RV.mean(1), nats_R.detach())


def mixture_log_probs(x: Tensor, parameters: tuple[Tensor, ...], dtype: torch.dtype | None = None) -> Tensor:
    """``log sum over k of pi_k softmax(W h_k + b)`` with ``pi = softmax(P x)`` and ``h_k = tanh(Q_k x + q_k)``.

    Args:
        x: features (..., F).
        parameters: P (K, F), the Q_k one below the other (K E, F), the q_k (K E), W (V, E), b (V).
        dtype: that the softmaxes are taken in.
    """
    prior_KF, latent_LF, latent_bias_L, weight_VE, bias_V = parameters
    log_prior_K = functional.linear(x, prior_KF).log_softmax(-1, dtype=dtype)
    h_KE = functional.linear(x, latent_LF, latent_bias_L).tanh().unflatten(-1, (len(prior_KF), -1))
    log_probs_KV = functional.linear(h_KE, weight_VE, bias_V).log_softmax(-1, dtype=dtype)
    return (log_prior_K.unsqueeze(-1) + log_probs_KV).logsumexp(-2)


def in_pieces(cost: RowCost, positions: Positions, parameters: tuple[Tensor, ...]) -> Costs:
    """What each position costs times its weight, computed for some positions at a time, with gradients.

    Args:
        cost: the cost of one position.
        positions: all of them.
        parameters: those of the cost.
    """
    x_RF, _, weight_R = positions
    takes_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x_RF, *parameters))
    numbers_per_row = cost.numbers_per_row(parameters)
    num_rows = max(_MIN_ROWS, _NUMBERS_AT_ONCE // numbers_per_row)
    # A compiler makes a form of its own, and cannot look into this one.
    if torch.compiler.is_compiling() or len(x_RF) * numbers_per_row <= FEW_NUMBERS:
        return Costs(*(part * weight_R for part in cost.costs(positions, parameters)))
    if not takes_gradient:
        starts = range(0, len(x_RF), num_rows)
        found = [cost.costs(positions.rows(slice(start, start + num_rows)), parameters) for start in starts]
        nats_R = torch.cat([costs.nats for costs in found]) * weight_R
        return Costs(torch.cat([costs.objective for costs in found]) * weight_R, nats_R)
    return Costs(*_InPieces.apply(cost, num_rows, *positions, *parameters))


class _InPieces(torch.autograd.Function):
    """Costs whose gradient is taken with them, piece by piece, as if every position's cost were to be lowered alike.

    If it turns out that they are not, the gradient is taken anew.
    """

    @staticmethod
    def forward(
        ctx: Any, cost: RowCost, num_rows: int, x_RF: Tensor, targets_R: Tensor, weight_R: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.cost, ctx.num_rows = cost, num_rows
        costs, gradients = _with_gradients(cost, num_rows, Positions(x_RF, targets_R, weight_R), parameters)
        ctx.save_for_backward(x_RF, targets_R, weight_R, *parameters, *gradients)
        nats_R = costs.nats * weight_R
        ctx.mark_non_differentiable(nats_R)
        return costs.objective * weight_R, nats_R

    @staticmethod
    def backward(ctx: Any, of_objective_R: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x_RF, targets_R, weight_R, *rest = ctx.saved_tensors  # asked for once: recomputed activations are given once
        num_parameters = (len(rest) - 1) // 2
        parameters, gradients = tuple(rest[:num_parameters]), rest[num_parameters:]
        if torch.is_grad_enabled():  # the gradient is to be differentiated itself
            gradients = _by_pytorch(ctx.cost, Positions(x_RF, targets_R, weight_R * of_objective_R), parameters)
        elif not (of_objective_R == of_objective_R[0]).all():
            positions = Positions(x_RF, targets_R, weight_R * of_objective_R)
            gradients = _with_gradients(ctx.cost, ctx.num_rows, positions, parameters)[1]
        elif of_objective_R[0] != 1:
            gradients = [gradient * of_objective_R[0] for gradient in gradients]
        return None, None, gradients[0], None, None, *gradients[1:]


def _with_gradients(
    cost: RowCost, num_rows: int, positions: Positions, parameters: tuple[Tensor, ...]
) -> tuple[Costs, list[Tensor]]:
    """Costs without their weights; the gradients, with them, of the features and of each parameter."""
    of_parameters = tuple(torch.empty_like(parameter) for parameter in parameters)
    found, of_x = [], []
    num_all = len(positions.x_RF)
    num_pieces = max(1, -(-num_all // num_rows))
    borders = [num_all * number // num_pieces for number in range(num_pieces + 1)]
    for number, piece in enumerate(map(slice, borders, borders[1:])):
        beta = int(number > 0)  # the first piece finds nothing to be added to
        costs, of_piece_RF = cost.add_gradients(positions.rows(piece), parameters, of_parameters, beta)
        found.append(costs)
        of_x.append(of_piece_RF)
    objective_R, nats_R = (torch.cat([costs[part] for costs in found]) for part in (0, 1))
    return Costs(objective_R, nats_R), [torch.cat(of_x), *of_parameters]


def _by_pytorch(cost: RowCost, positions: Positions, parameters: tuple[Tensor, ...]) -> list[Tensor]:
    """The gradient by operations of PyTorch, with gradients of its own."""
    # Views, because one argument may have been computed from another, and the way between them is not of this cost.
    views = [tensor.view_as(tensor) for tensor in (positions.x_RF, *parameters)]
    objective_R = cost.costs(positions._replace(x_RF=views[0]), tuple(views[1:])).objective
    wanted = [view for view in views if view.requires_grad]
    found = iter(torch.autograd.grad(objective_R, wanted, positions.weight_R, create_graph=True))
    return [next(found) if view.requires_grad else torch.zeros_like(view) for view in views]


def sampled_costs(
    positions: Positions,
    target_weight_RF: Tensor,
    target_bias_R: Tensor,
    negatives: Negatives,
    weight_NF: Tensor,
    bias_N: Tensor,
) -> Costs:
    """The cost of the target among tokens drawn at random, which estimates that among all.

        z_n' = z_n - log(N q_n)                         for each negative n, drawn with probability q_n
        cost = log(exp z_target + sum over n of exp z_n') - z_target

    The sum estimates that over all other tokens without bias, so that the cost comes near the exact one as N grows. A
    negative that is a position's target is none there.
    Papers: Bengio and Senecal 2008, https://doi.org/10.1109/TNN.2007.912312; Jean et al. 2015,
    https://arxiv.org/abs/1412.2007; the form with the correction on negatives alone: Blanc and Rendle 2018,
    https://arxiv.org/abs/1712.00527.

    Args:
        positions: where something is predicted.
        target_weight_RF: the target's row of the output matrix, for each position.
        target_bias_R: the target's bias.
        negatives: tokens drawn, the same for all positions.
        weight_NF: the negatives' rows of the output matrix.
        bias_N: the negatives' biases.
    """
    x_RF, targets_R, weight_R = positions
    of_target_R = (x_RF * target_weight_RF).sum(1) + target_bias_R
    of_negatives_RN = functional.linear(x_RF, weight_NF, bias_N - negatives.log_expected_N.to(bias_N))
    of_negatives_RN = of_negatives_RN.masked_fill(targets_R.unsqueeze(1) == negatives.ids_N, float("-inf"))
    all_R = torch.cat([of_target_R.unsqueeze(1), of_negatives_RN], dim=1).logsumexp(1)
    costs_R = (all_R - of_target_R) * weight_R
    return Costs(costs_R, costs_R.detach())


class Proposal:
    """Draws negatives: token ids, each with a chance of its own.

    Args:
        chances_V: how likely each token is to be drawn, above 0, summing to one.
    """

    def __init__(self, chances_V: Tensor) -> None:
        chances_V = chances_V.double()
        self._log_chances_V = chances_V.log()
        self._up_to_V = chances_V.cumsum(0)

    def draw(self, uniform_N: Tensor) -> Negatives:
        """Token ids by the inverse of the distribution function.

        Args:
            uniform_N: in [0, 1).
        """
        # Numbers that round to the end belong to the last token.
        ids_N = torch.searchsorted(self._up_to_V, uniform_N.double(), right=True).clamp(max=len(self._up_to_V) - 1)
        return Negatives(ids_N, self._log_chances_V[ids_N] + math.log(len(ids_N)))


def unigram_chances(counts_V: Tensor, power: float = 0.75) -> Tensor:
    """How likely tokens are to be negatives, from how often they occur: ``q_k`` proportional to ``(n_k + 1)^power``.

    The one that is added leaves no token without a chance, which the estimate needs. The power, less than 1, draws rare
    tokens more often than they occur: Mikolov et al. 2013, https://arxiv.org/abs/1310.4546.

    Args:
        counts_V: n_k.
        power: 1 draws as the text does, 0 all alike.
    """
    weights_V = (counts_V.double() + 1).pow(power)
    return weights_V / weights_V.sum()
