"""Write which kind of model can do what: python tools/capabilities.py docs/capabilities.md

Everything is found by asking or trying: whether a cell brings a fast scan, whether its step is compiled, what a token
costs either way at the default sizes. Only the last depends on the machine, which is named.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elman.cells import cell_names, find_cell
from elman.cells.base import Cell
from elman.engine import CannotLower, Engine, TorchStepper, capability
from elman.models.contract import CountedModel, LanguageModel
from elman.models.kinds import build_model, kind_names, model_config

VOCAB_SIZE = 65
NUM_TOKENS, NUM_REPEATS = 100, 7


def small_text_model(kind: str) -> LanguageModel:
    """A model of the kind at its default sizes, for characters; a counted one has seen a text."""
    network = build_model(model_config({"kind": kind}), VOCAB_SIZE, seed=1, dtype=torch.float32)
    if isinstance(network, CountedModel):
        network.count(np.random.default_rng(1).integers(0, VOCAB_SIZE, 100_000), reset_at_documents=False)
    return network


def microseconds_per_token(stepper: Engine | TorchStepper) -> float:
    """The median over repeats of the mean time of a step, one text."""
    state: Any = stepper.initial_state(1)
    times = []
    for _ in range(NUM_REPEATS):
        started = time.perf_counter()
        for token in range(NUM_TOKENS):
            _, state = stepper.step([token % VOCAB_SIZE], state)
        times.append((time.perf_counter() - started) / NUM_TOKENS)
    return 1e6 * statistics.median(times)


def engine_of(network: LanguageModel, precision: Any = "float32") -> Engine | None:
    """The compiled step, where there is one."""
    try:
        return Engine(network, precision=precision, num_threads=1)
    except CannotLower:
        return None


def row(kind: str) -> list[str]:
    """What one kind can do."""
    network = small_text_model(kind)
    counted = isinstance(network, CountedModel)
    if kind in cell_names():
        own = find_cell(kind).scan is not Cell.scan
        scan = "native" if own else "fallback: its step, repeated"
    else:
        scan = "of its cells" if kind in ("stack", "seq2seq") else "native"
    level, reason = capability(kind)
    engine, in_pytorch = engine_of(network), microseconds_per_token(TorchStepper(network))
    cost = f"{in_pytorch:,.0f} us"
    compiled = "native" if engine is None else f"native, {microseconds_per_token(engine):,.0f} us"
    return [
        f"`{kind}`",
        "counted" if counted else "native",
        "native" if counted else scan,
        cost,
        compiled if level == "native" else f"fallback, {cost}: {reason}",
        "native" if engine is not None and engine_of(network, "int8") is not None else "refused",
        "native" if kind in cell_names() else "refused",
        "native" if counted else "refused",
    ]


def table() -> str:
    """The table as Markdown."""
    columns = (
        "kind", "train", "scan", "step in PyTorch", "compiled step", "compiled in int8", "layer of a mixed stack",
        "ARPA file",
    )  # fmt: skip
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    with torch.no_grad():
        lines += ["| " + " | ".join(row(kind)) + " |" for kind in kind_names()]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page of the documentation."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    from quality import machine

    about = machine()
    return f"""# Which kind can do what

Made by `python tools/capabilities.py docs/capabilities.md`, {time.strftime("%Y-%m-%d")}, on {about["processor"]}, one
thread, PyTorch {about["torch"]}. *Native* is a form of its own, *fallback* works by something slower, *refused* ends in
one line that says what is accepted. Every kind is trained, resumed, evaluated, sampled, scored and inspected by the
same commands. Times are those of one token of one text at the default sizes of the kind, with {VOCAB_SIZE} characters.

{table()}"""


if __name__ == "__main__":
    torch.set_num_threads(1)
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
