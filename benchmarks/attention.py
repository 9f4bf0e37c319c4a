"""What one more token costs at different places of a text: an LSTM and a Transformer of the same number of parameters.

    python benchmarks/attention.py --positions 10 100 1000 10000

The LSTM carries its state. The Transformer generates in two ways: with its cache, and by reading the whole prefix again
for each token, as textbook code does; its window is the same in both, so that both give the same distribution. Weights
are those of the start, which take the same time as any others. Figures are medians of processor time on one thread, for
one text, so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from elman.models.contract import LanguageModel
from elman.models.kinds import build_model, model_class, model_config
from elman.models.state import State

VOCAB_SIZE = 66
TRANSFORMER = {
    "kind": "transformer",
    "num_layers": 4,
    "hidden_size": 128,
    "embedding_size": 128,
    "feedforward_size": 344,
}


def lstm_of(num_parameters: int) -> dict[str, object]:
    """The settings of a one-layer LSTM whose number of parameters is nearest to this."""

    def distance(hidden_size: int) -> int:
        config = model_config({"kind": "lstm", "hidden_size": hidden_size})
        return abs(model_class(config).predicted_num_parameters(config, VOCAB_SIZE) - num_parameters)

    return {"kind": "lstm", "hidden_size": min(range(1, 2048), key=distance)}


def carry_on(model: LanguageModel, token_B1: Tensor, state: State) -> Tensor:
    """The distribution after one more token, from what the model carries."""
    return model.head.log_probs(model.features(token_B1, state)[0])


def read_again(model: LanguageModel, tokens_BT: Tensor) -> Tensor:
    """The distribution after the last token, from the whole text."""
    features_BTF, _ = model.features(tokens_BT, model.initial_state(len(tokens_BT)))
    return model.head.log_probs(features_BTF[:, -1:])


def seconds_of(call: Callable[[], Tensor], budget_seconds: float) -> float:
    """The median processor time of a call, of as many as the budget allows but three at least."""
    call()
    found: list[float] = []
    while len(found) < 3 or sum(found) < budget_seconds:
        started = time.process_time()
        call()
        found.append(time.process_time() - started)
    return statistics.median(found)


class Figure(NamedTuple):
    """What one more token costs."""

    way: str
    num_parameters: int
    position: int
    milliseconds: float
    state_bytes: int | None
    """What is carried there; none where the text is read again."""

    def __str__(self) -> str:
        carried = "" if self.state_bytes is None else f", {self.state_bytes:,} bytes"
        return f"{self.milliseconds:,.3g} ms{carried}"


def measure(way: str, model: LanguageModel, position: int, budget_seconds: float, rereads: bool) -> Figure:
    """The cost of the token at this position."""
    tokens_BT = torch.randint(VOCAB_SIZE, (1, position), generator=torch.Generator().manual_seed(1))
    state = model.initial_state(1)
    for piece_BT in tokens_BT[:, :-1].split(256, dim=1):
        _, state = model.features(piece_BT, state)
    call = partial(read_again, model, tokens_BT) if rereads else partial(carry_on, model, tokens_BT[:, -1:], state)
    milliseconds = 1000 * seconds_of(call, budget_seconds)
    return Figure(way, model.num_parameters, position, milliseconds, None if rereads else state.num_bytes)


def main() -> None:
    """Measure and print a table, a row for each way of generating."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, nargs="+", default=[10, 100, 1000, 10000])
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=3.0, help="spent on each figure")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    build = partial(build_model, vocab_size=VOCAB_SIZE, seed=1, dtype=torch.float32)
    transformer = build(model_config({**TRANSFORMER, "attention_window": arguments.window}))
    lstm = build(model_config(lstm_of(transformer.num_parameters)))
    ways = {
        "LSTM": (lstm, False),
        "Transformer, cache": (transformer, False),
        "Transformer, reading again": (transformer, True),
    }
    figures: list[Figure] = []
    print("| at position |", " | ".join(f"{position:,}" for position in arguments.positions), "|")
    print("|---|" + "---|" * len(arguments.positions))
    for way, (model, rereads) in ways.items():
        with torch.no_grad():
            found = [measure(way, model, place, arguments.seconds, rereads) for place in arguments.positions]
        print(f"| {way} |", " | ".join(map(str, found)), "|", flush=True)
        figures += found
    if arguments.out:
        where = {"window": arguments.window, "torch": torch.__version__, "machine": platform.machine()}
        text = json.dumps({**where, "figures": [figure._asdict() for figure in figures]}, indent=1)
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
