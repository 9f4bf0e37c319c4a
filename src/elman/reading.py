"""A place in a text as a value: what was read, and the model's state and prediction after it.

A reading never changes; reading on gives another. So a text can be branched (go on twice from one reading), rewound
(keep an earlier one), saved and taken up again. Shape letter: V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as arrays_to_bytes

from elman.errors import ModelFileError, TextError
from elman.files import write_atomically
from elman.models.contract import LanguageModel
from elman.models.file import Bundle
from elman.models.state import State
from elman.text.tokenizers import never_seen

Unknown: TypeAlias = Literal["error", "skip"]
Logits: TypeAlias = npt.NDArray[np.floating[Any]]

_PIECE = 1024  # tokens read at once
_FORMAT = 1
_KEY = "elman_reading"


def read_tokens(network: LanguageModel, tokens: list[list[int]], state: State) -> tuple[Logits, State]:
    """Read the same number of tokens in every row: logits (B, V) of the next ones, and the state."""
    with torch.no_grad():
        features_BTF, state = network.features(torch.tensor(tokens, device=network.device), state)
        logits_BV: Logits = network.head.logits(features_BTF[:, -1:])[:, 0].cpu().numpy()
    return logits_BV, state


@dataclass(frozen=True)
class Reading:
    """A text up to some place, as a model has read it."""

    bundle: Bundle = field(repr=False)
    tokens: tuple[int, ...]
    """Everything read after the first boundary."""
    num_given: int
    """How many of these come before the first that was drawn; presence and frequency penalties count those after."""
    state: State = field(repr=False)
    logits_V: Logits = field(repr=False)
    """For the token that comes next, in the model's precision."""
    is_parted: bool = False
    """Whether white space that no token stands for is at the end, as after a prompt for a model of words."""

    @classmethod
    def start(cls, bundle: Bundle) -> Reading:
        """The place before the first token: only the boundary was read."""
        network = bundle.network
        logits_BV, state = read_tokens(network, [[bundle.tokenizer.boundary_id]], network.initial_state(1))
        return cls(bundle, (), 0, state, logits_BV[0])

    @property
    def text(self) -> str:
        """The text of all tokens."""
        return self.bundle.tokenizer.decode(self.tokens)

    def read(self, text: str, *, unknown: Unknown = "error") -> Reading:
        """Read on, any length of text.

        Raises:
            TextError: the text holds what the model never saw, unless ``unknown`` is ``skip``, which leaves it out.
        """
        tokenizer = self.bundle.tokenizer
        if not text:
            return self
        if unknown == "error" and (missing := tokenizer.unknown_characters(text)):
            raise TextError(f"the prompt holds {never_seen(missing)}; take them out, or give --unknown skip")
        tokens = tokenizer.encode(text, unknown="skip").tolist()
        after = self.take(tokens)
        is_parted = tokenizer.level == "word" and text[-1].isspace()
        return replace(after, num_given=len(after.tokens), is_parted=is_parted)

    def take(self, tokens: Sequence[int]) -> Reading:
        """Read tokens on that were drawn from the model."""
        if not tokens:
            return self
        state, logits_V = self.state, self.logits_V
        for start in range(0, len(tokens), _PIECE):
            logits_BV, state = read_tokens(self.bundle.network, [list(tokens[start : start + _PIECE])], state)
            logits_V = logits_BV[0]
        return self.after(tokens, state, logits_V)

    def after(self, tokens: Sequence[int], state: State, logits_V: Logits) -> Reading:
        """The place after drawn tokens that are read already, with the state and logits there."""
        if not tokens:
            return self
        return Reading(self.bundle, (*self.tokens, *tokens), self.num_given, state, logits_V)

    def save(self, path: str | Path) -> None:
        """Write it to a file: state, prediction and tokens as safetensors, with the fingerprint of the model."""
        about = {
            "format": _FORMAT,
            "model": fingerprint(self.bundle),
            "num_given": self.num_given,
            "is_parted": self.is_parted,
        }
        arrays = {
            "state": np.frombuffer(self.state.to_bytes(), np.uint8),
            "logits": self.logits_V,
            "tokens": np.array(self.tokens, np.int64),
        }
        try:
            write_atomically(Path(path), arrays_to_bytes(arrays, metadata={_KEY: json.dumps(about, sort_keys=True)}))
        except OSError as error:
            raise ModelFileError(f"the state file {str(path)!r} cannot be written: {error.strerror}") from None

    @classmethod
    def load(cls, path: str | Path, bundle: Bundle) -> Reading:
        """Read what :meth:`save` wrote, to go on with the same model.

        Raises:
            ModelFileError: the file is missing or damaged, or comes from another model.
        """
        path = Path(path)
        try:
            with safe_open(path, framework="np") as file:
                about = _checked_about(path, file.metadata(), bundle)
                arrays = {name: file.get_tensor(name) for name in ("state", "logits", "tokens")}
        except OSError as error:
            raise ModelFileError(f"the state file {str(path)!r} cannot be read: {error.strerror or error}") from None
        except SafetensorError as error:
            raise ModelFileError(f"{str(path)!r} is not a state file, or damaged: {error}") from None
        network = bundle.network
        state = State.from_bytes(arrays["state"].tobytes(), like=network.initial_state(1))
        start = cls.start(bundle)
        tokens, logits_V = arrays["tokens"], arrays["logits"]
        fits = (
            all(len(tensor) == 1 for tensor in state.tensors.values())
            and all(_are_tokens(tensor, bundle.tokenizer.size) for tensor in state.tensors.values())
            and tokens.dtype == np.int64
            and tokens.ndim == 1
            and (not tokens.size or 0 <= tokens.min() <= tokens.max() < bundle.tokenizer.size)
            and logits_V.dtype == start.logits_V.dtype
            and logits_V.shape == start.logits_V.shape
            and 0 <= about["num_given"] <= tokens.size
        )
        if not fits:
            raise ModelFileError(f"{str(path)!r} is damaged: its parts do not fit the model")
        # Copied: memory that comes from a file has another alignment.
        return cls(bundle, tuple(tokens.tolist()), about["num_given"], state, logits_V.copy(), about["is_parted"])


def is_reading(path: Path) -> bool:
    """Whether a file is one that :meth:`Reading.save` wrote, of any model."""
    try:
        with safe_open(path, framework="np") as file:
            return _KEY in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def _are_tokens(tensor: torch.Tensor, vocab_size: int) -> bool:
    """Whether the integers of a part of a state, which are tokens, are those of a vocabulary."""
    if tensor.is_floating_point() or not tensor.numel():
        return True
    return 0 <= int(tensor.min()) <= int(tensor.max()) < vocab_size


def _checked_about(path: Path, metadata: Mapping[str, str] | None, bundle: Bundle) -> dict[str, Any]:
    """What a state file says of itself, if it is of this model."""
    try:
        about = json.loads((metadata or {})[_KEY])
        known = about["format"] == _FORMAT
        kinds = type(about["num_given"]) is int and type(about["is_parted"]) is bool
    except (KeyError, TypeError, ValueError, RecursionError):
        known = kinds = False
    if not known or not kinds:
        raise ModelFileError(f"{str(path)!r} is not a state file of this version of Elman: save one with --save-state")
    if about["model"] != fingerprint(bundle):
        raise ModelFileError(f"{str(path)!r} is a state of another model: give the model that it was saved from")
    checked: dict[str, Any] = about
    return checked


def fingerprint(bundle: Bundle) -> str:
    """A digest of the weights and the tokenizer, the same wherever the model lies."""
    digest = hashlib.sha256(json.dumps(bundle.tokenizer.to_dict(), sort_keys=True).encode())
    for name, tensor in bundle.network.tensors().items():  # weights, or the tables of a counted model
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]
