"""``elman inspect``."""

from __future__ import annotations

from typing import Literal

from cyclopts import App

from elman.cli.flags import OwnCell, Switch

app = App(name="inspect", help="Look into a model.")
for _name, _help in (
    ("gradients", "How far back gradients reach, on which way, and what would help where they do not."),
    ("saliency", "Which earlier tokens predictions rest on, and how far back the model remembers."),
    ("mitigations", "What acts against vanishing and exploding gradients: small trainings, compared."),
):
    app.command(f"elman.cli.gradients:{_name}", name=_name, help=_help)
for _name, _help in (
    ("units", "Which units follow quotes, brackets, lines, words ... and does the model use them?"),
    ("state", "The states along a text: their map, their dimension, and which moments are alike."),
    ("embeddings", "Neighbours of tokens in the embedding, and a map."),
    ("probe", "What families of models can remember: tasks of known answer, learned short and asked long."),
    ("closing", "Does it close the quotes and brackets of a real text, and from how far?"),
    ("errors", "Which errors would go with what help; or where another model differs, token by token."),
):
    app.command(f"elman.cli.looking:{_name}", name=_name, help=_help)


@app.command(name="model")
def model(run: str, /, *, json: Switch = False, cell: OwnCell = None) -> None:
    """Layers with their shapes, parameters, state and operations.

    Args:
        run: A run folder or a model.safetensors.
        json: Print one JSON object on standard output.
    """
    from elman.cli.output import print_json, print_table, size
    from elman.inspection.architecture import describe
    from elman.models.file import load_model

    architecture = describe(load_model(run, cell=cell))
    if json:
        print_json(architecture.to_dict())
        return
    rows = []
    for part in architecture.parts:
        shapes = "\n".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in part.shapes.items())
        if part.stored_bytes:
            shapes = f"{part.entries:,}\n{size(part.stored_bytes)}"
        counts = (part.parameters, part.state_bytes, part.operations)
        share = f"{architecture.share(part):.1%}"
        rows.append([f"{part.name}\n{part.what}", shapes, share, *(f"{count:,}" for count in counts)])
    totals = (architecture.parameters, architecture.state_bytes, architecture.operations)
    stored = f"{architecture.entries:,}\n{size(architecture.stored_bytes)}" if architecture.stored_bytes else ""
    rows.append(["all", stored, "100.0%", *(f"{total:,}" for total in totals)])
    print_table(
        f"{architecture.kind}, {architecture.dtype}, vocabulary {architecture.vocabulary:,}",
        ["", "shapes", "share", "parameters", "state bytes", "operations per token"],
        rows,
        text_columns=2,
        footer=True,
    )


@app.command(name="ngram")
def ngram(
    run: str, /, *text: str, split: Literal["test", "valid", "train"] | None = None, json: Switch = False
) -> None:
    """How much of a text an n-gram model has seen, order by order.

    Args:
        run: A run folder, a model.safetensors or an .arpa file.
        text: Files, folders, globs, '-' for standard input, or the name of a corpus; none: the run's own corpus.
        split: The part of the corpus; none: the test part, else the validation part.
        json: Print one JSON object on standard output.
    """
    from elman.cli.output import clean, print_json, print_table
    from elman.inspection.ngram import inspect_ngram

    sparsity = inspect_ngram(run, text or None, split=split)
    if json:
        print_json(sparsity.to_dict())
        return
    part = sparsity.corpus if sparsity.split == "text" else f"the {sparsity.split} part of {sparsity.corpus}"
    print_table(
        clean(f"{part}: {sparsity.tokens:,} tokens"),
        ["order", "n-grams counted", "never seen", "context never seen", "tokens backed off"],
        [
            (f"{o.order}", f"{o.counted:,}", f"{o.unseen:.2%}", f"{o.context_unseen:.2%}", f"{o.backoff_depth:.3f}")
            for o in sparsity.orders
        ],
    )
