"""``elman inspect``, and what its commands have in common: arguments, and the three ways to hand out a result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeVar

from cyclopts import App, Parameter

from elman.cli.flags import Json, OwnCell
from elman.visible import clean

if TYPE_CHECKING:
    from elman.page import Page

Run = Annotated[str, Parameter(help="A run folder or a model.safetensors.")]
Text = Annotated[
    str,
    Parameter(
        help="Files, folders, globs, '-' for standard input, or the name of a corpus; none: the run's own corpus."
    ),
]
Part = Annotated[
    Literal["test", "valid", "train"] | None,
    Parameter(help="The part of the corpus; none: the test part, else the validation part."),
]
MaxTokens = Annotated[int, Parameter(help="Read so many tokens of the text.")]
Names = Annotated[tuple[str, ...], Parameter(negative=())]

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
    ("closing", "Do models close the quotes and brackets of a real text, and from how far?"),
    ("errors", "Which errors would go with what help; or where another model differs, token by token."),
):
    app.command(f"elman.cli.looking:{_name}", name=_name, help=_help)


class Found(Protocol):
    """What a look has found."""

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""


class OfText(Protocol):
    """What was found in a text."""

    @property
    def corpus(self) -> str:
        """Its name."""

    @property
    def split(self) -> str:
        """Which part of it was read; ``text`` for all of it."""


_Found = TypeVar("_Found", bound=Found)


def hand_out(
    found: _Found,
    print_tables: Callable[[_Found], None],
    page: Callable[[_Found], Page],
    *,
    json: bool,
    html: Path | None,
    notices: Sequence[str] = (),
) -> None:
    """Give what was found to a person, a program and a browser: tables or JSON, and a page where one is asked for.

    What was found is printed first: it is not lost where the page cannot be written. What a reader should know about
    the text stands at the top of the page, and on standard error.
    """
    from elman.cli.output import print_json

    if json:
        print_json(found.to_dict())
    else:
        print_tables(found)
    say(notices)
    if html is not None:
        written = page(found)
        written.lead = " ".join([written.lead, *(f"Note: {notice}." for notice in notices)])
        written.write(html)
        if not json:
            print(clean(f"page: {html}"))


def say(notices: Sequence[str]) -> None:
    """What a reader of the figures should know, on standard error."""
    import sys

    for notice in notices:
        print(f"note: {clean(notice)}", file=sys.stderr)


def where(found: OfText) -> str:
    """Which text it was, as part of a sentence."""
    return found.corpus if found.split == "text" else f"the {found.split} part of {found.corpus}"


def names_model(word: str) -> bool:
    """Whether it is the name of a run or of a model's file, and of no text."""
    path = Path(word)
    is_run = any((path / name).is_file() for name in ("run.toml", "model.safetensors"))
    return is_run or path.suffix in (".safetensors", ".arpa")


@app.command(name="model")
def model(run: Run, /, *, json: Json = False, cell: OwnCell = None) -> None:
    """Layers with their shapes, parameters, state and operations."""
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
    run: Annotated[str, Parameter(help="A run folder, a model.safetensors or an .arpa file.")],
    /,
    *text: Text,
    split: Part = None,
    json: Json = False,
) -> None:
    """How much of a text an n-gram model has seen, order by order."""
    from elman.cli.output import print_json, print_table
    from elman.inspection.ngram import inspect_ngram

    sparsity = inspect_ngram(run, text or None, split=split)
    say(sparsity.notices)
    if json:
        print_json(sparsity.to_dict())
        return
    print_table(
        clean(f"{where(sparsity)}: {sparsity.tokens:,} tokens"),
        ["order", "n-grams counted", "never seen", "context never seen", "tokens backed off"],
        [
            (f"{o.order}", f"{o.counted:,}", f"{o.unseen:.2%}", f"{o.context_unseen:.2%}", f"{o.backoff_depth:.3f}")
            for o in sparsity.orders
        ],
    )
