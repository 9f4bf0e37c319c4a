"""What a training takes on one device or on many: memory, time and communication, from a few numbers.

    seconds of an update = T L s + k R T F / v + communication

T steps and R rows of a process, L layers, F operations for a token in the forward pass, k = 3 because the backward pass
takes twice as many (4 where activations are computed again). s is what a step of a layer takes however few its rows
are: step t + 1 waits for step t, so T L s stays whatever is added in devices. v is the speed of the products.

    all processes hold all       4 bytes x (parameters + gradients + optimiser) + activations
                                 each update moves 2 (N - 1) / N x 4 bytes x parameters over each link
    divided among N (FSDP2)      the first term / N, and one layer in one piece
                                 each update moves 3 (N - 1) / N x 4 bytes x parameters
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elman.config import EmbeddingConfig, ModelConfig, TrainingConfig
from elman.data.streams import Segment
from elman.errors import ConfigError
from elman.models.contract import CountedModel, LanguageModel
from elman.models.kinds import build_model, model_class
from elman.models.losses import FEW_NUMBERS
from elman.models.noise import Noise
from elman.process import as_in_training, num_threads
from elman.training.distributed import Ranks, choose_device
from elman.training.gradients import Gradients
from elman.training.objective import proposal_of
from elman.training.optimizers import Optimizer

_BYTES = 4
"""Of a number of float32."""
_MAX_BUILT = 50_000_000
"""Parameters above which activations are counted on a narrower model of the same form."""
_BUCKET_BYTES = 2**25
"""Gradients are added up in pieces of this size."""
_COUNTED_STEPS = 16
_WIDTHS = ("embedding_size", "hidden_size", "feedforward_size", "output_projection")
_SMALL_SUMS = 3
"""Sums of a few numbers in every update: the time, and twice whether to stop."""


@dataclass(frozen=True)
class Machine:
    """One of several equal devices, and the link to the others."""

    operations_per_second: float
    """Of the products of a training, as they are reached, not as they are advertised."""
    step_seconds: float
    """For one step of one layer, forward and back, of very few rows."""
    memory_bytes: float
    bytes_per_second: float
    """That a device sends to another while it receives as many."""
    latency_seconds: float
    """Of a sum of a few numbers over two devices."""


@dataclass(frozen=True)
class Work:
    """What an update asks of a process."""

    parameters: int
    largest_group: int
    """Parameters of the layer, or of all that is no layer, that are in one piece while they are used."""
    optimizer_numbers: float
    """That the optimiser, and the mean of the weights where there is one, remember for each parameter."""
    operations: int
    """For a token, forward."""
    passes: int
    """3, or 4 where activations are computed again."""
    num_layers: int
    saved_bytes: float
    """That the forward pass keeps for the backward pass, for each token of each row, and the gradients of what the last
    layer gives and reads, with which the backward pass begins."""
    rows: int
    steps: int

    @property
    def tokens(self) -> int:
        """That are read by one process in an update."""
        return self.rows * self.steps


@dataclass(frozen=True)
class Forecast:
    """What an update takes on some number of devices, each with the same number of rows."""

    processes: int
    is_divided: bool
    memory_bytes: float
    """Of each device."""
    fits: bool
    waiting_seconds: float
    """For step after step; no further device shortens it."""
    product_seconds: float
    communication_seconds: float
    tokens_per_second: float
    """Of all together."""

    @property
    def seconds(self) -> float:
        """Of an update."""
        return self.waiting_seconds + self.product_seconds + self.communication_seconds

    @property
    def efficiency(self) -> float:
        """The part of the time that is not spent on communication."""
        return 1 - self.communication_seconds / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return vars(self) | {"seconds": self.seconds, "efficiency": self.efficiency}


def forecast(work: Work, machine: Machine, processes: int, *, is_divided: bool = False) -> Forecast:
    """What an update takes.

    Args:
        work: that of one process.
        machine: each device.
        processes: N, one for each device.
        is_divided: FSDP2 in place of copies.
    """
    state = _BYTES * work.parameters * (2 + work.optimizer_numbers)
    activations = work.tokens * work.saved_bytes
    if is_divided:
        memory = state / processes + 2 * _BYTES * work.largest_group + activations
    else:
        memory = state + activations + (min(_BUCKET_BYTES, _BYTES * work.parameters) if processes > 1 else 0)
    waiting = work.steps * work.num_layers * machine.step_seconds * work.passes / 3
    products = work.passes * work.tokens * work.operations / machine.operations_per_second
    communication = _communication_seconds(work, machine, processes, is_divided)
    return Forecast(
        processes=processes,
        is_divided=is_divided,
        memory_bytes=memory,
        fits=memory <= machine.memory_bytes,
        waiting_seconds=waiting,
        product_seconds=products,
        communication_seconds=communication,
        tokens_per_second=processes * work.tokens / (waiting + products + communication),
    )


def _communication_seconds(work: Work, machine: Machine, processes: int, is_divided: bool) -> float:
    if processes == 1:
        return 0.0
    num_bytes = _BYTES * work.parameters
    if is_divided:
        num_sums, turns = 3 * (work.num_layers + 1), 3
    else:
        num_sums, turns = -(-num_bytes // _BUCKET_BYTES), 2
    # A sum over N devices goes round in N - 1 turns, there and back.
    latency = (num_sums + _SMALL_SUMS) * machine.latency_seconds * (processes - 1)
    return latency + turns * (processes - 1) / processes * num_bytes / machine.bytes_per_second


def work_of(model: ModelConfig, training: TrainingConfig, vocab_size: int) -> Work:
    """What an update of these settings asks of a process.

    Activations are counted: a short piece of text is read by a model of these settings, and what is kept for the
    backward pass is added up. Where that would be too large, two narrower ones of the same form read it, and what they
    keep is continued in a straight line.

    Raises:
        ConfigError: the kind is counted, not trained; or no narrower model is small enough for this vocabulary.
    """
    kind = model_class(model)
    if issubclass(kind, CountedModel):
        raise ConfigError(f"model.kind {model.kind!r} is counted, not trained: there is no update to plan")
    parameters, factor = kind.predicted_num_parameters(model, vocab_size), 1
    narrowest = min(_widths(model).values()) // _width_step(model)
    while kind.predicted_num_parameters(_narrower(model, factor), vocab_size) > _MAX_BUILT:
        factor *= 2
        if 2 * factor > narrowest:
            raise ConfigError(
                f"a vocabulary of {vocab_size:,} tokens is too large for this forecast, which counts activations on "
                f"models of up to {_MAX_BUILT:,} parameters; accepted: a smaller one"
            )
    narrow = _narrower(model, factor)
    built, saved = _counted(narrow, training, vocab_size)
    width, of_narrow = (sum(_widths(one).values()) for one in (model, narrow))
    if factor > 1:
        half = _narrower(model, 2 * factor)
        _, of_half = _counted(half, training, vocab_size)
        saved += (width - of_narrow) * (saved - of_half) / (of_narrow - sum(_widths(half).values()))
    layers = [sum(p.numel() for p in layer.parameters()) for layer in _layers(built)]
    groups = [built.num_parameters - sum(layers), *layers]
    looked_up = [c for c in built.components() if not c.operations and c.what == "look-up"]
    is_tied = isinstance(model, EmbeddingConfig) and model.tie_weights
    only_read = 0 if is_tied else sum(p.numel() for c in looked_up for p in c.parameters.values()) * width // of_narrow
    hidden = sum(matrix.numel() for matrix, _ in built.hidden_matrices()) * (width / of_narrow) ** 2
    numbers = {"adamw": 2.0, "muon": 2 - hidden / parameters}.get(training.optimizer, float(training.momentum > 0))
    return Work(
        parameters=parameters,
        largest_group=round(max(groups) / built.num_parameters * parameters),
        optimizer_numbers=numbers + (training.averaging != "none"),
        operations=2 * (parameters - only_read),
        passes=4 if training.recompute_tokens else 3,
        num_layers=max(1, len(layers)),
        saved_bytes=saved,
        rows=training.batch_size,
        steps=training.bptt,
    )


def _narrower(model: ModelConfig, factor: int) -> ModelConfig:
    """The same form, its widths divided by a factor, as nearly as heads allow."""
    step = _width_step(model) if factor > 1 else 1
    widths = {name: max(step, width // factor // step * step) for name, width in _widths(model).items()}
    return model.model_copy(update=widths)


def _width_step(model: ModelConfig) -> int:
    """What widths are multiples of: of the blocks of gates, and with heads of two for each, as positions turn pairs."""
    return math.lcm(2 * getattr(model, "num_heads", 0) or 1, getattr(model, "num_gate_blocks", 1))


def _widths(model: ModelConfig) -> dict[str, int]:
    """The widths that are set as numbers; a projection may be none, or follow the embedding."""
    widths = {name: getattr(model, name) for name in _WIDTHS if name in type(model).model_fields}
    return {name: width for name, width in widths.items() if width and not isinstance(width, bool)}


def _layers(network: LanguageModel) -> list[nn.Module]:
    return [layer for stack in network.modules() if isinstance(stack, nn.ModuleList) for layer in stack]


def _counted(model: ModelConfig, training: TrainingConfig, vocab_size: int) -> tuple[LanguageModel, float]:
    """A model, and the bytes that it keeps for the backward pass for a token."""
    network = build_model(model, vocab_size, seed=1, dtype=torch.float32)
    short, long = (_saved_bytes(network, training, steps) for steps in (_COUNTED_STEPS, 2 * _COUNTED_STEPS))
    return network, (long - short) / _COUNTED_STEPS


def _saved_bytes(network: LanguageModel, training: TrainingConfig, steps: int) -> int:
    """What the forward pass over one row keeps, parameters aside, and the first gradients of the backward pass."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    segment = _segment(network.vocab_size, 1, steps)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        features_BTF, _ = network.features(segment.tokens_BT, network.initial_state(1), None, Noise(1, 0, 1))
        graph = features_BTF
        # A loss in pieces keeps gradients alone, which are counted with the parameters and the features.
        if training.batch_size * training.bptt * network.vocab_size <= FEW_NUMBERS:
            graph = network.head.nll(features_BTF, segment.targets_BT, segment.weight_BT).sum()
    total = sum(kept.values()) + 2 * features_BTF.nbytes
    del graph  # until here, what it keeps has addresses of its own
    return total


def _segment(vocab_size: int, rows: int, steps: int) -> Segment:
    drawn = torch.randint(vocab_size, (rows, steps + 1), generator=torch.Generator().manual_seed(1))
    return Segment(drawn[:, :-1], drawn[:, 1:], torch.ones(rows, steps), None, rows * steps, False)


class Update:
    """One update of a model on text drawn at random, again and again, as a training makes it.

    Args:
        network: the model; the rate is so low that it stays what it is.
        config: rows of each process, segment, loss, precision and optimiser.
        ranks: the processes that share the update; none: this one alone.
    """

    def __init__(self, network: LanguageModel, config: TrainingConfig, ranks: Ranks | None = None) -> None:
        self._rows, self._ranks = config.batch_size, Ranks() if ranks is None else ranks
        self._whole = _segment(network.vocab_size, self._rows * self._ranks.size, config.bptt)
        self._segment = self._whole.part(self._ranks.rank, self._ranks.size)
        proposal = proposal_of(config, self._whole.tokens_BT.flatten().numpy(), network.vocab_size)
        self._gradients = Gradients(network, config, self._ranks, None, (), lambda text: None, proposal)
        self._optimizer = Optimizer(network, config)
        self._state, self._number = network.initial_state(self._rows), 0

    @property
    def num_tokens(self) -> int:
        """That this process reads in an update."""
        return self._segment.tokens_BT.numel()

    def __call__(self) -> None:
        self.gradient()
        self._optimizer.step(1e-6)

    def gradient(self) -> None:
        """The clipped gradient alone, which changes nothing but the state."""
        noise = Noise(1, self._number, self._rows * self._ranks.size, self._ranks.rank * self._rows)
        _, _, self._state = self._gradients.compute(self._segment, self._whole, self._state, noise)
        self._number += 1


def time_updates(
    model: ModelConfig, training: TrainingConfig, vocab_size: int, ranks: Ranks, num_updates: int = 5
) -> list[float]:
    """Seconds of each of some updates on text drawn at random, after one that is not counted.

    With several processes every one of them reads ``training.batch_size`` rows, and the seconds are those of the first.
    """
    network = build_model(model, vocab_size, seed=1, dtype=torch.float32, device=choose_device("cpu"))
    update = Update(network, training, ranks)
    seconds: list[float] = []
    with num_threads(training.num_threads), as_in_training():
        for _ in range(num_updates + 1):
            ranks.any(False)
            started = time.perf_counter()
            update()
            seconds += ranks.of_first(time.perf_counter() - started)
    return seconds[1:]


def fit(measured: Sequence[tuple[Work, float]]) -> tuple[float, float]:
    """Operations per second and seconds per step, from seconds of updates of one process.

    Least squares of the relative error, neither below zero.

    Args:
        measured: two updates at least, that differ in width or in rows.
    """
    products = np.array([work.passes * work.tokens * work.operations for work, _ in measured])
    steps = np.array([work.steps * work.num_layers * work.passes / 3 for work, _ in measured])
    seconds = np.array([taken for _, taken in measured])
    of_both = np.stack([products, steps], axis=1) / seconds[:, None]
    (per_operation, step_seconds), *_ = np.linalg.lstsq(of_both, np.ones(len(seconds)), rcond=None)
    if step_seconds < 0:  # steps without a product take too little to show
        of_products = of_both[:, 0]
        per_operation, step_seconds = of_products.sum() / (of_products @ of_products), 0.0
    if per_operation <= 0:  # and here the products do
        raise ConfigError("the time of these updates does not rise with their products: measure wider models")
    return float(1 / per_operation), float(step_seconds)


def measured_speeds(
    model: ModelConfig, training: TrainingConfig, vocab_size: int, ranks: Ranks | None = None
) -> tuple[float, float]:
    """Operations per second and seconds per step on this machine, from short trainings of this form.

    Four updates are timed: of these settings and of a model a quarter as wide, each with all its rows and with a
    quarter of them.

    Args:
        model: the form.
        training: rows and steps.
        vocab_size: of the model.
        ranks: the processes that measure at the same time, each for itself; none: this one alone.
    """
    measured = []
    for factor in (1, 4):
        for share in (1, 4):
            narrow = _narrower(model, factor)
            fewer = training.model_copy(update={"batch_size": max(1, training.batch_size // share)})
            seconds = time_updates(narrow, fewer, vocab_size, Ranks() if ranks is None else ranks)
            measured.append((work_of(narrow, fewer, vocab_size), min(seconds)))
    return fit(measured)
