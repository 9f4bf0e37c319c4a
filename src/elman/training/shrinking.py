"""A smaller model from one that is trained: small weights made zero, or an output matrix of low rank.

Shape letters: B rows, T time, F features, V vocabulary, r rank.

Neither trains anything. What they cost is measured on the validation part; a training that starts from what they leave
(``elman train --from``) wins some of it back.
"""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elman.config import EmbeddingConfig
from elman.data.streams import Streams
from elman.errors import ConfigError, ModelFileError, UserError
from elman.evaluation import evaluate_split
from elman.judge import dataset_of_run
from elman.metrics import Score
from elman.models.contract import CountedModel, LanguageModel
from elman.models.file import Bundle, load_model, model_bytes, save_model
from elman.models.heads import LinearHead
from elman.models.kinds import build_model, model_config
from elman.training.folder import Run

_ROWS, _STEPS = 16, 256
_PROBED = 2**16
"""Tokens of the training text that features are looked at for."""


@dataclass(frozen=True)
class Size:
    """How large a model is, and how good."""

    parameters: int
    nonzero: int
    """Parameters that are not zero."""
    bytes: int
    """Of the model file."""
    gzip_bytes: int
    """The same, compressed."""
    nats_per_token: float
    """On the validation part, read as one stream, or document by document where the training did."""
    bits_per_char: float | None


@dataclass(frozen=True)
class Shrunk:
    """What became of a model."""

    before: Size
    after: Size
    tokens: int
    """That it was judged on."""
    path: Path
    """The new model file."""

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        cost = self.after.nats_per_token - self.before.nats_per_token
        return asdict(self) | {"path": str(self.path), "cost_nats_per_token": cost}


def shrink(
    where: str | Path,
    out: str | Path,
    *,
    rank: int | None = None,
    sparsity: float | None = None,
    cell: str | None = None,
) -> Shrunk:
    """Write a smaller model, and say what it costs.

    Args:
        where: the run folder of a model, whose corpus has not changed.
        out: the model file to write.
        rank: of the output matrix (:func:`with_output_of_rank`); none: it stays.
        sparsity: the share of every matrix that becomes zero (:func:`pruned`), after that; none: nothing does.
        cell: a person's own cell, where the model was trained with one.

    Raises:
        ConfigError: nothing is asked for, or what is asked for is not to be had for this model, or ``out`` exists.
        ModelFileError: ``where`` is no run folder.
        UserError: the corpus is gone or has no validation part, or ``out`` cannot be written.
    """
    where, out = Path(where), Path(out)
    if rank is None and sparsity is None:
        raise ConfigError("nothing to do: give --rank, or --sparsity, or both")
    with _writing(out):
        if out.exists():
            raise ConfigError(f"{str(out)!r} exists: give another --out")
        # Before all that takes minutes. No question answers it as surely as a file without a name.
        tempfile.TemporaryFile(dir=next(folder for folder in out.absolute().parents if folder.exists())).close()
    if where.is_file():
        raise ModelFileError(
            f"{str(where)!r} is not a run folder: what a model loses is judged on the validation text of its run; "
            "give the run folder"
        )
    config = Run.open(where).config(cell=cell)
    bundle, dataset = load_model(where, cell=cell), dataset_of_run(where, cell=cell)
    if isinstance(bundle.network, CountedModel):
        raise ConfigError(f"model.kind {config.model.kind!r} has no matrices: count it with a lower model.order")
    if config.data.pairs:
        raise ConfigError(
            "a model of pairs is not judged on a stream of text, by which this command measures: for a smaller one, "
            "train one with a smaller --model.hidden-size and judge it with `elman eval`"
        )
    if (valid := dataset.valid) is None:
        raise ConfigError(f"{str(where)!r} has no validation part to judge on: set data.valid_fraction above 0")
    network, resets = bundle.network, config.data.reset_at_documents
    if rank is not None:
        reset_token = dataset.tokenizer.boundary_id if resets else None
        network = with_output_of_rank(network, rank, *feature_moments(network, dataset.train.tokens, reset_token))
    if sparsity is not None:
        network = pruned(network, sparsity)
    evaluations = [
        evaluate_split(
            one,
            valid,
            bundle.tokenizer,
            state_policy="reset" if resets else "carried",
            num_streams=_ROWS if resets else 1,
        )
        for one in (bundle.network, network)
    ]
    provenance = {"shrunk": {"rank": rank, "sparsity": sparsity}, "valid": evaluations[1].to_dict()}
    shrunk = Bundle(network, bundle.tokenizer, {**bundle.provenance, **provenance})
    before, after = (_size(one, found.score) for one, found in zip((bundle, shrunk), evaluations, strict=True))
    with _writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        save_model(out, shrunk)
    return Shrunk(before, after, len(valid.tokens) - 1, out)


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{str(out)!r} cannot be written ({error.strerror}): give another --out") from None


def pruned(network: LanguageModel, sparsity: float) -> LanguageModel:
    """A copy of a model in which the smallest weights of every matrix are zero.

    Of each parameter with rows and columns, this share, rounded down, of its elements is made zero, those of the least
    magnitude. Biases stay. Papers: Han et al. 2015, https://arxiv.org/abs/1506.02626; on LSTMs: See et al. 2016,
    https://arxiv.org/abs/1606.09274.

    Args:
        network: it is not changed.
        sparsity: from 0 to below 1.
    """
    if not 0 <= sparsity < 1:
        raise ConfigError(f"a sparsity of {sparsity:g}; accepted: a share from 0 to below 1")
    copy = _copied(network)
    for parameter in copy.parameters():
        if parameter.dim() > 1:
            smallest = parameter.data.abs().flatten().argsort(stable=True)[: int(sparsity * parameter.numel())]
            parameter.data.view(-1)[smallest] = 0.0
    return copy


def with_output_of_rank(network: LanguageModel, rank: int, mean_F: Tensor, covariance_FF: Tensor) -> LanguageModel:
    """A copy of a model whose output matrix is a product of two, of this rank.

    Its logits ``W f + b`` become ``A (P f) + c`` with A (V, r) and P (r, F). A constant that all logits of a position
    share changes no probability, so W stands for itself less the mean of its rows. Then A P and c are those with

        least  E (squared length of (W f + b) - (A P f + c))      over features of mean m and covariance S:

        U = the first r left singular vectors of W S^(1/2);   A P = U U^T W;   c = b + (W - A P) m

    What is left of that mean is the sum of the squares of the other singular values (Eckart and Young 1936,
    https://doi.org/10.1007/BF02288367, of the matrix weighted by what it is multiplied with). A and P are
    scaled alike, so that both can be trained on.

    Args:
        network: it is not changed.
        rank: r.
        mean_F: m.
        covariance_FF: S.

    Raises:
        ConfigError: its output is not one plain matrix, or such a product would be no smaller.
    """
    head, config = network.head, network.config
    if type(head) is not LinearHead or not isinstance(config, EmbeddingConfig) or config.tie_weights:
        what = head.what if isinstance(head, LinearHead) else "no plain matrix"
        raise ConfigError(f"only an output of one matrix of its own can be given a low rank, and this one is {what}")
    matrix_VF = head.weight if head.projection is None else head.weight @ head.projection
    vocab_size, feature_size = matrix_VF.shape
    held = sum(parameter.numel() for parameter in (head.weight, head.projection) if parameter is not None)
    most = min((held - 1) // (vocab_size + feature_size), min(vocab_size, feature_size))
    if not most:
        raise ConfigError(f"an output of rank {rank} is no smaller than this one, which is of the lowest rank already")
    if not 1 <= rank <= most:
        raise ConfigError(
            f"an output of rank {rank} is no smaller than this one of {vocab_size:,} x {feature_size:,}; accepted: 1 "
            f"to {most}"
        )
    with torch.no_grad():
        w_VF = matrix_VF.double()
        w_VF = w_VF - w_VF.mean(0)
        values_F, vectors_FF = torch.linalg.eigh(covariance_FF.double())
        root_FF = (vectors_FF * values_F.clamp(min=0).sqrt()) @ vectors_FF.T
        left_VR = torch.linalg.svd(w_VF @ root_FF, full_matrices=False).U[:, :rank]
        kept_RF = left_VR.T @ w_VF
        turned_RR, scale_R, right_RF = torch.linalg.svd(kept_RF, full_matrices=False)
        parts = {
            "head.weight": left_VR @ turned_RR * scale_R.sqrt(),
            "head.projection": scale_R.sqrt().unsqueeze(1) * right_RF,
            "head.bias": head.bias.double() + (w_VF - left_VR @ kept_RF) @ mean_F.double(),
        }
    return _copied(network, config.model_copy(update={"output_projection": rank}), parts)


def feature_moments(network: LanguageModel, tokens: Any, reset_token: int | None = None) -> tuple[Tensor, Tensor]:
    """Mean (F) and covariance (F, F) of what the head reads along a text, in float64.

    Args:
        network: the model.
        tokens: the text, its boundary first; its beginning counts, up to 65,536 tokens.
        reset_token: the boundary, where it resets the state.
    """
    count, total, products = 0, torch.zeros(()).double(), torch.zeros(()).double()
    for x_RF in _features(network, np.asarray(tokens[: _PROBED + 1]), reset_token):
        count += len(x_RF)
        total = total + x_RF.sum(0)
        products = products + x_RF.T @ x_RF
    mean_F = total / count
    return mean_F, products / count - torch.outer(mean_F, mean_F)


@torch.no_grad()
def _features(network: LanguageModel, tokens: Any, reset_token: int | None) -> Iterator[Tensor]:
    """Features of a text in float64, in pieces of positions."""
    num_rows = min(_ROWS, len(tokens) - 1)
    state = network.initial_state(num_rows)
    streams = Streams(tokens, num_rows, _STEPS, reset_token=reset_token)
    for index in range(streams.num_segments):
        segment = streams.segment(index)
        features_BTF, state = network.features(segment.tokens_BT, state, segment.reset_BT)
        yield features_BTF[segment.weight_BT > 0].double()


def _copied(
    network: LanguageModel, config: EmbeddingConfig | None = None, changed: dict[str, Tensor] | None = None
) -> LanguageModel:
    """The same model, of other settings and with other parameters where they are given."""
    settings = (network.config if config is None else config).model_dump()
    copy = build_model(
        model_config(settings), network.vocab_size, seed=None, dtype=network.dtype, boundary_id=network.boundary_id
    )
    theirs = {**dict(network.named_parameters()), **(changed or {})}
    with torch.no_grad():
        for name, parameter in copy.named_parameters():
            parameter.copy_(theirs[name])
    return copy


def _size(bundle: Bundle, score: Score) -> Size:
    data = model_bytes(bundle)
    return Size(
        parameters=bundle.network.num_parameters,
        nonzero=sum(int(parameter.count_nonzero()) for parameter in bundle.network.parameters()),
        bytes=len(data),
        gzip_bytes=len(gzip.compress(data, mtime=0)),
        nats_per_token=score.nats_per_token,
        bits_per_char=score.bits_per_char,
    )
