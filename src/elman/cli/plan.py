"""``elman plan``."""

from __future__ import annotations

import math

from elman.cli.flags import AllFlags, ConfigFile, Json, Preset, Switch, resolved
from elman.errors import UserError


def plan(
    *,
    vocabulary: int | None = None,
    tokens: float = 1e9,
    processes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64),
    measure: Switch = False,
    tera_operations: float = 0.1,
    step_microseconds: float = 100.0,
    memory_gigabytes: float = 16.0,
    link_gigabytes: float = 1.0,
    link_microseconds: float = 100.0,
    preset: Preset = None,
    config: ConfigFile = None,
    json: Json = False,
    flags: AllFlags | None = None,
) -> None:
    """What a training takes on one device or on many: memory, time, communication.

    Args:
        vocabulary: Tokens in the vocabulary; none: tokenizer.max_size, and where that is none 256 characters,
            257 bytes, 8,192 BPE tokens or 10,000 words.
        tokens: Tokens to train on, in all.
        processes: Numbers of devices, one process for each, with training.batch_size rows each. Repeat it for several.
        measure: Take the speed of products and of steps from short trainings on this machine.
        tera_operations: Operations (10^12) in a second that a device reaches in training.
        step_microseconds: What one step of one layer takes, forward and back, however few its rows.
        memory_gigabytes: Memory of a device (10^9 bytes).
        link_gigabytes: What a device sends to another in a second (10^9 bytes).
        link_microseconds: What a sum of a few numbers over two devices takes.
    """
    from elman.cli.output import print_json, print_table, size
    from elman.text.bpe import DEFAULT_SIZE
    from elman.training.scaling import Machine, forecast, measured_speeds, work_of

    settings = resolved(flags, preset, config)
    tokenizer = settings.tokenizer
    is_assumed = vocabulary is None and tokenizer.max_size is None and tokenizer.level in ("char", "word")
    if vocabulary is None:
        without_text = {"char": 256, "word": 10_000, "byte": 257, "bpe": DEFAULT_SIZE}  # a byte, or the boundary
        vocabulary = tokenizer.max_size or without_text[tokenizer.level]
    counts = {"vocabulary": (vocabulary,), "processes": processes}
    amounts = {
        "tokens": tokens,
        "tera-operations": tera_operations,
        "memory-gigabytes": memory_gigabytes,
        "link-gigabytes": link_gigabytes,
    }
    times = {"step-microseconds": step_microseconds, "link-microseconds": link_microseconds}
    for name, numbers in counts.items():
        for number in numbers:
            if number < 1:
                raise UserError(f"--{name} is {number}; accepted: 1 or more")
    for name, value in amounts.items():
        if not 0 < value < math.inf:
            raise UserError(f"--{name} is {value:g}; accepted: a number above 0")
    for name, value in times.items():
        if not 0 <= value < math.inf:
            raise UserError(f"--{name} is {value:g}; accepted: 0 or more")
    work = work_of(settings.model, settings.training, vocabulary)
    speeds = (tera_operations * 1e12, step_microseconds / 1e6)
    if measure:
        speeds = measured_speeds(settings.model, settings.training, vocabulary)
    machine = Machine(*speeds, memory_gigabytes * 1e9, link_gigabytes * 1e9, link_microseconds / 1e6)
    forecasts = [
        forecast(work, machine, number, is_divided=is_divided)
        for number in processes
        for is_divided in ((False, True) if number > 1 else (False,))
    ]
    if json:
        found = [one.to_dict() | {"hours": tokens / one.tokens_per_second / 3600} for one in forecasts]
        asked = {"vocabulary": vocabulary, "tokens": tokens}
        print_json({"work": vars(work), "machine": vars(machine), **asked, "forecasts": found})
        return
    rows = [
        (
            str(one.processes),
            "divided" if one.is_divided else "whole",
            size(round(one.memory_bytes)) + ("" if one.fits else " !"),
            f"{1000 * one.seconds:,.1f}",
            f"{one.waiting_seconds / one.seconds:.0%}",
            f"{one.communication_seconds / one.seconds:.0%}",
            f"{one.tokens_per_second:,.0f}",
            f"{tokens / one.tokens_per_second / 3600:,.1f}",
        )
        for one in forecasts
    ]
    print_table(
        f"{work.parameters:,} parameters, a vocabulary of {vocabulary:,}{' (assumed)' * is_assumed}, "
        f"{work.rows} rows of {work.steps} tokens for each device; "
        f"{machine.operations_per_second / 1e9:,.1f} billion operations a second, "
        f"{1e6 * machine.step_seconds:,.1f} us for a step of a layer",
        ("devices", "model", "memory", "ms/update", "waiting", "links", "tokens/s", "hours"),
        rows,
        text_columns=2,
    )
    if any(not one.fits for one in forecasts):
        print(f"! does not fit into {size(round(machine.memory_bytes))}")
