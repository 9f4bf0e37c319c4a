"""``elman score``."""

from __future__ import annotations

import codecs
import io
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from elman.cli.flags import OwnCell, Switch
from elman.errors import TextError, UserError

if TYPE_CHECKING:
    from elman.models.file import Bundle
    from elman.scoring import LineScore, TextScore, TokenScore
    from elman.text.sources import Piece
    from elman.text.tokenizers import Unknown

_READ_AT_ONCE = 1 << 16
_SECONDS_BETWEEN_LOOKS = 0.2
_MIN_LINES = 100


def score(
    run: str,
    /,
    *text: str,
    by: Literal["line", "token"] | None = None,
    follow: Switch = False,
    threshold: float | None = None,
    quantile: float | None = None,
    marked: Switch = False,
    top: int | None = None,
    rank: Switch = False,
    prompt: Annotated[str, Parameter(allow_leading_hyphen=True)] = "",
    unknown: Literal["error", "skip", "token"] | None = None,
    json: Switch = False,
    cell: OwnCell = None,
) -> None:
    """Say how surprising a text is to a model, and where.

    Args:
        run: A run folder or a model.safetensors.
        text: Files, folders, globs, or '-' for standard input, which is also what is read where none is given.
        by: Print a line for each line, or each token, as it is read; none: one figure and the most surprising places.
        follow: Print as text arrives, and wait for what is written to the end of a file; by line unless --by token.
        threshold: Mark lines with more nats per token than this, or tokens with more nats.
        quantile: Mark those above this quantile of the 10,000 before them, such as 0.99.
        marked: Print the marked ones alone.
        top: How many of the most surprising places to show; none: 10.
        rank: Every line is a text of its own: the most probable first.
        prompt: What stands before each of the texts to rank, given and not scored.
        unknown: What to do with what the model never saw: refuse it, leave it out, or read it as <unk>; none: error
            with --rank, else token.
        json: One JSON object on standard output; with --by or --follow one on each line.
    """
    from elman.models.file import load_model
    from elman.scoring import score_stream
    from elman.translation import is_of_pairs

    if rank and (by or follow or threshold is not None or quantile is not None):
        raise UserError("--rank scores whole texts: leave --by, --follow, --threshold and --quantile out")
    if prompt and not rank:
        raise UserError("--prompt belongs to --rank")
    if marked and threshold is None and quantile is None:
        raise UserError("--marked needs something to mark by: --threshold NATS or --quantile SHARE")
    if top is not None and top < 0:
        raise UserError(f"--top is {top}; accepted: 0 and more")
    bundle = load_model(run, cell=cell)
    if is_of_pairs(bundle):
        raise UserError(f"{run!r} was trained on pairs, of which the source is given: elman eval {run} PAIRS judges it")
    if top is not None and (rank or by or follow or threshold is not None or quantile is not None):
        raise UserError("--top belongs to the summary: leave it out with --by, --follow, --rank and marks")
    pieces = _pieces(bundle, text or ("-",), follow)
    if rank:
        _print_ranking(bundle, pieces, prompt, unknown or "error", json=json)
        return
    tokens = score_stream(bundle, pieces, unknown=unknown or "token")
    if by or follow or threshold is not None or quantile is not None:
        _print_as_read(tokens, by or "line", _Marks(threshold, quantile), only_marked=marked, json=json)
    else:
        _print_summary(tokens, 10 if top is None else top, json=json)


def _pieces(bundle: Bundle, names: tuple[str, ...], follow: bool) -> Iterator[Piece]:
    from elman.config import DataConfig, TextConfig
    from elman.text.corpora import open_corpus

    # Tokens that are bytes show every byte; text of any other kind has a sign for those that are no text.
    errors = "surrogateescape" if bundle.tokenizer.level == "byte" else "replace"
    if names == ("-",):
        return _decoded(_standard_input(), errors)
    if follow:
        if len(names) > 1 or not Path(names[0]).is_file():
            raise UserError(f"--follow reads one file or standard input, not {' '.join(names)!r}")
        return _decoded(_growing_file(Path(names[0])), errors)
    corpus = open_corpus(DataConfig(corpus=names), TextConfig(), raw=bundle.tokenizer.level == "byte")
    return (piece for source in corpus.parts.values() for piece in source.pieces())


def _standard_input() -> Iterator[bytes]:
    """Whatever has arrived, at once; nothing is waited for but the first byte of it."""
    try:
        number = sys.stdin.fileno()
    except (io.UnsupportedOperation, AttributeError):  # another stream has taken its place
        yield sys.stdin.buffer.read()
        return
    while data := os.read(number, _READ_AT_ONCE):
        yield data


def _growing_file(path: Path) -> Iterator[bytes]:
    """A file, and what is written to its end, until the user ends it."""
    with path.open("rb") as file:
        while True:
            if data := file.read(_READ_AT_ONCE):
                yield data
            else:
                time.sleep(_SECONDS_BETWEEN_LOOKS)


def _decoded(chunks: Iterable[bytes], errors: str) -> Iterator[Piece]:
    """UTF-8 with its line ends as one line feed; bytes that are none do not end it, for a log may hold such."""
    from elman.text.sources import Piece

    utf8 = codecs.getincrementaldecoder("utf-8")(errors)
    decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
    for data in chunks:
        if text := decoder.decode(data):
            yield Piece(text, starts_document=False)
    if text := decoder.decode(b"", final=True):
        yield Piece(text, starts_document=False)


class _Marks:
    """Which figures stand out: above a number, or above a quantile of those before."""

    def __init__(self, threshold: float | None, quantile: float | None) -> None:
        from elman.scoring import RunningQuantile

        self._threshold = threshold
        self._quantile = None if quantile is None else RunningQuantile(quantile)
        self._seen = 0

    def __call__(self, nats: float) -> bool:
        above = self._threshold is not None and nats > self._threshold
        if self._quantile is not None:
            # A quantile of a few numbers says nothing yet.
            above = above or (self._seen >= _MIN_LINES and nats > self._quantile.value)
            self._quantile.add(nats)
        self._seen += 1
        return above


def _print_as_read(
    tokens: Iterator[TokenScore],
    by: Literal["line", "token"],
    is_marked: _Marks,
    *,
    only_marked: bool,
    json: bool,
) -> None:
    from elman.cli.output import print_json
    from elman.scoring import by_line
    from elman.visible import clean

    items: Iterable[LineScore | TokenScore] = by_line(tokens) if by == "line" else tokens
    with suppress(KeyboardInterrupt):  # the way to end what never ends
        for item in items:
            figures = _figures(item)
            mark = is_marked(figures["nats_per_token"])
            if only_marked and not mark:
                continue
            if json:
                print_json({**figures, "marked": mark})
            else:
                shown = clean(repr(item.text) if by == "token" else item.text)
                print(f"{'!' if mark else ' '} {figures['nats_per_token']:8.3f}  {shown}")
            sys.stdout.flush()


def _figures(item: LineScore | TokenScore) -> dict[str, Any]:
    from elman.scoring import LineScore

    if isinstance(item, LineScore):
        return {
            "line": item.number,
            "text": item.text,
            "tokens": item.tokens,
            "nats": item.nats,
            "nats_per_token": item.nats_per_token,
            "highest_nats": item.highest,
        }
    return {"position": item.position, "text": item.text, "nats": item.nats, "nats_per_token": item.nats}


def _print_summary(tokens: Iterator[TokenScore], top: int, *, json: bool) -> None:
    from elman.cli.output import figure, print_json, print_table
    from elman.scoring import most_surprising
    from elman.visible import clean

    num_tokens, nats = 0, 0.0

    def counted() -> Iterator[TokenScore]:
        nonlocal num_tokens, nats
        for token in tokens:
            num_tokens, nats = num_tokens + 1, nats + token.nats
            yield token

    places = most_surprising(counted(), top)
    if not num_tokens:
        raise TextError("the text is empty: there is not one token to score")
    per_token = nats / num_tokens
    if json:
        print_json({
            "tokens": num_tokens,
            "nats_total": nats,
            "nats_per_token": per_token,
            "most_surprising": [
                {"position": p.score.position, "nats": p.score.nats, "text": p.score.text, "before": p.before,
                 "after": p.after}
                for p in places
            ],
        })  # fmt: skip
        return
    print(f"{num_tokens:,} tokens, {per_token:.4f} nats ({per_token / math.log(2):.4f} bits) per token")
    if places:
        print_table(
            "the most surprising tokens",
            ["where", "nats", "position"],
            [
                (_visible(clean(p.before[-24:] + "[" + p.score.text + "]" + p.after[:24])), figure(p.score.nats, 2),
                 f"{p.score.position:,}")
                for p in places
            ],
        )  # fmt: skip


def _visible(text: str) -> str:
    return text.replace("\n", "↵").replace("\t", "→")


def _print_ranking(bundle: Bundle, pieces: Iterator[Piece], prompt: str, unknown: Unknown, *, json: bool) -> None:
    from elman.cli.output import figure, print_json, print_table
    from elman.scoring import score_texts
    from elman.visible import clean

    whole = "".join("\n" * piece.starts_document + piece.text for piece in pieces)
    texts = [line for line in whole.split("\n") if line]
    if not texts:
        raise TextError("there is no text to rank: give one on each line")
    ranked: list[TextScore] = sorted(
        score_texts(bundle, texts, prompt=prompt, unknown=unknown), key=lambda found: found.nats
    )
    if json:
        print_json({"prompt": prompt, "ranking": [vars(s) | {"nats_per_token": s.nats_per_token} for s in ranked]})
        return
    print_table(
        "",
        ["text", "nats", "nats/token", "tokens"],
        [(clean(s.text), figure(s.nats, 2), figure(s.nats_per_token, 3), f"{s.tokens:,}") for s in ranked],
    )
