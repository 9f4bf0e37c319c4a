"""Every family of language model on one text: equal parameters, equal seconds of training, one table.

    python benchmarks/families.py sweep tiny-shakespeare.txt --seconds 30
    python benchmarks/families.py train tiny-shakespeare.txt --seconds 120
    python benchmarks/families.py table

``sweep`` chooses. The last tenth of the text is put aside; of the rest, nine tenths train and one tenth judges. Every
family gets the same rates for the same number of seconds. ``train`` trains each family with its best choice
on the first nine tenths, and judges it once on the last tenth: the whole of it, one stream, carried state. Nothing else
should run meanwhile. ``table`` prints what was found as Markdown.

Results are added to ``benchmarks/results/families.json`` after each step; what is there already is not done again.
Another file, given by ``--results``, begins with the choices of that one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from quality import machine

import elman
from elman.config import SamplingConfig
from elman.errors import TrainingError
from elman.generation import Sampler
from elman.models.kinds import model_class, model_config

RESULTS = Path(__file__).parent / "results" / "families.json"

NUM_PARAMETERS = 1_000_000
VOCAB_SIZE = 67  # of tiny-shakespeare's characters and the boundary
RATES = {
    "0.01/0.02": {"learning_rate": 0.01, "matrix_learning_rate": 0.02},
    "0.02/0.04": {"learning_rate": 0.02, "matrix_learning_rate": 0.04},
}
"""What every family is tried with: the rate of AdamW, and that of the matrices, which Muon takes."""
ORDERS = {f"order {order}": order for order in (5, 6, 7, 8)}
"""The same for the n-gram, which has no rate."""
SEED = 1


def recurrent(width: int) -> dict[str, Any]:
    """One wide layer, as the gated classics are used."""
    return {"hidden_size": width, "embedding_size": 128, "num_layers": 1}


def deep(width: int) -> dict[str, Any]:
    """Four layers, with whatever the kind puts around its cell by default."""
    return {"hidden_size": width, "embedding_size": width, "num_layers": 4}


def deep_with_feedforward(width: int) -> dict[str, Any]:
    """The same for the kinds that put a feed-forward network around their cell."""
    return deep(width) | {"feedforward_size": 8 * width // 3}


def transformer(width: int) -> dict[str, Any]:
    """The same, over two segments' worth of tokens."""
    return deep_with_feedforward(width) | {"attention_window": 128}


def window(width: int) -> dict[str, Any]:
    """A window of 12 characters."""
    return {"hidden_size": width, "embedding_size": 64, "window_size": 12}


FAMILIES: dict[str, Callable[[int], dict[str, Any]] | None] = {
    "ngram": None,
    "window": window,
    "elman": recurrent,
    "lstm": recurrent,
    "gru": recurrent,
    "multiplicative_lstm": recurrent,
    "mogrifier_lstm": recurrent,
    "qrnn": deep_with_feedforward,
    "mingru": deep_with_feedforward,
    "minlstm": deep_with_feedforward,
    "rglru": deep_with_feedforward,
    "mamba": deep,
    "slstm": deep_with_feedforward,
    "mlstm": deep_with_feedforward,
    "gated_deltanet": deep_with_feedforward,
    "transformer": transformer,
}
"""How each family's settings follow from a width; the width is then chosen for the number of parameters."""


def settings_of(kind: str, choice: str) -> dict[str, Any]:
    """The model section of a family at about a million parameters; of the n-gram, which has none, by its order."""
    of_width = FAMILIES[kind]
    if of_width is None:
        return {"kind": kind, "order": ORDERS[choice]}

    def size(width: int) -> int:
        config = model_config({"kind": kind} | of_width(width))
        return model_class(config).predicted_num_parameters(config, VOCAB_SIZE)

    width = min(range(32, 1537, 16), key=lambda width: abs(size(width) - NUM_PARAMETERS))
    return {"kind": kind} | of_width(width)


def training_of(kind: str, choice: str, **budget: Any) -> dict[str, Any]:
    """The training section; a counted model takes none of it."""
    if FAMILIES[kind] is None:
        return {}
    return {
        **RATES[choice],
        "optimizer": "muon",
        "batch_size": 32,
        "bptt": 64,
        "adam_beta2": 0.99,
        "warmup_updates": 50,
        **budget,
    }


QUIET = {"evaluation": {"every_updates": 10**9, "max_tokens": 1000}, "sampling": {"every_updates": 10**9}}


def sweep(text: str, kind: str, seconds: float, threads: int) -> dict[str, float]:
    """Nats on the slice for every choice."""
    training = text[: int(0.9 * len(text))]
    border = int(0.9 * len(training))
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "slice"
        folder.mkdir()
        (folder / "train.txt").write_text(training[:border], "utf-8")
        (folder / "valid.txt").write_text(training[border:], "utf-8")
        for choice in ORDERS if FAMILIES[kind] is None else RATES:
            started = time.perf_counter()
            out, model = Path(name) / f"run-{choice}", settings_of(kind, choice)
            section = training_of(kind, choice, max_seconds=seconds, num_threads=threads)
            try:
                run = elman.train(folder, out=out, seed=SEED, model=model, training=section, **QUIET)
                nats = elman.evaluate(run.path, split="valid").evaluation.score.nats_per_token
            except TrainingError:
                nats = float("inf")
            found[choice] = round(nats, 4)
            print(f"{kind:20s} {choice:18s} {nats:.4f} nats, {time.perf_counter() - started:.0f} s", flush=True)
    return found


def train(text_file: Path, kind: str, choice: str, seconds: float, threads: int) -> dict[str, Any]:
    """One training, and all that the table says about it."""
    with tempfile.TemporaryDirectory() as name:
        run = elman.train(
            text_file,
            out=Path(name) / "run",
            seed=SEED,
            model=settings_of(kind, choice),
            training=training_of(kind, choice, max_seconds=seconds, num_threads=threads),
            data={"valid_fraction": 0.0, "test_fraction": 0.1},
            **QUIET,
        )
        end = [record for record in run.records() if record["kind"] == "end"][-1]
        score = elman.evaluate(run.path).evaluation.score
        model = elman.load(run.path)
    network = model.network
    tokens = torch.randint(VOCAB_SIZE - 1, (1, 10_000), generator=torch.Generator().manual_seed(1))
    state = network.initial_state(1)
    state_bytes = {}
    with torch.no_grad():
        for piece in tokens.split([10, *[999] * 10], dim=1):
            _, state = network.features(piece, state)
            state_bytes.setdefault("10", state.num_bytes)
    state_bytes["10000"] = state.num_bytes
    settings = SamplingConfig(max_new_tokens=1000, min_new_tokens=1000, temperature=1.0)
    sampler = Sampler(model, settings=settings, seed=1, stepper=model.stepper)
    started = time.perf_counter()
    drawn = len(sampler.run().tokens)
    return {
        "nats_per_token": score.nats_per_token,
        "bits_per_char": score.to_dict()["bits_per_char"],
        "parameters": network.num_parameters,
        "tokens": end["tokens"],
        "updates": end["update"],
        "seconds": end["measured"]["seconds"],
        "train_tokens_per_second": end["tokens"] / end["measured"]["seconds"],
        "state_bytes": state_bytes,
        "generated_tokens_per_second": drawn / (time.perf_counter() - started),
        "choice": choice,
        "settings": settings_of(kind, choice),
    }


def table(results: dict[str, Any]) -> str:
    """The results as Markdown, the best first."""
    columns = (
        "kind", "nats", "bits/char", "parameters", "tokens trained", "state after 10 tokens", "state after 10,000",
        "training tokens/s", "generation tokens/s",
    )  # fmt: skip
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for kind, found in sorted(results["families"].items(), key=lambda item: item[1]["nats_per_token"]):
        few, many = (f"{found['state_bytes'][key]:,} B" for key in ("10", "10000"))
        lines.append(
            f"| `{kind}` | {found['nats_per_token']:.3f} | {found['bits_per_char']:.3f} | {found['parameters']:,} "
            f"| {found['tokens']:,} | {few} | {many} | {found['train_tokens_per_second']:,.0f} "
            f"| {found['generated_tokens_per_second']:,.0f} |"
        )
    made = results["machine"]
    lines += [
        "",
        f"`python benchmarks/families.py train {results['text']} --seconds {results['seconds']:g}`, {results['date']}, "
        f"{made['processor']}, {results['threads']} thread, PyTorch {made['torch']}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Do one of the three steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sweep", "train", "table"))
    parser.add_argument("text", type=Path, nargs="?")
    parser.add_argument("--kinds", default=",".join(FAMILIES))
    parser.add_argument("--seconds", type=float, help="of each training; 30 to sweep, 120 to train by default")
    parser.add_argument(
        "--threads", type=int, default=1, help="of each training; two may run side by side, on two cores"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    found = next((path for path in (arguments.results, RESULTS) if path.exists()), None)
    results = {"sweep": {}} if found is None else json.loads(found.read_text())
    if found != arguments.results:  # what was chosen holds for other trainings too
        results = {"sweep": results["sweep"], "families": {}}

    def keep() -> None:
        arguments.results.parent.mkdir(exist_ok=True)
        arguments.results.write_text(json.dumps(results, indent=2) + "\n")

    for kind in arguments.kinds.split(",") if arguments.what != "table" else ():
        if arguments.what == "sweep" and kind not in results["sweep"]:
            seconds = arguments.seconds or 30.0
            found = sweep(arguments.text.read_text("utf-8"), kind, seconds, arguments.threads)
            results["sweep"][kind] = {"seconds": seconds, "nats": found}
            keep()
        if arguments.what == "train" and kind not in results["families"]:
            nats, seconds = results["sweep"][kind]["nats"], arguments.seconds or 120.0
            choice = min(nats, key=nats.get)
            results["families"][kind] = train(arguments.text, kind, choice, seconds, arguments.threads)
            results |= {
                "text": arguments.text.name,
                "seconds": seconds,
                "threads": arguments.threads,
                "date": time.strftime("%Y-%m-%d"),
                "machine": machine(),
            }
            keep()
            print(f"{kind:20s} {results['families'][kind]['nats_per_token']:.4f} nats", flush=True)
    if arguments.what == "table":
        print(table(results))


if __name__ == "__main__":
    main()
