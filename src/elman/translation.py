"""Sequence to sequence: write the target of a source, greedily or by beam search, and count how often it is right.

Shape letters: B rows, T time, V vocabulary, N examples. Works on any language model that was trained on pairs: a source
is read between two boundaries, and what follows the second one, up to the next, is the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elman.beam import beam_search
from elman.data.pairs import Ids, Pairs
from elman.data.streams import share_of
from elman.engine import AnyStepper, Stepper, TorchStepper, stepper
from elman.errors import ElmanError, TextError, UserError
from elman.evaluation import ALONE, Interrupted, Team
from elman.models.contract import LanguageModel
from elman.models.file import Bundle
from elman.models.state import State
from elman.text.tokenizers import Tokenizer, Unknown, never_seen

_ROWS_AT_ONCE = 64
_MOST_BUCKETS = 10


@dataclass(frozen=True)
class Translation:
    """A target that was written."""

    text: str
    tokens: tuple[int, ...]
    """Without the boundary."""
    nats: float
    """-ln p of the tokens given the source, and of the boundary where it ended them."""
    finished: bool
    """Whether the boundary ended it; otherwise the length did."""


def is_of_pairs(bundle: Bundle) -> bool:
    """Whether a model was trained on pairs."""
    return isinstance(bundle.provenance.get("pairs"), dict)


def reverses_source(bundle: Bundle) -> bool:
    """Whether a model of pairs reads the tokens of a source in reverse order.

    Raises:
        UserError: the model was not trained on pairs.
    """
    how = bundle.provenance.get("pairs")
    if not isinstance(how, dict):
        raise UserError("this model was not trained on pairs of source and target: train one with data.pairs true")
    return how.get("reverse_source") is True


def translate(
    bundle: Bundle,
    sources: Sequence[str],
    *,
    num_beams: int = 1,
    max_new_tokens: int = 300,
    length_penalty: float = 1.0,
    unknown: Unknown = "error",
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Translation]:
    """Write the target of each source.

    Args:
        bundle: a model that was trained on pairs.
        sources: as the sources of the training.
        num_beams: 1 takes the most probable token at each step; more follow so many texts (:mod:`elman.beam`).
        max_new_tokens: tokens of a target at most.
        length_penalty: of beam search, which ranks texts of n tokens by log p / n^length_penalty.
        unknown: what to do with what the vocabulary lacks: refuse it, leave it out, or read it as ``<unk>``.
        should_stop: polled between batches.

    Raises:
        UserError: the model was not trained on pairs, or a number is out of its range.
        TextError: a source is empty or holds what the vocabulary lacks.
        Interrupted: ``should_stop()`` was true.
    """
    reverse_source, tokenizer = reverses_source(bundle), bundle.tokenizer
    _need_beams(num_beams)
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {max_new_tokens}; accepted: 1 and more")
    encoded = []
    for number, source in enumerate(sources, 1):
        if unknown == "error" and (missing := tokenizer.unknown_characters(source)):
            raise TextError(
                f"source {number} holds {never_seen(missing)}; take "
                "them out, or give --unknown skip, or token to read them as <unk>"
            )
        encoded.append(tokenizer.encode(source, unknown="skip" if unknown == "error" else unknown))
        if not encoded[-1].size:
            raise TextError(f"source {number} is empty: there is nothing to translate")
    found: dict[int, Translation] = {}
    form = stepper(bundle.network) if encoded else None
    # Sources of like length share a batch, so that little of it is padding.
    order = sorted(range(len(encoded)), key=lambda index: len(encoded[index]))
    for start in range(0, len(order), _ROWS_AT_ONCE):
        if should_stop():
            raise Interrupted
        rows = order[start : start + _ROWS_AT_ONCE]
        written = write_targets(
            bundle.network,
            tokenizer,
            [encoded[row] for row in rows],
            reverse_source=reverse_source,
            num_beams=num_beams,
            max_new_tokens=max_new_tokens,
            length_penalty=length_penalty,
            form=form,
        )
        found |= zip(rows, written, strict=True)
    return [found[index] for index in range(len(encoded))]


def _need_beams(num_beams: int) -> None:
    if num_beams < 1:
        raise UserError(f"num_beams is {num_beams}; accepted: 1 (greedy) and more")


@torch.no_grad()
def write_targets(
    network: LanguageModel,
    tokenizer: Tokenizer,
    sources: Sequence[Ids],
    *,
    reverse_source: bool,
    num_beams: int = 1,
    max_new_tokens: int = 300,
    length_penalty: float = 1.0,
    form: AnyStepper | None = None,
) -> list[Translation]:
    """Write the target of each source, all in one batch; sources are tokens in the order of the text.

    ``form`` is that of a step, from :func:`elman.engine.stepper`; none: PyTorch's.
    """
    logits_BV, state = _read(network, tokenizer.boundary_id, [s[::-1] if reverse_source else s for s in sources])
    never = [] if tokenizer.unknown_id is None else [tokenizer.unknown_id]  # it stands for no text
    step: Stepper[Any] = form or TorchStepper(network)
    if num_beams == 1:
        return _greedy(step, tokenizer, logits_BV, step.take(state), never, max_new_tokens)

    def adjust(_: Sequence[tuple[int, ...]], log_probs_KV: NDArray[np.float64]) -> None:
        log_probs_KV[:, never] = -math.inf

    written = []
    for row, logits_V in enumerate(logits_BV):
        best = beam_search(
            step,
            step.take(state.select([row])),
            logits_V,
            boundary_id=tokenizer.boundary_id,
            num_beams=num_beams,
            max_new_tokens=max_new_tokens,
            length_penalty=length_penalty,
            adjust=adjust,
        )[0]
        written.append(Translation(tokenizer.decode(best.tokens), best.tokens, -best.log_prob, best.finished))
    return written


def _read(network: LanguageModel, boundary_id: int, sources: Sequence[Ids]) -> tuple[Tensor, State]:
    """Read boundary, source and boundary of each row: logits (B, V) of the first target token, and the state."""
    longest = max(map(len, sources)) + 2
    tokens = np.full((len(sources), longest), int(boundary_id == 0), np.int64)
    starts = np.zeros(tokens.shape, bool)
    for row, source in enumerate(sources):
        # All rows end in one column. What stands before a shorter one is forgotten by the reset at its beginning.
        first = longest - len(source) - 2
        tokens[row, first:] = [boundary_id, *source, boundary_id]
        starts[row, first] = True
    tokens_BT, reset_BT = (torch.from_numpy(array).to(network.device) for array in (tokens, starts))
    features_BTF, state = network.features(tokens_BT, network.initial_state(len(sources)), reset_BT)
    return network.head.logits(features_BTF[:, -1:])[:, 0], state


def _greedy(
    form: Stepper[Any],
    tokenizer: Tokenizer,
    logits_BV: Tensor | NDArray[np.floating[Any]],
    state: Any,
    never: list[int],
    max_new_tokens: int,
) -> list[Translation]:
    """The most probable token at each step, in every row until its boundary."""
    tokens: list[list[int]] = [[] for _ in logits_BV]
    log_probs, finished = [0.0] * len(tokens), [False] * len(tokens)
    rows = list(range(len(tokens)))
    for _ in range(max_new_tokens):
        log_probs_BV = torch.as_tensor(logits_BV).cpu().double().log_softmax(-1)
        if log_probs_BV.isnan().any():
            raise ElmanError("the model's logits hold NaN or infinity: its weights are damaged or training diverged")
        log_probs_BV[:, never] = -math.inf
        best = log_probs_BV.max(dim=1)
        going = []
        for place, (row, token, log_prob) in enumerate(
            zip(rows, best.indices.tolist(), best.values.tolist(), strict=True)
        ):
            log_probs[row] += log_prob
            finished[row] = token == tokenizer.boundary_id
            if not finished[row]:
                tokens[row].append(token)
                going.append(place)
        if not going:
            break
        rows = [rows[place] for place in going]
        logits_BV, state = form.step([tokens[row][-1] for row in rows], state.select(going))
    return [
        Translation(tokenizer.decode(ids), tuple(ids), -log_prob, ended)
        for ids, log_prob, ended in zip(tokens, log_probs, finished, strict=True)
    ]


@dataclass(frozen=True)
class Accuracy:
    """How often targets are right, over some examples."""

    examples: int
    exact_match: float
    """Share of the examples whose written target is the given one, its end included."""
    token_accuracy: float
    """Share of the target tokens, the closing boundary counted, that are the most probable after the given ones."""
    written_token_accuracy: float
    """Share of the target tokens, the closing boundary counted, that the written target has in the same place."""
    nats_per_token: float
    """Mean of -ln p over the target tokens, the closing boundary counted."""


@dataclass(frozen=True)
class PairReport:
    """The accuracy on pairs, over all of them and by the length of the target."""

    num_beams: int
    """1: greedy."""
    overall: Accuracy
    by_target_length: tuple[tuple[int, int, Accuracy], ...]
    """Shortest and longest target of each group, in tokens without the boundary, and its accuracy."""

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        groups = [
            {"shortest": shortest, "longest": longest, **asdict(accuracy)}
            for shortest, longest, accuracy in self.by_target_length
        ]
        return {"num_beams": self.num_beams, **asdict(self.overall), "by_target_length": groups}


@torch.no_grad()
def judge_pairs(
    network: LanguageModel,
    tokenizer: Tokenizer,
    pairs: Pairs,
    *,
    num_beams: int = 1,
    should_stop: Callable[[], bool] = lambda: False,
    team: Team = ALONE,
) -> PairReport:
    """Write the target of every source and hold it against the given one.

    A written target is cut where it is longer than the longest of all given ones: it is wrong by then.

    Args:
        network: a model of pairs; it is not changed.
        tokenizer: the one that made the tokens.
        pairs: the examples in batches; no figure depends on how many a batch has.
        num_beams: 1 writes greedily, more by beam search.
        should_stop: polled between batches; in a team it must answer alike everywhere.
        team: who shares the work, each calling this with the same arguments; all get the same result.

    Raises:
        Interrupted: ``should_stop()`` was true.
    """
    _need_beams(num_beams)
    counts = np.zeros((4, pairs.num_examples))
    right, likely, written_right, nats = counts
    lengths = np.array([len(pairs.target(example)) for example in range(pairs.num_examples)])
    for index, batch in enumerate(pairs.batches()):
        if should_stop():
            raise Interrupted
        examples = batch[share_of(len(batch), team.rank, team.size)]
        if not len(examples):
            continue
        segment = pairs.segment(index).part(team.rank, team.size)
        targets_BT, weight_BT = segment.targets_BT.to(network.device), segment.weight_BT.to(network.device)
        features_BTF, _ = network.features(segment.tokens_BT.to(network.device), network.initial_state(len(examples)))
        nats_BT = network.head.nll(features_BTF, targets_BT, weight_BT.to(network.dtype))
        nats[examples] = nats_BT.sum(1).cpu().numpy()
        hits_BT = (network.head.logits(features_BTF).argmax(-1) == targets_BT) & (weight_BT > 0)
        likely[examples] = hits_BT.sum(1).cpu().numpy()
        given = [(*pairs.target(example).tolist(), tokenizer.boundary_id) for example in examples]
        written = write_targets(
            network,
            tokenizer,
            [pairs.source(example) for example in examples],
            reverse_source=pairs.reverse_source,
            num_beams=num_beams,
            max_new_tokens=int(lengths.max()) + 1,
        )
        ended = [(*w.tokens, tokenizer.boundary_id) if w.finished else w.tokens for w in written]
        right[examples] = [mine == theirs for mine, theirs in zip(ended, given, strict=True)]
        written_right[examples] = [
            sum(a == b for a, b in zip(mine, theirs, strict=False)) for mine, theirs in zip(ended, given, strict=True)
        ]
    counts[:] = np.reshape(team.sum(*counts.ravel().tolist()), counts.shape)

    def accuracy(chosen_N: NDArray[np.bool_]) -> Accuracy:
        num_targets = float((lengths[chosen_N] + 1).sum())
        return Accuracy(
            examples=int(chosen_N.sum()),
            exact_match=float(right[chosen_N].mean()),
            token_accuracy=float(likely[chosen_N].sum() / num_targets),
            written_token_accuracy=float(written_right[chosen_N].sum() / num_targets),
            nats_per_token=float(nats[chosen_N].sum() / num_targets),
        )

    longest = int(lengths.max())
    width = -(-longest // _MOST_BUCKETS) or 1
    groups = [(first, min(first + width - 1, longest)) for first in range(1, longest + 1, width)]
    chosen = [(first, last, (lengths >= first) & (lengths <= last)) for first, last in groups]
    return PairReport(
        num_beams=num_beams,
        overall=accuracy(lengths >= 0),
        by_target_length=tuple((first, last, accuracy(those)) for first, last, those in chosen if those.any()),
    )
