"""How fast n-grams of a text are counted and scored, and what they are worth on its last tenth.

    OMP_NUM_THREADS=1 python benchmarks/ngram.py TEXT [--orders 3 6 10] [--level char] [--smoothing kneser_ney]

Counts the first nine tenths of the text and scores the last tenth as `elman train` and `elman eval` do, through the
contract. Seconds are those that one core worked, of the second of two passes: the first one compiles.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from elman.config import TokenizerConfig
from elman.data.prepare import Split, tokenize_text
from elman.evaluation import evaluate_split
from elman.models.contract import CountedModel
from elman.models.kinds import build_model, model_config
from elman.text.building import train_tokenizer
from elman.text.sources import StringSource


def measure(order: int, smoothing: str, train: Split, held_out: Split, tokenizer) -> dict[str, float]:
    """Figures of one order."""
    config = model_config({"kind": "ngram", "order": order, "smoothing": smoothing})
    model = build_model(config, tokenizer.size, seed=1, dtype=torch.float32, boundary_id=tokenizer.boundary_id)
    assert isinstance(model, CountedModel)
    for _ in range(2):
        started = time.process_time()
        model.count(np.asarray(train.tokens))
        counted = time.process_time()
        evaluation = evaluate_split(model, held_out, tokenizer)
        scored = time.process_time()
    tables = model.tensors().values()
    return {
        "order": order,
        "nats_per_token": evaluation.score.nats_per_token,
        "counting_seconds": counted - started,
        "scored_tokens_per_second": evaluation.score.tokens / (scored - counted),
        "ngrams": sum(part.entries for part in model.components()),
        "table_megabytes": sum(tensor.numel() * tensor.element_size() for tensor in tables) / 1e6,
    }


def main() -> None:
    """Measure each order and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--orders", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20])
    parser.add_argument("--level", choices=["char", "byte", "word"], default="char")
    parser.add_argument("--smoothing", choices=["kneser_ney", "add_k", "stupid_backoff"], default="kneser_ney")
    asked = parser.parse_args()
    text = asked.text.read_text(encoding="utf-8")
    cut = len(text) * 9 // 10
    tokenizer = train_tokenizer(TokenizerConfig(level=asked.level), StringSource(text[:cut]))
    train, held_out = (tokenize_text(part, tokenizer) for part in (text[:cut], text[cut:]))
    print(f"{len(train.tokens) - 1:,} tokens counted, {len(held_out.tokens) - 1:,} scored, V = {tokenizer.size:,}")
    for order in asked.orders:
        figures = measure(order, asked.smoothing, train, held_out, tokenizer)
        if order == asked.orders[0]:
            print("| " + " | ".join(figures) + " |\n" + "|---" * len(figures) + "|")
        print("| " + " | ".join(f"{v:,.4f}" if isinstance(v, float) else f"{v:,}" for v in figures.values()) + " |")


if __name__ == "__main__":
    main()
