"""Print how the first layer grows with the window, and a recurrent one does not: python tools/window_table.py"""

from __future__ import annotations

import torch

from elman.inspection.architecture import Architecture, describe
from elman.models.file import Bundle
from elman.models.kinds import build_model, model_config
from elman.text.tokenizers import ByteTokenizer

WINDOWS = (1, 2, 4, 8, 16, 32, 64)


def of_kind(kind: str, **settings: int) -> Architecture:
    """A model of bytes with the default sizes, part by part."""
    tokenizer = ByteTokenizer()
    network = build_model(model_config({"kind": kind, **settings}), tokenizer.size, seed=1, dtype=torch.float32)
    return describe(Bundle(network, tokenizer))


def row(name: str, sees: str, architecture: Architecture) -> str:
    """A line of the table: the layer that reads the embeddings is the second part."""
    layer = architecture.parts[1]
    return f"| {name} | {sees} | {layer.parameters:,} | {layer.operations:,} | {architecture.state_bytes:,} |"


def table() -> str:
    """The table as Markdown."""
    lines = [
        "| model | tokens it sees | parameters of the first layer | its operations per token | state bytes |",
        "|---|---|---|---|---|",
        *(row(f"window, k = {k}", f"{k}", of_kind("window", window_size=k)) for k in WINDOWS),
        *(row(kind, "all", of_kind(kind)) for kind in ("elman", "gru", "lstm")),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
