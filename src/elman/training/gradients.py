"""The gradient of one update: of the mean loss over all rows, whoever reads them, and in whatever pieces.

Shape letters: B rows, T time, F features.

    loss = sum over rows and times of weight * nats / number of targets, over all rows of all processes

and what ``elman.training.objective`` adds to it or puts in its place.

Rows may be read in several pieces (``training.accumulate``), by several processes, in half the bits
(``training.precision``), with activations that are computed a second time in place of being kept
(``training.recompute_tokens``), or by compiled code (``training.compile``). It is one sum all the same: the number of
targets that it is divided by is that of the whole, and the masks of dropout belong to rows, not to pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elman.config import TrainingConfig
from elman.data.streams import Segment, share_of
from elman.models.contract import LanguageModel
from elman.models.losses import Costs, Proposal
from elman.models.noise import Noise
from elman.models.state import State
from elman.training.distillation import Teacher, state_of_student
from elman.training.distributed import Ranks
from elman.training.objective import penalty, training_costs
from elman.training.optimizers import has_bfloat16_units

if TYPE_CHECKING:
    from elman.training.sharding import Shards

Term: TypeAlias = Callable[[Tensor, Segment], Tensor | None]
"""From the features and the segment to a term of the loss in nats per token, or none."""

_DTYPES = {None: None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _half_of(precision: str | None, network: LanguageModel) -> torch.dtype | None:
    """What matrix products are taken in, ``auto`` decided for the machine at hand; none: the model's own."""
    if precision == "auto":
        is_quicker = network.dtype == torch.float32 and has_bfloat16_units(network.device)
        precision = "bfloat16" if is_quicker else None
    return _DTYPES[precision]


class Read(NamedTuple):
    """What reading some rows gives."""

    features_BTF: Tensor
    objective: Tensor
    """What is lowered: the part of the loss that is theirs, scaled."""
    nats: Tensor
    """What their targets cost, as a part of the mean over all, without a gradient."""
    state: State
    """After them."""


class LossScale:
    """What the loss is multiplied by, so that gradients of float16 neither vanish nor overflow; a power of two.

    It is halved as often as a gradient overflows, and doubled after 2000 updates without one.
    Paper: Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740
    """

    _UPDATES_UNTIL_DOUBLED = 2000

    def __init__(self) -> None:
        self.factor = 2.0**16
        self._num_good = 0

    def halve(self) -> bool:
        """Make it smaller; false where it is at its smallest."""
        self._num_good = 0
        if self.factor == 1.0:
            return False
        self.factor /= 2
        return True

    def count(self) -> None:
        """Take in that a gradient was finite."""
        self._num_good += 1
        if self._num_good == self._UPDATES_UNTIL_DOUBLED:
            self.factor, self._num_good = self.factor * 2, 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {"factor": self.factor, "num_good": self._num_good}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Put back what :meth:`to_dict` gave."""
        self.factor, self._num_good = values["factor"], values["num_good"]


class Gradients:
    """Computes the gradient of an update, and leaves it in the parameters.

    Args:
        network: the model.
        config: how.
        ranks: the processes that share the rows.
        shards: how the parameters are divided among them; none: each has all.
        terms: what is added to the loss.
        note: told what the user should know.
        proposal: draws the negatives; needed with ``training.num_negatives``.
        teacher: whose distribution is learned as well; none: the text alone.
    """

    def __init__(
        self,
        network: LanguageModel,
        config: TrainingConfig,
        ranks: Ranks,
        shards: Shards | None,
        terms: Sequence[Term],
        note: Callable[[str], None],
        proposal: Proposal | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        self._network, self._config, self._ranks, self._shards = network, config, ranks, shards
        self._parameters: Sequence[nn.Parameter] = list(network.parameters()) if shards is None else shards.parameters
        self._terms, self._note = terms, note
        self._proposal, self._teacher = proposal, teacher
        self._half = _half_of(config.precision, network)
        self.scale = LossScale() if config.precision == "float16" else None
        self._has_penalty = config.activation_penalty > 0 or config.temporal_penalty > 0
        self._read: Callable[[Segment, int, State, Noise], Read] = self._read_plainly
        if config.compile:
            self._compiled = torch.compile(self._read_plainly, fullgraph=True, dynamic=False)
            self._read = self._read_compiled

    @property
    def _factor(self) -> float:
        """What the loss is multiplied by while its gradient is computed."""
        return 1.0 if self.scale is None else self.scale.factor

    def compute(self, segment: Segment, whole: Segment, before: State, noise: Noise) -> tuple[float, float, State]:
        """Leave the clipped gradient of the mean loss in the parameters.

        Args:
            segment: the rows of this process.
            whole: the rows of all.
            before: the state of the former, that of the teacher's models with it (:meth:`Teacher.initial_state`).
            noise: the masks of dropout for the former.

        Returns:
            The mean loss in nats per token, the norm of the gradient before clipping, and the state after the segment,
            without its graph. The first two are those of all processes.
        """
        while True:
            nats, state = self._backward(segment, whole, before, noise)
            norm = self._norm()
            # The same numbers everywhere, unless the machines differ; what follows from them must not differ at all.
            loss, grad_norm = self._ranks.of_first(nats.item(), norm.item())
            overflows = math.isfinite(loss) and not math.isfinite(grad_norm)
            if self.scale is None or not overflows or not self.scale.halve():
                break
        if self.scale is not None and math.isfinite(grad_norm):
            self.scale.count()
        if self._config.max_grad_norm is not None:
            factor = self._config.max_grad_norm / (norm + 1e-6)
            if factor < 1:
                for gradient in self._gradients():
                    gradient.mul_(factor)
        return loss, grad_norm, state

    def _backward(self, segment: Segment, whole: Segment, before: State, noise: Noise) -> tuple[Tensor, State]:
        """Leave the gradient in the parameters: the mean of nats over all rows, and the state of those at hand."""
        for parameter in self._parameters:
            parameter.grad = None
        num_rows = len(segment.tokens_BT)
        num_pieces = min(self._config.accumulate, num_rows)
        nats, states = [], []
        for number in range(num_pieces):
            rows = share_of(num_rows, number, num_pieces)
            # mypy does not see the type of a default argument of a lambda.
            piece, state = segment.cut(rows), before.map(lambda tensor, rows=rows: tensor[rows])  # type: ignore[misc]
            if self._shards is not None:
                self._shards.adds_up(number == num_pieces - 1)
            read = self._forward(piece, whole.num_targets, state, noise.of_rows(rows.start))
            objective = read.objective
            if self._has_penalty:
                weight_BT = piece.weight_BT.to(read.features_BTF)
                of_features = penalty(self._network.config, read.features_BTF, weight_BT, self._config)
                objective = objective + of_features * (self._factor / whole.num_targets)
            for term in self._terms:
                if (added := term(read.features_BTF, piece)) is not None:
                    objective = objective + added * (self._factor * len(piece.tokens_BT) / len(whole.tokens_BT))
            objective.backward()
            nats.append(read.nats)
            states.append(read.state.detach())
        added = nats[0] if num_pieces == 1 else torch.stack(nats).sum()
        if self._shards is not None:  # its hooks have added the gradients up already
            self._shards.take_gradients()
            added = added.new_tensor(self._ranks.sum(added.item())[0])
        elif self._ranks.size > 1:
            added = self._add_up(added)
        if self.scale is not None:
            for gradient in self._gradients():
                gradient.div_(self._factor)
        return added, states[0] if num_pieces == 1 else State.stack(states)

    def _forward(self, piece: Segment, num_targets: int, state: State, noise: Noise) -> Read:
        """Read some rows, all of a segment at once or in pieces of time whose activations are computed again."""
        num_steps, length = piece.tokens_BT.shape[1], self._config.recompute_tokens
        if not length or num_steps <= length:
            return self._read(piece, num_targets, state, noise)
        noise = replace(noise, masks={}, num_steps=num_steps)
        features, objectives, nats = [], [], []
        for start in range(0, num_steps, length):
            read = checkpoint(
                self._read,
                piece.cut(times=slice(start, start + length)),
                num_targets,
                state,
                replace(noise, first_step=start),
                use_reentrant=False,
                preserve_rng_state=False,  # nothing is drawn from the global generators
            )
            if self._terms or self._has_penalty:  # nobody else asks for features, and they take memory
                features.append(read.features_BTF)
            objectives.append(read.objective)
            nats.append(read.nats)
            state = read.state
        features_BTF = torch.cat(features, dim=1) if features else read.features_BTF
        return Read(features_BTF, torch.stack(objectives).sum(), torch.stack(nats).sum(), state)

    def _read_plainly(self, piece: Segment, num_targets: int, state: State, noise: Noise) -> Read:
        network = self._network
        device, is_half = network.device, self._half is not None
        # A weight that is rounded for one part is not kept for the next, which would miss it when it is recomputed.
        keeps = not self._config.recompute_tokens
        with torch.autocast(device.type, self._half, enabled=is_half, cache_enabled=keeps):
            reset_BT = None if piece.reset_BT is None else piece.reset_BT.to(device)
            tokens_BT = piece.tokens_BT.to(device)
            own_state = state if self._teacher is None else state_of_student(state)
            features_BTF, after = network.features(tokens_BT, own_state, reset_BT, noise)
            # The gradient begins with the weights: what is scaled is scaled from there on.
            weight_BT = piece.weight_BT.to(device, network.dtype) * (self._factor / num_targets)
            targets_BT, dtype = piece.targets_BT.to(device), network.dtype if is_half else None
            costs = training_costs(
                network, features_BTF, targets_BT, weight_BT, self._config, noise, dtype, self._proposal
            )
            if self._teacher is not None:
                lesson = self._teacher.read(tokens_BT, state, reset_BT)
                objective = self._teacher.mixed(costs.objective, network.head, features_BTF, lesson, weight_BT)
                costs = Costs(objective, costs.nats)
                after = State({**after.tensors, **lesson.state.tensors})
        if is_half:  # what is carried on keeps all its bits
            after = State({name: tensor.to(state.tensors[name].dtype) for name, tensor in after.tensors.items()})
        return Read(features_BTF, costs.objective, costs.nats / self._factor, after)

    def _read_compiled(self, piece: Segment, num_targets: int, state: State, noise: Noise) -> Read:
        try:
            return Read(*self._compiled(piece, num_targets, state, noise))
        except Exception as error:  # a compiler fails in more ways than can be listed; the plain form tells real faults
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            why = " ".join([f"{type(error).__name__}:", *lines[:2]])
            self._note(f"training.compile: this model is not compiled here ({why}); the training goes on without")
            self._read = self._read_plainly
            return self._read(piece, num_targets, state, noise)

    def _add_up(self, nats: Tensor) -> Tensor:
        """Make the gradients those of all processes; the sum of their nats."""
        # What no row of this process uses may be used elsewhere; what nobody uses has no gradient, as in one process.
        used = nats.new_tensor([parameter.grad is not None for parameter in self._parameters], dtype=nats.dtype)
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        sums = torch.cat([nats.reshape(1), used])
        self._ranks.add_up([*self._gradients(), sums])
        for parameter, is_used in zip(self._parameters, sums[1:].tolist(), strict=True):
            if not is_used:
                parameter.grad = None
        return sums[0]

    def _gradients(self) -> list[Tensor]:
        """The numbers of all gradients; of a sparse one those of its rows, each row once."""
        found = []
        for parameter in self._parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
                found.append(parameter.grad._values())
            elif parameter.grad is not None:
                found.append(parameter.grad)
        return found

    def _norm(self) -> Tensor:
        norm = torch.nn.utils.get_total_norm(self._gradients())
        return norm if self._shards is None else self._shards.norm(norm)
