"""The fixed-window neural language model: the next token from the last k, and from nothing before them.

Shape letters: B rows, T time, K window, E embedding, I input of the hidden layer (K x E), H hidden, F features,
V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from elman.config import ModelConfig, WindowConfig
from elman.errors import ConfigError
from elman.models.contract import Component, LanguageModel
from elman.models.heads import LinearHead, OutputHead, draw_embedding, draw_uniform, embed, make_head
from elman.models.heads import predicted_num_parameters as predicted_num_parameters_of_head
from elman.models.noise import Noise
from elman.models.state import State


class WindowModel(LanguageModel):
    """The neural probabilistic language model, a window that slides over the text.

        x_t = (C(w_{t-k+1}), ..., C(w_t))                    the embeddings side by side, the oldest first
        h_t = tanh(M x_t + d)
        y_t = U h_t + b                                      or U h_t + W x_t + b with direct connections
        p(w_{t+1} | w_{t-k+1} ... w_t) = softmax(y_t)

    The paper writes n - 1 for the window k, H for M, and x with the newest first. Before a text stand boundary tokens.
    All positions of a segment are computed at once: nothing is carried but the tokens.

    Dropout (with noise only) falls on x and on h.

    State: the last k tokens, (B, k), int64; at first the boundary token k times.
    Parameters: V E of the embedding, H (k E + 1) of the hidden layer, those of the output, V k E of W.
    Initialisation: C is N(0, 1/E) or uniform within +-``embedding_range``; M uniform within +-sqrt(3/k), which gives
    M x a variance of one; W uniform within +-1/sqrt(k E); d zero.
    Paper: Bengio, Ducharme, Vincent and Jauvin 2003, https://www.jmlr.org/papers/v3/bengio03a.html
    """

    config: WindowConfig
    head: OutputHead

    def __init__(self, config: ModelConfig, vocab_size: int, *, dtype: torch.dtype, boundary_id: int = 0) -> None:
        super().__init__(_own(config), vocab_size, dtype=dtype, boundary_id=boundary_id)
        input_size = self.config.window_size * self.config.embedding_size
        self.embedding = nn.Parameter(torch.zeros(vocab_size, self.config.embedding_size, dtype=dtype))
        self.hidden_weight = nn.Parameter(torch.zeros(self.config.hidden_size, input_size, dtype=dtype))
        self.hidden_bias = nn.Parameter(torch.zeros(self.config.hidden_size, dtype=dtype))
        of_head = (self.config, self.config.hidden_size, self.embedding)
        self.head = DirectHead(*of_head) if self.config.direct_connections else make_head(*of_head)

    def reset_parameters(self, generator: torch.Generator) -> None:
        draw_embedding(self.embedding, self.config, generator)
        draw_uniform(self.hidden_weight, math.sqrt(3 / self.config.window_size), generator)
        self.hidden_bias.data.zero_()
        self.head.reset_parameters(generator)

    def initial_state(self, batch_size: int) -> State:
        shape = (batch_size, self.config.window_size)
        return State({"tokens": torch.full(shape, self.boundary_id, dtype=torch.int64, device=self.device)})

    def features(
        self, tokens_BT: Tensor, state: State, reset_BT: Tensor | None = None, noise: Noise | None = None
    ) -> tuple[Tensor, State]:
        windows_BTK = last_tokens(tokens_BT, state.tensors["tokens"], reset_BT, self.boundary_id)
        x_BTI = self._drop(embed(windows_BTK, self.embedding, self.config, noise).flatten(2), noise, "embedding")
        h_BTH = self._drop(functional.linear(x_BTI, self.hidden_weight, self.hidden_bias).tanh(), noise, "hidden")
        # Copied, so that the state does not keep the whole segment in memory.
        return self._with_direct(h_BTH, x_BTI), State({"tokens": windows_BTK[:, -1].clone()})

    def step(self, token_B: Tensor, state: State) -> tuple[Tensor, State]:
        window_BK = torch.cat([state.tensors["tokens"][:, 1:], token_B.unsqueeze(1)], dim=1)
        x_BI = torch.cat([self.embedding[w_B] for w_B in window_BK.unbind(1)], dim=1)
        h_BH = torch.tanh(x_BI @ self.hidden_weight.T + self.hidden_bias)
        return self._with_direct(h_BH, x_BI), State({"tokens": window_BK})

    def _with_direct(self, h: Tensor, x: Tensor) -> Tensor:
        """What the head reads: h, and x behind it where it has direct connections."""
        return torch.cat([h, x], dim=-1) if self.config.direct_connections else h

    def _drop(self, x_BTI: Tensor, noise: Noise | None, place: str) -> Tensor:
        return x_BTI if noise is None else noise.dropout(x_BTI, self.config.dropout, place)

    def components(self) -> list[Component]:
        hidden = {"weight": self.hidden_weight, "bias": self.hidden_bias}
        return [
            Component("embedding", "look-up", {"weight": self.embedding}),
            Component("hidden", "tanh of the window", hidden, 2 * self.hidden_weight.numel(), ("tokens",)),
            self.head.component(),
        ]

    def hidden_matrices(self) -> list[tuple[nn.Parameter, int]]:
        return [(self.hidden_weight, 1)]

    @staticmethod
    def predicted_num_parameters(config: ModelConfig, vocab_size: int) -> int:
        config = _own(config)
        input_size = config.window_size * config.embedding_size
        embedding = vocab_size * config.embedding_size
        hidden = config.hidden_size * (input_size + 1)
        direct = vocab_size * input_size if config.direct_connections else 0
        return embedding + hidden + predicted_num_parameters_of_head(config, config.hidden_size, vocab_size) + direct


def last_tokens(tokens_BT: Tensor, before_BK: Tensor, reset_BT: Tensor | None, boundary_id: int) -> Tensor:
    """The last K tokens up to each token, (B, T, K); where a text starts inside them, boundaries stand before that.

    Args:
        tokens_BT: what is read.
        before_BK: the last K tokens before it, K being 1 or more.
        reset_BT: where a text starts.
        boundary_id: the boundary token.
    """
    size = before_BK.shape[1]
    windows_BTK = torch.cat([before_BK[:, 1:], tokens_BT], dim=1).unfold(1, size, 1)
    if reset_BT is None:
        return windows_BTK
    time_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
    # When the text that each token belongs to has started; far enough back where that was before the segment.
    started_BT = torch.where(reset_BT, time_T, -size).cummax(dim=1).values
    time_TK = time_T.unsqueeze(1) + torch.arange(1 - size, 1, device=tokens_BT.device)
    return torch.where(time_TK < started_BT.unsqueeze(2), boundary_id, windows_BTK)


class DirectHead(LinearHead):
    """The output of the hidden layer together with W x, where the features are h and then x."""

    def __init__(self, config: WindowConfig, feature_size: int, embedding_VE: nn.Parameter) -> None:
        super().__init__(config, feature_size, embedding_VE)
        input_size = config.window_size * config.embedding_size
        self.direct = nn.Parameter(embedding_VE.new_zeros(len(embedding_VE), input_size))

    def reset_parameters(self, generator: torch.Generator) -> None:
        super().reset_parameters(generator)
        draw_uniform(self.direct, 1 / math.sqrt(self.direct.shape[1]), generator)

    def parts(self, features: Tensor) -> tuple[Tensor, Tensor]:
        h, x = self._split(features)
        h, weight = super().parts(h)
        return torch.cat([h, x], dim=-1), torch.cat([weight, self.direct], dim=1)

    def logits(self, features_BTF: Tensor) -> Tensor:
        h_BTH, x_BTI = self._split(features_BTF)
        return functional.linear(*super().parts(h_BTH), self.bias) + functional.linear(x_BTI, self.direct)

    def _split(self, features: Tensor) -> list[Tensor]:
        input_size = self.direct.shape[1]
        return list(features.split([features.shape[-1] - input_size, input_size], dim=-1))


def _own(config: ModelConfig) -> WindowConfig:
    if not isinstance(config, WindowConfig):
        raise ConfigError(f"model.kind {config.kind!r} is not a fixed-window model")
    return config
