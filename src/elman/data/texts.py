"""The text of tokens again, piece by piece in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elman.text.tokenizers import Tokenizer

_TOKENS_AT_ONCE = 1 << 18


def texts_of(tokens: NDArray[np.integer[Any]], tokenizer: Tokenizer) -> Iterator[str | None]:
    """The decoded text of tokens, the boundary first, in pieces, and None at each border between documents."""
    decoder = tokenizer.decoder()
    for start in range(1, len(tokens), _TOKENS_AT_ONCE):
        ids = tokens[start : start + _TOKENS_AT_ONCE]
        for i, document in enumerate(np.split(ids, np.flatnonzero(ids == tokenizer.boundary_id))):
            if i > 0:
                yield decoder.flush()
                yield None
            yield "".join(map(decoder.feed, document[i > 0 :].tolist()))
    yield decoder.flush()


def count_words(texts: Iterable[str | None]) -> int:
    """Words, parted by white space or the border of a document, in a text that comes in pieces cut anywhere."""
    num_words, is_inside = 0, False
    for text in texts:
        if text:
            num_words += len(text.split()) - (is_inside and not text[0].isspace())
            is_inside = not text[-1].isspace()
        elif text is None:
            is_inside = False
    return num_words
