"""The forecasts of ``elman plan`` against measurements: several sizes, by one process and by two.

    python benchmarks/scaling.py
    torchrun --nproc-per-node 2 benchmarks/scaling.py

Speeds are fitted to updates of a small, a middle and a large size; with two processes also those of the link, from sums
of a few and of many numbers. Then other sizes, rows and lengths are forecast and timed. A process has one thread.
"""

from __future__ import annotations

import json
import resource
import time

import torch

from elman.config import TrainingConfig
from elman.models.kinds import model_config
from elman.training.distributed import Ranks, join
from elman.training.scaling import Machine, Work, fit, forecast, time_updates, work_of

VOCABULARY = 128
FITTED = [(width, rows, 64) for width in (96, 192, 512) for rows in (8, 32)]
FORECAST = [(128, 16, 64), (160, 24, 64), (256, 32, 64), (256, 16, 128), (384, 16, 32)]
"""Width, rows of each process, tokens of a segment."""
REPEATS = 9


def timed(width: int, rows: int, steps: int, ranks: Ranks) -> tuple[Work, float]:
    """An update, and the shortest time that it took."""
    model = model_config({"kind": "lstm", "hidden_size": width, "embedding_size": width})
    training = TrainingConfig(batch_size=rows, bptt=steps)
    work = work_of(model, training, VOCABULARY)
    return work, min(time_updates(model, training, VOCABULARY, ranks, REPEATS))


def link(ranks: Ranks) -> tuple[float, float]:
    """Seconds of a sum of a few numbers, and bytes a second of one of many, by two processes."""
    times = {}
    for numbers in (8, 4_000_000):
        tensor = torch.ones(numbers)
        found = []
        for _ in range(20):
            ranks.any(False)
            started = time.perf_counter()
            ranks.add_up([tensor])
            found.append(time.perf_counter() - started)
            tensor.fill_(1.0)
        times[numbers] = ranks.of_first(min(found))[0]
    few, many = times.values()
    moved = 4 * 4_000_000 * 2 * (ranks.size - 1) / ranks.size
    return few, moved / (many - few)


def main() -> None:
    """Fit, forecast, measure and print a line of JSON for each."""
    torch.set_num_threads(1)
    with join() as ranks:
        latency, bandwidth = link(ranks) if ranks.size > 1 else (0.0, 1.0)
        free = Machine(1.0, 0.0, 1.0, bandwidth, latency)
        # Two processes on one machine take memory and clock from each other: they are timed together.
        fitted = [timed(*size, ranks) for size in FITTED]
        speeds = fit([(work, taken - forecast(work, free, ranks.size).communication_seconds) for work, taken in fitted])
        machine = Machine(*speeds, memory_bytes=1e12, bytes_per_second=bandwidth, latency_seconds=latency)
        if ranks.rank == 0:
            print(json.dumps({"processes": ranks.size, **vars(machine)}))
        for size in FORECAST:
            work, seconds = timed(*size, ranks)
            expected = forecast(work, machine, ranks.size)
            if ranks.rank == 0:
                print(json.dumps({
                    "processes": ranks.size,
                    "width": size[0],
                    "rows": size[1],
                    "steps": size[2],
                    "forecast_seconds": round(expected.seconds, 4),
                    "seconds": round(seconds, 4),
                    "error": round(expected.seconds / seconds - 1, 3),
                    "communication_seconds": round(expected.communication_seconds, 4),
                    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                }))  # fmt: skip


if __name__ == "__main__":
    main()
