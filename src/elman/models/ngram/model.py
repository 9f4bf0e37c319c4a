"""The n-gram model: the next token from the last n - 1, by what was counted.

Shape letters: B rows, T time, K tokens of the context (n - 1), N positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elman.config import ModelConfig, NgramConfig
from elman.errors import ConfigError, ModelFileError
from elman.models.contract import Component, CountedModel, Head
from elman.models.ngram.counting import build_tables
from elman.models.ngram.tables import Ids, Tables, uniform_tables
from elman.models.noise import Noise
from elman.models.state import State
from elman.models.window import last_tokens


class NgramModel(CountedModel):
    """Counts of all sequences of up to n tokens, smoothed (:mod:`elman.models.ngram.counting`).

    All arithmetic is in float64, whatever the dtype of the results; on another device too, the tables are read by the
    CPU. Before anything is counted, all tokens are equally probable.

    A text begins with its boundary, and no counted context reaches further back. The initial state is full of boundary
    tokens: its context is the boundary alone, unless empty documents were counted, which are boundaries in a row.

    State: the last n - 1 tokens, (B, n - 1), int64; at first boundary tokens. Features: the same for every token.
    """

    config: NgramConfig
    head: NgramHead

    def __init__(self, config: ModelConfig, vocab_size: int, *, dtype: torch.dtype, boundary_id: int = 0) -> None:
        if not isinstance(config, NgramConfig):
            raise ConfigError(f"model.kind {config.kind!r} is not an n-gram model")
        super().__init__(config, vocab_size, dtype=dtype, boundary_id=boundary_id)
        self.head = NgramHead(uniform_tables(vocab_size), dtype, backs_off=config.smoothing != "add_k")

    def count(
        self,
        tokens: NDArray[np.integer[Any]],
        *,
        reset_at_documents: bool = False,
        poll: Callable[[], None] = lambda: None,
    ) -> list[str]:
        reset_token = self.boundary_id if reset_at_documents else None
        self.head.tables, notices = build_tables(
            tokens, self.config, self.vocab_size, reset_token=reset_token, poll=poll
        )
        return notices

    def tensors(self) -> dict[str, Tensor]:
        return {name: torch.from_numpy(array) for name, array in self.head.tables.arrays.items()}

    def load_tables(self, tables: Mapping[str, Tensor]) -> None:
        expected = self.tensors()
        if tables.keys() != expected.keys():
            raise ModelFileError(f"it holds the tables {sorted(tables)}; an n-gram model has {sorted(expected)}")
        for name, table in tables.items():
            if table.dtype != expected[name].dtype:
                raise ModelFileError(f"its table {name} is {table.dtype}; accepted: {expected[name].dtype}")
        loaded = Tables(self.vocab_size, **{name: table.cpu().numpy().copy() for name, table in tables.items()})
        if fault := loaded.fault(self.config.order):
            raise ModelFileError(f"it is no n-gram model of order {self.config.order}: {fault}")
        self.head.tables = loaded

    def initial_state(self, batch_size: int) -> State:
        shape = (batch_size, self.config.order - 1)
        return State({"tokens": torch.full(shape, self.boundary_id, dtype=torch.int64, device=self.device)})

    def features(
        self, tokens_BT: Tensor, state: State, reset_BT: Tensor | None = None, noise: Noise | None = None
    ) -> tuple[Tensor, State]:
        before_BK = state.tensors["tokens"]
        if not before_BK.shape[1]:
            return tokens_BT.new_zeros(*tokens_BT.shape, 0), state
        contexts_BTK = last_tokens(tokens_BT, before_BK, reset_BT, self.boundary_id)
        # Copied, so that the state does not keep the whole segment in memory.
        return contexts_BTK, State({"tokens": contexts_BTK[:, -1].clone()})

    def step(self, token_B: Tensor, state: State) -> tuple[Tensor, State]:
        context_BK = torch.cat([state.tensors["tokens"], token_B.unsqueeze(1)], dim=1)[:, 1:]
        return context_BK, State({"tokens": context_BK})

    def components(self) -> list[Component]:
        tables = self.head.tables
        parts = [Component("context", f"the last {self.config.order - 1} tokens", {}, state=("tokens",))]
        for order in range(1, self.config.order + 1):
            ngrams, contexts = tables.num_ngrams(order), tables.num_contexts(order - 1)
            size = ngrams * tables.bytes_per_ngram + contexts * tables.bytes_per_context
            parts.append(Component(f"order {order}", "n-grams", {}, entries=ngrams, stored_bytes=size))
        return parts


class NgramHead(Head):
    """Looks up contexts of K tokens, and what follows them.

    Args:
        tables: what is known.
        dtype: of the results.
        backs_off: what was not seen after a context is looked for after the shorter one.
    """

    def __init__(self, tables: Tables, dtype: torch.dtype, *, backs_off: bool) -> None:
        super().__init__()
        self.tables = tables
        self.dtype = dtype
        self.backs_off = backs_off

    def logits(self, features_BTF: Tensor) -> Tensor:
        log_probs_NV = self.tables.distributions(_contexts(features_BTF), backs_off=self.backs_off)
        return (
            torch.from_numpy(log_probs_NV).to(self.dtype).to(features_BTF.device).unflatten(0, features_BTF.shape[:2])
        )

    def log_probs(self, features_BTF: Tensor) -> Tensor:
        return self.logits(features_BTF)  # they are normalised

    def nll(
        self,
        features_BTF: Tensor,
        targets_BT: Tensor,
        weight_BT: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        targets_N = cast(Ids, targets_BT.flatten().cpu().numpy())
        log_probs_N, _ = self.tables.score(_contexts(features_BTF), targets_N, backs_off=self.backs_off)
        nats_BT = torch.from_numpy(-log_probs_N).to(dtype or self.dtype).to(targets_BT.device).view_as(targets_BT)
        return nats_BT if weight_BT is None else nats_BT * weight_BT


def _contexts(features_BTF: Tensor) -> Ids:
    return cast(Ids, features_BTF.flatten(0, 1).cpu().numpy())
