"""Compiled steps: a model's own ``step``, traced once and lowered to a kernel for the CPU."""

from elman.engine.engine import AnyStepper, Capability, Engine, EngineState, Stepper, TorchStepper, capability, stepper
from elman.engine.trace import CannotLower

__all__ = [
    "AnyStepper",
    "CannotLower",
    "Capability",
    "Engine",
    "EngineState",
    "Stepper",
    "TorchStepper",
    "capability",
    "stepper",
]
