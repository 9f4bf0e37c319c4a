"""Judge a model on a text: every token once, sums in float64, the state carried from the start to the end.

Shape letters: B rows, T time, N tokens, F features, V vocabulary.

``carried`` reads the text as one stream. ``reset`` starts every document from the initial state, documents being the
rows of a batch. ``num_streams > 1`` is an estimate: the text is cut into parallel streams whose states start empty;
it is quicker, slightly pessimistic, and recorded. A :class:`Window` is for models that can only read so many tokens.

Memory is bounded whatever the length of the text and the size of the vocabulary: features of a segment, and logits of
a piece of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elman.data.pairs import Pairs
from elman.data.streams import Segment, share_of
from elman.errors import UserError
from elman.metrics import Accuracy, AccuracyTally, Interval, Score, block_bootstrap, finite, perplexity

if TYPE_CHECKING:
    from elman.data.prepare import Split
    from elman.models.contract import Head
    from elman.models.state import State
    from elman.text.tokenizers import Tokenizer

StatePolicy = Literal["carried", "reset"]
Reals: TypeAlias = NDArray[np.float64]
Ids: TypeAlias = NDArray[np.int64]

_TOKENS_AT_ONCE = 2**20  # of a memory-mapped text that may be larger than memory
_SEGMENT_LENGTH = 1024
_MAX_LOGITS = 2**22  # at once: 32 MiB in float64
_NUMBERS_AT_ONCE = 2**16  # added up over processes
_MAX_BLOCKS = 100
_MIN_BLOCK_TOKENS = 32


class Team(Protocol):
    """The processes that share an evaluation: each reads some of the rows, and the sums are added up."""

    rank: int
    size: int

    def sum(self, *values: float) -> tuple[float, ...]:
        """The sum of each value over all of them."""


class _Alone:
    rank, size = 0, 1

    def sum(self, *values: float) -> tuple[float, ...]:
        return values


ALONE: Team = _Alone()
"""One process, which reads everything itself."""


class Readable(Protocol):
    """What a model must have to be judged; every :class:`elman.models.contract.LanguageModel` has it."""

    vocab_size: int
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    @property
    def head(self) -> Head:
        """From features to the distribution over the vocabulary."""

    def initial_state(self, batch_size: int) -> State:
        """The state before the first token."""

    def features(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        """Read tokens: what the head needs for each next token, and the state after the last."""


def softmax_dtype(network: Readable) -> torch.dtype:
    """In float64 a uniform model costs ln V to the last digit; MPS has no float64."""
    return network.dtype if network.device.type == "mps" else torch.float64


@dataclass(frozen=True)
class Window:
    """Read a text in overlapping windows, each from the initial state, as a model of limited context must.

    The first window scores all of its tokens. Each one after it moves on by ``stride`` tokens and scores these alone,
    given the ``size - stride`` tokens before them. The smaller the stride, the more context, and the more work.
    """

    size: int
    """Tokens read at once, the scored ones among them."""
    stride: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"a window of {self.size} tokens; accepted: one token or more")
        if not 1 <= self.stride <= self.size:
            raise UserError(f"a window of {self.size} moves on by {self.stride}; accepted: a stride of 1 to the window")


@dataclass(frozen=True)
class Evaluation:
    """A score and how it was taken."""

    score: Score
    state_policy: StatePolicy | Literal["window", "pairs"]
    """``window``: no state is carried further than a window; ``pairs``: every target given its source, each example
    from the initial state."""
    num_streams: int
    num_documents: int
    num_unknown: int
    """Tokens that the tokenizer does not know; their presence makes figures per character undefined."""
    vocab_size: int
    num_unknown_kinds: int = 0
    """Different words or characters among them; 0 where nobody has counted."""
    window: Window | None = None
    block_nats: tuple[float, ...] = ()
    """Nats of each of up to 100 contiguous blocks of the text, of at least 32 tokens each, or of as many examples."""
    block_tokens: tuple[int, ...] = ()
    """Tokens of each block."""
    accuracy: Accuracy | None = None
    """None where it was not asked for."""

    @cached_property
    def interval(self) -> Interval | None:
        """Between which values the nats per token may lie; see :func:`elman.metrics.block_bootstrap`."""
        return block_bootstrap(self.block_nats, self.block_tokens)

    @property
    def adjusted_perplexity(self) -> float | None:
        """The perplexity of a model that also has to say which unknown word it is.

        ``exp((nats_total + m ln R) / tokens)`` with m unknown tokens of R different kinds, each taken to be as probable
        as the others: ``<unk>`` is no bargain any more. None where R is not known.
        """
        if self.num_unknown and not self.num_unknown_kinds:
            return None
        spelled = self.num_unknown * math.log(max(1, self.num_unknown_kinds))
        return perplexity((self.score.nats_total + spelled) / self.score.tokens)

    def to_dict(self) -> dict[str, Any]:
        """All figures by name, ready for JSON."""
        return (
            self.score.to_dict()
            | {
                "state_policy": self.state_policy,
                "num_streams": self.num_streams,
                "window": None if self.window is None else self.window.size,
                "stride": None if self.window is None else self.window.stride,
                "documents": self.num_documents,
                "unknown_tokens": self.num_unknown,
                "unknown_kinds": self.num_unknown_kinds if self.num_unknown else 0,
                "unknown_rate": self.num_unknown / self.score.tokens,
                "vocabulary": self.vocab_size,
            }
            | finite({"adjusted_perplexity": self.adjusted_perplexity})
            | ({} if self.accuracy is None else self.accuracy.to_dict())
        )


class Interrupted(Exception):
    """The caller's ``should_stop`` became true; there is no result."""


def evaluate_split(
    network: Readable,
    split: Split,
    tokenizer: Tokenizer,
    *,
    state_policy: StatePolicy = "carried",
    num_streams: int = 1,
    window: Window | None = None,
    max_tokens: int | None = None,
    segment_length: int | None = None,
    with_accuracy: bool = False,
    surprisal: Reals | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    team: Team = ALONE,
) -> Evaluation:
    """Score a token sequence.

    Args:
        network: the model; it is not changed.
        split: the tokens, the boundary first, and the counts of the text.
        tokenizer: the one that made the tokens.
        state_policy: ``carried`` or ``reset`` (see the module).
        num_streams: parallel streams under ``carried``; rows of documents or of windows read at once otherwise.
        window: read in windows; under ``reset`` none reaches over the border of a document.
        max_tokens: score the first tokens only.
        segment_length: tokens read at once; the result does not depend on it.
        with_accuracy: also measure how often the most probable tokens are right.
        surprisal: an array that gets the nats of each target, in the order of the text.
        should_stop: polled between segments; in a team it must answer alike everywhere.
        team: who shares the work, each calling this with the same arguments; all get the same result.

    Raises:
        Interrupted: ``should_stop()`` was true.
    """
    tokens = split.tokens if max_tokens is None else split.tokens[: max_tokens + 1]
    num_targets = len(tokens) - 1
    if num_targets < 1:
        raise UserError("the text is empty: there is not one token to predict")
    if state_policy == "carried" and window is None:
        num_streams = min(num_streams, num_targets)
        batches: Iterable[tuple[Span, ...]] = [_streams(num_targets, num_streams)]
    else:
        units = _units(tokens, tokenizer.boundary_id, state_policy, window)
        batches = iter(lambda: tuple(islice(units, num_streams)), ())
    length = segment_length or max(_SEGMENT_LENGTH, 0 if window is None else window.size)
    num_blocks = min(_MAX_BLOCKS, num_targets // _MIN_BLOCK_TOKENS)
    tally = _Tally(team, tokenizer.unknown_id, _Blocks(num_targets, num_blocks), surprisal, with_accuracy)
    for spans in batches:
        for segment, positions_B in segments_of(tokens, spans, length, tokenizer.boundary_id):
            if should_stop():
                raise Interrupted
            tally.read(network, segment, positions_B[:, None] + np.arange(segment.targets_BT.shape[1]))
    tally.add_up()
    whole = tally.tokens == len(split.tokens) - 1
    loses_text = not tokenizer.lossless or split.num_unknown > 0 or not whole
    return Evaluation(
        score=Score(
            nats_total=tally.nats,
            tokens=tally.tokens,
            chars=None if loses_text else split.num_chars,
            bytes=None if loses_text else split.num_bytes,
        ),
        state_policy="window" if state_policy == "carried" and window is not None else state_policy,
        num_streams=num_streams,
        num_documents=split.num_documents,
        num_unknown=tally.num_unknown,
        vocab_size=network.vocab_size,
        num_unknown_kinds=split.num_unknown_kinds if whole else 0,
        window=window,
        block_nats=tuple(tally.blocks.nats.tolist()),
        block_tokens=tuple(tally.blocks.tokens.tolist()),
        accuracy=None if tally.accuracy is None else tally.accuracy.result(),
    )


def evaluate_pairs(
    network: Readable,
    split: Split,
    tokenizer: Tokenizer,
    *,
    reverse_source: bool = False,
    num_rows: int = 16,
    max_targets: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    team: Team = ALONE,
) -> Evaluation:
    """Score the targets of a corpus of pairs, each given its source, from the initial state.

    All figures are those of the targets alone: their tokens with the boundary that ends each, characters and bytes. The
    blocks of the interval are whole examples in the order of the corpus, up to 100 blocks of as many each.

    Args:
        network: the model; it is not changed.
        split: sources and targets in turn, and the counts of the text.
        tokenizer: the one that made the tokens.
        reverse_source: read the tokens of each source in reverse order.
        num_rows: examples read at once; the result does not depend on it.
        max_targets: score the first examples only, up to so many targets.
        should_stop: polled between batches; in a team it must answer alike everywhere.
        team: who shares the work, each calling this with the same arguments.

    Raises:
        Interrupted: ``should_stop()`` was true.
    """
    pairs = Pairs(split.tokens, num_rows, tokenizer.boundary_id, reverse_source, max_targets=max_targets)
    blocks = _Blocks(pairs.num_examples, min(_MAX_BLOCKS, pairs.num_examples))
    tally = _Tally(team, tokenizer.unknown_id, blocks)
    for examples, segment in zip(pairs.batches(), pairs, strict=True):
        if should_stop():
            raise Interrupted
        tally.read(network, segment, np.broadcast_to(examples[:, None], segment.targets_BT.shape))
    tally.add_up()
    chars, num_bytes = 0, 0
    if keeps_text := tokenizer.lossless and not split.num_unknown:
        for example in range(pairs.num_examples):
            target = tokenizer.decode(pairs.target(example))
            chars, num_bytes = chars + len(target), num_bytes + len(target.encode())
    return Evaluation(
        score=Score(tally.nats, tally.tokens, chars if keeps_text else None, num_bytes if keeps_text else None),
        state_policy="pairs",
        num_streams=num_rows,
        num_documents=2 * pairs.num_examples,
        num_unknown=tally.num_unknown,
        vocab_size=network.vocab_size,
        block_nats=tuple(tally.blocks.nats.tolist()),
        block_tokens=tuple(tally.blocks.tokens.tolist()),
    )


class Span(NamedTuple):
    """One row of a batch: inputs ``tokens[begin:end]``, of whose targets those from ``scored`` on count."""

    begin: int
    scored: int
    end: int


def _streams(num_targets: int, num_streams: int) -> tuple[Span, ...]:
    """The text cut into streams that differ in length by one token at most, the longer ones first."""
    shortest, longer = divmod(num_targets, num_streams)
    ends = [(row + 1) * shortest + min(row + 1, longer) for row in range(num_streams)]
    return tuple(Span(begin, begin, end) for begin, end in zip([0, *ends], ends, strict=False))


def _units(tokens: NDArray[Any], boundary_id: int, state_policy: StatePolicy, window: Window | None) -> Iterator[Span]:
    """What starts from the initial state: documents, or windows of them, or windows of the whole text."""
    whole = Span(0, 0, len(tokens) - 1)
    documents = iter([whole]) if state_policy == "carried" else _documents(tokens, boundary_id)
    return documents if window is None else chain.from_iterable(_windows(one, window) for one in documents)


def _documents(tokens: NDArray[Any], boundary_id: int) -> Iterator[Span]:
    """Documents, each from its boundary to where the next one's would be predicted, the longest first."""
    pieces = range(0, len(tokens) - 1, _TOKENS_AT_ONCE)
    starts = np.concatenate(
        [start + np.flatnonzero(tokens[:-1][start : start + _TOKENS_AT_ONCE] == boundary_id) for start in pieces]
    )
    ends = np.append(starts[1:], len(tokens) - 1)
    # Documents of like length share a batch, so that little of it is padding.
    for i in np.argsort(starts - ends, kind="stable"):
        yield Span(int(starts[i]), int(starts[i]), int(ends[i]))


def _windows(document: Span, window: Window) -> Iterator[Span]:
    scored, end = document.begin, min(document.begin + window.size, document.end)
    while scored < document.end:
        yield Span(max(document.begin, end - window.size), scored, end)
        scored, end = end, min(end + window.stride, document.end)


def segments_of(
    tokens: NDArray[Any], spans: tuple[Span, ...], length: int, boundary_id: int
) -> Iterator[tuple[Segment, Ids]]:
    """Spans side by side, segment by segment, and where the first target of each row stands among all targets."""
    begins = np.array([span.begin for span in spans])
    longest = max(span.end - span.begin for span in spans)
    for time in range(0, longest, length):
        width = min(length, longest - time)
        padded = np.full((len(spans), width + 1), boundary_id, np.int64)
        weight = np.zeros((len(spans), width), np.float32)
        for row, (begin, scored, end) in enumerate(spans):
            start = begin + time
            piece = tokens[start : min(start + width, end) + 1]
            padded[row, : len(piece)] = piece
            weight[row, max(0, scored - start) : max(0, len(piece) - 1)] = 1.0
        segment = Segment(
            tokens_BT=torch.from_numpy(padded[:, :-1]),
            targets_BT=torch.from_numpy(padded[:, 1:]),
            weight_BT=torch.from_numpy(weight),
            reset_BT=None,
            num_targets=int(weight.sum()),
            starts_anew=time == 0,
        )
        yield segment, begins + time


class _Blocks:
    """What the targets in each of some contiguous blocks of a text cost.

    Args:
        num_places: places of the text, the tokens of one stream or the examples of pairs.
        num_blocks: the blocks, which differ in length by one place at most.
    """

    def __init__(self, num_places: int, num_blocks: int) -> None:
        self._num_places = num_places
        self.nats = np.zeros(num_blocks)
        self.tokens = np.zeros(num_blocks, np.int64)

    def add(self, places_N: Ids, nats_N: Reals) -> None:
        """Take the targets at some places in."""
        if num_blocks := len(self.nats):
            blocks_N = places_N * num_blocks // self._num_places
            self.nats += np.bincount(blocks_N, nats_N, minlength=num_blocks)
            self.tokens += np.bincount(blocks_N, minlength=num_blocks)


class _Tally:
    """Reads segments one after the other, and sums up what their targets cost.

    Args:
        team: who reads the other rows.
        unknown_id: the token of what the tokenizer does not know.
        blocks: gets the nats of each target at its place in the text.
        surprisal: gets them too, one by one.
        with_accuracy: also look at how probable other tokens are.
    """

    def __init__(
        self,
        team: Team,
        unknown_id: int | None,
        blocks: _Blocks,
        surprisal: Reals | None = None,
        with_accuracy: bool = False,
    ) -> None:
        self.nats, self.tokens, self.num_unknown = 0.0, 0, 0
        self.blocks = blocks
        self.accuracy = AccuracyTally() if with_accuracy else None
        self._team, self._unknown_id, self._surprisal = team, unknown_id, surprisal
        if surprisal is not None:
            surprisal[:] = 0.0  # at the end the sum over all processes, of which one has something else to say
        self._state: State

    def read(self, network: Readable, segment: Segment, places_BT: Ids) -> None:
        """Take this process's rows of a segment in; the state goes on from the one before, unless it starts anew.

        Args:
            network: the model.
            segment: the rows of all processes.
            places_BT: where each target stands in the text.
        """
        places_BT = places_BT[share_of(len(places_BT), self._team.rank, self._team.size)]
        segment = segment.part(self._team.rank, self._team.size)
        num_rows, num_steps = segment.tokens_BT.shape
        targets_BT, weight_BT = segment.targets_BT.to(network.device), segment.weight_BT.to(network.device)
        width = max(1, _MAX_LOGITS // (network.vocab_size * num_rows))
        with torch.no_grad():
            state = network.initial_state(num_rows) if segment.starts_anew else self._state
            features_BTF, self._state = network.features(segment.tokens_BT.to(network.device), state)
            for time in range(0, num_steps, width):
                here = slice(time, time + width)
                if not segment.weight_BT[:, here].any():
                    continue  # context of a window, or a process without rows
                nats_BT = self._judge(network, features_BTF[:, here], targets_BT[:, here], weight_BT[:, here])
                self.nats += nats_BT.sum(dtype=torch.float64).item()
                self._place(nats_BT, segment.weight_BT[:, here], places_BT[:, here])
        self.tokens += segment.num_targets
        if self._unknown_id is not None:
            self.num_unknown += int(((segment.targets_BT == self._unknown_id) & (segment.weight_BT > 0)).sum())

    def add_up(self) -> None:
        """Put the sums of all processes together, at the end."""
        if self._team.size == 1:
            return
        self.nats, tokens, num_unknown = self._team.sum(self.nats, self.tokens, self.num_unknown)
        self.tokens, self.num_unknown = int(tokens), int(num_unknown)
        arrays: list[NDArray[Any]] = [self.blocks.nats, self.blocks.tokens]
        if self.accuracy is not None:
            arrays.append(self.accuracy.sums)
        if self._surprisal is not None:
            pieces = range(0, len(self._surprisal), _NUMBERS_AT_ONCE)
            arrays += [self._surprisal[start : start + _NUMBERS_AT_ONCE] for start in pieces]
        for array in arrays:
            array[:] = np.reshape(self._team.sum(*array.ravel().tolist()), array.shape)

    def _judge(self, network: Readable, features_BTF: Tensor, targets_BT: Tensor, weight_BT: Tensor) -> Tensor:
        """The nats of each target."""
        dtype = softmax_dtype(network)
        if self.accuracy is None:
            return network.head.nll(features_BTF, targets_BT, weight_BT, dtype=dtype)
        log_probs_BTV = network.head.logits(features_BTF).to(dtype).log_softmax(-1)
        of_target_BT1 = log_probs_BTV.gather(-1, targets_BT.unsqueeze(-1))
        num_before_BT = (log_probs_BTV > of_target_BT1).sum(-1)
        num_equal_BT = (log_probs_BTV == of_target_BT1).sum(-1)
        counts_BT = weight_BT > 0
        # Among equals, a fair draw decides which ones come first.
        right_at_1, right_at_5 = (
            ((k - num_before_BT).to(dtype) / num_equal_BT).clamp(0, 1)[counts_BT].double().cpu().numpy() for k in (1, 5)
        )
        confidence = log_probs_BTV.amax(-1).exp()[counts_BT].double().cpu().numpy()
        self.accuracy.add(right_at_1, right_at_5, confidence)
        return -of_target_BT1.squeeze(-1) * weight_BT

    def _place(self, nats_BT: Tensor, weight_BT: Tensor, places_BT: Ids) -> None:
        """Note the nats where they belong in the text."""
        counts_BT = weight_BT.numpy() > 0
        places_N, nats_N = places_BT[counts_BT], nats_BT.double().cpu().numpy()[counts_BT]
        if self._surprisal is not None:
            self._surprisal[places_N] = nats_N
        self.blocks.add(places_N, nats_N)
