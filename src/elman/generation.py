"""Draw text from a model, token by token, one text or several at once; every piece as soon as it is certain.

Shape letters: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from elman.beam import beam_search
from elman.choosing import Chooser, Floats, Rules, choose
from elman.config import SamplingConfig
from elman.engine import AnyStepper, Drawing, Engine, Stepper, TorchStepper, draw_rows
from elman.errors import ElmanError, UserError
from elman.models.file import Bundle
from elman.models.state import State
from elman.reading import Logits, Reading, Unknown
from elman.text.tokenizers import Tokenizer

FinishReason = Literal["length", "stop", "boundary", "interrupted"]

_LONGEST_CHARACTER = 4  # in tokens, where a token is a byte
_MOST_AT_ONCE, _SECONDS_AT_ONCE = 256, 0.01
"""Of tokens that compiled code draws before they are looked at."""


@dataclass(frozen=True)
class Generated:
    """What was drawn."""

    text: str
    """Without the prompt, and without the stop string that ended it."""
    tokens: tuple[int, ...]
    """Every token drawn, the last one too where it belongs to a stop string."""
    finish_reason: FinishReason
    seed: int


class TextStream:
    """Tokens in, text out: never half a character, never the beginning of a stop string that may still come.

    Args:
        tokenizer: the model's.
        after: the reading that the text goes on from; words are parted from what stands before.
        stop: strings that end the text wherever tokens cut them. The first to be complete counts; of those complete
            at the same character, the longest.
    """

    def __init__(self, tokenizer: Tokenizer, after: Reading | None = None, stop: Sequence[str] = ()) -> None:
        self._decoder, self._stop, self._held = tokenizer.decoder(), tuple(stop), ""
        for token in after.tokens[-_LONGEST_CHARACTER:] if after else ():
            self._decoder.feed(token)
        self._is_parted = after is not None and after.is_parted
        self.has_stopped = False

    def feed(self, token: int) -> str:
        """The text that is certain now, possibly none."""
        piece = self._decoder.feed(token)
        if self._is_parted:
            piece, self._is_parted = piece.removeprefix(" "), False
        return self._certain(piece, is_last=False)

    def flush(self) -> str:
        """What is still held back, at the end of the tokens."""
        return self._certain(self._decoder.flush(), is_last=True)

    def _certain(self, piece: str, *, is_last: bool) -> str:
        text = self._held + piece
        found = [(start + len(s), start) for s in self._stop if (start := text.find(s)) >= 0]
        if found:
            self.has_stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = 0 if is_last else max(self._possible_stops(text), default=0)
        ready, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return ready

    def _possible_stops(self, text: str) -> Iterator[int]:
        """Lengths of the ends of the text that are beginnings of a stop string."""
        return (n for s in self._stop for n in range(1, len(s)) if text.endswith(s[:n]))


class _Text:
    """One text while it is drawn, without the model."""

    def __init__(self, start: Reading, rules: Rules, seed: int, stop: Sequence[str]) -> None:
        self.chooser = Chooser(rules, seed=seed, tokens=start.tokens, num_given=start.num_given)
        self.tokens: list[int] = []
        self._stream = TextStream(start.bundle.tokenizer, start, stop)
        self._pieces: list[str] = []
        self.reason: FinishReason | None = None if rules.settings.max_new_tokens else "length"

    def take(self, token: int) -> str:
        """The text that a drawn token makes certain; the reason is set once the text has ended."""
        rules = self.chooser.rules
        if token == rules.boundary_id:
            return self.finish("boundary")
        self.chooser.append(token)
        self.tokens.append(token)
        piece = self._stream.feed(token)
        self._pieces.append(piece)
        if self._stream.has_stopped:
            self.reason = "stop"
        elif len(self.tokens) == rules.settings.max_new_tokens:
            piece += self.finish("length")
        return piece

    def finish(self, reason: FinishReason) -> str:
        """The rest of the text, which ends here."""
        piece = self._stream.flush()
        self._pieces.append(piece)
        self.reason = "stop" if self._stream.has_stopped else reason
        return piece

    def uniforms(self, count: int) -> npt.NDArray[np.float64]:
        """What decides the next tokens; greedy ones need nothing."""
        chooser = self.chooser
        if not chooser.rules.settings.temperature:
            return np.zeros(count)
        return np.array([chooser.uniform_at(len(chooser.tokens) + i) for i in range(count)])

    def result(self) -> Generated:
        """The whole, once the text has ended."""
        if self.reason is None:
            raise ElmanError("the text has not ended: read all of its pieces first")
        return Generated("".join(self._pieces), tuple(self.tokens), self.reason, self.chooser.seed)


class Sampler:
    """An iterator over the pieces of one text; :attr:`result` and :attr:`end` are there once it is exhausted.

    Args:
        bundle: the model.
        prompt: how the text begins, or goes on from ``start``; empty: nothing is read.
        start: a place to go on from; none: the beginning, the boundary token alone.
        settings: those of ``sampling`` that concern one text.
        seed: of this text alone. A token is decided by the seed and its position: going on from a saved place with
            the same seed gives the text that would have come without the interruption.
        stop: strings that end the text, wherever the tokens cut them; the first to be complete counts.
        unknown: what to do with characters of the prompt that the model never saw.
        stepper: the form of the model's step, from :func:`elman.engine.stepper`; none: PyTorch's.
        should_stop: polled before every token.
    """

    def __init__(
        self,
        bundle: Bundle,
        prompt: str = "",
        *,
        start: Reading | None = None,
        settings: SamplingConfig | None = None,
        seed: int = 0,
        stop: Sequence[str] = (),
        unknown: Unknown = "error",
        stepper: AnyStepper | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        _refuse_empty(stop)
        self._bundle, self._prompt, self._unknown, self._start = bundle, prompt, unknown, start
        self._stepper: Stepper[Any] = stepper or TorchStepper(bundle.network)
        self._rules = Rules(settings or SamplingConfig(), bundle.tokenizer)
        self._seed, self._stop, self._should_stop = seed, tuple(stop), should_stop
        self.result: Generated | None = None
        self.end: Reading | None = None
        """The place after the last token, to go on from."""

    def __iter__(self) -> Iterator[str]:
        start = (self._start or Reading.start(self._bundle)).read(self._prompt, unknown=self._unknown)
        text = _Text(start, self._rules, self._seed, self._stop)
        if self._rules.settings.num_beams > 1:
            pieces = self._searched(start, text)
        elif isinstance(self._stepper, Engine) and self._rules.drawing is not None:
            pieces = self._drawn_ahead(start, text, self._stepper, self._rules.drawing)
        else:
            pieces = self._drawn(start, text)
        yield from filter(None, pieces)
        self.result = text.result()

    def run(self) -> Generated:
        """Draw the whole text."""
        for _ in self:
            pass
        if self.result is None:
            raise ElmanError("the text ended without a result")
        return self.result

    def _drawn(self, start: Reading, text: _Text) -> Iterator[str]:
        logits_BV: Logits = start.logits_V[None]
        state = self._stepper.take(start.state)
        while text.reason is None:
            if self._should_stop():
                yield text.finish("interrupted")
                break
            (token,) = choose(logits_BV, [text.chooser])
            yield text.take(token)
            if text.reason != "boundary":
                logits_BV, state = self._stepper.step([token], state)
        self.end = start.after(text.tokens, self._stepper.give(state), logits_BV[0])

    def _drawn_ahead(self, start: Reading, text: _Text, engine: Engine, how: Drawing) -> Iterator[str]:
        """The same text, several tokens at a time by compiled code; what it draws beyond the end is forgotten."""
        logits_V: Logits = start.logits_V
        state, size = engine.take(start.state), 1
        while text.reason is None:
            num_before, began = len(text.tokens), perf_counter()
            count = min(size, self._rules.settings.max_new_tokens - num_before)
            num_before_end = text.chooser.num_before_end
            drawn = engine.draw(logits_V, state, how, text.uniforms(count), num_before_end=num_before_end)
            seconds = perf_counter() - began
            for token in drawn.tokens:
                if self._should_stop():
                    yield text.finish("interrupted")
                    break
                yield text.take(token)
                if text.reason is not None:
                    break
            taken = text.tokens[num_before:]
            if len(taken) == len(drawn.tokens) - (drawn.tokens[-1:] == [how.boundary_id]):
                logits_V, state = drawn.logits_V, drawn.state
            elif taken:
                logits_V, state = engine.read(taken, state)
            if text.reason is None and drawn.error is not None:
                raise drawn.error
            size = min(2 * size, _MOST_AT_ONCE) if seconds < _SECONDS_AT_ONCE else max(1, size // 2)
        self.end = start.after(text.tokens, engine.give(state), logits_V)

    def _searched(self, start: Reading, text: _Text) -> Iterator[str]:
        settings, boundary_id = self._rules.settings, self._rules.boundary_id

        def adjust(drawn: Sequence[tuple[int, ...]], log_probs_KV: Floats) -> None:
            for tokens, log_probs_V in zip(drawn, log_probs_KV, strict=True):
                text.chooser.extended(tokens).adjust(log_probs_V)

        best, *_ = beam_search(
            self._stepper,
            self._stepper.take(start.state),
            start.logits_V,
            boundary_id=boundary_id,
            num_beams=settings.num_beams,
            max_new_tokens=settings.max_new_tokens,
            length_penalty=settings.length_penalty,
            adjust=adjust,
            should_stop=self._should_stop,
        )
        for token in best.tokens:
            yield text.take(token)
            if text.reason is not None:
                break
        else:
            if text.reason is None:
                yield text.finish("boundary" if best.finished else "interrupted")
        self.end = start.take(text.tokens)


def generate_batch(
    bundle: Bundle,
    prompts: Sequence[str],
    *,
    seeds: Sequence[int],
    settings: SamplingConfig | None = None,
    stop: Sequence[str] = (),
    unknown: Unknown = "error",
    stepper: AnyStepper | None = None,
) -> list[Generated]:
    """Draw several texts side by side, each as it comes alone, one prompt and one seed for each."""
    settings = settings or SamplingConfig()
    _refuse_empty(stop)
    if settings.num_beams > 1:
        return [
            Sampler(bundle, prompt, settings=settings, seed=seed, stop=stop, unknown=unknown, stepper=stepper).run()
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
    rules, beginning = Rules(settings, bundle.tokenizer), Reading.start(bundle)
    starts = {prompt: beginning.read(prompt, unknown=unknown) for prompt in prompts}
    texts = [_Text(starts[prompt], rules, seed, stop) for prompt, seed in zip(prompts, seeds, strict=True)]
    if not texts or not settings.max_new_tokens:
        return [text.result() for text in texts]
    alive = texts
    logits_BV = np.stack([starts[prompt].logits_V for prompt in prompts])
    form: Stepper[Any] = stepper or TorchStepper(bundle.network)
    state = form.take(State.stack([starts[prompt].state for prompt in prompts]))
    if not starts[prompts[0]].state.tensors:  # nothing carried does not say how many rows carry it
        state = form.initial_state(len(prompts))
    while alive:
        tokens = _chosen(form, rules, logits_BV, [text.chooser for text in alive])
        for text, token in zip(alive, tokens, strict=True):
            text.take(token)
        rows = [row for row, text in enumerate(alive) if text.reason is None]
        alive = [alive[row] for row in rows]
        if alive:
            state = state if len(rows) == len(tokens) else state.select(rows)
            logits_BV, state = form.step([tokens[row] for row in rows], state)
    return [text.result() for text in texts]


def _chosen(form: Stepper[Any], rules: Rules, logits_BV: Logits, choosers: list[Chooser]) -> list[int]:
    """The next token of each row: by compiled code where a text alone is drawn so too."""
    if not isinstance(form, Engine) or rules.drawing is None:
        return choose(logits_BV, choosers)
    uniforms_B = np.array([chooser.uniform for chooser in choosers])
    return draw_rows(logits_BV, rules.drawing, uniforms_B, [not chooser.num_before_end for chooser in choosers])


def _refuse_empty(stop: Sequence[str]) -> None:
    if any(not string for string in stop):
        raise UserError("an empty stop string would end every text at once: leave it out")
