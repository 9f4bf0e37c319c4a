"""Which earlier tokens a prediction rests on, and how far back a model remembers at all.

Shape letters: B rows (places, or variants of one), T time (tokens of a context), E embedding, V vocabulary.

Three answers for each token x_i of a context, in nats of ln p(target | context); above 0 the token speaks for it:

- gradient x input: the embedding of x_i times the derivative by it, the first-order guess of what it adds;
- integrated gradients (Sundararajan et al. 2017, https://arxiv.org/abs/1703.01365): the same derivative, averaged on
  the straight way from a context of mean embeddings to this one; the sum over tokens is what the whole context adds;
- deletion: what ln p loses when x_i is left out. It is measured and not estimated, for every kind of model.

The memory horizon asks how far back anything matters: all that stands more than d tokens back is exchanged for another
text, and the divergence of the two predictions is what is lost by not knowing it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy import integer
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from elman.config import EmbeddingConfig, Seq2SeqConfig
from elman.errors import TextError, UserError
from elman.inspection.gradients import finite
from elman.inspection.watching import Places, places
from elman.judge import SplitName, find_subject
from elman.models.contract import LanguageModel
from elman.models.file import load_model
from elman.models.state import State
from elman.text.tokenizers import Tokenizer, never_seen
from elman.translation import is_of_pairs

Ids: TypeAlias = NDArray[integer[Any]]

METHODS = {
    "gradient": "gradient x input",
    "integrated": "integrated gradients",
    "deletion": "deletion",
}
LENGTH, NUM_PLACES, THRESHOLD, MAX_DISTANCE = 100, 8, 0.01, 400
_NUM_HORIZON_PLACES = 32
_LEAST_NODES, _MOST_NODES = 16, 256
_TOLERANCE = 1e-3
"""What the sum of integrated gradients may miss, in nats and relative to the sum, before more points are taken."""
_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class Attribution:
    """What each token of one context adds to ln p(target), in nats, the oldest first."""

    position: int
    """Of the target in the text."""
    tokens: tuple[str, ...]
    target: str
    nats: float
    """What the target cost."""
    gradient: tuple[float, ...] | None
    """Gradient x input; none for a model without embeddings."""
    integrated: tuple[float, ...] | None
    gap: float | None
    """By how many nats the sum of the integrated gradients differs from what the context adds."""
    deletion: tuple[float, ...]


@dataclass(frozen=True)
class Horizon:
    """How much the prediction changes when all that stands further back is exchanged for another text."""

    threshold: float
    """In nats."""
    distances: tuple[int, ...]
    """Tokens that stay."""
    mean: tuple[float, ...]
    """Kullback-Leibler divergence of the two predictions in nats, mean over places."""
    high: tuple[float, ...]
    """That which nine places of ten stay below."""
    tokens: int | None
    """The distance from which on the mean stays below the threshold; none where it never does."""


@dataclass(frozen=True)
class Saliency:
    """What predictions rest on."""

    kind: str
    corpus: str
    split: str
    attributions: tuple[Attribution, ...]
    horizon: Horizon | None
    """None for a single context."""
    notices: tuple[str, ...] = ()
    """What a reader of the figures should know about the text."""

    def by_distance(self, method: str) -> tuple[float, ...]:
        """Mean size of what the token at each distance adds, from distance 1, by one of ``METHODS``.

        Empty where the model has no such figures.
        """
        rows = [row for row in (asdict(one)[method] for one in self.attributions) if row is not None]
        return tuple(np.abs(np.array(rows)).mean(0)[::-1].tolist()) if rows else ()

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        by_distance = {name: self.by_distance(name) for name in METHODS}
        return finite(asdict(self) | {"by_distance": by_distance})


def inspect_saliency(
    where: str | Path,
    text: str | Path | Sequence[str | Path] | None = None,
    *,
    prompt: str | None = None,
    split: SplitName | None = None,
    length: int = LENGTH,
    num_places: int = NUM_PLACES,
    threshold: float = THRESHOLD,
    max_distance: int = MAX_DISTANCE,
    cell: str | None = None,
) -> Saliency:
    """Ask what the predictions of a model rest on.

    Args:
        where: a run folder or a model file.
        text: files, a folder, a glob, ``-``, or the name of a corpus; none: the corpus of the run.
        prompt: look at the most probable continuation of this text, and at nothing else.
        split: which part; none: the test part, else the validation part.
        length: tokens of a context that are looked at one by one.
        num_places: contexts, spread over the text.
        threshold: nats below which a change of the prediction counts as none.
        max_distance: how far back the horizon is looked for.
        cell: a person's own cell, where the model was trained with one.

    Raises:
        UserError: the model is one of pairs, or there is no such text, or it is too short.
    """
    bundle = load_model(where, cell=cell)
    network, tokenizer = bundle.network, bundle.tokenizer
    if is_of_pairs(bundle) or isinstance(network.config, Seq2SeqConfig):
        raise UserError("saliency reads running text, and this model was trained on pairs: give a model of one text")
    if length < 2 or num_places < 1 or max_distance < 1 or not 0 <= threshold < math.inf:
        raise UserError("--length is 2 and more, --places and --max-distance 1 and more, --threshold 0 and more")
    if prompt is not None:
        if text is not None or split is not None:
            raise UserError("--prompt is the whole text: leave TEXT and --split out")
        chosen = _prompted(network, tokenizer, prompt, length)
        return Saliency(network.config.kind, "the prompt", "text", attributions(network, tokenizer, chosen), None)
    subject = find_subject(where, bundle, text, split=split, cell=cell)
    tokens = subject.tokens.tokens
    chosen = places(network, tokens, num_places, length)
    return Saliency(
        kind=network.config.kind,
        corpus=subject.corpus,
        split=subject.split,
        attributions=attributions(network, tokenizer, chosen),
        horizon=memory_horizon(network, tokens, threshold=threshold, max_distance=max_distance),
        notices=subject.notices,
    )


def _prompted(network: LanguageModel, tokenizer: Tokenizer, prompt: str, length: int) -> Places:
    """The end of a prompt, with the most probable next token for a target."""
    if not prompt:
        raise TextError("the prompt is empty: there is nothing that a prediction could rest on")
    if missing := tokenizer.unknown_characters(prompt):
        raise TextError(f"the prompt holds {never_seen(missing)}: take them out")
    tokens = np.concatenate([[tokenizer.boundary_id], tokenizer.encode(prompt)])
    length = min(length, len(tokens))
    before_BT = torch.from_numpy(tokens[None, :-length]).to(network.device)
    tokens_BT = torch.from_numpy(tokens[None, -length:]).to(network.device)
    state = network.initial_state(1)
    with torch.no_grad():
        if before_BT.shape[1]:
            _, state = network.features(before_BT, state)
        features_BTF, _ = network.features(tokens_BT, state)
        target_B = network.head.logits(features_BTF[:, -1:])[:, 0].argmax(-1)
    return Places((len(tokens) - length,), tokens_BT, target_B, state)


def attributions(network: LanguageModel, tokenizer: Tokenizer, chosen: Places) -> tuple[Attribution, ...]:
    """What each token of each place adds to the target."""
    has_embedding = isinstance(network.config, EmbeddingConfig)
    found = []
    for row, start in enumerate(chosen.starts):
        place = chosen.select([row])
        read = place.tokens_BT[0].tolist()
        integrated, gap = integrated_gradients(network, place) if has_embedding else (None, None)
        gradient = gradient_x_input(network, place) if has_embedding else None
        found.append(
            Attribution(
                position=start + len(read),
                tokens=tuple(tokenizer.decode([token]) for token in read),
                target=tokenizer.decode(place.targets_B.tolist()),
                nats=_nats_of_place(network, place),
                gradient=None if gradient is None else tuple(gradient.tolist()),
                integrated=None if integrated is None else tuple(integrated.tolist()),
                gap=gap,
                deletion=tuple(deletion(network, place).tolist()),
            )
        )
    return tuple(found)


def _nats_of_place(network: LanguageModel, place: Places) -> float:
    with torch.no_grad():
        features_BTF, _ = network.features(place.tokens_BT, place.state)
        return network.head.nll(features_BTF[:, -1:], place.targets_B.unsqueeze(1)).item()


class _Features(nn.Module):
    """Reading as a module, so that the embedding can be handed in."""

    def __init__(self, network: LanguageModel) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens_BT: Tensor, state: State) -> Tensor:
        return self.network.features(tokens_BT, state)[0]


def _log_prob_of_vectors(network: LanguageModel, place: Places, x_BTE: Tensor) -> Tensor:
    """ln p(target) of contexts that are given as vectors, (B,).

    The network looks tokens up in its embedding: it is lent a larger one, with a row for every vector behind its own.
    """
    rows, length, _ = x_BTE.shape
    embedding_VE = network.get_parameter("embedding").detach()
    ids_BT = len(embedding_VE) + torch.arange(rows * length, device=x_BTE.device).view(rows, length)
    lent = {"network.embedding": torch.cat([embedding_VE, x_BTE.flatten(0, 1)])}
    state = place.state.select([0] * rows)
    features_BTF: Tensor = functional_call(_Features(network), lent, (ids_BT, state))
    return -network.head.nll(features_BTF[:, -1:], place.targets_B.expand(rows).unsqueeze(1))[:, 0]


def gradient_x_input(network: LanguageModel, place: Places) -> Tensor:
    """Embedding times derivative of ln p(target), (T,), of one place."""
    x_BTE = network.get_parameter("embedding").detach()[place.tokens_BT].requires_grad_()
    (gradient_BTE,) = torch.autograd.grad(_log_prob_of_vectors(network, place, x_BTE).sum(), x_BTE)
    return (gradient_BTE * x_BTE).sum(-1)[0].detach()


def integrated_gradients(network: LanguageModel, place: Places) -> tuple[Tensor, float]:
    """Integrated gradients of ln p(target) from the mean embedding, (T,), of one place.

    Returns:
        What each token adds, and by how much their sum misses what the context adds. Gauss-Legendre points are doubled
        until that is little.
    """
    embedding_VE = network.get_parameter("embedding").detach()
    x_TE = embedding_VE[place.tokens_BT[0]]
    base_TE = embedding_VE.mean(0).expand_as(x_TE)
    with torch.no_grad():
        at_base, at_x = _log_prob_of_vectors(network, place, torch.stack([base_TE, x_TE])).tolist()
    num_nodes = _LEAST_NODES
    while True:
        nodes, weights = np.polynomial.legendre.leggauss(num_nodes)
        mean_TE = torch.zeros_like(x_TE)
        for some in np.array_split(np.arange(num_nodes), -(-num_nodes // _ROWS_AT_ONCE)):
            share_B11 = x_TE.new_tensor((nodes[some] + 1) / 2).view(-1, 1, 1)
            way_BTE = (base_TE + share_B11 * (x_TE - base_TE)).requires_grad_()
            (gradient_BTE,) = torch.autograd.grad(_log_prob_of_vectors(network, place, way_BTE).sum(), way_BTE)
            mean_TE += torch.einsum("b,bte->te", x_TE.new_tensor(weights[some] / 2), gradient_BTE)
        added_T = ((x_TE - base_TE) * mean_TE).sum(-1)
        gap = added_T.sum().item() - (at_x - at_base)
        if abs(gap) <= _TOLERANCE * max(1.0, abs(at_x - at_base)) or num_nodes >= _MOST_NODES:
            return added_T, gap
        num_nodes *= 2


def deletion(network: LanguageModel, place: Places) -> Tensor:
    """What ln p(target) loses when each token of one place is left out, (T,): exact, and 0 where nothing changes."""
    tokens_T = place.tokens_BT[0]
    length = len(tokens_T)
    if length < 2:
        raise TextError("a context of one token has nothing to leave out: give a longer one")
    with torch.no_grad():
        # Read so that all variants are of one length: the whole context from the state after its first token.
        _, after_first = network.features(tokens_T[None, :1], place.state)
        kept = [torch.cat([tokens_T[:index], tokens_T[index + 1 :]]) for index in range(length)]
        rows_BT, states = torch.stack([tokens_T[1:], *kept]), [after_first, *[place.state] * length]
        log_probs, ends = [], []
        for some in torch.arange(length + 1).split(_ROWS_AT_ONCE):
            start = State.stack([states[index] for index in some.tolist()])
            features_BTF, end = network.features(rows_BT[some], start)
            targets_BT = place.targets_B.expand(len(some)).unsqueeze(1)
            log_probs.append(-network.head.nll(features_BTF[:, -1:], targets_BT)[:, 0])
            ends.append(end)
        log_probs_B = torch.cat(log_probs)
        lost_T = log_probs_B[0] - log_probs_B[1:]
        return lost_T.masked_fill(_same_tokens(State.stack(ends), [0] * length, range(1, length + 1)), 0.0)


def _same_tokens(state: State, some: Sequence[int], others: Sequence[int]) -> Tensor:
    """Whether rows of a state are the last tokens and nothing else, and equal: then the predictions are the same.

    Whatever the rounding of a product of matrices makes of one row and the other.
    """
    same = torch.ones(len(some), dtype=torch.bool)
    for tensor in state.tensors.values():
        if tensor.is_floating_point():
            return torch.zeros_like(same)
        same &= (tensor[list(some)] == tensor[list(others)]).flatten(1).all(1).cpu()
    return same


def memory_horizon(
    network: LanguageModel,
    tokens: Ids,
    *,
    threshold: float = THRESHOLD,
    max_distance: int = MAX_DISTANCE,
    num_places: int = _NUM_HORIZON_PLACES,
) -> Horizon:
    """Exchange what stands further back than some distance, for growing distances.

    At each place of a text the state of so many tokens before is exchanged for that of another place; the last tokens
    are read from there. What the past before them is worth is the divergence KL(p || p') of the predictions.

    Args:
        network: of any kind.
        tokens: a text, its boundary first.
        threshold: in nats.
        max_distance: tokens.
        num_places: of the text, two or more.
    """
    chosen = places(network, tokens, num_places, max_distance)
    count = len(chosen.starts)
    if count < 2:
        raise TextError(
            f"the text has {len(tokens)} tokens, too few for two places {max_distance} tokens long: give more"
        )
    others = [(row + count // 2) % count for row in range(count)]
    distances = _distances(max_distance)
    states, state, position = {}, chosen.state, 0
    with torch.no_grad():
        for distance in reversed(distances):
            end = max_distance - distance
            if end > position:
                _, state = network.features(chosen.tokens_BT[:, position:end], state)
            states[distance], position = state, end
        means, highs = [], []
        for distance in distances:
            last_BT = chosen.tokens_BT[:, -distance:]
            both = State.stack([states[distance], states[distance].select(others)])
            features_BTF, after = network.features(last_BT.repeat(2, 1), both)
            log_probs_BV = network.head.log_probs(features_BTF[:, -1:])[:, 0].double()
            here_BV, there_BV = log_probs_BV.chunk(2)
            terms_BV = here_BV.exp() * (here_BV - there_BV)
            lost_B = terms_BV.masked_fill(here_BV.isneginf(), 0.0).sum(-1).clamp(min=0.0)
            same_B = _same_tokens(after, range(count), range(count, 2 * count))
            lost_B = lost_B.masked_fill(same_B.to(lost_B.device), 0.0)
            means.append(lost_B.mean().item())
            highs.append(lost_B.quantile(0.9).item())
    beyond = [index for index, mean in enumerate(means) if mean > threshold]
    first = beyond[-1] + 1 if beyond else 0
    tokens_back = distances[first] if first < len(distances) else None
    return Horizon(threshold, tuple(distances), tuple(means), tuple(highs), tokens_back)


def _distances(longest: int) -> list[int]:
    """Every distance at first, then ever wider ones."""
    found = [1]
    while found[-1] < longest:
        found.append(min(longest, max(found[-1] + 1, round(found[-1] * 1.2))))
    return found
