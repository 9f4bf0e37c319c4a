"""Optimisers and the course of the learning rate.

AdamW and SGD are PyTorch's. Muon is ours, because it has to know the gates: the matrices of a gated cell are stacked,
and each gate's block is a linear map of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from elman.config import TrainingConfig
from elman.models.contract import LanguageModel

QUINTICS = ((7.36253, -20.74341, 15.16056), (2.91754, -2.18241, 0.47553), (2.04631, -1.42947, 0.39335))
"""Coefficients a, b, c of the polynomials a x + b x^3 + c x^5 that follow each other in :func:`newton_schulz`. Each is
as near one as a quintic can be on the interval that the one before it leaves: the first on [0.03, 1]."""


def newton_schulz(matrix_NRC: Tensor) -> Tensor:
    """Push the singular values of each of N matrices (R rows, C columns) towards one, keeping singular vectors.

    Three quintic steps X <- a X + (b A + c A^2) X with A = X X^T, after X has been divided by the fourth root of the
    sum of its singular values' fourth powers, which is at least the largest. What is then 0.03 or more comes within
    0.04 of one, what is less is multiplied by up to 44.
    Papers: the iteration as part of an optimiser is from Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/,
    with five steps of one polynomial; the best polynomial for each step from Amsel et al. 2025,
    https://arxiv.org/abs/2505.16932.
    """
    wide = matrix_NRC.shape[-2] <= matrix_NRC.shape[-1]
    x = matrix_NRC if wide else matrix_NRC.mT
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).contiguous()  # products read rows
    gram = x @ x.mT
    # The norm of A is the square of what X is to be divided by; a hundredth more, since bfloat16 rounds, and the first
    # polynomial is steep beyond one.
    scale_N11 = 1.01 * gram.norm(dim=(-2, -1), keepdim=True) + 1e-7
    x, gram = x / scale_N11.sqrt(), gram / scale_N11
    for number, (a, b, c) in enumerate(QUINTICS):
        if number:
            gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised, for the matrices of hidden layers.

        m <- beta m + g;   u = newton_schulz(g + beta m), block by block;   W <- W (1 - lr * decay) - lr * s * u

    with s = sqrt(max(1, rows / columns)) of a block. Where the processor multiplies matrices of bfloat16 in hardware,
    the iteration runs in it, as the authors' does: it brings singular values near one, not to one, in any precision.
    Paper: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.

    Args:
        blocks: each matrix with the number of equal blocks stacked along its rows.
        lr: learning rate; the change of a block has singular values of about lr.
        momentum: beta.
        weight_decay: decoupled.
    """

    def __init__(
        self, blocks: Iterable[tuple[nn.Parameter, int]], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        groups = [{"params": [matrix], "blocks": count} for matrix, count in blocks]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # a closure has no use here
        """Apply one update. Matrices of one block shape are orthogonalised together."""
        by_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor, dict[str, Any]]]] = {}
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum"] = torch.zeros_like(matrix)
                momentum = state["momentum"].mul_(group["momentum"]).add_(matrix.grad)
                ahead = matrix.grad.add(momentum, alpha=group["momentum"])
                blocks_NRC = ahead.view(group["blocks"], -1, ahead.shape[-1])
                by_shape.setdefault(tuple(blocks_NRC.shape[1:]), []).append((matrix, blocks_NRC, group))
        for (rows, columns), entries in by_shape.items():
            ahead_NRC = torch.cat([blocks for _, blocks, _ in entries])
            updates_NRC = newton_schulz(ahead_NRC.to(_iteration_dtype(ahead_NRC))).to(ahead_NRC.dtype)
            scale = math.sqrt(max(1.0, rows / columns))
            pieces = updates_NRC.split([len(blocks) for _, blocks, _ in entries])
            for (matrix, _, group), update in zip(entries, pieces, strict=True):
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update.reshape(matrix.shape), alpha=-group["lr"] * scale)


def has_bfloat16_units(device: torch.device) -> bool:
    """Whether the device multiplies matrices of bfloat16 in hardware: AMX in a processor, tensor cores in a GPU."""
    if device.type == "cpu":
        return torch.cpu._is_amx_tile_supported()  # PyTorch has no public name for it that is as old
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def _iteration_dtype(like: Tensor) -> torch.dtype:
    """What Newton-Schulz is quickest in: bfloat16 in place of float32 where there is hardware for it."""
    return torch.bfloat16 if like.dtype == torch.float32 and has_bfloat16_units(like.device) else like.dtype


class Optimizer:
    """The optimisers of one model and the rate that they share.

    Args:
        network: the model, whose parameters are each updated once, shared ones too; a counted model has none.
        config: optimiser, rates and decay. Decay falls on matrices alone.
        parts: what is updated in place of the parameters, the parts of them that this process holds.
    """

    def __init__(
        self, network: LanguageModel, config: TrainingConfig, parts: Sequence[nn.Parameter] | None = None
    ) -> None:
        self.parameters = list(network.parameters()) if parts is None else list(parts)
        hidden = network.hidden_matrices() if config.optimizer == "muon" else []
        taken = {id(matrix) for matrix, _ in hidden}
        rest = [p for p in self.parameters if id(p) not in taken]
        groups = [
            {"params": [p for p in rest if p.dim() > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self._is_plain = config.optimizer == "sgd" and not config.momentum and not config.weight_decay
        self._optimizers: list[tuple[torch.optim.Optimizer, float]] = []
        if groups and config.optimizer == "sgd":
            sgd = torch.optim.SGD(groups, config.learning_rate, config.momentum)
            self._optimizers.append((sgd, config.learning_rate))
        elif groups:
            betas = (config.adam_beta1, config.adam_beta2)
            adamw = torch.optim.AdamW(groups, config.learning_rate, betas, fused=True)
            self._optimizers.append((adamw, config.learning_rate))
        if hidden:
            muon = Muon(hidden, config.matrix_learning_rate, weight_decay=config.weight_decay)
            self._optimizers.append((muon, config.matrix_learning_rate))

    @property
    def takes_sparse_rows(self) -> bool:
        """Whether what has no gradient stays as it is, so that a gradient may hold the rows alone that have one."""
        return self._is_plain

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for optimizer, _ in self._optimizers:
            optimizer.zero_grad()

    def step(self, rate: float) -> None:
        """Apply one update at this share of the peak rates."""
        for optimizer, peak in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * rate
            optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        """All that the optimisers remember, by name."""
        return {
            f"{number}.{index}.{name}": value
            for number, (optimizer, _) in enumerate(self._optimizers)
            for index, memory in optimizer.state_dict()["state"].items()
            for name, value in memory.items()
            if value is not None
        }

    def owner(self, name: str) -> nn.Parameter:
        """The parameter that one of :meth:`tensors` goes with."""
        number, index, _ = name.split(".")
        groups = self._optimizers[int(number)][0].param_groups
        parameters: list[nn.Parameter] = [parameter for group in groups for parameter in group["params"]]
        return parameters[int(index)]

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what :meth:`tensors` gave, into fresh memory."""
        for number, (optimizer, _) in enumerate(self._optimizers):
            memory: dict[int, dict[str, Tensor]] = {}
            for key, value in tensors.items():
                owner, index, name = key.split(".")
                if int(owner) == number:
                    memory.setdefault(int(index), {})[name] = value.clone()
            optimizer.load_state_dict({"state": memory, "param_groups": optimizer.state_dict()["param_groups"]})


def learning_rate_share(config: TrainingConfig, update: int, progress: float, plateau_factor: float) -> float:
    """The share of the peak rate for an update.

    Args:
        config: schedule, warm-up and final rate.
        update: number of the update, from 0.
        progress: part of the budget that is used up, 0 to 1.
        plateau_factor: what ``plateau`` has made of the rate so far.
    """
    warmup = min(1.0, (update + 1) / config.warmup_updates) if config.warmup_updates else 1.0
    if config.schedule == "plateau":
        return warmup * plateau_factor
    if config.schedule == "constant":
        return warmup
    fall = progress if config.schedule == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return warmup * (1 - (1 - config.final_rate) * fall)
