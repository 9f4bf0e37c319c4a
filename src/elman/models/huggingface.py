"""Causal language models of Hugging Face's ``transformers``, read from a folder, to be judged like any other.

Nothing is downloaded, no code in the folder is run, and weights are read from safetensors alone. Numbers are float32,
whatever the file holds.

Shape letters: B rows, T time, F features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from elman.errors import MissingExtraError, ModelFileError, UserError
from elman.models.contract import Head
from elman.models.state import State
from elman.text.bpe import BPETokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CONFIG, _TOKENIZER = "config.json", "tokenizer.json"
_DEFAULT_CONTEXT = 1024
_PROBED_TOKENS = 8


def is_huggingface(where: str | Path) -> bool:
    """Whether this is a folder of ``transformers``: it holds a ``config.json``, and no run has written it."""
    folder = Path(where)
    return (folder / _CONFIG).is_file() and not (folder / "run.toml").exists()


class HuggingFaceModel:
    """A causal language model behind the face that evaluation asks for (:class:`elman.evaluation.Readable`).

    Its state is the tokens read so far, (B, n), int64: the context is read anew with each call. Read in windows, as a
    limited context asks for anyway, nothing is read twice.

    Args:
        model: in evaluation mode.
        context_size: how many tokens it can read; none: any number.
    """

    dtype = torch.float32

    def __init__(self, model: PreTrainedModel, context_size: int | None) -> None:
        self._model = model
        self.context_size = context_size
        self.vocab_size = _vocab_size(model)
        self._body, self.head = _body_and_head(model)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._model.device

    @property
    def default_window(self) -> int:
        """Tokens read at once where nothing else is asked for: the context, 1024 at most."""
        return min(self.context_size or _DEFAULT_CONTEXT, _DEFAULT_CONTEXT)

    def initial_state(self, batch_size: int) -> State:
        """Nothing has been read."""
        return State({"tokens": torch.zeros((batch_size, 0), dtype=torch.int64, device=self.device)})

    def features(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        """Read tokens: what the head needs for each next token, and the state after the last.

        Raises:
            UserError: the context is full.
        """
        read_BT = torch.cat([state.tensors["tokens"], tokens_BT], dim=1)
        if self.context_size is not None and read_BT.shape[1] > self.context_size:
            raise UserError(
                f"this model reads {self.context_size} tokens at most, and {read_BT.shape[1]} were given: "
                f"read in windows, --window {self.context_size} or less"
            )
        return self._body(read_BT)[:, -tokens_BT.shape[1] :], State({"tokens": read_BT})


def _vocab_size(model: PreTrainedModel) -> int:
    return len(cast(Tensor, model.get_input_embeddings().weight))


class _Whole(Head):
    """Where the features are the logits already."""

    def logits(self, features_BTF: Tensor) -> Tensor:
        return features_BTF


class _Output(Head):
    """The model's own output layer."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def logits(self, features_BTF: Tensor) -> Tensor:
        logits: Tensor = self.layer(features_BTF)
        return logits


def _body_and_head(model: PreTrainedModel) -> tuple[Any, Head]:
    """A function from tokens to features, and the head that reads them.

    Logits of a long text and a large vocabulary would fill the memory, so they are computed piece by piece from the
    last hidden state. Some models do more to their logits than their output layer says; whether this one does is tried.
    """

    def logits(tokens_BT: Tensor) -> Tensor:
        found: Tensor = model(input_ids=tokens_BT, use_cache=False).logits
        return found

    def hidden(tokens_BT: Tensor) -> Tensor:
        found: Tensor = model.base_model(input_ids=tokens_BT, use_cache=False)[0]
        return found

    layer = model.get_output_embeddings()
    if model.base_model is not model and isinstance(layer, torch.nn.Linear):
        probe_BT = torch.arange(_PROBED_TOKENS, device=model.device)[None] % _vocab_size(model)
        with torch.no_grad():
            expected_BTV, hidden_BTF = logits(probe_BT), hidden(probe_BT)
            if hidden_BTF.shape[-1] == layer.in_features and torch.allclose(layer(hidden_BTF), expected_BTV):
                return hidden, _Output(layer)
    return logits, _Whole()


def load_huggingface(where: str | Path, *, device: torch.device | str = "cpu") -> tuple[HuggingFaceModel, BPETokenizer]:
    """Read a model and its tokenizer from a folder that ``save_pretrained`` wrote.

    Raises:
        ModelFileError: something is missing, damaged, of another kind, or would have to run code of the folder.
    """
    folder = Path(where)
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise MissingExtraError("transformers", "hf", f"reading {str(where)!r}") from None
    if not (folder / _TOKENIZER).is_file():
        raise ModelFileError(f"{str(where)!r} holds no {_TOKENIZER}: save the tokenizer of the model beside it")
    how: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        # Weights that a file lacks would be drawn at random, from PyTorch's own generator.
        with _quiet(), torch.random.fork_rng(devices=[]):
            config = AutoConfig.from_pretrained(folder, **how)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **how
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise ModelFileError(f"{str(where)!r} is no causal language model that can be read here: {reason}") from None
    model, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise ModelFileError(f"{str(where)!r} lacks weights of its own architecture: {', '.join(missing[:3])}")
    model.eval()
    # The name that most configurations have, be it under another one inside.
    context_size = getattr(config, "max_position_embeddings", None)
    network = HuggingFaceModel(model.to(device), context_size if isinstance(context_size, int) else None)
    try:
        serialized = (folder / _TOKENIZER).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{str(folder / _TOKENIZER)!r} cannot be read: {error}") from None
    tokenizer = BPETokenizer(serialized)
    for token in (config.bos_token_id, config.eos_token_id, tokenizer.boundary_id):
        if isinstance(token, int) and 0 <= token < network.vocab_size:
            tokenizer.boundary_id = token  # what this model was trained to see before a text
            return network, tokenizer
    raise ModelFileError(
        f"{str(where)!r} names no token that stands before a text: give its {_CONFIG} a bos_token_id or eos_token_id"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's warnings and progress bars, which would stand between results."""
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()
