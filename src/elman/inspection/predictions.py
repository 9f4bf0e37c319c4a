"""What a model predicts along a text, by its fast form, as one stream and in bounded memory: any model of the contract.

Shape letters: B rows, T time, F features, V vocabulary, N tokens predicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elman.errors import TextError, UserError
from elman.models.contract import LanguageModel
from elman.models.file import Bundle, load_model
from elman.translation import is_of_pairs

_NUMBERS_AT_ONCE = 1 << 22


class Predicted(NamedTuple):
    """The predictions of some tokens in a row."""

    start: int
    """Position in the text of the first token predicted; the boundary at the start of the text is position 0."""
    log_probs_TV: Tensor
    targets_T: Tensor


def predictions(network: LanguageModel, tokens: NDArray[np.integer[Any]]) -> Iterator[Predicted]:
    """Read tokens, the boundary first, and give the distribution over each next one in pieces."""
    for start, features_BTF, targets_T in _read(network, tokens):
        yield Predicted(start, network.head.log_probs(features_BTF)[0], targets_T)


def surprisals(network: LanguageModel, tokens: NDArray[np.integer[Any]]) -> NDArray[np.float32]:
    """What each token after the first costs, in nats: (N,)."""
    nats = [network.head.nll(features_BTF, targets_T[None])[0] for _, features_BTF, targets_T in _read(network, tokens)]
    return torch.cat(nats).float().cpu().numpy()


def load_plain(where: str | Path, *, cell: str | None = None) -> Bundle:
    """The model in a run folder or file. Raises UserError: it is one of pairs, which reads no plain text."""
    bundle = load_model(where, cell=cell)
    if is_of_pairs(bundle):
        raise UserError(f"{str(where)!r} was trained on pairs: give a model of plain text")
    return bundle


def first_tokens(tokens: NDArray[np.integer[Any]], max_tokens: int) -> NDArray[np.integer[Any]]:
    """The boundary and so many tokens of a text at most."""
    if max_tokens < 1:
        raise UserError(f"{max_tokens} tokens were asked for; accepted: 1 and more")
    return tokens[: max_tokens + 1]


def _read(network: LanguageModel, tokens: NDArray[np.integer[Any]]) -> Iterator[tuple[int, Tensor, Tensor]]:
    if len(tokens) < 2:
        raise TextError("the text is empty: there is not one token to predict")
    state = network.initial_state(1)
    size = max(1, min(1024, _NUMBERS_AT_ONCE // network.vocab_size))
    for start in range(0, len(tokens) - 1, size):
        piece_T = torch.from_numpy(tokens[start : start + size + 1].astype(np.int64)).to(network.device)
        with torch.no_grad():
            features_BTF, state = network.features(piece_T[None, :-1], state)
            yield start + 1, features_BTF, piece_T[1:]
