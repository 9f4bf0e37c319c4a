"""Draw text from a model, one token at a time, from a carried state.

Shape letters: V vocabulary. The order is that of Hugging Face's ``generate``: temperature, top-k, top-p.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from elman.config import SamplingConfig
from elman.errors import ElmanError, TextError, UserError
from elman.models.file import Bundle
from elman.models.noise import derived_seed
from elman.models.state import State

FinishReason = Literal["length", "stop", "boundary", "interrupted"]
Unknown = Literal["error", "skip"]

_PROMPT_PIECE = 1024  # tokens of a prompt read at once


@dataclass(frozen=True)
class Generated:
    """What was drawn."""

    text: str
    """Without the prompt, and without the stop string that ended it."""
    tokens: tuple[int, ...]
    """Every token drawn, the last one too where it belongs to a stop string."""
    finish_reason: FinishReason
    seed: int


def probabilities(logits_V: Tensor, settings: SamplingConfig) -> Tensor:
    """The distribution that a token is drawn from: (V,), float64, positive where kept, summing to one.

    Logits are shifted by their maximum before they are divided, so that any positive temperature works; temperature
    0 puts all on the most probable token (the first of equals). ``top_k`` keeps the k largest; ``top_p`` then keeps
    the smallest set of most probable tokens whose probabilities reach p (Holtzman et al. 2020,
    https://arxiv.org/abs/1904.09751), one at least.

    Raises:
        ElmanError: the logits hold NaN or positive infinity, or nothing finite.
    """
    logits_V = logits_V.double()
    largest = logits_V.max()
    if not largest.isfinite():
        raise ElmanError("the model's logits hold NaN or infinity: its weights are damaged or training diverged")
    shifted_V = logits_V - largest
    if settings.temperature == 0:
        probabilities_V = torch.zeros_like(shifted_V)
        probabilities_V[logits_V.argmax()] = 1.0
        return probabilities_V
    scores_V = shifted_V / settings.temperature
    if 0 < settings.top_k < len(scores_V):
        kth = scores_V.topk(settings.top_k).values[-1]
        scores_V = scores_V.masked_fill(scores_V < kth, -math.inf)
    probabilities_V = scores_V.softmax(0)
    if settings.top_p < 1.0:
        ordered, order = probabilities_V.sort(descending=True, stable=True)
        beyond = ordered.cumsum(0) - ordered >= settings.top_p
        beyond[0] = False
        probabilities_V[order[beyond]] = 0.0
        probabilities_V = probabilities_V / probabilities_V.sum()
    return probabilities_V


def read_prompt(bundle: Bundle, prompt: str, *, unknown: Unknown = "error") -> tuple[Tensor, State]:
    """Read the boundary and then the prompt, of any length: logits (V,) of the next token, and the state."""
    tokenizer, network = bundle.tokenizer, bundle.network
    if unknown == "error" and (missing := tokenizer.unknown_characters(prompt)):
        shown = " ".join(repr(character) for character in missing[:20])
        raise TextError(
            f"the prompt holds {len(missing)} characters or words that the model never saw: {shown}; "
            "take them out, or give --unknown skip"
        )
    tokens = [tokenizer.boundary_id, *tokenizer.encode(prompt, unknown="skip").tolist()]
    state = network.initial_state(1)
    for start in range(0, len(tokens), _PROMPT_PIECE):
        piece_BT = torch.tensor([tokens[start : start + _PROMPT_PIECE]], device=network.device)
        features_BTF, state = network.features(piece_BT, state)
    return network.head.logits(features_BTF[:, -1:])[0, 0], state


class Sampler:
    """An iterator over the pieces of one text; :attr:`result` holds the whole once it is exhausted.

    Args:
        bundle: the model.
        prompt: how the text begins; empty: from the boundary token alone.
        settings: temperature, top_k, top_p, max_new_tokens.
        seed: of this text alone.
        stop: strings that end it, wherever the tokens cut them; the first to be complete counts.
        unknown: what to do with characters of the prompt that the model never saw.
        should_stop: polled before every token.
    """

    def __init__(
        self,
        bundle: Bundle,
        prompt: str = "",
        *,
        settings: SamplingConfig | None = None,
        seed: int = 0,
        stop: Sequence[str] = (),
        unknown: Unknown = "error",
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        if any(not string for string in stop):
            raise UserError("an empty stop string would end every text at once: leave it out")
        self._bundle, self._prompt, self._unknown = bundle, prompt, unknown
        self._settings = settings or SamplingConfig()
        self._seed, self._stop, self._should_stop = seed, tuple(stop), should_stop
        self._reason: FinishReason = "length"
        self.result: Generated | None = None

    def __iter__(self) -> Iterator[str]:
        tokens: list[int] = []
        pieces: list[str] = []
        for piece in self._pieces(tokens):
            pieces.append(piece)
            yield piece
        self.result = Generated("".join(pieces), tuple(tokens), self._reason, self._seed)

    def run(self) -> Generated:
        """Draw the whole text."""
        for _ in self:
            pass
        if self.result is None:
            raise ElmanError("the text ended without a result")
        return self.result

    def _pieces(self, tokens: list[int]) -> Iterator[str]:
        """Text as soon as no stop string can begin in it any more; appends to ``tokens`` as they are drawn."""
        decoder = self._bundle.tokenizer.decoder()
        # The decoder has to know that something stands before: words are joined by spaces.
        for token in self._bundle.tokenizer.encode(self._prompt, unknown="skip").tolist()[-1:]:
            decoder.feed(token)
        is_word_start = self._bundle.tokenizer.level == "word" and self._prompt[-1:].isspace()
        held = ""
        for token in self._draw():
            tokens.append(token)
            piece = decoder.feed(token)
            held += piece.removeprefix(" ") if is_word_start else piece
            is_word_start = False
            ends = [held.find(string) for string in self._stop if string in held]
            if ends:
                self._reason = "stop"
                if min(ends):
                    yield held[: min(ends)]
                return
            keep = self._possible_stop(held)
            if ready := held[: len(held) - keep]:
                yield ready
            held = held[len(held) - keep :]
        if rest := held + decoder.flush():
            yield rest

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        lengths = (n for string in self._stop for n in range(1, len(string)) if text.endswith(string[:n]))
        return max(lengths, default=0)

    def _draw(self) -> Iterator[int]:
        """Tokens until the boundary, the length or the caller ends them."""
        tokenizer, network = self._bundle.tokenizer, self._bundle.network
        generator = torch.Generator().manual_seed(derived_seed(self._seed, "text"))
        with torch.no_grad():
            logits_V, state = read_prompt(self._bundle, self._prompt, unknown=self._unknown)
        for _ in range(self._settings.max_new_tokens):
            if self._should_stop():
                self._reason = "interrupted"
                return
            logits_V = logits_V.cpu()
            if tokenizer.unknown_id is not None:
                logits_V[tokenizer.unknown_id] = -math.inf  # it stands for no text
            token = int(torch.multinomial(probabilities(logits_V, self._settings), 1, generator=generator))
            if token == tokenizer.boundary_id:
                self._reason = "boundary"
                return
            yield token
            with torch.no_grad():
                output = network(torch.tensor([[token]], device=network.device), state)
            logits_V, state = output.logits_BTV[0, 0], output.state
