"""Memory and time of training by the length of a segment: as it is, recomputed, in half the bits, in pieces of rows.

    python benchmarks/memory.py
    python benchmarks/memory.py --kind mingru --lengths 64,256,1024

Each row is a process of its own. ``peak`` is the most memory that it held above what it held before the first update,
``seconds`` the median of an update, both of one thread.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys

import torch

from elman.config import TrainingConfig
from elman.models.kinds import model_config
from elman.training.distributed import Ranks
from elman.training.scaling import time_updates

FORMS = {
    "as it is": {},
    "recomputed": {"recompute_tokens": 32},
    "bfloat16": {"precision": "bfloat16"},
    "both": {"recompute_tokens": 32, "precision": "bfloat16"},
    "in 4 pieces of rows": {"accumulate": 4},
}


def measure(arguments: argparse.Namespace, length: int, form: str) -> None:
    """In a fresh process: one line of JSON."""
    torch.set_num_threads(1)
    widths = {"hidden_size": arguments.width, "embedding_size": arguments.width}
    model = model_config({"kind": arguments.kind, **widths})
    training = TrainingConfig(batch_size=arguments.rows, bptt=length, **FORMS[form])
    time_updates(model, TrainingConfig(batch_size=4, bptt=2), arguments.vocabulary, Ranks(), 1)  # loads what is needed
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = time_updates(model, training, arguments.vocabulary, Ranks(), arguments.updates)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(
        json.dumps({
            "kind": arguments.kind,
            "bptt": length,
            "form": form,
            "peak_megabytes": round(peak / 1000),
            "seconds": round(statistics.median(seconds), 3),
        })
    )  # fmt: skip


def main() -> None:
    """Measure every length in every form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="lstm")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--lengths", default="64,256,1024")
    parser.add_argument("--one", nargs=2, metavar=("LENGTH", "FORM"), help="in this process, one of them")
    arguments = parser.parse_args()
    if arguments.one:
        measure(arguments, int(arguments.one[0]), arguments.one[1])
        return
    for length in arguments.lengths.split(","):
        for form in FORMS:
            subprocess.run([sys.executable, *sys.argv, "--one", length, form], check=True)


if __name__ == "__main__":
    main()
