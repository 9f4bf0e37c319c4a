"""The one contract of all language models: ``p(next token | everything before)``, evaluated from a carried state.

Shape letters: B rows, T time, F features, V vocabulary.

    state = model.initial_state(batch_size)
    features_BTF, state = model.features(tokens_BT, state, reset_BT)      any T >= 1
    model.head.logits(features_BTF) | .log_probs(features_BTF) | .nll(features_BTF, targets_BT, weight_BT)
    model(tokens_BT, state) -> Output(logits_BTV, state)

Evaluation, generation and training are written against this and know no architecture. The laws that every model
keeps, and the code that checks them, are in ``elman.models.laws``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from numpy import integer
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from elman.config import ModelConfig
from elman.models.noise import Noise
from elman.models.state import State


class Output(NamedTuple):
    """The plain form of a model's answer."""

    logits_BTV: Tensor
    state: State


class Moment(NamedTuple):
    """One step of a model, for whoever looks inside."""

    features_BF: Tensor
    state: State
    """After the step."""
    named: Mapping[str, Tensor]
    """Gates, candidates and other intermediates of each layer, such as ``0.forget_gate``."""
    outputs: Mapping[str, Tensor]
    """What each layer hands to the next, such as ``0.output``."""


@dataclass(frozen=True)
class Component:
    """One part of a model, for whoever takes it apart."""

    name: str
    what: str
    parameters: Mapping[str, nn.Parameter]
    operations: int = 0
    """Floating-point operations for each token: two for each element of each matrix that is multiplied by."""
    state: tuple[str, ...] = ()
    """What it carries of the state, by name."""
    entries: int = 0
    """What it holds instead of parameters: n-grams counted."""
    stored_bytes: int = 0
    """Memory of its entries."""


class Head(nn.Module, ABC):
    """From features to the distribution over the vocabulary."""

    @abstractmethod
    def logits(self, features_BTF: Tensor) -> Tensor:
        """Unnormalised log-probabilities, (B, T, V)."""

    def log_probs(self, features_BTF: Tensor) -> Tensor:
        """Log-probabilities in nats, (B, T, V)."""
        return self.logits(features_BTF).log_softmax(-1)

    def nll(
        self,
        features_BTF: Tensor,
        targets_BT: Tensor,
        weight_BT: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Negative log-likelihood of each target in nats, times its weight: (B, T).

        A weight of 0 takes a position out, be it padding or text that is given and not predicted. The softmax is
        taken in ``dtype``; none: in that of the logits.
        """
        logits_BTV = self.logits(features_BTF)
        if dtype is not None:
            logits_BTV = logits_BTV.to(dtype)
        nats_BT = functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none")
        nats_BT = nats_BT.view_as(targets_BT)
        return nats_BT if weight_BT is None else nats_BT * weight_BT


class LanguageModel(nn.Module, ABC):
    """A conditional distribution with a carried state. It has no training mode: noise is an argument.

    Args:
        config: settings of the kind.
        vocab_size: V.
        dtype: of the parameters.
        boundary_id: the boundary token in the vocabulary; a tokenizer knows it.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, *, dtype: torch.dtype, boundary_id: int = 0) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.dtype = dtype
        self.boundary_id = boundary_id

    head: Head

    @abstractmethod
    def initial_state(self, batch_size: int) -> State:
        """The state before the first token, which is the boundary token; finite, one row for each text."""

    @abstractmethod
    def features(
        self, tokens_BT: Tensor, state: State, reset_BT: Tensor | None = None, noise: Noise | None = None
    ) -> tuple[Tensor, State]:
        """Read tokens: what the head needs for each next token, and the state after the last.

        Args:
            tokens_BT: int64, any T >= 1.
            state: from :meth:`initial_state` or an earlier call; never changed.
            reset_BT: bool; where true, that row's state is initial before the token is read.
            noise: the masks of dropout; none outside training.
        """

    @abstractmethod
    def step(self, token_B: Tensor, state: State) -> tuple[Tensor, State]:
        """Read one token by the paper's equations: features (B, F) and the next state. It specifies `features`."""

    def named_step(self, token_B: Tensor, state: State) -> Moment:
        """:meth:`step` with what a kind lets be seen of it; a kind without layers of cells shows nothing more."""
        return Moment(*self.step(token_B, state), {}, {})

    @abstractmethod
    def components(self) -> list[Component]:
        """The parts in the order in which a token passes them: all parameters and all of the state."""

    def hidden_matrices(self) -> list[tuple[nn.Parameter, int]]:
        """The matrices into hidden layers, each with the number of equal blocks (gates) stacked along its rows.

        Muon takes these; a kind without hidden layers has none.
        """
        return []

    @staticmethod
    @abstractmethod
    def predicted_num_parameters(config: ModelConfig, vocab_size: int) -> int:
        """Number of trained numbers, from the settings alone."""

    @abstractmethod
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw all parameters anew."""

    def forward(self, tokens_BT: Tensor, state: State, reset_BT: Tensor | None = None) -> Output:
        """Logits for each next token, and the state after the last."""
        features_BTF, state = self.features(tokens_BT, state, reset_BT)
        return Output(self.head.logits(features_BTF), state)

    def tensors(self) -> dict[str, Tensor]:
        """All that tells it from others of its settings, by name: what a file of it has to hold."""
        return dict(self.named_parameters())

    @property
    def num_parameters(self) -> int:
        """Number of trained numbers, a shared one counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device


class CountedModel(LanguageModel):
    """A model that is counted and not trained: one pass over a text fills its tables. It has no parameters."""

    def __init__(self, config: ModelConfig, vocab_size: int, *, dtype: torch.dtype, boundary_id: int = 0) -> None:
        super().__init__(config, vocab_size, dtype=dtype, boundary_id=boundary_id)
        self.register_buffer("_place", torch.zeros(0), persistent=False)

    @property
    def device(self) -> torch.device:
        """Where states and results are. Tables stay where they are read, in the memory of the CPU."""
        return self.get_buffer("_place").device

    @abstractmethod
    def count(
        self,
        tokens: NDArray[integer[Any]],
        *,
        reset_at_documents: bool = False,
        poll: Callable[[], None] = lambda: None,
    ) -> list[str]:
        """Fill the tables from a text, in place of what they hold.

        Args:
            tokens: the text, its boundary first.
            reset_at_documents: every boundary begins a text of its own, as in a state that is reset there.
            poll: called now and then; what it raises ends the counting and leaves the model as it was.

        Returns:
            A line for everything that a user should know.
        """

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Its tables, by name."""

    @abstractmethod
    def load_tables(self, tables: Mapping[str, Tensor]) -> None:
        """Take what :meth:`tensors` gave, from anywhere. Raises ModelFileError where the settings do not fit them."""

    def reset_parameters(self, generator: torch.Generator) -> None:
        """There are none."""

    @staticmethod
    def predicted_num_parameters(config: ModelConfig, vocab_size: int) -> int:
        return 0
