"""Try settings on a slice of the training text, as presets are chosen: the held-out part of the text is not touched.

    python benchmarks/search.py tiny-shakespeare.txt --updates 1200 \
        "training.learning_rate=0.01 training.matrix_learning_rate=0.04" "model.dropout=0.1"

The last tenth of the text is put aside. Of the rest, nine tenths train and one tenth judges, as one stream with carried
state. Every quoted argument is one trial on top of the preset; a line of JSON is printed for each.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import elman


def settings_of(trial: str) -> dict[str, Any]:
    """``section.name=value`` pairs as sections."""
    sections: dict[str, Any] = defaultdict(dict)
    for pair in trial.split():
        path, _, value = pair.partition("=")
        section, _, name = path.rpartition(".")
        (sections[section] if section else sections)[name] = value
    return sections


def judge(folder: Path, preset: str, updates: int, seed: int, trial: str) -> dict[str, Any]:
    """Train one trial for so many updates and judge it on the slice."""
    settings = settings_of(trial)
    settings["training"] |= {"max_updates": updates, "max_seconds": "none"}
    quiet = {"evaluation": {"every_updates": 10**9, "max_tokens": 1000}, "sampling": {"every_updates": 10**9}}
    with tempfile.TemporaryDirectory() as out:
        run = elman.train(folder, out=Path(out) / "run", preset=preset, seed=seed, **quiet, **settings)
        records = list(run.records())
        result = elman.evaluate(run.path, split="valid").to_dict()
    last = [record for record in records if record["kind"] == "update"][-1]
    return {
        "trial": trial,
        "slice_nats_per_token": round(result["nats_per_token"], 4),
        "slice_bits_per_char": result["bits_per_char"],
        "train_nats_last_update": round(last["nats"], 3),
        "updates": last["update"],
        "seed": seed,
        "milliseconds_per_update": round(1000 * last["measured"]["elapsed_seconds"] / last["update"], 1),
    }


def main() -> None:
    """Run every trial."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("trials", nargs="+")
    parser.add_argument("--preset", default="cpu-1min")
    parser.add_argument("--updates", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=1111)
    arguments = parser.parse_args()
    text = arguments.text.read_text("utf-8")
    training = text[: int(0.9 * len(text))]
    border = int(0.9 * len(training))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.txt").write_text(training[:border], "utf-8")
        (folder / "valid.txt").write_text(training[border:], "utf-8")
        for trial in arguments.trials:
            found = judge(folder, arguments.preset, arguments.updates, arguments.seed, trial)
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
