"""Recurrence against attention, measured: what a token costs in training and in generation, and what is carried.

Models of equal numbers of parameters with the weights of the start, which take the same time as any others:

- training: forward and backward over the same number of tokens, cut into fewer and longer rows;
- parallelism: how many times faster tokens are read when all of a row are given at once than one by one;
- generation: one more token at a place in a text, from what is carried there; for the Transformer also by reading the
  whole text again, as textbook code does;
- state: the bytes carried there;
- gradient path: the fewest arithmetic steps between a prediction and the state that a token so far back left behind,
  counted in the graph that PyTorch records. What only moves numbers about does not count.

For each a power law cost = c size^k is fitted: k = 0 is constant, 1 linear, 2 quadratic.

Shape letters: B rows, T time, F features.
"""

from __future__ import annotations

import heapq
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from elman.comparison.entries import PASSES_IN_TRAINING, operations_per_token, sized
from elman.comparison.statistics import growth_exponent
from elman.errors import UserError
from elman.models.contract import LanguageModel
from elman.models.kinds import build_model, model_config
from elman.models.state import State, grows
from elman.page import Page, new_figure, write_svg
from elman.process import num_threads
from elman.training.distributed import choose_device

KINDS = ("elman", "lstm", "gru", "mingru", "mamba", "transformer")
LENGTHS = (16, 64, 256, 1024, 4096)
POSITIONS = (10, 100, 1000, 10000)
DISTANCES = (16, 64, 256)

_VOCAB_SIZE = 66
_TOKENS_AT_ONCE = 256
_MIN_CALLS = 3
_READ_ALONE = 256
_MOVES = (
    "Alias", "AsStrided", "Cat", "Clone", "Expand", "Index", "Permute", "Reshape", "Select", "Slice", "Split",
    "Squeeze", "Stack", "T", "ToCopy", "Transpose", "Unbind", "UnsafeSplit", "UnsafeView", "Unsqueeze", "View", "Where",
)  # fmt: skip
"""Nodes of the graph that only move numbers about, by their names without the ending Backward0."""
_LEAF = "torch::autograd::AccumulateGrad"


@dataclass(frozen=True)
class Growth:
    """A cost at several sizes, and how it grows."""

    sizes: tuple[int, ...]
    costs: tuple[float, ...]

    @property
    def exponent(self) -> float | None:
        """The k of cost = c size^k; none where there is one size, or no cost."""
        if len(self.sizes) < 2 or min(self.costs) <= 0:
            return None
        return growth_exponent(self.sizes, self.costs)

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return asdict(self) | {"exponent": self.exponent}


@dataclass(frozen=True)
class Card:
    """What one way of modelling costs."""

    way: str
    """The kind, and for a Transformer how it generates."""
    parameters: int
    operations: int
    """For each token, forward."""
    training: Growth
    """Seconds for each token of a training, by the length of the rows."""
    parallelism: float
    """How many times faster a row is read at once than one token after the other."""
    generation: Growth
    """Seconds for one more token, by its position."""
    state: Growth | None
    """Bytes carried, by position; none where the text is read again."""
    gradient_path: Growth
    """Arithmetic steps, by distance in tokens."""
    share_of_peak: float | None
    """Operations in the fastest training over those of a large product of matrices on the same device; none where the
    operations of a token depend on its place."""

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        growths = ("training", "generation", "state", "gradient_path")
        return asdict(self) | {
            name: None if (growth := getattr(self, name)) is None else growth.to_dict() for name in growths
        }


@dataclass(frozen=True)
class Scorecard:
    """All ways, and where they were measured."""

    cards: tuple[Card, ...]
    where: dict[str, Any]
    is_complete: bool = True
    """False where there were more ways to measure."""

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        cards = [card.to_dict() for card in self.cards]
        return {"where": self.where, "is_complete": self.is_complete, "cards": cards}


def measure(
    kinds: Sequence[str] = KINDS,
    *,
    num_parameters: int = 300_000,
    lengths: Sequence[int] = LENGTHS,
    positions: Sequence[int] = POSITIONS,
    distances: Sequence[int] = DISTANCES,
    window: int | None = None,
    seconds: float = 1.0,
    device: str = "auto",
    threads: int = 1,
    tell: Callable[[str], None] = lambda line: None,
    keep: Callable[[Scorecard], None] = lambda scorecard: None,
) -> Scorecard:
    """Measure every kind.

    Args:
        kinds: of models; each gets the width that comes nearest to
        num_parameters: so many parameters.
        lengths: of rows in training; the longest one says how many tokens an update has.
        positions: in a text, of the token that is generated.
        distances: in tokens, of the gradient's path.
        window: tokens that a Transformer attends to; none: all of the longest text.
        seconds: spent on each figure at least, and four calls at least, however long they take.
        device: auto, cpu, cuda or mps.
        threads: of PyTorch on the CPU.
        tell: gets a line for each figure that is begun.
        keep: gets what is measured by then whenever a kind is done, for one who may stop before the end.
    """
    if min(*lengths, *positions, *distances, 2) < 1 or seconds <= 0:
        raise UserError("lengths, positions and distances start at 1, and seconds above 0")
    place = choose_device(device)
    longest = max(*lengths, *positions)
    cards: list[Card] = []
    with num_threads(threads):
        clock = _Clock(place, threads, seconds)
        peak = _peak(clock)
        where = _where(clock, peak, threads, max(lengths))
        # All at first: what cannot be made is refused before anything is measured.
        networks = [_model(kind, num_parameters, longest if window is None else window, place) for kind in kinds]
        for number, (kind, network) in enumerate(zip(kinds, networks, strict=True), 1):
            now = _Teller(tell, f"measuring {kind} ({number} of {len(kinds)})")
            card = _card(kind, network, clock, peak, lengths, positions, distances, now)
            if _is_growing(network):
                costs = [
                    clock(_reads_again(network, at)) for at in now("one more token without a cache, at", positions)
                ]
                again = Growth(tuple(positions), tuple(costs))
                cards.append(replace(card, way=f"{kind}, cache"))
                cards.append(replace(card, way=f"{kind}, reading again", generation=again, state=None))
            else:
                cards.append(card)
            keep(Scorecard(tuple(cards), where, is_complete=number == len(kinds)))
    return Scorecard(tuple(cards), where)


@dataclass(frozen=True)
class _Teller:
    """Says of each figure that it is begun."""

    tell: Callable[[str], None]
    what: str

    def __call__(self, figure: str, sizes: Sequence[int]) -> Iterator[int]:
        """The sizes, each told before it is given."""
        for size in sizes:
            self.tell(f"{self.what}: {figure} {size:,}")
            yield size


def _where(clock: _Clock, peak: float, threads: int, num_tokens: int) -> dict[str, Any]:
    place = clock.device
    return {
        "device": torch.cuda.get_device_name() if place.type == "cuda" else platform.processor() or platform.machine(),
        "threads": threads,
        "clock": "processor time" if clock.is_of_processor else "elapsed time",
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "peak_operations_per_second": peak,
        "tokens_per_update": num_tokens,
    }


def _model(kind: str, num_parameters: int, window: int, device: torch.device) -> LanguageModel:
    settings: dict[str, Any] = {"kind": kind}
    if "attention_window" in type(model_config(settings)).model_fields:
        settings["attention_window"] = window
    settings = sized(model_config(settings), num_parameters, _VOCAB_SIZE)
    return build_model(model_config(settings), _VOCAB_SIZE, seed=1, dtype=torch.float32, device=device)


class _Clock:
    """The median time of a call, of as many as the seconds allow but three at least, after one that does not count.

    One thread on the CPU is timed by what it gets of the processor, so that other work on the machine counts little.
    """

    def __init__(self, device: torch.device, threads: int, seconds: float) -> None:
        self.device, self._seconds = device, seconds
        self.is_of_processor = device.type == "cpu" and threads == 1
        self._now = time.process_time if self.is_of_processor else time.perf_counter

    def __call__(self, call: Callable[[], Any]) -> float:
        self._once(call)
        found: list[float] = []
        while len(found) < _MIN_CALLS or math.fsum(found) < self._seconds:
            found.append(self._once(call))
        return statistics.median(found)

    def _once(self, call: Callable[[], Any]) -> float:
        self._wait()
        started = self._now()
        call()
        self._wait()
        return self._now() - started

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()


def _peak(clock: _Clock) -> float:
    """Operations a second of a large product of matrices, the most that a model could reach."""
    size = 1024 if clock.device.type == "cpu" else 8192
    matrix = torch.randn(size, size, generator=torch.Generator().manual_seed(1)).to(clock.device)
    return 2 * size**3 / clock(lambda: matrix @ matrix)


def _card(
    kind: str,
    network: LanguageModel,
    clock: _Clock,
    peak: float,
    lengths: Sequence[int],
    positions: Sequence[int],
    distances: Sequence[int],
    now: _Teller,
) -> Card:
    num_tokens = max(lengths)
    per_token = [
        clock(_trains(network, max(1, num_tokens // length), length)) / num_tokens
        for length in now("training in rows of", lengths)
    ]
    (row,) = now("reading at once, and token by token, a row of", [_READ_ALONE])
    parallelism = clock(_reads_singly(network, row)) / clock(_reads_at_once(network, row))
    states = [_state_before(network, position) for position in positions]
    ahead = zip(now("one more token, at", positions), states, strict=True)
    generation = tuple(clock(_carries_on(network, state)) for _, state in ahead)
    operations = operations_per_token(network)
    exact = build_model(network.config, _VOCAB_SIZE, seed=1, dtype=torch.float64)
    steps = tuple(float(gradient_path(exact, distance)) for distance in now("the gradient's path over", distances))
    return Card(
        way=kind,
        parameters=network.num_parameters,
        operations=operations,
        training=Growth(tuple(lengths), tuple(per_token)),
        parallelism=parallelism,
        generation=Growth(tuple(positions), generation),
        state=Growth(tuple(positions), tuple(float(state.num_bytes) for state in states)),
        gradient_path=Growth(tuple(distances), steps),
        share_of_peak=None if _is_growing(network) else PASSES_IN_TRAINING * operations / min(per_token) / peak,
    )


def _tokens(network: LanguageModel, rows: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(_VOCAB_SIZE, (rows, length), generator=generator).to(network.device)


def _trains(network: LanguageModel, rows: int, length: int) -> Callable[[], None]:
    """Forward and backward over rows of this length."""
    tokens_BT = _tokens(network, rows, length + 1)

    def call() -> None:
        features_BTF, _ = network.features(tokens_BT[:, :-1], network.initial_state(rows))
        network.head.nll(features_BTF, tokens_BT[:, 1:]).mean().backward()
        network.zero_grad()

    return call


@torch.no_grad()
def _state_before(network: LanguageModel, position: int) -> State:
    """What is carried after all tokens before this position, the first being 1."""
    state = network.initial_state(1)
    for piece_BT in _tokens(network, 1, position)[:, 1:].split(_TOKENS_AT_ONCE, dim=1):
        _, state = network.features(piece_BT, state)
    return state


def _carries_on(network: LanguageModel, state: State) -> Callable[[], Tensor]:
    token_B1 = _tokens(network, 1, 1)

    @torch.no_grad()
    def call() -> Tensor:
        return network.head.log_probs(network.features(token_B1, state)[0])

    return call


def _reads_again(network: LanguageModel, position: int) -> Callable[[], Tensor]:
    tokens_BT = _tokens(network, 1, position)

    @torch.no_grad()
    def call() -> Tensor:
        features_BTF, _ = network.features(tokens_BT, network.initial_state(1))
        return network.head.log_probs(features_BTF[:, -1:])

    return call


def _reads_at_once(network: LanguageModel, length: int) -> Callable[[], Tensor]:
    tokens_BT = _tokens(network, 1, length)

    @torch.no_grad()
    def call() -> Tensor:
        return network.features(tokens_BT, network.initial_state(1))[0]

    return call


def _reads_singly(network: LanguageModel, length: int) -> Callable[[], State]:
    tokens_BT = _tokens(network, 1, length)

    @torch.no_grad()
    def call() -> State:
        state = network.initial_state(1)
        for token_B1 in tokens_BT.split(1, dim=1):
            _, state = network.features(token_B1, state)
        return state

    return call


def _is_growing(network: LanguageModel) -> bool:
    return any(grows(tensor) for tensor in network.initial_state(1).tensors.values())


def gradient_path(network: LanguageModel, distance: int) -> int:
    """Fewest arithmetic steps from a prediction back to what a token left behind in the state.

    A part of the state that by itself brings nothing so far, such as the last inputs of a short convolution, is no way:
    in the graph its tensors hang together all the same, what has left it and what has come in.

    Args:
        network: the model; its readable form is followed, one step for each token. In float64 small gradients do not
            vanish for want of range.
        distance: tokens from the one that is looked back to, to the one that predicts.
    """
    tokens_BT = _tokens(network, 1, distance + 1)
    with torch.no_grad():
        _, behind = network.step(tokens_BT[:, 0], network.initial_state(1))
    left = behind.map(lambda tensor: tensor.clone().requires_grad_(tensor.is_floating_point()))

    def prediction(ways: set[str]) -> Tensor:
        """After all tokens, with these parts of the state alone connected from step to step."""
        state = left
        for token_B in tokens_BT[:, 1:].unbind(1):
            parts = state.tensors.items()
            state = State({name: part if name in ways else part.detach() for name, part in parts})
            features_BF, state = network.step(token_B, state)
        return features_BF.sum()

    def brings_something(name: str) -> bool:
        (gradient,) = torch.autograd.grad(prediction({name}), left.tensors[name], allow_unused=True)
        return gradient is not None and bool(gradient.any())

    ways = {name for name, tensor in left.tensors.items() if tensor.requires_grad and brings_something(name)}
    if not ways:
        raise UserError(f"no gradient of model.kind {network.config.kind!r} comes from {distance} tokens back")
    start = prediction(ways).grad_fn
    return _shortest_path(start, {id(left.tensors[name]) for name in ways}) if start is not None else 0


def _shortest_path(start: Node, leaves: set[int]) -> int:
    """The least number of arithmetic nodes between a node and any of some leaves (Dijkstra)."""
    queue: list[tuple[int, int, Node]] = [(_weight(start), 0, start)]
    best = {start: _weight(start)}
    number = 1
    while queue:
        cost, _, node = heapq.heappop(queue)
        if cost > best[node]:
            continue
        if node.name() == _LEAF and id(node.variable) in leaves:  # type: ignore[attr-defined]  # leaves have it
            return cost
        for following, _ in node.next_functions:
            if following is None:
                continue
            reached = cost + _weight(following)
            if reached < best.get(following, reached + 1):
                best[following] = reached
                heapq.heappush(queue, (reached, number, following))
                number += 1
    raise UserError("no gradient leads from the prediction to the state")


def _weight(node: Node) -> int:
    name = node.name()
    return 0 if name == _LEAF or name.partition("Backward")[0] in _MOVES else 1


def scorecard_page(scorecard: Scorecard) -> Page:
    """The scorecard as one page."""
    where = scorecard.where
    end = "" if scorecard.is_complete else " It was stopped: there were more models to measure."
    page = Page(
        "Recurrence against attention",
        f"Models of about {scorecard.cards[0].parameters:,} parameters, measured on {where['device']}, "
        f"{where['threads']} thread of PyTorch {where['torch']}, {where['clock']}.{end}",
    )
    page.section("One picture", "Both axes are logarithmic: a straight line is a power, and its slope says which.")
    page.figure(picture(scorecard), "Lower is better everywhere.")
    page.section("How each grows", "The k of cost = c size^k. 0: not at all; 1: with the size; 2: with its square.")
    page.table(["model", *(heading for heading, _ in _COLUMNS)], table(scorecard))
    page.section("What was measured")
    for line in _EXPLAINED:
        page.text(line)
    return page


_COLUMNS = (
    ("parameters", "parameters"),
    ("training, k", "training"),
    ("read at once, times", "parallelism"),
    ("share of peak", "share_of_peak"),
    ("one more token, k", "generation"),
    ("state, k", "state"),
    ("gradient path, k", "gradient_path"),
)

_EXPLAINED = (
    "Training: seconds for each token of a forward and backward pass over the same number of tokens, cut into fewer "
    "and longer rows. A recurrent model takes one step after the other: of fewer rows it has less to do at once.",
    "Read at once: how many times faster a row of tokens is read when all of it is given than token by token.",
    "Share of peak: operations in the fastest training, over those of a large product of matrices on the same device.",
    "One more token: seconds for a token at a place in a text, from what is carried there; reading again: without a "
    "cache, from the beginning of the text. Attention spans the whole text unless a window was given.",
    "State: the bytes carried for one text. Gradient path: the fewest arithmetic steps between a prediction and the "
    "state that a token so far back left behind, counted in the graph that PyTorch records.",
)


def table(scorecard: Scorecard) -> list[list[str | int]]:
    """A row for each way: names, and the exponents of growth."""
    rows = []
    for card in scorecard.cards:
        row: list[str | int] = [card.way]
        for _, name in _COLUMNS:
            value = getattr(card, name)
            if isinstance(value, Growth):
                value = value.exponent
            row.append("–" if value is None else value if isinstance(value, int) else f"{value:z.2f}")
        rows.append(row)
    return rows


def picture(scorecard: Scorecard) -> Any:
    """All that grows, in one figure of four panels."""
    panels = (
        ("training", "microseconds for each token of training", "length of the rows", 1e6),
        ("generation", "milliseconds for one more token", "its position in the text", 1e3),
        ("state", "kilobytes carried", "position in the text", 1e-3),
        ("gradient_path", "arithmetic steps back", "distance in tokens", 1.0),
    )
    figure, axes = new_figure(2, 2, height=7.0)
    for (name, title, label, factor), one_axes in zip(panels, axes.flat, strict=True):
        measured: Sequence[int] = ()
        for number, card in enumerate(scorecard.cards):
            growth = getattr(card, name)
            again = "reading again" in card.way
            if growth is None or (again and name != "generation"):
                one_axes.plot([], [])  # takes its colour, so that a way has the same everywhere
                continue
            costs = [cost * factor for cost in growth.costs]
            # Lines that lie on each other stay visible.
            width = 1.2 + 0.5 * (len(scorecard.cards) - number) / len(scorecard.cards)
            one_axes.plot(growth.sizes, costs, marker="o", markersize=3.5, linewidth=width, label=card.way)
            measured = growth.sizes
        one_axes.set_xscale("log")
        one_axes.set_yscale("log")
        one_axes.set_xticks(measured, [f"{size:,}" for size in measured])
        one_axes.xaxis.minorticks_off()
        one_axes.set_title(title, fontsize=10)
        one_axes.set_xlabel(label)
    axes[0, 1].legend(frameon=False, fontsize=8)
    return figure


def write_scorecard(scorecard: Scorecard, folder: Path) -> list[Path]:
    """Write page and picture into a folder. Raises UserError: it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_svg(picture(scorecard), folder / "scorecard.svg")
    except OSError as error:
        raise UserError(f"{str(folder)!r} cannot be written ({error.strerror}): give another --out") from None
    scorecard_page(scorecard).write(folder / "scorecard.html")
    return [folder / "scorecard.html", folder / "scorecard.svg"]
