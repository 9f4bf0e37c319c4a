"""Training with large vocabularies: speed beside the same model as one writes it by hand, memory, and quality.

    python benchmarks/training.py speed --check
    python benchmarks/training.py memory
    python benchmarks/training.py quality wikitext-2-valid.txt wikitext-2-test.txt --seconds 60
    python benchmarks/training.py curve tiny-shakespeare.txt --preset cpu-1min --updates 150 300 600 1200

``speed`` takes the settings of PyTorch's example word_language_model: an LSTM of two layers of 200, batch 20, segments
of 35, SGD with gradients clipped at norm 0.25; without dropout, so that losses can be compared. The text is
``synthetic:zipf``, words with a natural rank-frequency curve. The hand-written model is nn.Embedding, nn.LSTM,
nn.Linear and CrossEntropyLoss. The models take turns, some batches each in a process of its own, and every batch counts
from the text to the changed weights. The losses of the exact one are held against the example's in float64, because at
the example's rate of 20 the rounding of float32 alone moves a loss by 0.01 within ten batches.

``limit`` is the time of the matrix products alone at the speed of a large one on this machine: three times the two
operations of each element of each matrix, for every token.

``memory`` is the most memory that the loss of 700 positions and its gradient add, each in a process of its own.
``quality`` trains with each output for so many seconds and judges it on the second file. ``curve`` trains a preset for
some numbers of updates, each a training of its own because schedules follow the budget, and judges it on the last tenth
of the text: the points by which `elman bench` says what a machine can expect (``RECORDED`` in
``elman.training.bench``). They do not depend on the machine's speed, so that other work may go on meanwhile.
Results go to ``benchmarks/results/training.json``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from quality import machine

import elman
from elman.data.prepare import Dataset, prepare
from elman.settings import resolve
from elman.training.loop import Trainer

RESULTS = Path(__file__).parent / "results" / "training.json"
ROWS, STEPS, WIDTH, RATE, CLIP = 20, 35, 200, 20.0, 0.25
VOCABULARIES = (10_000, 33_278)
SPECIAL_TOKENS = 3
OUTPUTS: dict[str, dict[str, Any]] = {
    "exact": {},
    "adaptive": {"output": "adaptive"},
    "sampled": {},
}
CUTOFFS = {10_000: (500, 3000), 33_278: (1000, 8000)}


class Example(nn.Module):
    """The example's model, as it is written there: time first."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.encoder = nn.Embedding(vocab_size, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, 2)
        self.decoder = nn.Linear(WIDTH, vocab_size)
        self.vocab_size = vocab_size

    def forward(self, tokens, hidden):
        """Logits of all positions, one below the other, and the next state."""
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        return self.decoder(output).view(-1, self.vocab_size), hidden


def example_losses(model: Example, tokens: torch.Tensor) -> Iterator[float]:
    """The example's loop: a loss for every batch."""
    steps = len(tokens) // ROWS
    data = tokens[: steps * ROWS].view(ROWS, steps).t().contiguous()
    criterion = nn.CrossEntropyLoss()
    hidden, start = None, 0
    while True:
        if start >= steps - 1:
            hidden, start = None, 0
        length = min(STEPS, steps - 1 - start)
        inputs, targets = data[start : start + length], data[start + 1 : start + 1 + length].reshape(-1)
        model.zero_grad()
        hidden = None if hidden is None else tuple(part.detach() for part in hidden)
        output, hidden = model(inputs, hidden)
        loss = criterion(output, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=-RATE)
        yield loss.item()
        start += STEPS


def word_dataset(vocab_size: int, num_words: int) -> Dataset:
    """Words with a natural rank-frequency curve; the boundary is left out, as the example has none."""
    corpus = f"synthetic:zipf,words={num_words},vocabulary={vocab_size - SPECIAL_TOKENS}"
    data = {"corpus": [corpus], "valid_fraction": 0.0, "test_fraction": 0.0}
    config = resolve({"data": data}, preset="pytorch-word-lm")
    return prepare(config.data, config.text, config.tokenizer)


def settings_of(output: str, vocab_size: int) -> dict[str, Any]:
    """What makes an output, as settings."""
    model: dict[str, Any] = dict(OUTPUTS[output])
    if output == "adaptive":
        model["output_cutoffs"] = CUTOFFS.get(vocab_size, (1000, 5000))
    return {"model": model, "training": {"num_negatives": 1024} if output == "sampled" else {}}


def trainer_of(dataset: Dataset, output: str, dtype: str = "float32") -> Trainer:
    """Elman's preset for the example, without dropout and without end."""
    chosen = settings_of(output, dataset.tokenizer.size)
    settings = {
        "dtype": dtype,
        "model": {"dropout": 0.0, **chosen["model"]},
        "training": {"max_updates": 10**9, "max_epochs": "none", "schedule": "constant", **chosen["training"]},
        "evaluation": {"every_updates": 10**9},
        "sampling": {"every_updates": 10**9},
        "checkpoint": {"every_seconds": "none"},
    }
    trainer = Trainer(resolve(settings, preset="pytorch-word-lm"), dataset)
    without_boundary = trainer.streams.tokens[1:]
    trainer.streams = type(trainer.streams)(without_boundary, ROWS, STEPS, trim=True)
    return trainer


def elman_losses(trainer: Trainer) -> Iterator[float]:
    """A loss for every update."""
    return (record.values["nats"] for record in trainer.records() if record.kind == "update")


def same_weights(trainer: Trainer, model: Example) -> None:
    """Give the example's model the weights that Elman drew."""
    network = trainer.network
    with torch.no_grad():
        model.encoder.weight.copy_(network.embedding)
        model.decoder.weight.copy_(network.head.weight)
        model.decoder.bias.copy_(network.head.bias)
        for index, layer in enumerate(network.layers):
            for name, parameter in layer.named_parameters():
                getattr(model.rnn, f"{name}_l{index}").copy_(parameter)


def largest_difference(dataset: Dataset, num_batches: int = 50) -> float:
    """Between the losses of both, in float64 at the example's rate."""
    trainer, model = trainer_of(dataset, "exact", "float64"), Example(dataset.tokenizer.size).double()
    same_weights(trainer, model)
    tokens = torch.from_numpy(dataset.train.tokens[1:].astype("int64"))
    pairs = zip(elman_losses(trainer), example_losses(model, tokens), strict=False)
    return max(abs(ours - theirs) for (ours, theirs), _ in zip(pairs, range(num_batches), strict=False))


def matrix_seconds(network: elman.models.contract.LanguageModel, gflops: float) -> float:
    """How long the matrix products of one batch take at this speed."""
    operations = sum(component.operations for component in network.components())
    return 3 * operations * ROWS * STEPS / gflops / 1e9


def peak_gflops() -> float:
    """Of a large matrix product, the best of some."""
    matrix, best = torch.randn(2048, 2048), 0.0
    for _ in range(8):
        started = time.perf_counter()
        matrix @ matrix
        best = max(best, 2 * 2048**3 / (time.perf_counter() - started) / 1e9)
    return best


def batches(connection: Connection, name: str, vocab_size: int, words: int, threads: int) -> None:
    """A process that trains one model, some batches whenever it is told to, and says how long each took."""
    torch.set_num_threads(threads)
    dataset = word_dataset(vocab_size, words)
    if name == "example":
        losses = example_losses(Example(vocab_size), torch.from_numpy(dataset.train.tokens[1:].astype("int64")))
    else:
        losses = elman_losses(trainer_of(dataset, name))
    while number := connection.recv():
        times = []
        for _ in range(number):
            started, before = time.perf_counter(), time.process_time()
            next(losses)
            times.append((time.perf_counter() - started, time.process_time() - before))
        connection.send(times)


def speed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Batches of every model, in turns, each in a process of its own: what one sets in its process is no other's."""
    found: dict[str, Any] = {}
    processes = multiprocessing.get_context("spawn")
    for vocab_size in arguments.vocabularies:
        dataset = word_dataset(vocab_size, arguments.words)
        pipes: dict[str, Connection] = {}
        for name in ("example", *OUTPUTS):
            pipes[name], theirs = processes.Pipe()
            given = (theirs, name, vocab_size, arguments.words, arguments.threads)
            processes.Process(target=batches, args=given, daemon=True).start()
        seconds: dict[str, list[float]] = {name: [] for name in pipes}
        worked: dict[str, list[float]] = {name: [] for name in pipes}
        peaks: list[float] = []
        for turn in range(arguments.turns + 1):
            peaks.append(peak_gflops())
            for name, pipe in pipes.items():
                pipe.send(arguments.batches)
                times = pipe.recv()
                if turn:  # the first turn warms up
                    seconds[name] += [one for one, _ in times]
                    worked[name] += [one for _, one in times]
        for pipe in pipes.values():
            pipe.send(0)
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        processor = {name: statistics.median(times) for name, times in worked.items()}
        gflops = statistics.median(peaks)
        limit = matrix_seconds(trainer_of(dataset, "exact").network, gflops)
        found[str(vocab_size)] = {
            "milliseconds_per_batch": {name: round(1000 * value, 1) for name, value in medians.items()},
            "tokens_per_second": {name: round(ROWS * STEPS / value) for name, value in medians.items()},
            "times_the_example": {name: round(medians["example"] / value, 2) for name, value in medians.items()},
            "processor_milliseconds_per_batch": {name: round(1000 * value, 1) for name, value in processor.items()},
            "times_the_example_by_processor": {
                name: round(processor["example"] / value, 2) for name, value in processor.items()
            },
            "limit_milliseconds": round(1000 * limit, 1),
            "share_of_limit": {name: round(limit / medians[name], 2) for name in ("example", "exact")},
            "matrix_product_gflops": round(gflops),
            "cutoffs": CUTOFFS.get(vocab_size),
            "threads": arguments.threads,
            "batches": arguments.turns * arguments.batches,
            "largest_difference_of_50_losses": largest_difference(dataset) if arguments.check else None,
        }
        print(vocab_size, json.dumps(found[str(vocab_size)]), flush=True)
    return found


def loss_alone(vocab_size: int, how: str) -> None:
    """The loss of 700 positions and its gradient, plain or in pieces."""
    from elman.models.losses import LinearCost, Positions, in_pieces

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS * STEPS, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(vocab_size, WIDTH, generator=generator).mul_(0.1).requires_grad_()
    targets = torch.randint(vocab_size, (len(x),), generator=generator)
    small = torch.nn.functional.cross_entropy(x[:2] @ weight[:9].T, targets[:2] % 9)  # loads what is needed
    small.backward()
    weight.grad = torch.zeros_like(weight)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if how == "plain":
        torch.nn.functional.cross_entropy(x @ weight.T, targets).backward()
    else:
        ones = torch.full((len(x),), 1 / len(x))
        in_pieces(LinearCost(), Positions(x, targets, ones), (weight,)).objective.sum().backward()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def memory(arguments: argparse.Namespace) -> dict[str, Any]:
    """Each in a process of its own."""
    found: dict[str, Any] = {}
    for vocab_size in (*arguments.vocabularies, 300_000):
        sizes = {}
        for how in ("plain", "pieces"):
            command = [sys.executable, __file__, "one", "--vocabulary", str(vocab_size), "--how", how]
            ran = subprocess.run(command, capture_output=True, text=True, check=True)
            sizes[how] = round(int(ran.stdout) / 1024, 1)
        found[str(vocab_size)] = {
            "mebibytes": sizes,
            "gradient_of_the_matrix": round(vocab_size * WIDTH * 4 / 2**20, 1),
            "all_logits": round(ROWS * STEPS * vocab_size * 4 / 2**20, 1),
        }
        print(vocab_size, json.dumps(found[str(vocab_size)]), flush=True)
    return found


def quality(arguments: argparse.Namespace) -> dict[str, Any]:
    """Nats of each output after as many seconds."""
    found: dict[str, Any] = {"seconds": arguments.seconds, "texts": [path.name for path in arguments.texts]}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part, path in zip(("train", "valid"), arguments.texts, strict=True):
            (folder / f"{part}.txt").write_bytes(path.read_bytes())
        for output in OUTPUTS:
            chosen = settings_of(output, 0)
            run = elman.train(
                folder,
                out=folder / "runs" / output,
                preset="pytorch-word-lm",
                model={"dropout": 0.2, **chosen["model"]},
                training={
                    "max_seconds": arguments.seconds,
                    "max_epochs": "none",
                    "optimizer": "adamw",
                    "learning_rate": 3e-3,
                    "schedule": "cosine",
                    "warmup_updates": 50,
                    **chosen["training"],
                },
                evaluation={"every_updates": 10**9},
                sampling={"every_updates": 10**9, "max_new_tokens": 1},
            )
            end = [record for record in run.records() if record["kind"] == "end"][-1]
            judged = elman.evaluate(run.path, split="valid").evaluation
            found[output] = {
                "nats_per_token": round(judged.score.nats_per_token, 4),
                "updates": end["update"],
                "vocabulary": judged.vocab_size,
            }
            print(output, json.dumps(found[output]), flush=True)
    return found


def curve(arguments: argparse.Namespace) -> dict[str, Any]:
    """Nats of a preset after some numbers of updates, the median over seeds."""
    points: dict[int, list[float]] = {}
    for updates in sorted(arguments.updates):
        points[updates] = []
        for seed in range(1, arguments.seeds + 1):
            with tempfile.TemporaryDirectory() as name:
                run = elman.train(
                    arguments.text,
                    out=Path(name) / "run",
                    preset=arguments.preset,
                    seed=seed,
                    data={"valid_fraction": 0.0, "test_fraction": 0.1},
                    training={"max_updates": updates, "max_seconds": "none"},
                    sampling={"every_updates": 10**9, "max_new_tokens": 1},
                )
                points[updates].append(round(elman.evaluate(run.path).evaluation.score.nats_per_token, 4))
            print(updates, seed, points[updates][-1], flush=True)
    medians = {updates: round(statistics.median(nats), 4) for updates, nats in points.items()}
    seconds = resolve(preset=arguments.preset).training.max_seconds
    print(f'"{arguments.preset}": Recorded({seconds}, {tuple(medians.items())}),')
    return {"nats": medians, "of_each_seed": points}


def keep(what: str, found: dict[str, Any], command: str, path: Path = RESULTS) -> None:
    """Put a result beside those of the other commands."""
    report = json.loads(path.read_text()) if path.exists() else {}
    report[what] = {"command": command, "date": time.strftime("%Y-%m-%d"), "machine": machine(), "results": found}
    path.write_text(json.dumps(report, indent=2) + "\n")


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    for name in ("speed", "memory"):
        one = commands.add_parser(name)
        one.add_argument("--vocabularies", type=int, nargs="+", default=list(VOCABULARIES))
    speed_parser = commands.choices["speed"]
    speed_parser.add_argument("--words", type=int, default=200_000)
    speed_parser.add_argument("--turns", type=int, default=5)
    speed_parser.add_argument("--batches", type=int, default=8, help="of each model in a turn")
    speed_parser.add_argument("--threads", type=int, default=2)
    speed_parser.add_argument("--check", action="store_true", help="also hold 50 losses against the example's")
    quality_parser = commands.add_parser("quality")
    quality_parser.add_argument("texts", type=Path, nargs=2)
    quality_parser.add_argument("--seconds", type=float, default=60.0)
    curve_parser = commands.add_parser("curve")
    curve_parser.add_argument("text", type=Path)
    curve_parser.add_argument("--preset", default="cpu-1min")
    curve_parser.add_argument("--updates", type=int, nargs="+", default=[150, 300, 600, 1200])
    curve_parser.add_argument("--seeds", type=int, default=1)
    one = commands.add_parser("one", help="one process of memory")
    one.add_argument("--vocabulary", type=int, required=True)
    one.add_argument("--how", choices=("plain", "pieces"), required=True)
    arguments = parser.parse_args()
    if arguments.what == "one":
        loss_alone(arguments.vocabulary, arguments.how)
        return
    if arguments.what == "speed":
        torch.set_num_threads(arguments.threads)
    runs: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "speed": speed,
        "memory": memory,
        "quality": quality,
        "curve": curve,
    }
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    name = f"curve of {arguments.preset}" if arguments.what == "curve" else arguments.what
    keep(name, runs[arguments.what](arguments), f"python benchmarks/training.py {' '.join(words)}")


if __name__ == "__main__":
    main()
