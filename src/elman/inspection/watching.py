"""Read a text with a network and see what is inside, token by token: state, gates, outputs. Nothing is changed by it.

Shape letters: B rows, T time, U units, F features.

    for piece in watch(network, tokens, ["0.c", "0.forget_gate"]):     tokens: the boundary first, of any length
        piece.start, piece.tokens_T, piece.targets_T, piece.nats_T     read, what follows, and what that cost
        piece.values["0.c"]                                            (T, U), after each token was read

    watchable(network)                 {"0.h": 64, "0.c": 64, "0.forget_gate": 64, ..., "0.output": 64, "features": 64}
    places(network, tokens, 16, 100)   pieces of a text, each with the state that the text before it leaves
    network.named_step(token_B, state) one step, differentiable: Moment(features_BF, state, named, outputs)
    in_float64(network)                a copy for figures that must not depend on rounding

Names begin with the number of the layer, from 0, as those of the state do. A part of more than one dimension (a
convolution's inputs, a matrix memory) is laid out as one row of units. The text passes as one stream, so that memory
does not grow with it; every number is that of the paper's equations, ``LanguageModel.step``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy import integer
from numpy.typing import NDArray
from torch import Tensor

from elman.errors import TextError, UserError, nearest
from elman.models.contract import CountedModel, LanguageModel, Moment
from elman.models.kinds import build_model
from elman.models.state import State

_TOKENS_AT_ONCE = 256


@dataclass(frozen=True)
class Watched:
    """Some tokens of a text that were read one after the other, and what was seen after each."""

    start: int
    """Position in the text of the first token read."""
    tokens_T: Tensor
    """Read, int64."""
    targets_T: Tensor
    """The tokens that follow them."""
    nats_T: Tensor
    """What each of these cost."""
    values: Mapping[str, Tensor]
    """By name, (T, U)."""
    state: State
    """After the last of the tokens, one row."""


def watchable(network: LanguageModel) -> dict[str, int]:
    """Everything of a network that can be watched, with its number of units.

    What grows with the text, as the keys of a Transformer do, has no fixed units and is left out.
    """
    token_B = torch.full((1,), network.boundary_id, device=network.device)
    with torch.no_grad():
        first = network.named_step(token_B, network.initial_state(1))
        second = _seen(network.named_step(token_B, first.state))
    sizes = {name: values_BU.shape[1] for name, values_BU in _seen(first).items()}
    return {name: size for name, size in sizes.items() if second[name].shape[1] == size}


def watch(
    network: LanguageModel,
    tokens: NDArray[integer[Any]],
    names: Sequence[str] = (),
    *,
    state: State | None = None,
    change: Callable[[State], State] = lambda state: state,
    tokens_at_once: int = _TOKENS_AT_ONCE,
) -> Iterator[Watched]:
    """Read a text as one stream: every token but the last, which is only predicted.

    Args:
        network: of any kind; of one that is no stack of cells, the state, the features and the nats can be seen.
        tokens: the text, its boundary token first; may be memory-mapped.
        names: what to keep, out of :func:`watchable`.
        state: before the first token, one row; none: the initial one.
        change: takes the state before each token is read, and gives the one to go on from: for interventions.
        tokens_at_once: how many a piece holds.

    Raises:
        UserError: there is nothing of that name, or the text has no token to predict.
    """
    known = watchable(network)
    for name in names:
        if name not in known:
            raise UserError(f"this network has no {name!r} to watch{nearest(name, known)}")
    if len(tokens) < 2:
        raise UserError("the text is empty: give one of a token or more")
    return _watch(network, tokens, names, state or network.initial_state(1), change, tokens_at_once)


def _watch(
    network: LanguageModel,
    tokens: NDArray[integer[Any]],
    names: Sequence[str],
    state: State,
    change: Callable[[State], State],
    tokens_at_once: int,
) -> Iterator[Watched]:
    for start in range(0, len(tokens) - 1, tokens_at_once):
        piece_T = torch.from_numpy(tokens[start : start + tokens_at_once + 1].astype("int64")).to(network.device)
        kept: dict[str, list[Tensor]] = {name: [] for name in names}
        features = []
        with torch.no_grad():
            for token_B in piece_T[:-1].split(1):
                moment = network.named_step(token_B, change(state))
                state = moment.state
                features.append(moment.features_BF)
                seen = _seen(moment) if names else {}
                for name, rows in kept.items():
                    rows.append(seen[name])
            nats_BT = network.head.nll(torch.stack(features, dim=1), piece_T[None, 1:])
        values = {name: torch.cat(rows) for name, rows in kept.items()}
        yield Watched(start, piece_T[:-1], piece_T[1:], nats_BT[0], values, state)


def _seen(moment: Moment) -> dict[str, Tensor]:
    """All that a step shows, each (B, U): the parts of the state that are no tokens, intermediates, outputs."""
    everything = {**moment.named, **moment.outputs, "features": moment.features_BF}
    everything |= {name: tensor for name, tensor in moment.state.tensors.items() if tensor.is_floating_point()}
    return {name: tensor.flatten(1) for name, tensor in everything.items() if tensor.is_floating_point()}


@dataclass(frozen=True)
class Places:
    """Pieces of a text of one length, side by side, each with the state that all of the text before it leaves."""

    starts: tuple[int, ...]
    """Positions in the text of their first tokens."""
    tokens_BT: Tensor
    """To be read, int64."""
    targets_B: Tensor
    """The token after each piece."""
    state: State
    """Before the first token of each."""

    def select(self, rows: Sequence[int]) -> Places:
        """Some of the places, in the given order."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.tokens_BT.device)
        starts = tuple(self.starts[row] for row in rows)
        return Places(starts, self.tokens_BT[index], self.targets_B[index], self.state.select(index))


def places(
    network: LanguageModel, tokens: NDArray[integer[Any]], count: int, length: int, *, within: int = 20_000
) -> Places:
    """Choose pieces that start at equal distances in the beginning of a text.

    Args:
        network: reads the text up to the last of them.
        tokens: the text, its boundary token first.
        count: of pieces at most; there are fewer where the text is too short for so many different ones.
        length: tokens of each, a target not counted.
        within: how many tokens of the text are looked at.

    Raises:
        TextError: the text is too short for one.
    """
    last = min(len(tokens), within) - length - 1
    if last < 0:
        raise TextError(f"the text has {len(tokens)} tokens, {length} in a row and one more are looked at: give more")
    count = min(count, last + 1)
    starts = sorted({round(last * index / max(1, count - 1)) for index in range(count)})
    state, position = network.initial_state(1), 0
    states = []
    for start in starts:
        for first in range(position, start, _TOKENS_AT_ONCE):
            piece = tokens[first : min(first + _TOKENS_AT_ONCE, start)].astype("int64")
            with torch.no_grad():
                _, state = network.features(torch.from_numpy(piece)[None].to(network.device), state)
        position = start
        states.append(state)
    rows = [torch.from_numpy(tokens[start : start + length + 1].astype("int64")) for start in starts]
    both_BT = torch.stack(rows).to(network.device)
    return Places(tuple(starts), both_BT[:, :-1], both_BT[:, -1], State.stack(states))


def in_float64(network: LanguageModel) -> LanguageModel:
    """A copy on the CPU with parameters of double precision; a counted model, which has none, is given back."""
    if isinstance(network, CountedModel):
        return network
    copy = build_model(
        network.config, network.vocab_size, seed=None, dtype=torch.float64, boundary_id=network.boundary_id
    )
    with torch.no_grad():
        for mine, theirs in zip(copy.parameters(), network.parameters(), strict=True):
            mine.copy_(theirs)
    return copy
