"""How training speed falls as a model or its batch grows: tokens per second, and the exponents of the fall.

    python benchmarks/growth.py --kinds lstm mingru --seconds 0.7

One thing grows at a time, from an LSTM of 256 units, one layer, 32 rows of 64 tokens and 66 characters. Every figure is
the median of some updates on random tokens: loss, gradient, clipping, AdamW. The exponent is the slope of the logarithm
of tokens per second over that of the size, at the upper half of the sizes: -2 says that twice the size takes four times
as long. Results go to ``benchmarks/results/growth.json``, the picture to ``docs/images/growth.svg``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from quality import machine

from elman.config import TrainingConfig
from elman.models.kinds import build_model, model_config
from elman.page import new_figure, write_svg
from elman.process import as_in_training
from elman.training.bench import median_seconds
from elman.training.scaling import Update

ROOT = Path(__file__).parents[1]
RESULTS, PICTURE = ROOT / "benchmarks" / "results" / "growth.json", ROOT / "docs" / "images" / "growth.svg"
BASE = {"width": 256, "depth": 1, "batch": 32, "bptt": 64, "vocabulary": 66}
SIZES = {
    "width": (64, 128, 256, 512, 1024),
    "depth": (1, 2, 4, 8),
    "batch": (4, 16, 64, 256),
    "bptt": (8, 32, 128, 512),
    "vocabulary": (100, 1000, 10_000, 30_000),
}


def tokens_per_second(kind: str, size: dict[str, int], seconds: float) -> float:
    """Of training at one size."""
    model = {"kind": kind, "hidden_size": size["width"], "embedding_size": size["width"], "num_layers": size["depth"]}
    network = build_model(model_config(model), size["vocabulary"], seed=1, dtype=torch.float32)
    update = Update(network, TrainingConfig(batch_size=size["batch"], bptt=size["bptt"]))
    with as_in_training():
        return update.num_tokens / median_seconds(update, seconds)


def exponent(sizes: Sequence[int], speeds: Sequence[float]) -> float:
    """The slope of log speed over log size by least squares, at the upper half of the sizes."""
    half = len(sizes) // 2
    x, y = ([math.log(value) for value in values[half:]] for values in (sizes, speeds))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def draw(found: dict[str, Any], path: Path) -> None:
    """One picture: what grows from left to right, a line for each kind."""
    figure, axes = new_figure(1, len(SIZES), width=12.0, height=3.2)
    for one, (what, sizes) in zip(axes, SIZES.items(), strict=True):
        for kind, of_kind in found.items():
            fall = of_kind[what]["exponent"]
            one.plot(sizes, of_kind[what]["tokens_per_second"], marker="o", label=f"{kind}: {fall:+.2f}")
        one.set(xscale="log", yscale="log", xlabel=what)
        one.set_xticks(SIZES[what], [f"{size:,}".replace("0,000", "0k") for size in SIZES[what]], fontsize=8)
        one.xaxis.minorticks_off()
        one.legend(fontsize=8)
    for one in axes[1:]:  # one scale for all, so that slopes can be compared
        one.sharey(axes[0])
        one.tick_params(labelleft=False)
    axes[0].set_ylabel("tokens per second")
    write_svg(figure, path)


def main() -> None:
    """Measure, fit, draw, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["lstm", "mingru"])
    parser.add_argument("--seconds", type=float, default=0.7, help="for each figure")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found: dict[str, Any] = {}
    for kind in arguments.kinds:
        found[kind] = {}
        for what, sizes in SIZES.items():
            speeds = [tokens_per_second(kind, BASE | {what: size}, arguments.seconds) for size in sizes]
            found[kind][what] = {
                "sizes": sizes,
                "tokens_per_second": [round(speed) for speed in speeds],
                "exponent": round(exponent(sizes, speeds), 2),
            }
            print(kind, what, json.dumps(found[kind][what]), flush=True)
    PICTURE.parent.mkdir(exist_ok=True)
    draw(found, PICTURE)
    report = {
        "command": f"python benchmarks/growth.py {' '.join(sys.argv[1:])}".strip(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "base": BASE,
        "results": found,
    }
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
