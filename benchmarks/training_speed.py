"""How fast training is: every cell beside the machine's peak, the parts of an update, loops, equal sizes, scans.

    python benchmarks/training_speed.py cells
    python benchmarks/training_speed.py parts
    python benchmarks/training_speed.py loops
    python benchmarks/training_speed.py sizes --threads 1
    python benchmarks/training_speed.py scans --threads 1
    python benchmarks/training_speed.py table

``cells`` trains a layer of 512 units of every cell in float32, with what its stack has around it by default, on 64
texts of 64 tokens: the gradient alone (forward, loss, backward), and whole updates (with clipping and AdamW).
Operations are those of the model: two for each element of each matrix that a token is multiplied by, and what a cell's
page counts for its memory, state or attention; the backward pass counts twice the forward pass, and what is computed a
second time is not counted. The share is that of a product of two matrices of 2048 x 2048 in float32, PyTorch's own,
which takes its turns between the cells. Figures are medians over the turns. ``table`` writes them to
``docs/training-speed-table.md``.

``parts`` trains an LSTM of 512 units on 64 texts of 64 tokens with AdamW and with Muon, as `elman train` does: with the
records written to a folder, and the lines that the terminal gets. Each part is timed by the clock where it is called.

``loops`` holds the gradients by hand of the Elman RNN and the GRU against PyTorch's kernels, in turns.
``sizes`` are models of equal size, and ``scans`` the forms of the selective scan: the loss of 32 texts of 64 tokens and
its gradient, without the optimiser. ``processor_seconds`` is the median of the time that processors worked, over all
threads, so that other work on the machine counts little; ``seconds`` is the shortest time by the clock. All take turns.

Results of ``cells`` and ``parts`` go to ``benchmarks/results/training-speed.json``.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import elman
from elman.cells import cell_names
from elman.cells.base import GatedCell
from elman.cli.display import Display
from elman.config import TrainingConfig
from elman.data.streams import Streams
from elman.models.contract import LanguageModel
from elman.models.kinds import build_model, model_class, model_config, model_config_class
from elman.process import as_in_training
from elman.scan.selective import selective_scan
from elman.settings import resolve
from elman.training.gradients import Gradients
from elman.training.keeper import Keeper
from elman.training.loop import Callback, Record, Trainer
from elman.training.optimizers import Optimizer
from elman.training.scaling import Update
from training import keep

ROOT = Path(__file__).parents[1]
RESULTS, TABLE = ROOT / "benchmarks" / "results" / "training-speed.json", ROOT / "docs" / "training-speed-table.md"
VOCAB_SIZE = 66
WIDTH = 512
BATCH = {"batch_size": 64, "bptt": 64}
MATRIX_SIZE = 2048
ROWS, STEPS = 32, 64
SHAPES = {
    "lstm": {"embedding_size": 128},
    "mamba": {"num_layers": 2},
    "rglru": {"num_layers": 2},
}
PARTS: Mapping[str, tuple[type, str]] = {
    "data": (Streams, "segment"),
    "model": (Gradients, "_backward"),
    "clipping": (Gradients, "compute"),
    "optimizer": (Optimizer, "step"),
    "logging": (Keeper, "_keep"),
    "display": (Display, "on_record"),
    "update": (Trainer, "_train_segment"),
}
"""Where each part of an update is called; ``compute`` is the model's part and clipping together."""


def layer_of(kind: str) -> LanguageModel:
    """A layer of a cell at the width measured, in what its stack has around it by default."""
    settings = {"kind": kind, "hidden_size": WIDTH, "embedding_size": WIDTH, "num_layers": 1}
    fields = model_config_class(kind).model_fields
    if "feedforward_size" in fields and fields["feedforward_size"].default:
        settings["feedforward_size"] = 8 * WIDTH // 3
    return build_model(model_config(settings), VOCAB_SIZE, seed=1, dtype=torch.float32)


def seconds_of(call: Callable[[], object]) -> float:
    """By the clock."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def cells(arguments: argparse.Namespace) -> dict[str, Any]:
    """The gradient and whole updates of every cell, in turns with a large product."""
    matrix = torch.randn(MATRIX_SIZE, MATRIX_SIZE, generator=torch.Generator().manual_seed(1))
    product = torch.zeros_like(matrix)
    operations: dict[str, int] = {}
    calls: dict[str, Callable[[], object]] = {}
    for kind in arguments.kinds or cell_names():
        network = layer_of(kind)
        update = Update(network, TrainingConfig(**BATCH))
        operations[kind] = 3 * sum(component.operations for component in network.components()) * update.num_tokens
        calls |= {f"{kind} gradient": update.gradient, f"{kind} update": update}
    found = defaultdict[str, list[float]](list)
    for turn in range(arguments.turns + 1):
        for name, call in calls.items():
            peak, seconds = seconds_of(lambda: torch.mm(matrix, matrix, out=product)), seconds_of(call)
            if turn:  # the first compiles and warms up
                found["product"].append(peak)
                found[name].append(seconds)
    peak = 2 * MATRIX_SIZE**3 / statistics.median(found["product"]) / 1e9
    results: dict[str, Any] = {
        "product_gflops": round(peak, 1),
        "threads": torch.get_num_threads(),
        "turns": arguments.turns,
        "cells": {},
    }
    for kind, count in operations.items():
        seconds = {what: statistics.median(found[f"{kind} {what}"]) for what in ("gradient", "update")}
        results["cells"][kind] = {"gigaoperations": round(count / 1e9, 2)} | {
            what: {
                "milliseconds": round(1000 * one, 1),
                "gflops": round(count / one / 1e9, 1),
                "share": round(count / one / 1e9 / peak, 3),
            }
            for what, one in seconds.items()
        }
        print(kind, json.dumps(results["cells"][kind]), flush=True)
    return results


@contextmanager
def timed(seconds: dict[str, float]) -> Iterator[None]:
    """Add up the seconds of every part while it lasts; of records, those of updates count."""

    def watch(part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def watched(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = method(*arguments)
            if not isinstance(arguments[-1], Record) or arguments[-1].kind == "update":
                seconds[part] += time.perf_counter() - started
            return result

        return watched

    with ExitStack() as stack:
        for part, (owner, name) in PARTS.items():
            method = vars(owner)[name]
            setattr(owner, name, watch(part, method))
            stack.callback(setattr, owner, name, method)
        yield


def parts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Shares of the time of an update."""
    results: dict[str, Any] = {"threads": torch.get_num_threads(), "updates": arguments.updates}
    for optimizer in ("adamw", "muon"):
        seconds = defaultdict[str, float](float)

        class Start(Callback):
            """Forgets the first updates, which set things up."""

            def on_record(self, record: Record, seconds: dict[str, float] = seconds) -> None:
                if record.kind == "update" and record.values["update"] == arguments.warmup:
                    seconds.clear()

        settings = {
            "model": {"kind": "lstm", "hidden_size": WIDTH, "embedding_size": WIDTH},
            "training": {
                **BATCH,
                "optimizer": optimizer,
                "max_updates": arguments.warmup + arguments.updates,
                "num_threads": torch.get_num_threads(),
            },
            "evaluation": {"every_updates": 10**9},
            "sampling": {"every_updates": 10**9, "max_new_tokens": 1},
            "checkpoint": {"every_seconds": "none"},
            "data": {"valid_fraction": 0.0, "test_fraction": 0.0},
        }
        corpus = "synthetic:zipf,words=200000"
        display = Display(resolve({**settings, "data": {**settings["data"], "corpus": [corpus]}}))
        with tempfile.TemporaryDirectory() as folder, timed(seconds), display:
            elman.train(corpus, out=Path(folder) / "run", callbacks=[display, Start()], **settings)
        whole = seconds["update"] + seconds["logging"] + seconds["display"]
        own = {"clipping": seconds["clipping"] - seconds["model"]}
        shares = {part: (own.get(part, seconds[part])) / whole for part in PARTS if part != "update"}
        shares["rest"] = 1 - sum(shares.values())
        results[optimizer] = {
            "milliseconds": round(1000 * whole / arguments.updates, 2),
            "shares": {part: round(share, 4) for part, share in shares.items()},
            "beside_the_model": round(1 - shares["model"], 4),
        }
        print(optimizer, json.dumps(results[optimizer]), flush=True)
    return results


def table() -> str:
    """The cells as Markdown, the highest share first."""
    kept = json.loads(RESULTS.read_text())["cells"]
    found, processor = kept["results"], kept["machine"]["processor"]
    lines = [
        f"{processor}, {found['threads']} threads, {kept['date']}; the product: {found['product_gflops']:.0f} GFLOP/s.",
        "",
        "| cell | 10^9 operations | gradient, ms | GFLOP/s | of the product | update, ms | of the product |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, one in sorted(found["cells"].items(), key=lambda item: -item[1]["update"]["share"]):
        gradient, update = one["gradient"], one["update"]
        lines.append(
            f"| `{kind}` | {one['gigaoperations']:.1f} | {gradient['milliseconds']:.0f} | {gradient['gflops']:.0f} | "
            f"{gradient['share']:.0%} | {update['milliseconds']:.0f} | {update['share']:.0%} |"
        )
    return "\n".join(lines) + "\n"


def loops(arguments: argparse.Namespace) -> None:
    """The gradient of a layer by a loop of Elman's own and by PyTorch's kernel: a line of JSON for each size."""

    def fused(cell: GatedCell, x_BTI: torch.Tensor) -> bool:
        return False

    forms = {"loop": GatedCell.is_looped, "kernel": fused}
    for rows, width in ((8, 64), (32, 128), (32, 256), (64, 512)):
        for kind in ("elman", "gru"):
            config = model_config({"kind": kind, "hidden_size": width, "embedding_size": width})
            network = build_model(config, VOCAB_SIZE, seed=1, dtype=torch.float32)
            update = Update(network, TrainingConfig(batch_size=rows, bptt=STEPS))
            found = defaultdict[str, list[float]](list)
            for turn in range(arguments.repeats + 1):
                for name, form in forms.items():
                    GatedCell.is_looped = form
                    seconds = seconds_of(update.gradient)
                    if turn:
                        found[name].append(seconds)
            median = {name: round(1000 * statistics.median(one), 2) for name, one in found.items()}
            print(json.dumps({"kind": kind, "width": width, "rows": rows, "milliseconds": median}), flush=True)


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


def processor_times(arguments: argparse.Namespace) -> None:
    """Models of equal size, or the forms of the selective scan: a line of JSON for each."""
    tried: dict[str, Callable[[], None]]
    if arguments.what == "scans":
        tried = {name: partial(gradient_of_scan, name) for name in ("compiled", "sequential", "parallel")}
        sizes = {}
    else:
        models = {kind: model_of(kind, arguments.parameters) for kind in SHAPES}
        tried = {kind: partial(gradient_of_model, model) for kind, model in models.items()}
        sizes = {kind: {"parameters": model.num_parameters} for kind, model in models.items()}
    clock = defaultdict[str, list[float]](list)
    processors = defaultdict[str, list[float]](list)
    for turn in range(arguments.repeats + 1):
        for name, one in tried.items():
            worked, seconds = time.process_time(), seconds_of(one)
            if turn:  # the first compiles
                clock[name].append(seconds)
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


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    for name in ("cells", "parts", "loops", "sizes", "scans"):
        commands.add_parser(name).add_argument("--threads", type=int, default=1 if name in ("sizes", "scans") else 2)
    commands.add_parser("table")
    commands.choices["cells"].add_argument("--kinds", nargs="+", help="these alone")
    commands.choices["cells"].add_argument("--turns", type=int, default=7)
    commands.choices["parts"].add_argument("--updates", type=int, default=60)
    commands.choices["parts"].add_argument("--warmup", type=int, default=5, help="updates before them")
    commands.choices["sizes"].add_argument("--parameters", type=int, default=1_000_000)
    for name in ("loops", "sizes", "scans"):
        commands.choices[name].add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    if arguments.what == "table":
        TABLE.write_text(table())
        return
    torch.set_num_threads(arguments.threads)
    with as_in_training():
        if arguments.what in ("loops", "sizes", "scans"):
            (loops if arguments.what == "loops" else processor_times)(arguments)
            return
        found = {"cells": cells, "parts": parts}[arguments.what](arguments)
    keep(arguments.what, found, f"python benchmarks/training_speed.py {' '.join(sys.argv[1:])}", RESULTS)


if __name__ == "__main__":
    main()
