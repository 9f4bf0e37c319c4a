"""Training: the loop, optimisation, checkpoints, and the run folder that holds what comes of it."""

from __future__ import annotations

from elman.training.run import resume as resume
from elman.training.run import train as train
