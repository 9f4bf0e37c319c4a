"""What a model costs on a text: summed first, divided once.

Nats are summed in float64 over every token. All else follows from the sum and from the counts of tokens, characters
and bytes, so that models with different tokenizers can be compared by ``bits_per_char`` and ``bits_per_byte``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Score:
    """The negative log-likelihood of a text and the counts to divide it by.

    Args:
        nats_total: sum of -ln p over all tokens, in nats.
        tokens: tokens predicted.
        chars: characters of the text; none where the tokens do not give the text back (``<unk>``, words).
        bytes: its bytes in UTF-8; none under the same condition.
    """

    nats_total: float
    tokens: int
    chars: int | None
    bytes: int | None

    @property
    def nats_per_token(self) -> float:
        """Mean of -ln p over the tokens."""
        return self.nats_total / self.tokens

    @property
    def perplexity(self) -> float:
        """``exp(nats_per_token)``, per token of the model's own vocabulary; infinite where that overflows."""
        return perplexity(self.nats_per_token)

    @property
    def bits_per_char(self) -> float | None:
        """Bits per character of the text."""
        return self._bits_per(self.chars)

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of the text in UTF-8."""
        return self._bits_per(self.bytes)

    def _bits_per(self, count: int | None) -> float | None:
        return self.nats_total / math.log(2) / count if count else None

    def to_dict(self) -> dict[str, Any]:
        """All figures by name, ready for JSON: an infinite or undefined one is ``null``, with a flag beside it."""
        figures = {
            "tokens": self.tokens,
            "chars": self.chars,
            "bytes": self.bytes,
            "nats_total": self.nats_total,
            "nats_per_token": self.nats_per_token,
            "perplexity": self.perplexity,
            "bits_per_char": self.bits_per_char,
            "bits_per_byte": self.bits_per_byte,
        }
        not_finite = [name for name, value in figures.items() if isinstance(value, float) and not math.isfinite(value)]
        return {name: None if name in not_finite else value for name, value in figures.items()} | {
            f"{name}_is_{'nan' if math.isnan(figures[name] or 0.0) else 'infinite'}": True for name in not_finite
        }


def perplexity(nats_per_token: float) -> float:
    """``exp`` of the mean; infinity instead of an overflow."""
    try:
        return math.exp(nats_per_token)
    except OverflowError:
        return math.inf
