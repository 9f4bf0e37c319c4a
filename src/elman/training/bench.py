"""What this machine does: its matrix products and memory, and how fast each family trains and writes on it.

Measured on what is there at the time, other programs included. Nothing is trained to any purpose.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from elman.cells import cell_names
from elman.config import ModelConfig, TrainingConfig
from elman.engine import stepper
from elman.errors import ConfigError, nearest
from elman.models.kinds import build_model, kind_names, model_class, model_config, model_config_class
from elman.page import Page
from elman.process import as_in_training
from elman.settings import resolve
from elman.training.scaling import Update

NUM_PARAMETERS = 1_000_000
"""Of the models measured, about."""
VOCAB_SIZE = 66
"""Of the models measured: characters of English prose."""
_ROWS, _STEPS = 32, 64
_MATRIX_SIZE = 2048
_COPIED_NUMBERS = 2**25
"""128 MiB: more than caches hold."""


class Recorded(NamedTuple):
    """What a preset came to on the machine of its makers."""

    seconds: float
    """Its budget."""
    curve: tuple[tuple[int, float], ...]
    """Nats per character of the last tenth of tiny-shakespeare after a training of so many updates."""


RECORDED = {
    "cpu-1min": Recorded(60.0, ((300, 1.7369), (600, 1.5348), (1200, 1.4554), (1758, 1.4304), (2400, 1.4133))),
    "cpu-3min": Recorded(180.0, ((400, 1.5761), (900, 1.4385), (1282, 1.4121), (2484, 1.3936))),
    "cpu-10min": Recorded(600.0, ((2672, 1.3785), (4482, 1.3661))),
}
"""By `benchmarks/training.py curve`; where the number of updates is not round, by `quality.py`, the mean of three."""


@dataclass(frozen=True)
class Machine:
    """What a machine can do at best."""

    processor: str
    cpus: int
    threads: int
    matrix_gflops: float
    """Floating-point operations of a large float32 matrix product, in 10^9 a second."""
    memory_gigabytes_per_second: float
    """Read and written by a sum of two large arrays into a third."""


@dataclass(frozen=True)
class FamilySpeed:
    """How fast one family is here."""

    kind: str
    parameters: int
    train_tokens_per_second: float
    """Loss, gradient and AdamW, 32 rows of 64 tokens."""
    train_share_of_peak: float
    """Of the machine's matrix product: three times the operations of the matrices, for every token trained."""
    generated_tokens_per_second: float
    """One text, token by token, compiled where the kind has a compiled step."""


@dataclass(frozen=True)
class PresetSpeed:
    """What a preset does here."""

    preset: str
    milliseconds_per_update: float
    updates: int
    """In its budget of seconds."""
    expected_nats: float | None
    """By the recorded curve at so many updates; none where that does not reach so far."""
    recorded_updates: int
    """The point of the curve that is nearest."""
    recorded_nats: float


@dataclass(frozen=True)
class Bench:
    """All that was measured."""

    machine: Machine
    families: tuple[FamilySpeed, ...]
    presets: tuple[PresetSpeed, ...]

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return asdict(self)

    def page(self) -> Page:
        """The same on a page."""
        machine = self.machine
        page = Page("What this machine does", f"{machine.processor}, {machine.cpus} processors.")
        page.numbers({
            "GFLOP/s of a matrix product": machine.matrix_gflops,
            "GB/s of memory": machine.memory_gigabytes_per_second,
            "threads": machine.threads,
        })  # fmt: skip
        page.section("Families", f"Models of about {NUM_PARAMETERS:,} parameters and {VOCAB_SIZE} characters.")
        columns = ("kind", "parameters", "trained tokens/s", "share of peak, %", "written tokens/s")
        page.table(
            columns,
            [
                (
                    one.kind,
                    one.parameters,
                    round(one.train_tokens_per_second),
                    round(100 * one.train_share_of_peak, 1),
                    round(one.generated_tokens_per_second),
                )
                for one in self.families
            ],
        )
        if self.presets:
            page.section("Presets", "Nats per character are read off a curve recorded on another machine: expect them.")
            page.table(
                ("preset", "ms per update", "updates in its budget", "expected nats", "recorded: updates", "nats"),
                [
                    (
                        one.preset,
                        one.milliseconds_per_update,
                        one.updates,
                        one.expected_nats,
                        one.recorded_updates,
                        one.recorded_nats,
                    )
                    for one in self.presets
                ],
            )
        return page


def measure_machine() -> Machine:
    """The speed of matrix products and of memory."""
    matrix = torch.randn(_MATRIX_SIZE, _MATRIX_SIZE, generator=torch.Generator().manual_seed(1))
    product = torch.zeros_like(matrix)
    x, y, z = (torch.zeros(_COPIED_NUMBERS) for _ in range(3))
    return Machine(
        processor=_processor(),
        cpus=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        matrix_gflops=2 * _MATRIX_SIZE**3 / _shortest(lambda: torch.mm(matrix, matrix, out=product)) / 1e9,
        memory_gigabytes_per_second=3 * 4 * _COPIED_NUMBERS / _shortest(lambda: torch.add(x, y, out=z)) / 1e9,
    )


def _shortest(call: Callable[[], object], repeats: int = 5) -> float:
    """Seconds of the quickest of some calls; the first, which may set things up, does not count."""
    call()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text("utf-8", "replace").splitlines() if path.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def sized_config(kind: str, num_parameters: int = NUM_PARAMETERS) -> ModelConfig:
    """The settings of a kind, its defaults but for the widths, that come nearest to so many parameters."""
    fields = model_config_class(kind).model_fields
    deep = bool(fields["residual"].default) if "residual" in fields else False

    def of_width(width: int) -> ModelConfig:
        settings: dict[str, Any] = {"kind": kind, "hidden_size": width}
        if deep:
            settings |= {"num_layers": 4, "embedding_size": width}
            if "feedforward_size" in fields and fields["feedforward_size"].default:
                settings["feedforward_size"] = 8 * width // 3
        return model_config(settings)

    def size(width: int) -> int:
        config = of_width(width)
        return model_class(config).predicted_num_parameters(config, VOCAB_SIZE)

    return of_width(min(range(32, 1537, 16), key=lambda width: abs(size(width) - num_parameters)))


def median_seconds(call: Callable[[], object], seconds: float) -> float:
    """The median time of a call, called for so many seconds and three times at least."""
    call()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < until:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def measure_family(kind: str, matrix_gflops: float, seconds: float = 1.0) -> FamilySpeed:
    """How fast a family trains and writes.

    Args:
        kind: its name.
        matrix_gflops: of the machine.
        seconds: that each of the two is measured for.
    """
    network = build_model(sized_config(kind), VOCAB_SIZE, seed=1, dtype=torch.float32)
    update = Update(network, TrainingConfig(batch_size=_ROWS, bptt=_STEPS))
    trained = median_seconds(update, seconds)
    operations = 3 * sum(component.operations for component in network.components()) * update.num_tokens
    compiled: Any = stepper(network)  # whichever it is, it takes the states that it gives
    state = compiled.initial_state(1)
    compiled.step([0], state)
    written, until = 0, time.perf_counter() + seconds
    started = time.perf_counter()
    while written < 10 or time.perf_counter() < until:
        _, state = compiled.step([written % VOCAB_SIZE], state)
        written += 1
    return FamilySpeed(
        kind=kind,
        parameters=network.num_parameters,
        train_tokens_per_second=update.num_tokens / trained,
        train_share_of_peak=operations / trained / 1e9 / matrix_gflops,
        generated_tokens_per_second=written / (time.perf_counter() - started),
    )


def measure_preset(name: str, seconds: float = 2.0) -> PresetSpeed:
    """How many updates of a preset fit into its budget here, and what that has come to elsewhere."""
    recorded, config = RECORDED[name], resolve(preset=name)
    network = build_model(config.model, VOCAB_SIZE, seed=1, dtype=torch.float32)
    per_update = median_seconds(Update(network, config.training), seconds)
    updates = int(recorded.seconds / per_update)
    nearest_updates, nats = min(recorded.curve, key=lambda point: abs(math.log(point[0] / max(1, updates))))
    expected = expected_nats(recorded.curve, updates)
    return PresetSpeed(name, 1000 * per_update, updates, expected, nearest_updates, nats)


def expected_nats(curve: Sequence[tuple[int, float]], updates: int) -> float | None:
    """Between the points of a recorded curve, along a straight line over the logarithm of the updates."""
    for (before, high), (after, low) in pairwise(curve):
        if before <= updates <= after:
            share = math.log(updates / before) / math.log(after / before)
            return high + share * (low - high)
    return None


def measured_kinds() -> tuple[str, ...]:
    """The kinds that :func:`measure_family` knows: every cell, and the window."""
    return (*cell_names(), "window")


def bench(
    kinds: Sequence[str] = (), *, seconds: float = 1.0, progress: Callable[[str], None] = lambda what: None
) -> Bench:
    """Measure this machine: what it can do, family after family, and the presets.

    Args:
        kinds: the families; none: all.
        seconds: for each figure of a family.
        progress: told what is measured next.

    Raises:
        ConfigError: there is no such family, or it is not trained.
    """
    for kind in kinds:
        if kind not in measured_kinds():
            what = "is not measured" if kind in kind_names() else "is unknown"
            raise ConfigError(f"kind {kind!r} {what}{nearest(kind, measured_kinds())}")
    progress("machine")
    machine = measure_machine()
    families, presets = [], []
    with as_in_training():
        for kind in kinds or measured_kinds():
            progress(kind)
            families.append(measure_family(kind, machine.matrix_gflops, seconds))
        for name in RECORDED:
            progress(f"preset {name}")
            presets.append(measure_preset(name, 2 * seconds))
    return Bench(machine, tuple(families), tuple(presets))
