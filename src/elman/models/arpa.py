r"""ARPA files of back-off n-gram models: written for standard tools, and read as models of Elman.

Tokens stand between spaces, so characters that cannot stand there are escaped: white space, control characters and the
backslash as ``\u0020`` and the like (``\U0001f600`` beyond four digits), and the first character of a word that reads
like one of the names below. Bytes are written as ``\x0a``. The boundary is ``</s>`` where it is predicted and ``<s>``
where it is context; ``<unk>`` is itself. A comment above the tables, ``# elman char``, says that a file is escaped so,
and at which level its tokens are. A file without it is read as it stands: at character level where all tokens are
single characters, else at word level.

Shape letters: N n-grams, K tokens of a context, V vocabulary.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from pydantic import ValidationError

from elman.config import NgramConfig
from elman.errors import ModelFileError, UserError
from elman.files import write_atomically
from elman.models.file import Bundle
from elman.models.kinds import build_model
from elman.models.ngram.model import NgramModel
from elman.models.ngram.tables import Ids, Reals, Tables, assemble
from elman.text.tokenizers import (
    END_OF_LINE,
    MAX_VOCABULARY_SIZE,
    UNKNOWN,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    WordTokenizer,
)

START, END = "<s>", "</s>"

_COMMENT = re.compile(r"#\s*elman (char|byte|word)\s*")
_NEVER = -99.0
"""The logarithm that the format writes for a probability of zero."""
_LN_10 = math.log(10)
_NAMES = (START, END, UNKNOWN, END_OF_LINE)
_LEVELS = ("char", "byte", "word")


def write_arpa(bundle: Bundle, path: str | Path) -> None:
    """Write an n-gram model as an ARPA file; whoever reads it by the rules of back-off gets the same probabilities.

    Raises:
        UserError: the model is no n-gram model, or one that the format cannot hold.
    """
    network, tokenizer = bundle.network, bundle.tokenizer
    if not isinstance(network, NgramModel):
        raise UserError(f"ARPA holds n-gram models; this is model.kind {network.config.kind!r}: take another format")
    if not network.head.backs_off:
        raise UserError(
            "model.smoothing 'add_k' does not back off, so ARPA cannot hold it; accepted: kneser_ney, stupid_backoff"
        )
    if tokenizer.level not in _LEVELS:
        raise UserError(f"ARPA holds tokens that are {', '.join(_LEVELS)}; this tokenizer's level is {tokenizer.level}")
    try:
        write_atomically(Path(path), "".join(_lines(network, tokenizer)).encode())
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be written ({error.strerror or error}): give another") from None


def _lines(network: NgramModel, tokenizer: Tokenizer) -> Iterator[str]:
    names = _written(tokenizer)
    contexts = network.head.tables.context_rows()
    sections = [list(_section(network, names, contexts, order)) for order in range(1, network.config.order + 1)]
    yield f"# elman {tokenizer.level}\n\n\\data\\\n"
    yield from (f"ngram {order}={len(lines)}\n" for order, lines in enumerate(sections, 1))
    for order, lines in enumerate(sections, 1):
        yield f"\n\\{order}-grams:\n"
        yield from lines
    yield "\n\\end\\\n"


def _section(network: NgramModel, names: Sequence[str], contexts: Sequence[Ids], order: int) -> Iterator[str]:
    """A line for every n-gram, with the weight of the context that it is, where it is one."""
    tables, boundary_id = network.head.tables, network.boundary_id
    rows, log_probs = _ngram_rows(tables, contexts, order)
    numbers = tables.paths(rows)[:, -1]
    has_weight = (numbers >= 0) & (rows[:, -1] != boundary_id) & (order < network.config.order)
    weights = np.where(has_weight, tables.log_weights[numbers], 0.0)
    # What ends in a boundary is written twice: as what is predicted, and as the context that it is for what follows.
    starting = contexts[order] if order < len(contexts) else rows[:0]
    is_start = starting[:, -1] == boundary_id
    first = tables.first_of_length[min(order, len(contexts))]
    for row, weight in zip(starting[is_start], tables.log_weights[first:][: len(starting)][is_start], strict=True):
        yield _line(_NEVER * _LN_10, [*_named(names, row[:-1], boundary_id), START], weight)
    if order == 1 and not is_start.any():
        yield _line(_NEVER * _LN_10, [START], None)  # which every tool asks for
    for row, log_prob, weight, is_context in zip(
        rows.tolist(), log_probs.tolist(), weights.tolist(), has_weight.tolist(), strict=True
    ):
        yield _line(log_prob, [*_named(names, row[:-1], boundary_id), names[row[-1]]], weight if is_context else None)


def _ngram_rows(tables: Tables, contexts: Sequence[Ids], order: int) -> tuple[Ids, Reals]:
    """The tokens of all n-grams of an order, (N, order), and their log-probabilities."""
    if order == 1:  # every token, stored or not: other tools do not know what stands below
        return np.arange(tables.vocab_size).reshape(-1, 1), tables.distributions(np.zeros((1, 0), np.int64))[0]
    if order > len(contexts):
        return np.zeros((0, order), np.int64), np.zeros(0)
    first, end = tables.first_of_length[order - 1 : order + 1]
    borders = tables.first_ngram[first : end + 1].astype(np.int64)
    ngrams = slice(borders[0], borders[-1])
    repeated = np.repeat(contexts[order - 1], np.diff(borders), axis=0)
    return np.column_stack([repeated, tables.ngram_tokens[ngrams].astype(np.int64)]), tables.log_probs[ngrams]


def _named(names: Sequence[str], context: Sequence[int] | Ids, boundary_id: int) -> list[str]:
    return [START if token == boundary_id else names[token] for token in context]


def _line(log_prob: float, tokens: Sequence[str], log_weight: float | None) -> str:
    weight = "" if log_weight is None else f"\t{log_weight / _LN_10:.10g}"
    return f"{log_prob / _LN_10:.10g}\t{' '.join(tokens)}{weight}\n"


def _written(tokenizer: Tokenizer) -> list[str]:
    """The tokens of a vocabulary as they are written."""
    if tokenizer.level == "byte":
        return [*(f"\\x{value:02x}" for value in range(256)), END]
    own = {tokenizer.boundary_id: END, tokenizer.unknown_id: UNKNOWN}
    if tokenizer.level == "word":
        own[tokenizer.vocabulary.index(END_OF_LINE)] = END_OF_LINE
    return [own.get(token) or _escaped(text) for token, text in enumerate(tokenizer.vocabulary)]


def _escaped(text: str) -> str:
    escaped = "".join(c if c.isprintable() and c not in " \\" else _code(c) for c in text)
    return _code(text[0]) + escaped[1:] if text in _NAMES else escaped


def _code(character: str) -> str:
    value = ord(character)
    return f"\\u{value:04x}" if value < 0x10000 else f"\\U{value:08x}"


def _unescaped(text: str) -> str:
    return re.sub(
        r"\\u([0-9a-f]{4})|\\U(000[0-9a-f]{5}|0010[0-9a-f]{4})", lambda found: chr(int(found[1] or found[2], 16)), text
    )


@dataclass
class _Section:
    """The n-grams of one order as they stand in a file."""

    order: int
    tokens: array[int] = field(default_factory=lambda: array("q"))
    log_probs: array[float] = field(default_factory=lambda: array("d"))
    log_weights: array[float] = field(default_factory=lambda: array("d"))
    """Not a number where there is none."""
    predicts: array[int] = field(default_factory=lambda: array("b"))
    """0 where the n-gram is there for its weight alone."""

    @property
    def rows(self) -> Ids:
        """The tokens, (N, order)."""
        return np.array(self.tokens, np.int64).reshape(-1, self.order)


def read_arpa(path: str | Path, *, device: torch.device | str = "cpu") -> Bundle:
    """Read an ARPA file, of our own or of another tool.

    The tables are used as they stand: probabilities sum to one as exactly as the file says them. A token of the
    vocabulary that the file does not have, such as ``<unk>``, has a probability of 1e-99. Where a file of words by
    another tool has no ``<eos>``, which ends a line here, its ``</s>`` does, and a text never ends.

    Raises:
        ModelFileError: there is no such file, or it is not what it should be; the line is named.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            level, sections, texts = _Reader(path, file).read()
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{str(path)!r} is not UTF-8: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise ModelFileError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    tokenizer, id_of = _tokenizer(path, level, texts)
    if level is None and isinstance(tokenizer, WordTokenizer) and END_OF_LINE not in texts:
        id_of = _lines_for_sentences(sections, texts, id_of, tokenizer.vocabulary.index(END_OF_LINE))
    try:
        config = NgramConfig(kind="ngram", order=len(sections))
    except ValidationError as error:
        raise ModelFileError(f"{str(path)!r} has n-grams of {len(sections)} tokens; accepted: 1 to 20") from error
    network = build_model(config, tokenizer.size, seed=None, dtype=torch.float64, boundary_id=tokenizer.boundary_id)
    if not isinstance(network, NgramModel):
        raise ModelFileError(f"{str(path)!r} is no n-gram model")
    tables = _tables(path, sections, id_of, tokenizer.size)
    if fault := tables.fault(config.order):
        raise ModelFileError(f"{str(path)!r} is no n-gram model: {fault}")
    network.head.tables = tables
    return Bundle(network.to(device), tokenizer, {"corpus": path.name})


def _lines_for_sentences(sections: Sequence[_Section], texts: Sequence[str], id_of: Ids, line_end: int) -> Ids:
    """Other tools count lines, each a sentence of its own: their ``</s>`` is the end of a line, and a line that follows
    one begins like the first. Changes the sections, and gives the token that each text is now.
    """
    if END not in texts:
        return id_of
    end = texts.index(END)
    for section in sections if START in texts else ():
        rows, starts = section.rows, section.rows[:, 0] == texts.index(START)
        again = rows[starts].copy()
        again[:, 0] = end
        section.tokens.extend(again.ravel().tolist())
        for column in (section.log_probs, section.log_weights, section.predicts):
            column.extend(np.array(column)[starts].tolist())
    return np.where(np.arange(len(texts)) == end, line_end, id_of)


class _Reader:
    """Goes through the lines of a file."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self._path = path
        self._lines = enumerate(file, 1)
        self._number = 0
        self._ids: dict[str, int] = {}

    def _next(self) -> str:
        """The next line that holds something."""
        for number, line in self._lines:
            self._number = number
            if text := line.strip(" \t\r\n"):
                return text
        raise self._fault("it ends before \\end\\")

    def _fault(self, what: str) -> ModelFileError:
        return ModelFileError(f"{str(self._path)!r} is no ARPA file that can be read, line {self._number}: {what}")

    def read(self) -> tuple[str | None, list[_Section], list[str]]:
        """The level that the comment names, the sections by order, and the text of each token that they number."""
        level = None
        while (line := self._next()) != "\\data\\":
            found = _COMMENT.fullmatch(line)
            level = found[1] if found else level
        sizes: list[int] = []
        while found := re.fullmatch(r"ngram\s+(\d{1,9})\s*=\s*(\d{1,18})", line := self._next()):
            if int(found[1]) != len(sizes) + 1:
                raise self._fault(f"the size of order {len(sizes) + 1} belongs here")
            sizes.append(int(found[2]))
        if not sizes:
            raise self._fault("'ngram 1=...' belongs here")
        sections = []
        for order, size in enumerate(sizes, 1):
            if line != f"\\{order}-grams:":
                raise self._fault(f"\\{order}-grams: belongs here")
            section = _Section(order)
            while not (line := self._next()).startswith("\\") or not _is_heading(line):
                self._take(line, section)
            if len(section.log_probs) != size:
                raise self._fault(f"there are {len(section.log_probs)} n-grams of {order} tokens, {size} were said")
            sections.append(section)
        if line != "\\end\\":
            raise self._fault("\\end\\ belongs here")
        return level, sections, list(self._ids)

    def _take(self, line: str, section: _Section) -> None:
        parts = re.split("[ \t]+", line)  # other white space may belong to a token
        if len(parts) not in (section.order + 1, section.order + 2):
            raise self._fault(f"a logarithm, {section.order} tokens and perhaps a second logarithm belong here")
        try:
            log_prob = float(parts[0])
            log_weight = float(parts[-1]) if len(parts) == section.order + 2 else math.nan
        except ValueError:
            raise self._fault(f"{parts[0]!r} or {parts[-1]!r} is no number") from None
        if not (-math.inf < log_prob <= 0 and (math.isnan(log_weight) or math.isfinite(log_weight))):
            raise self._fault("the logarithm of a probability is finite and not above 0, that of a weight is finite")
        last = parts[section.order]
        section.tokens.extend(self._ids.setdefault(text, len(self._ids)) for text in parts[1 : section.order + 1])
        section.log_probs.append(log_prob * _LN_10)
        section.log_weights.append(math.nan if last == END else log_weight * _LN_10)
        section.predicts.append(last != START)


def _is_heading(line: str) -> bool:
    return line == "\\end\\" or re.fullmatch(r"\\\d+-grams:", line) is not None


def _tokenizer(path: Path, level: str | None, texts: Sequence[str]) -> tuple[Tokenizer, Ids]:
    """The tokenizer of a file, and the token that each of its texts is."""
    own = [text for text in texts if text not in (START, END, UNKNOWN)]
    plain = own if level is None else list(map(_unescaped, own))
    if level is None:
        level = "char" if all(len(text) == 1 for text in own) else "word"
    if len(set(plain)) < len(plain) or len(plain) > MAX_VOCABULARY_SIZE:
        raise ModelFileError(f"{str(path)!r} has two names for one token, or more than {MAX_VOCABULARY_SIZE:,} tokens")
    tokenizer: Tokenizer
    if level == "byte":
        tokenizer = ByteTokenizer()
        ids = {name: value for value, name in enumerate(_written(tokenizer)[: tokenizer.boundary_id])}
    elif level == "char":
        tokenizer = CharTokenizer(text for text in plain if len(text) == 1)
        of_plain = {text: token for token, text in enumerate(tokenizer.vocabulary)}
        ids = {text: of_plain[character] for text, character in zip(own, plain, strict=True) if len(character) == 1}
    else:
        tokenizer = WordTokenizer(text for text in plain if text != END_OF_LINE)
        of_plain = {text: token for token, text in enumerate(tokenizer.vocabulary)}
        ids = {text: of_plain[word] for text, word in zip(own, plain, strict=True)}
    ids |= {START: tokenizer.boundary_id, END: tokenizer.boundary_id}
    if tokenizer.unknown_id is not None:
        ids[UNKNOWN] = tokenizer.unknown_id
    try:
        return tokenizer, np.array([ids[text] for text in texts], np.int64)
    except KeyError as error:
        raise ModelFileError(f"{str(path)!r} is at level {level}, which has no token {error.args[0]!r}") from None


def _tables(path: Path, sections: Sequence[_Section], id_of: Ids, vocab_size: int) -> Tables:
    """Put together what was read: a context for everything that has a weight or is followed by something."""
    rows = [id_of[section.rows] for section in sections]
    predicts = [np.array(section.predicts, bool) for section in sections]
    weights = [np.array(section.log_weights) for section in sections]
    # Of each length: the contexts of the n-grams one longer, and what has a weight.
    used = [longer[predicted, :-1] for longer, predicted in zip(rows[1:], predicts[1:], strict=True)]
    weighted = [~np.isnan(weight) for weight in weights[:-1]]
    of_length = zip(used, rows, weighted, strict=False)
    contexts, numbers = _grow(
        [np.concatenate([one, row[has_weight]]) for one, row, has_weight in of_length], vocab_size
    )
    log_weights = [np.full(1, _NEVER * _LN_10 + math.log(vocab_size)), *(np.zeros(len(keys)) for keys in contexts)]
    ngrams, log_probs = [], []
    for order, section in enumerate(sections, 1):
        context = numbers[order - 2][: len(used[order - 2])] if order > 1 else np.zeros(predicts[0].sum(), np.int64)
        if order < len(sections):
            heavy = numbers[order - 1][len(used[order - 1]) :]
            _refuse_repeats(path, order, heavy)
            log_weights[order][heavy] = weights[order - 1][weighted[order - 1]]
        keys = context * vocab_size + rows[order - 1][predicts[order - 1], -1]
        by_key = np.argsort(keys)
        ngrams.append(keys[by_key])
        _refuse_repeats(path, order, ngrams[-1])
        log_probs.append(np.array(section.log_probs)[predicts[order - 1]][by_key])
    return assemble(vocab_size, contexts, ngrams, log_weights, log_probs)


def _grow(rows_of_length: Sequence[Ids], vocab_size: int) -> tuple[list[Ids], list[Ids]]:
    """The contexts that are needed for some contexts and for whatever they end in.

    Args:
        rows_of_length: for lengths 1, 2 and on: contexts (any number, length), the newest token last.
        vocab_size: V.

    Returns:
        For lengths 1, 2 and on: parent * V + oldest token of each context, sorted; and which of these each row is.
    """
    numbers = [np.zeros(len(rows), np.int64) for rows in rows_of_length]
    contexts = []
    for length in range(1, len(rows_of_length) + 1):
        longer = range(length - 1, len(rows_of_length))
        keys = [numbers[i] * vocab_size + rows_of_length[i][:, -length] for i in longer]
        found, number = np.unique(np.concatenate(keys), return_inverse=True)
        contexts.append(found)
        ends = np.cumsum([len(part) for part in keys])[:-1]
        for i, part in zip(longer, np.split(number, ends), strict=True):
            numbers[i] = part
    return contexts, numbers


def _refuse_repeats(path: Path, order: int, keys: Ids) -> None:
    if len(np.unique(keys)) < len(keys):
        raise ModelFileError(f"{str(path)!r} has an n-gram of {order} tokens twice: keep one of them")
