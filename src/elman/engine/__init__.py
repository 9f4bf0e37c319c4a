"""Compiled steps: a model's own ``step``, traced once and lowered to a kernel for the CPU."""
