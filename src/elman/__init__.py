"""Elman: train, judge, look into and ship recurrent neural language models.

    import elman

    run = elman.train("my.txt", max_seconds=60)
    model = elman.load("runs/my")
    print(model.generate("Once upon", temperature=0.8, seed=1).text)

Names are imported when first used, so that ``import elman`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elman.errors import ElmanError as ElmanError
    from elman.errors import UserError as UserError
    from elman.judge import evaluate as evaluate
    from elman.model import Model as Model
    from elman.model import load as load
    from elman.settings import Config as Config
    from elman.training import resume as resume
    from elman.training import train as train

__version__ = "0.1.0"

_HOMES = {
    "Config": "elman.settings",
    "ElmanError": "elman.errors",
    "Model": "elman.model",
    "UserError": "elman.errors",
    "evaluate": "elman.judge",
    "load": "elman.model",
    "resume": "elman.training",
    "train": "elman.training",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'elman' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
