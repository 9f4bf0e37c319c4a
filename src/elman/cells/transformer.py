"""Causal self-attention over a sliding window, as a recurrent cell whose state is its cache.

Shape letters: B rows, T time, I cell input, H hidden, N heads, D width of a head, S entries attended to, W window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, PositiveInt, model_validator

from elman.cells.base import Cell, CellState, FeedForwardConfig, Initial, Parameter, StatePart, Step
from elman.cells.primitives import heads, linear, merge_heads, split

if TYPE_CHECKING:
    from torch import Tensor

_ROTARY_BASE = 10_000.0
"""The slowest pair of a head turns by nearly one over this from one token to the next."""
_MIN_BLOCK = 128
"""Steps that a scan takes at once at least, so that a small window does not cut its work into crumbs."""


class TransformerConfig(FeedForwardConfig):
    """Settings of the Transformer."""

    num_heads: PositiveInt = 4
    """Number N of attention heads, each of width hidden_size / N."""
    attention_window: Annotated[int, Field(ge=2)] = 256
    """Number W of tokens that a layer attends to, the one at hand included."""

    @model_validator(mode="after")
    def _heads_have_an_even_width(self) -> Self:
        pairs = 2 * self.num_heads
        if rest := self.hidden_size % pairs:
            raise ValueError(
                f"num_heads {self.num_heads} cuts hidden_size {self.hidden_size} into no heads of even width: "
                f"take a hidden_size divisible by {pairs}, such as {self.hidden_size - rest + pairs}"
            )
        return self


class Transformer(Cell):
    """Multi-head causal self-attention with rotary positions, over the last W tokens.

        q_t, k_t, v_t = split(W_qkv x_t)                                     and each cut into N heads of width D
        a_ts = softmax over s of q_t . R(s - t) k_s / sqrt(D)                t - W < s <= t
        y_t = W_out concat over the heads of (sum over s of a_ts v_s)

    R(n) turns the pair of the elements i and i + D/2 by the angle n 10000^(-2i/D): a score depends on how far back a
    token is, not on where it stands. Keys are kept unturned and are turned by their distance when they are attended
    to, so that angles stay small and exact however long the text is.

    A Transformer block is this cell in a stack with ``residual``, ``norm`` and ``feedforward_size``, the defaults here.

    State: keys and values of the last W - 1 tokens, (B, up to W - 1, H) each, and ``seen``, which is 1 for each of
    them, and 0 where a row has fewer than others.
    Parameters: 3 H I + H H.
    Initialisation: W_qkv uniform within +-sqrt(3/I), W_out within a tenth of +-sqrt(3/H): what attention adds is small
    until it has learned where to look.
    Paper: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762; rotary positions are from Su et al. 2021,
    https://arxiv.org/abs/2104.09864, the sliding window from Beltagy et al. 2020, https://arxiv.org/abs/2004.05150.
    """

    Config = TransformerConfig
    config: TransformerConfig
    paper = "https://arxiv.org/abs/1706.03762"

    def parameters(self) -> Mapping[str, Parameter]:
        size, width = self.hidden_size, self.input_size
        return {
            "weight_qkv": Parameter((3 * size, width), Initial("uniform", math.sqrt(3 / width), parts=3)),
            "weight_out": Parameter((size, size), Initial("uniform", 0.1 * math.sqrt(3 / size))),
        }

    def state(self) -> Mapping[str, StatePart]:
        size = self.hidden_size
        return {"keys": StatePart((0, size)), "values": StatePart((0, size)), "seen": StatePart((0,))}

    def step(self, p: Mapping[str, Tensor], x_BI: Tensor, state: CellState) -> Step:
        import torch

        query_BH, key_BH, value_BH = split(linear(x_BI, p["weight_qkv"]), 3)
        new = {"keys": key_BH, "values": value_BH, "seen": torch.ones_like(key_BH[:, 0])}
        window = self.config.attention_window
        entries = {name: torch.cat([state[name], one.unsqueeze(1)], dim=1)[:, -window:] for name, one in new.items()}
        query_BND, keys_BSND, values_BSND = (
            heads(part, self.config.num_heads) for part in (query_BH, entries["keys"], entries["values"])
        )
        distances_S = torch.arange(1 - keys_BSND.shape[1], 1)
        turned_BSND = _turned(keys_BSND, _turns(distances_S, keys_BSND))
        scores_BSN = (turned_BSND * query_BND.unsqueeze(1)).sum(-1) / math.sqrt(query_BND.shape[-1])
        attention_BSN = scores_BSN.masked_fill(entries["seen"].unsqueeze(-1) == 0, -math.inf).softmax(1)
        mixed_BND = (attention_BSN.unsqueeze(-1) * values_BSND).sum(1)
        output_BH = linear(merge_heads(mixed_BND), p["weight_out"])
        named = {"query": query_BH, "key": key_BH, "value": value_BH, "attention": attention_BSN.transpose(1, 2)}
        return Step(output_BH, {name: part[:, 1 - window :] for name, part in entries.items()}, named)

    def scan(self, p: Mapping[str, Tensor], x_BTI: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        import torch

        outputs = []
        # In blocks, because the work of one block grows with the square of its length.
        for block_BTI in x_BTI.split(max(self.config.attention_window, _MIN_BLOCK), dim=1):
            output_BTH, state = self._scan_block(p, block_BTI, state)
            outputs.append(output_BTH)
        return torch.cat(outputs, dim=1), state

    def _scan_block(self, p: Mapping[str, Tensor], x_BTI: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        num_heads, window = self.config.num_heads, self.config.attention_window
        query_BTH, key_BTH, value_BTH = split(linear(x_BTI, p["weight_qkv"]), 3)
        new = {"keys": key_BTH, "values": value_BTH, "seen": torch.ones_like(key_BTH[:, :, 0])}
        cached = {name: state[name][:, 1 - window :] for name in new}
        entries = {name: torch.cat([cached[name], some], dim=1) for name, some in new.items()}
        query_BTND, key_BTND, cached_BSND = (heads(part, num_heads) for part in (query_BTH, key_BTH, cached["keys"]))
        num_cached = cached_BSND.shape[1]
        positions_S = torch.arange(num_cached + x_BTI.shape[1])
        distances_TS = (positions_S[num_cached:, None] - positions_S).to(x_BTI.device)
        attended_BNTS = (entries["seen"] != 0)[:, None, None] & (distances_TS >= 0) & (distances_TS < window)
        turns = _turns(positions_S, query_BTND)
        turns_before, turns_new = turns[:, :num_cached], turns[:, num_cached:]
        mixed_BNTD = scaled_dot_product_attention(
            _turned(query_BTND, turns_new).transpose(1, 2),
            # The cached keys are turned apart, because in training no gradient goes to them.
            torch.cat([_turned(cached_BSND, turns_before), _turned(key_BTND, turns_new)], dim=1).transpose(1, 2),
            heads(entries["values"], num_heads).transpose(1, 2),
            attended_BNTS,
        )
        output_BTH = linear(merge_heads(mixed_BNTD.transpose(1, 2)), p["weight_out"])
        return output_BTH, {name: part[:, 1 - window :] for name, part in entries.items()}

    def operations_per_step(self) -> int:
        """Those of the matrices, and of scores and weighted sum over a full window."""
        return super().operations_per_step() + 4 * self.config.attention_window * self.hidden_size


def _turns(positions_S: Tensor, like_BSND: Tensor) -> Tensor:
    """Cosines and sines of the angles of each pair at each position: (2, S, 1, D / 2)."""
    import torch

    width = like_BSND.shape[-1] // 2
    # In float64 whatever the model has, and on the CPU, because not every device has float64.
    rates_D = _ROTARY_BASE ** (-torch.arange(width, dtype=torch.float64) / width)
    angles_SD = positions_S.unsqueeze(1) * rates_D
    return torch.stack([angles_SD.cos(), angles_SD.sin()]).unsqueeze(2).to(like_BSND)


def _turned(x_BSND: Tensor, turns: Tensor) -> Tensor:
    """R(position) x, for the position of each of the S."""
    import torch

    first, second = split(x_BSND, 2)
    cos, sin = turns.unbind()
    turned = torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)
    return torch.cat(turned, dim=-1)
