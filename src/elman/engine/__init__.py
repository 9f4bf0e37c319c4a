"""Compiled steps: a model's own ``step``, traced once and lowered to a kernel for the CPU."""

from elman.engine.engine import (
    AnyStepper,
    Capability,
    Drawing,
    Drawn,
    Engine,
    EngineState,
    Stepper,
    TorchStepper,
    capability,
    damaged,
    draw_rows,
    nothing_left,
    stepper,
)
from elman.engine.trace import CannotLower

__all__ = [
    "AnyStepper",
    "CannotLower",
    "Capability",
    "Drawing",
    "Drawn",
    "Engine",
    "EngineState",
    "Stepper",
    "TorchStepper",
    "capability",
    "damaged",
    "draw_rows",
    "nothing_left",
    "stepper",
]
