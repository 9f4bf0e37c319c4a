"""``elman shrink``."""

from __future__ import annotations

from pathlib import Path

from elman.cli.flags import Json, OwnCell


def shrink(
    run: Path,
    /,
    *,
    out: Path,
    rank: int | None = None,
    sparsity: float | None = None,
    json: Json = False,
    cell: OwnCell = None,
) -> None:
    """Make a trained model smaller without training it, and say what that costs on the validation part.

    Args:
        run: The run folder.
        out: The model file to write.
        rank: Make the output matrix a product of two, with this many numbers between them.
        sparsity: Make this share of every matrix zero, the smallest weights.
    """
    from elman.cli.output import figure, print_json, print_table, size
    from elman.training.shrinking import shrink

    shrunk = shrink(run, out, rank=rank, sparsity=sparsity, cell=cell)
    if json:
        print_json(shrunk.to_dict())
        return
    both = (shrunk.before, shrunk.after)
    rows = [
        ["nats per token", *(figure(one.nats_per_token) for one in both)],
        ["bits per character", *(figure(one.bits_per_char) for one in both)],
        ["parameters", *(f"{one.parameters:,}" for one in both)],
        ["of them not zero", *(f"{one.nonzero:,}" for one in both)],
        ["file", *(size(one.bytes) for one in both)],
        ["file, gzip", *(size(one.gzip_bytes) for one in both)],
    ]
    print_table(f"on {shrunk.tokens:,} tokens of the validation part", ["", "before", "after"], rows)
    print(f"written to {out}; to judge it: elman eval {out} TEXT, with a text that it was not trained on")
