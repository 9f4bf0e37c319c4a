"""Start from another model's weights: tokens are matched by what they stand for, never by number.

Shape letters: B rows, T time, V vocabulary.

Whatever has a row for each token (the embedding, the output and its bias) takes over the rows of tokens that both
vocabularies hold; every other parameter is copied whole. Rows of new tokens are drawn as in a fresh model of the run's
seed. Only their output biases are set, so low that the model still says of old text what it said before: nowhere at the
beginning of the new training text do the new tokens together have more than :data:`NEW_SHARE` of the probability.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from elman.cells import own_kind
from elman.config import TokenizerConfig
from elman.data.prepare import Dataset, prepare, prepared_folder
from elman.errors import ConfigError, ModelFileError
from elman.models.contract import LanguageModel
from elman.models.file import Bundle, load_model, model_path
from elman.models.kinds import model_class
from elman.settings import Config
from elman.text.building import tokenizer_from_dict
from elman.text.tokenizers import Tokenizer

NEW_SHARE = 0.001
"""Of the probability, for all new tokens together: it costs old text 0.001 nats a token at most."""
_PROBED = 1024
"""Tokens of the new training text that the share is held against."""
_LOGITS_AT_ONCE = 2**24
_SHOWN = 20
_BIAS = "head.bias"
_ROUNDS = 4
"""One is enough for a softmax."""

Ids: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class Transfer:
    """What a training has taken over from another model."""

    sha256: str
    """Of the file of that model."""
    corpus: str | None
    """What it was trained on."""
    updates: int | None
    """How long it was trained."""
    num_matched: int
    """Tokens that both vocabularies hold."""
    num_new: int
    """Tokens that only the new one holds."""
    num_dropped: int
    """Tokens that only the old one held."""
    new_tokens: tuple[str, ...]
    """The first of the new ones."""
    copied: tuple[str, ...]
    """Parameters that were copied whole."""
    matched_by_row: tuple[str, ...]
    """Parameters with a row for each token, of which the rows of matched tokens were copied."""
    new_share: float
    """Of the probability, for all new tokens together, on average over the text that was probed."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What :meth:`to_dict` gave, which JSON has made lists of."""
        fields: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in values.items()}
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return asdict(self)

    def summary(self, name: str | None = None) -> str:
        """The report in one line; `name` is the run folder or model file."""
        after = "" if self.updates is None else f" after {self.updates:,} update{'s' * (self.updates != 1)}"
        names = ", ".join(self.matched_by_row)
        named = "" if name is None else f"{name!r}, "
        corpus = self.corpus or "an unnamed text"
        line = (
            f"started from {named}a model of {corpus}{after}: {self.num_matched:,} tokens matched "
            f"by their text, {self.num_new:,} new, {self.num_dropped:,} dropped; {len(self.copied)} parameters copied, "
            f"{len(self.matched_by_row)} row by row{f' ({names})' if names else ''}"
        )
        if self.new_tokens:
            more = " ..." if self.num_new > len(self.new_tokens) else ""
            line += f"; new: {' '.join(map(repr, self.new_tokens))}{more}"
        return line


@dataclass(frozen=True)
class Origin:
    """The model that a run was started from, as far as going on with the run needs it."""

    tokenizer: Tokenizer
    """That of the run, made from the model's."""
    transfer: Transfer

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a file."""
        return {"tokenizer": self.tokenizer.to_dict(), "transfer": self.transfer.to_dict()}

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """What :meth:`to_dict` gave, from a file that may be damaged. Raises ModelFileError if it is."""
        try:
            return cls(tokenizer_from_dict(values["tokenizer"]), Transfer.from_dict(values["transfer"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ModelFileError(f"it is no record of where a run started ({type(error).__name__}: {error})") from None


def prepare_for(config: Config) -> tuple[Dataset, Bundle | None]:
    """The corpus of a run, in the tokens of the model that it starts from, and that model, if there is one.

    At level char and word the model's vocabulary grows by what is new in the training part; byte and bpe tokens are
    those of the model, unless ``tokenizer.path`` names others. A prepared corpus keeps the tokens that it has.
    """
    if config.from_model is None:
        return prepare(config.data, config.text, config.tokenizer), None
    bundle = load_model(config.from_model, cell=own_kind(config.model.kind))
    if prepared_folder(config.data.corpus) is not None:
        return prepare(config.data, config.text, config.tokenizer), bundle
    if config.tokenizer.level in ("char", "word"):
        return prepare(config.data, config.text, config.tokenizer, extends=bundle.tokenizer), bundle
    chosen: Tokenizer | TokenizerConfig = bundle.tokenizer if config.tokenizer.path is None else config.tokenizer
    return prepare(config.data, config.text, chosen), bundle


def take_over(config: Config, bundle: Bundle, network: LanguageModel, dataset: Dataset) -> Origin:
    """Copy into a fresh network whatever another one of the same settings has learned.

    Args:
        config: the settings of the run.
        bundle: the model to start from.
        network: with initial weights, for the vocabulary of ``dataset``.
        dataset: the corpus of the run.
    """
    tokenizer = dataset.tokenizer
    old_ids, new_ids = matched_ids(bundle.tokenizer, tokenizer)
    is_new = np.ones(tokenizer.size, bool)
    is_new[new_ids] = False
    fresh = np.flatnonzero(is_new)
    is_same = bundle.tokenizer.to_dict() == tokenizer.to_dict()
    by_row = () if is_same else parameters_by_token(network)
    if fresh.size and _BIAS not in by_row:
        raise ConfigError(f"model.kind {network.config.kind!r} cannot take new tokens: its output has no bias for each")
    theirs = dict(bundle.network.named_parameters())
    old, new = torch.from_numpy(old_ids).to(network.device), torch.from_numpy(new_ids).to(network.device)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            source = theirs[name].to(parameter)
            if name in by_row:
                parameter[new] = source[old]
            else:
                parameter.copy_(source)
    share = hold_down(network, fresh, dataset.train.tokens[: _PROBED + 1]) if fresh.size else 0.0
    provenance = bundle.provenance
    transfer = Transfer(
        sha256=_sha256(model_path(config.from_model or "")),
        corpus=str(provenance["corpus"]) if "corpus" in provenance else None,
        updates=updates if isinstance(updates := provenance.get("updates"), int) else None,
        num_matched=len(new_ids),
        num_new=len(fresh),
        num_dropped=bundle.tokenizer.size - len(old_ids),
        new_tokens=tuple(tokenizer.vocabulary[i] for i in fresh[:_SHOWN]),
        copied=tuple(name for name, _ in network.named_parameters() if name not in by_row),
        matched_by_row=by_row,
        new_share=share,
    )
    return Origin(tokenizer, transfer)


def matched_ids(old: Tokenizer, new: Tokenizer) -> tuple[Ids, Ids]:
    """The ids of the tokens that two tokenizers share, in the one and in the other."""
    id_of = {entry: i for i, entry in enumerate(_told_apart(old.entries))}
    pairs = [(id_of[entry], i) for i, entry in enumerate(_told_apart(new.entries)) if entry in id_of]
    table = np.array(pairs, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _told_apart(entries: Sequence[bytes | str]) -> Iterator[tuple[bytes | str, int]]:
    """What tokens stand for; where several stand for the same, by their order."""
    seen = Counter[bytes | str]()
    for entry in entries:
        seen[entry] += 1
        yield entry, seen[entry]


def parameters_by_token(network: LanguageModel) -> tuple[str, ...]:
    """The names of the parameters with a row for each token: those that a larger vocabulary makes longer.

    Raises:
        ConfigError: the vocabulary shapes the model in another way too.
    """
    kind = model_class(network.config)
    with torch.device("meta"):  # shapes alone, without memory
        larger = kind(network.config, network.vocab_size + 1, dtype=network.dtype, boundary_id=network.boundary_id)
    found = []
    shapes = {name: tuple(parameter.shape) for name, parameter in larger.named_parameters()}
    for name, parameter in network.named_parameters():
        shape = tuple(parameter.shape)
        if shapes.get(name) == (network.vocab_size + 1, *shape[1:]) and shape[0] == network.vocab_size:
            found.append(name)
        elif shapes.get(name) != shape:
            raise ConfigError(
                f"a model whose output is shaped by the vocabulary ({name}) cannot take other tokens than it has: give "
                "one with model.output linear, or a text of the same tokens"
            )
    return tuple(found)


def hold_down(network: LanguageModel, fresh: Ids, tokens: NDArray[Any]) -> float:
    """Set the output biases of new tokens, all alike, so that nowhere in a text they have more than NEW_SHARE together.

        share_t = sigmoid(b + r_t),  r_t = logsumexp of new logits without b - logsumexp of old logits
        b = log(NEW_SHARE / (1 - NEW_SHARE)) - max_t r_t

    For a mixture of softmaxes, whose share is a mean of such, the last line is repeated with what is still missing.

    Args:
        network: with all else in place.
        fresh: the ids of the new tokens.
        tokens: the text, its boundary first.

    Returns:
        The share that they have now, on average.
    """
    bias = dict(network.named_parameters())[_BIAS]
    num_probed = max(1, min(len(tokens), _LOGITS_AT_ONCE // network.vocab_size))
    tokens_BT = torch.from_numpy(np.asarray(tokens[:num_probed], np.int64)).unsqueeze(0).to(network.device)
    is_new_V = torch.zeros(network.vocab_size, dtype=torch.bool, device=network.device)
    is_new_V[torch.from_numpy(fresh).to(network.device)] = True
    with torch.no_grad():
        features_BTF, _ = network.features(tokens_BT, network.initial_state(1))
        for _ in range(_ROUNDS):
            log_probs_BTV = network.head.log_probs(features_BTF)
            odds_BT = log_probs_BTV[..., is_new_V].logsumexp(-1) - log_probs_BTV[..., ~is_new_V].logsumexp(-1)
            bias[is_new_V] += math.log(NEW_SHARE / (1 - NEW_SHARE)) - odds_BT.max().item()
        return network.head.log_probs(features_BTF)[..., is_new_V].exp().sum(-1).mean().item()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
