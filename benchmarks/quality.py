"""How good a model some minutes give: a preset of Elman beside a plain PyTorch LSTM, in one run on one machine.

    python benchmarks/quality.py tiny-shakespeare.txt --preset cpu-1min --seeds 3 --out results.json

The last tenth of the text is held out; both are judged on all of it, as one stream with carried state. The two take
turns, seed by seed, so that a machine whose speed drifts is fair to both. Nothing else should run meanwhile.
``crops`` is the same model judged as one without carried state is: the text in pieces of 256 tokens, each read from the
initial state.

The plain LSTM is what one writes by hand: 256 units, one layer, batch 16, segments of 64, AdamW at 4e-3, gradients
clipped at norm 1, state carried.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import elman
from elman.settings import resolve

CROP = 256


class PlainLSTM(nn.Module):
    """Embedding, one ``nn.LSTM``, output."""

    def __init__(self, vocab_size: int, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.output = nn.Linear(width, vocab_size)

    def forward(self, tokens, state):
        """Logits and the next state."""
        hidden, state = self.lstm(self.embedding(tokens), state)
        return self.output(hidden), state


def train_plain(text: str, held_out: str, seed: int, seconds: float) -> dict[str, float]:
    """Train the plain LSTM for so many seconds and judge it."""
    torch.manual_seed(seed)
    characters = sorted(set(text))
    index = {character: number for number, character in enumerate(characters)}
    data = torch.tensor([index[c] for c in text])
    batch, bptt = 16, 64
    rows = data[: len(data) // batch * batch].view(batch, -1)
    model = PlainLSTM(len(characters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    started, state, position, updates = time.perf_counter(), None, 0, 0
    while time.perf_counter() - started < seconds:
        if position + bptt + 1 > rows.shape[1]:
            position, state = 0, None
        logits, state = model(rows[:, position : position + bptt], state)
        targets = rows[:, position + 1 : position + bptt + 1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        state = tuple(part.detach() for part in state)
        position, updates = position + bptt, updates + 1
    trained = time.perf_counter() - started
    tokens = torch.tensor([index[c] for c in held_out])
    total, state = 0.0, None
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, 1024):
            piece = tokens[start : start + 1025]
            logits, state = model(piece[None, :-1], state)
            total += nn.functional.cross_entropy(logits[0], piece[1:], reduction="sum").double().item()
    return {"nats_per_token": total / (len(tokens) - 1), "seconds": trained, "updates": updates}


def train_preset(text_file: Path, seed: int, preset: str, seconds: float, runs: Path) -> dict[str, float]:
    """Train Elman's preset and judge it by its own evaluation."""
    run = elman.train(
        text_file,
        out=runs / f"{preset}-{seed}",
        preset=preset,
        seed=seed,
        data={"valid_fraction": 0.0, "test_fraction": 0.1},
        training={"max_seconds": seconds},
    )
    end = [record for record in run.records() if record["kind"] == "end"][-1]
    carried = elman.evaluate(run.path).evaluation.score
    crops = elman.evaluate(run.path, window=CROP, stride=CROP).evaluation.score
    figures = {
        "nats_per_token": carried.nats_per_token,
        "nats_per_token_in_crops": crops.nats_per_token,
        "seconds": end["measured"]["seconds"],
        "updates": end["update"],
    }
    if carried.bits_per_char is not None:  # where words are unknown there is none
        figures["nats_per_char"] = carried.bits_per_char * math.log(2)
    return figures


def machine() -> dict[str, object]:
    """What the figures were measured on, with the machine's own matrix product as a yardstick."""
    matrix = torch.randn(2048, 2048)
    matrix @ matrix
    started = time.perf_counter()
    for _ in range(5):
        matrix @ matrix
    gflops = 5 * 2 * 2048**3 / (time.perf_counter() - started) / 1e9
    model_name = next(
        (line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor()
    )
    return {
        "processor": model_name,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "matrix_product_gflops": round(gflops),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def main() -> None:
    """Run the comparison, print it and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--preset", default="cpu-1min")
    parser.add_argument("--seconds", type=float, help="of training; left out: what the preset has")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="without the plain LSTM")
    parser.add_argument("--runs", type=Path, help="a folder that keeps the runs, for when one ends as it should not")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    seconds = arguments.seconds or resolve(preset=arguments.preset).training.max_seconds
    if seconds is None:
        parser.error(f"the preset {arguments.preset} is not one of so many seconds: give --seconds")
    text = arguments.text.read_text("utf-8")
    border = int(0.9 * len(text))
    before = machine()
    found: dict[str, list[dict[str, float]]] = {} if arguments.alone else {"plain": []}
    found[arguments.preset] = []
    with tempfile.TemporaryDirectory() as made:
        for seed in range(1, arguments.seeds + 1):
            for name, results in found.items():
                if name == "plain":
                    results.append(train_plain(text[:border], text[border:], seed, seconds))
                else:
                    results.append(train_preset(arguments.text, seed, name, seconds, arguments.runs or Path(made)))
                print(f"seed {seed}  {name:10s} {in_words(results[-1])}", flush=True)
    means = {
        name: {figure: statistics.mean(result[figure] for result in results) for figure in results[0]}
        for name, results in found.items()
    }
    for name, result in means.items():
        print(f"mean    {name:10s} {in_words(result)}")
    if arguments.out:
        options = f" --seconds {arguments.seconds:g}" if arguments.seconds else ""
        options += f" --seeds {arguments.seeds}" + (" --alone" if arguments.alone else "")
        report = {
            "what": "nats over the whole held-out text, one stream, carried state; and in crops of "
            f"{CROP}, each read from the initial state",
            "command": f"python benchmarks/quality.py {arguments.text.name} --preset {arguments.preset}{options}",
            "date": time.strftime("%Y-%m-%d"),
            "machine": before,
            "results": found,
            "means": means,
        }
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


def in_words(result: dict[str, float]) -> str:
    """One result on one line."""
    figures = [f"{result['nats_per_token']:.4f} nats a token"]
    if "nats_per_char" in result:
        figures.append(f"{result['nats_per_char']:.4f} a character")
    if "nats_per_token_in_crops" in result:
        figures.append(f"{result['nats_per_token_in_crops']:.4f} in crops")
    return f"{', '.join(figures)}, in {result['seconds']:.1f} s, {result['updates']:.0f} updates"


if __name__ == "__main__":
    main()
