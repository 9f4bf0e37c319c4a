"""What each token of a text cost a model, written out: a line of JSON for each, or the text itself in colours.

Surprisal is ``-ln p(token | all before)``, in nats.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from elman.data.prepare import Split
from elman.errors import UserError
from elman.evaluation import Evaluation, Reals
from elman.files import replacing
from elman.page import Page, Piece, new_figure
from elman.scoring import TokenScore
from elman.text.tokenizers import Tokenizer

MAX_SHOWN = 50_000
"""Tokens on a page: more make a browser slow."""
_TOKENS_AT_ONCE = 2**16
_STRONGEST = 0.99


@dataclass(frozen=True)
class Surprisal:
    """The tokens of a text and the nats of each, in order; they may lie on disk."""

    split: Split
    tokenizer: Tokenizer
    nats: Reals

    def __iter__(self) -> Iterator[TokenScore]:
        """Each token with the text that it adds; empty where it ends inside a character."""
        decoder, boundary = self.tokenizer.decoder(), self.tokenizer.boundary_id
        for start in range(0, len(self.nats), _TOKENS_AT_ONCE):
            tokens = self.split.tokens[1 + start : 1 + start + _TOKENS_AT_ONCE].tolist()
            nats = self.nats[start : start + _TOKENS_AT_ONCE].tolist()
            for position, (token, cost) in enumerate(zip(tokens, nats, strict=True), start):
                ends = token == boundary
                yield TokenScore(position, decoder.flush() if ends else decoder.feed(token), cost, ends)

    def write_jsonl(self, path: Path) -> None:
        """Write ``{"position": 0, "token": 17, "text": "T", "nats": 2.31, "ends_document": false}`` for each token."""
        try:
            with replacing(path) as file:
                for score in self:
                    line = {
                        "position": score.position,
                        "token": int(self.split.tokens[1 + score.position]),
                        "text": score.text,
                        "nats": score.nats,
                        "ends_document": score.ends_document,
                    }
                    file.write(json.dumps(line).encode() + b"\n")
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror}); name another file") from None

    def add_to(self, page: Page) -> None:
        """Add the beginning of the text to a page, the darker the more surprising."""
        shown = self.nats[:MAX_SHOWN]
        strongest = max(float(np.quantile(shown, _STRONGEST)), 1e-9)
        pieces = []
        for score in islice(self, len(shown)):
            text = "\n\n" if score.ends_document else score.text
            pieces.append(Piece(text, score.nats / strongest, f"{score.nats:.2f} nats"))
        whole = len(shown) == len(self.nats)
        what = "The whole text." if whole else f"The first {len(shown):,} of {len(self.nats):,} tokens."
        page.coloured(pieces, "", f"{strongest:.1f} nats and more", f"{what} Rest the pointer on one for its nats.")


def surprisal_page(title: str, evaluation: Evaluation, surprisal: Surprisal) -> Page:
    """One offline page: the figures, how far the model's confidence can be trusted, and the coloured text.

    Args:
        title: names model and text.
        evaluation: the figures.
        surprisal: of the same text.
    """
    score, interval = evaluation.score, evaluation.interval
    page = Page(title, "How surprising each token was to the model, given all before it.")
    page.section("Figures", f"{score.tokens:,} tokens, state {evaluation.state_policy}.")
    page.numbers({
        "nats per token": score.nats_per_token,
        "perplexity": score.perplexity,
        "bits per character": score.bits_per_char,
        "bits per byte": score.bits_per_byte,
    })  # fmt: skip
    if interval is not None:
        page.text(
            f"With {interval.level:.0%} confidence between {interval.low:.4f} and {interval.high:.4f} nats per token "
            f"({interval.num_resamples:,} draws of {interval.num_blocks} contiguous blocks)."
        )
    if accuracy := evaluation.accuracy:
        page.numbers({
            "right at the first guess": f"{accuracy.at_1:.1%}",
            "among the first five": f"{accuracy.at_5:.1%}",
            "expected calibration error": accuracy.expected_calibration_error,
        })  # fmt: skip
        figure, axes = new_figure(height=3.8)
        axes.plot([0, 1], [0, 1], color="#888888", linestyle="--", linewidth=1)
        bins = accuracy.calibration
        axes.plot([b.confidence for b in bins], [b.accuracy for b in bins], marker="o")
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="probability of the first guess", ylabel="share that was right")
        page.figure(figure, "On the dashed line the model is as often right as it says; below it, it is too sure.")
    page.section("The text")
    surprisal.add_to(page)
    return page
