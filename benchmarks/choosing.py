"""What choosing a token costs: microseconds for one row and for 64, by settings and size of the vocabulary.

    python benchmarks/choosing.py

Each figure is the least processor time of many short runs, so that other work on the machine disturbs it little. The
second line of each pair is by compiled code, which does not know all settings.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from elman.choosing import Chooser, Rules, choose
from elman.config import SamplingConfig
from elman.engine import draw_rows
from elman.text.tokenizers import CharTokenizer

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "greedy": {"temperature": 0.0},
    "top-k": {"top_k": 40},
    "top-p": {"top_p": 0.9},
    "all": {
        "logit_bias": {5: 1.0},
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "no_repeat_ngram_size": 4,
        "bad_words": ("ab",),
        "min_new_tokens": 1,
        "suppress_tokens": (7,),
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
        "typical_p": 0.95,
        "epsilon_cutoff": 1e-4,
        "eta_cutoff": 1e-4,
    },
}


def best_microseconds(call: Callable[[], object], repeats: int, calls: int = 10) -> float:
    """Of one call."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        for _ in range(calls):
            call()
        times.append(time.process_time() - started)
    return 1e6 * min(times) / calls


def main() -> None:
    """Print the table."""
    print(f"{'vocabulary':12}{'rows':>6}{'':>10}" + "".join(f"{name:>13}" for name in SETTINGS))
    for vocab_size in (65, 256, 10_000):
        tokenizer = CharTokenizer("ab" + "".join(map(chr, range(0x4E00, 0x4E00 + vocab_size - 4))))
        rng = np.random.default_rng(0)
        history = rng.integers(2, vocab_size, 300).tolist()
        for num_rows in (1, 64):
            logits_BV = rng.normal(scale=2, size=(num_rows, vocab_size)).astype(np.float32)
            lines = [f"{vocab_size:<12}{num_rows:>6}{form:>10}" for form in ("NumPy", "compiled")]
            for settings in SETTINGS.values():
                rules = Rules(SamplingConfig(**settings), tokenizer)
                rows = [Chooser(rules, seed=seed, tokens=history, num_given=0) for seed in range(num_rows)]
                repeats = 200 if num_rows * vocab_size < 20_000 else 20
                lines[0] += f"{best_microseconds(partial(choose, logits_BV, rows), repeats):>13.1f}"
                if rules.drawing is not None:
                    uniforms_B = np.array([row.uniform for row in rows])
                    call = partial(draw_rows, logits_BV, rules.drawing, uniforms_B, [True] * num_rows)
                    lines[1] += f"{best_microseconds(call, repeats):>13.1f}"
            print("\n".join(lines))


if __name__ == "__main__":
    main()
