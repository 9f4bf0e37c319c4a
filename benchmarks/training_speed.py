"""What the gradient of a segment costs: models of equal size side by side, and the forms of the selective scan.

    python benchmarks/training_speed.py --threads 1
    python benchmarks/training_speed.py --threads 2
    python benchmarks/training_speed.py --scans

Each row is the loss of 32 texts of 64 tokens and its gradient, without the optimiser. ``processor_seconds`` is the
median of the time that processors worked, over all threads, so that other work on the machine counts little;
``seconds`` is the shortest time by the clock. Models take turns.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from elman.models.contract import LanguageModel
from elman.models.kinds import build_model, model_class, model_config
from elman.scan.selective import selective_scan

VOCAB_SIZE = 66
ROWS, STEPS = 32, 64
SHAPES = {
    "lstm": {"embedding_size": 128},
    "mamba": {"num_layers": 2},
    "rglru": {"num_layers": 2},
}


def model_of(kind: str, num_parameters: int) -> LanguageModel:
    """The widest model of a kind that has no more parameters, in steps of 8."""
    found = None
    for width in range(8, 4096, 8):
        equal = {} if kind == "lstm" else {"embedding_size": width}
        feedforward = {"feedforward_size": 8 * width // 3} if kind == "rglru" else {}
        config = model_config({"kind": kind, "hidden_size": width, **SHAPES[kind], **equal, **feedforward})
        if model_class(config).predicted_num_parameters(config, VOCAB_SIZE) > num_parameters:
            break
        found = config
    if found is None:
        raise ValueError(f"no {kind} has so few parameters as {num_parameters}")
    return build_model(found, VOCAB_SIZE, seed=1, dtype=torch.float32)


def gradient_of_model(model: LanguageModel) -> None:
    """One segment from the initial state."""
    tokens = torch.randint(VOCAB_SIZE, (ROWS, STEPS + 1), generator=torch.Generator().manual_seed(1))
    features, _ = model.features(tokens[:, :-1], model.initial_state(ROWS))
    model.head.nll(features, tokens[:, 1:]).mean().backward()


def gradient_of_scan(backend: str, channels: int = 512, states: int = 16) -> None:
    """The selective scan of one layer."""
    generator = torch.Generator().manual_seed(1)
    x, dt = torch.rand(2, ROWS, STEPS, channels, generator=generator).unbind()
    B, C = torch.rand(2, ROWS, STEPS, states, generator=generator).unbind()
    A, h0 = -16 * torch.rand(channels, states), torch.zeros(ROWS, channels, states)
    leaves = [tensor.requires_grad_() for tensor in (x, 0.1 * dt, A, B, C, torch.ones(channels), h0)]
    y, _ = selective_scan(*leaves, backend)
    y.sum().backward()


def main() -> None:
    """Measure and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--scans", action="store_true", help="the forms of the selective scan in place of models")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tried: dict[str, Callable[[], None]]
    if arguments.scans:
        tried = {name: partial(gradient_of_scan, name) for name in ("compiled", "sequential", "parallel")}
        sizes = {}
    else:
        models = {kind: model_of(kind, arguments.parameters) for kind in SHAPES}
        tried = {kind: partial(gradient_of_model, model) for kind, model in models.items()}
        sizes = {kind: {"parameters": model.num_parameters} for kind, model in models.items()}
    clock: dict[str, list[float]] = {name: [] for name in tried}
    processors: dict[str, list[float]] = {name: [] for name in tried}
    for turn in range(arguments.repeats + 1):
        for name, one in tried.items():
            started, worked = time.perf_counter(), time.process_time()
            one()
            if turn:  # the first compiles
                clock[name].append(time.perf_counter() - started)
                processors[name].append(time.process_time() - worked)
    for name in tried:
        seconds, worked = min(clock[name]), statistics.median(processors[name])
        print(json.dumps({
            "what": name,
            **sizes.get(name, {}),
            "processor_seconds": round(worked, 4),
            "tokens_per_processor_second": round(ROWS * STEPS / worked),
            "seconds": round(seconds, 4),
            "threads": arguments.threads,
            "torch": torch.__version__,
            "machine": platform.machine(),
        }))  # fmt: skip


if __name__ == "__main__":
    main()
