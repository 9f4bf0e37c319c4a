"""What a token costs at any position of a text: an LSTM's state beside a Transformer's cache, and reading all anew.

    python benchmarks/constant_cost.py --save

Each model has two layers of 128 units, 65 tokens and random weights; one thread. The LSTM draws a million tokens by
`Engine.draw`; the places on the way are kept, and go on in turn: the time per token at each is the median of the turns,
its memory what the process has held up to there. The Transformer takes steps of PyTorch with a cache of so many
positions, whose entries are random numbers, since their values do not change the work; without a cache it reads the
whole text for one more token, up to 10,000. `--save` writes docs/images/constant-cost.svg and
benchmarks/results/constant-cost.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elman.engine import Drawing, Engine
from elman.models.contract import LanguageModel
from elman.models.kinds import build_model, model_config
from elman.models.state import State, grows

VOCAB_SIZE = 65
POSITIONS = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
LAST_ANEW = 10_000
PIECE, TURNS = 1000, 51


def model_of(kind: str) -> LanguageModel:
    """Two layers of 128 units."""
    config = model_config({"kind": kind, "hidden_size": 128, "embedding_size": 128, "num_layers": 2})
    return build_model(config, VOCAB_SIZE, seed=1, dtype=torch.float32)


def peak_megabytes() -> float:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def of_lstm() -> tuple[dict[int, float], dict[int, float]]:
    """Seconds per token at each position, and megabytes held up to there.

    The text is drawn once, and the place at each position kept; then all places go on in turn, so that what else the
    machine does meets each of them alike.
    """
    engine = Engine(model_of("lstm"), num_threads=1)
    how = Drawing(-1, temperature=1.0)  # no boundary: it goes on and on
    rng = np.random.default_rng(1)
    place = engine.read([1], engine.initial_state(1))
    memory, read, places = {}, 1, {}
    for position in POSITIONS:
        while read < position:
            num_tokens = min(PIECE, position - read)
            place = engine.draw(*place, how, rng.random(num_tokens))[1:3]
            read += num_tokens
        places[position], memory[position] = place, peak_megabytes()
    seconds: dict[int, list[float]] = {position: [] for position in POSITIONS}
    for _ in range(TURNS):
        for position, (logits_V, state) in places.items():
            uniforms = rng.random(PIECE)
            started = time.perf_counter()
            engine.draw(logits_V, state, how, uniforms)
            seconds[position].append((time.perf_counter() - started) / PIECE)
    return {position: statistics.median(found) for position, found in seconds.items()}, memory


def repeated(call: Callable[[], Any], times: int) -> float:
    """The median of some turns."""
    found = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def of_cache(network: LanguageModel, position: int) -> float:
    """Seconds for a step with a cache of so many positions."""
    generator = torch.Generator().manual_seed(1)
    initial = network.initial_state(1).tensors
    state = State({
        name: torch.randn((1, position, *part.shape[2:]), generator=generator) if grows(part) else part
        for name, part in initial.items()
    })  # fmt: skip
    token_B = torch.tensor([1])

    def step() -> None:
        features_BF, _ = network.step(token_B, state)
        network.head.logits(features_BF.unsqueeze(1))

    step()
    return repeated(step, 9 if position <= 100_000 else 3)


def of_reading_anew(network: LanguageModel, position: int) -> float:
    """Seconds to read so many tokens from the beginning, for the next one alone."""
    tokens_BT = torch.randint(VOCAB_SIZE, (1, position), generator=torch.Generator().manual_seed(1))

    def read() -> None:
        features_BTF, _ = network.features(tokens_BT, network.initial_state(1))
        network.head.logits(features_BTF[:, -1:])

    return repeated(read, 3)


def draw(curves: dict[str, dict[int, float]], path: Path) -> None:
    """The picture."""
    from elman.page import new_figure, write_svg

    figure, axes = new_figure(height=4.0)
    for name, curve in curves.items():
        axes.loglog(list(curve), [1e6 * seconds for seconds in curve.values()], marker="o", label=name)
    axes.set_xlabel("position in the text, tokens")
    axes.set_ylabel("time for one more token, microseconds")
    axes.legend()
    write_svg(figure, path)


def main() -> None:
    """Measure; print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write the picture and the figures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lstm, memory = of_lstm()
    transformer = model_of("transformer")
    with torch.no_grad():
        cache = {p: of_cache(transformer, p) for p in POSITIONS}
        anew = {p: of_reading_anew(transformer, p) for p in POSITIONS if p <= LAST_ANEW}
    curves = {"LSTM": lstm, "Transformer with a cache": cache, "Transformer, reading all anew": anew}
    print("| position | LSTM, µs | its memory, MB | Transformer with a cache, µs | reading all anew, µs |")
    print("|---|---|---|---|---|")
    for position in POSITIONS:
        figures = [f"{1e6 * curve[position]:,.1f}" if position in curve else "" for curve in curves.values()]
        print(f"| {position:,} | {figures[0]} | {memory[position]:,.1f} | {figures[1]} | {figures[2]} |")
    if arguments.save:
        root = Path(__file__).parents[1]
        results = {"seconds": curves, "megabytes_of_lstm": memory, "torch": torch.__version__}
        path = root / "benchmarks" / "results" / "constant-cost.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        draw(curves, root / "docs" / "images" / "constant-cost.svg")


if __name__ == "__main__":
    main()
