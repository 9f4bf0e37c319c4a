"""``elman inspect units|state|embeddings|probe|closing|errors``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from cyclopts import Parameter

from elman.cli.flags import OwnCell, Switch
from elman.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from elman.page import Page

Part = Literal["test", "valid", "train"]
Html = Annotated[str | None, Parameter(metavar="FILE", help="Write a page to look at, one file that needs no network.")]


def units(
    run: str,
    /,
    *text: str,
    split: Part | None = None,
    label: Annotated[tuple[str, ...], Parameter(negative=(), allow_leading_hyphen=True)] = (),
    label_file: str | None = None,
    unit: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    max_tokens: int = 20_000,
    seed: int = 0,
    json: Switch = False,
    html: Html = None,
    cell: OwnCell = None,
) -> None:
    """Which units follow quotes, brackets, lines, words ... and does the model use them?

    Args:
        run: A run folder or a model.safetensors.
        text: Files, folders, globs, '-' for standard input, or the name of a corpus; none: the run's own corpus.
        split: The part of the corpus; none: the test part, else the validation part.
        label: What to look for: quotes, line-position, ..., or NAME=REGEX. Repeat it; none: all that have a name.
        label_file: A file with a number for each token: one more label.
        unit: A unit to show in any case, PART:NUMBER such as 0.c:37. Repeat it for several.
        max_tokens: Read so many tokens of the text.
        seed: Of the random units and the resamples.
        json: Print one JSON object on standard output.
    """
    from elman.cli.output import clean, figure, print_table
    from elman.inspection.units import inspect_units
    from elman.inspection.units_page import units_page

    found = inspect_units(
        run,
        text or None,
        split=split,
        labels=label,
        label_file=label_file,
        units=unit,
        max_tokens=max_tokens,
        seed=seed,
        cell=cell,
    )
    if _handed_out(found, lambda: units_page(found), json, html):
        return
    holding = sum(claim.holds for claim in found.claims)
    print_table(
        clean(f"{_where(found.split, found.corpus)}: {found.tokens:,} tokens; {holding} of {len(found.claims)} hold"),
        ["follows", "unit", "score", "untrained", "effect", "random units", "holds"],
        [
            (
                claim.label,
                f"{claim.part}:{claim.unit}",
                figure(claim.score, 3),
                figure(claim.untrained_score, 3),
                figure(claim.effect),
                "-" if claim.random_interval is None else f"up to {figure(claim.random_interval[1])}",
                "yes" if claim.holds else _why_not(claim.beats_untrained, claim.passes_intervention),
            )
            for claim in found.claims
        ],
        text_columns=2,
    )
    if found.absent:
        print(f"hardly in the text: {', '.join(found.absent)}")


def _why_not(beats_untrained: bool, passes_intervention: bool) -> str:
    if not beats_untrained:
        return "no: as in an untrained model"
    return "yes" if passes_intervention else "no: random units do as much"


def state(
    run: str,
    /,
    *text: str,
    split: Part | None = None,
    part: str | None = None,
    span: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    method: Literal["pca", "tsne", "umap"] = "pca",
    max_tokens: int = 10_000,
    seed: int = 0,
    json: Switch = False,
    html: Html = None,
    cell: OwnCell = None,
) -> None:
    """The states along a text: their map, their dimension, and which moments and spans are alike.

    Args:
        run: A run folder or a model.safetensors.
        text: Files, folders, globs, '-' for standard input, or the name of a corpus; none: the run's own corpus.
        split: The part of the corpus; none: the test part, else the validation part.
        part: Of the state, such as 0.c; none: all of them together.
        span: Some words of the text; others with the same units on are looked for.
        method: Of the map.
        max_tokens: Read so many tokens of the text.
        seed: Of t-SNE and UMAP.
        json: Print one JSON object on standard output.
    """
    from elman.cli.output import clean, figure, print_table
    from elman.inspection.states import inspect_states
    from elman.inspection.states_page import states_page

    found = inspect_states(
        run,
        text or None,
        split=split,
        part=part,
        span=span,
        method=method,
        max_tokens=max_tokens,
        seed=seed,
        cell=cell,
    )
    if _handed_out(found, lambda: states_page(found), json, html):
        return
    print_table(
        clean(f"{_where(found.split, found.corpus)}: {found.tokens:,} tokens"),
        ["part", "units", "effective dimension", "variance along the first axis"],
        [(one.part, f"{one.units:,}", figure(one.effective, 1), f"{one.explained[0]:.1%}") for one in found.dimensions],
    )
    for title, places in (("similar moments", found.alike_moments), ("similar spans", found.alike_spans)):
        rows = [
            [_one_line(f"{p.before[-30:]}[{p.at}]{p.after}"), figure(p.similarity, 3)] for p in (found.span, *places)
        ]
        print_table(title, ["place", "alike"], rows)


def embeddings(
    run: str,
    /,
    *word: str,
    json: Switch = False,
    html: Html = None,
    cell: OwnCell = None,
) -> None:
    """Neighbours of tokens in the embedding, and a map.

    Args:
        run: A run folder or a model.safetensors.
        word: Tokens whose neighbours to show; none: the first of the vocabulary.
        json: Print one JSON object on standard output.
    """
    from elman.cli.output import print_table
    from elman.inspection.embeddings import inspect_embeddings
    from elman.inspection.embeddings_page import embeddings_page, shown_token

    found = inspect_embeddings(run, word, cell=cell)
    if _handed_out(found, lambda: embeddings_page(found), json, html):
        return
    print_table(
        f"{found.vocabulary:,} tokens of level {found.level}, embedding of {found.embedding_size}",
        ["token", "nearest"],
        [
            (shown_token(one.token), "  ".join(f"{shown_token(token)} {cosine:.2f}" for token, cosine in one.nearest))
            for one in found.neighbours
        ],
        text_columns=2,
    )


def probe(
    out: str,
    /,
    *,
    task: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    kind: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    updates: int = 1000,
    parameters: int = 30_000,
    seed: int = 0,
    json: Switch = False,
    html: Html = None,
) -> None:
    """What families of models can remember: tasks of known answer, learned short and asked long.

    Args:
        out: A folder for the trials; what was finished there is not done again.
        task: copying, parity, dyck-2 ... Repeat it for several; none: all.
        kind: lstm, mamba ... Repeat it for several; none: seven families.
        updates: Of each training.
        parameters: Of each model, about.
        seed: Of texts and models.
        json: Print one JSON object on standard output.
    """
    import sys

    from elman.cli.output import print_table
    from elman.inspection.probing import Trial, probe
    from elman.inspection.probing_page import probed_page

    def told(trial: Trial) -> None:
        figures = ", ".join(f"{one.length}: {one.accuracy:.0%}" for one in trial.by_length)
        print(f"{trial.task} {trial.kind}: {figures}", file=sys.stderr)

    found = probe(out, tasks=task, kinds=kind, updates=updates, parameters=parameters, seed=seed, on_trial=told)
    if _handed_out(found, lambda: probed_page(found), json, html):
        return
    for name, longest in found.learned.items():
        own = [trial for trial in found.trials if trial.task == name]
        print_table(
            f"{name}, learned up to length {longest}: answers right at length",
            ["family", "parameters", *(f"{one.length}" for one in own[0].by_length)],
            [
                (trial.kind, f"{trial.parameters:,}", *(f"{one.accuracy:.1%}" for one in trial.by_length))
                for trial in own
            ],
        )


def closing(
    run: str,
    /,
    *text: str,
    split: Part | None = None,
    max_tokens: int = 200_000,
    json: Switch = False,
    html: Html = None,
    cell: OwnCell = None,
) -> None:
    """Does it close the quotes and brackets of a real text, and from how far?

    Args:
        run: A run folder or a model.safetensors, of any kind.
        text: Files, folders, globs, '-' for standard input, or the name of a corpus; none: the run's own corpus.
        split: The part of the corpus; none: the test part, else the validation part.
        max_tokens: Read so many tokens of the text.
        json: Print one JSON object on standard output.
    """
    from elman.cli.output import clean, figure, print_table
    from elman.inspection.closing import inspect_closings
    from elman.inspection.closing_page import closings_page

    found = inspect_closings(run, text or None, split=split, max_tokens=max_tokens, cell=cell)
    if _handed_out(found, lambda: closings_page(found), json, html):
        return
    for group in found.groups:
        where = _where(found.split, found.corpus)
        print_table(
            clean(f"{group.name} of {where}, the most common closing sign {group.majority:.1%}; right one"),
            ["tokens since the opening", "cases", "of the closing signs", "of all tokens", "its probability"],
            [
                (
                    f"{one.nearest:,} to {one.farthest:,}",
                    f"{one.cases:,}",
                    f"{one.which:.1%}",
                    f"{one.top:.1%}",
                    figure(one.probability, 3),
                )
                for one in group.by_distance
            ],
        )


def errors(
    run: str,
    /,
    *text: str,
    split: Part | None = None,
    order: int | None = None,
    against: str | None = None,
    max_tokens: int = 100_000,
    json: Switch = False,
    html: Html = None,
    cell: OwnCell = None,
) -> None:
    """Which errors an n-gram, a longer memory ... would remove; or where another model differs, token by token.

    Args:
        run: A run folder, of any kind of model.
        text: Files, folders, globs, '-' for standard input, or the name of a corpus; none: the run's own corpus.
        split: The part of the corpus; none: the test part, else the validation part.
        order: Of the longest oracle n-gram; none: 6.
        against: Another run folder or model with the same tokens: compare the two instead.
        max_tokens: Read so many tokens of the text.
        json: Print one JSON object on standard output.
    """
    if against is not None:
        if order is not None or cell is not None:
            raise UserError("--order and --cell have no meaning with --against, which compares two models")
        _compare(run, against, text, split, max_tokens, json, html)
        return
    from elman.cli.output import clean, print_table
    from elman.inspection.errors import inspect_errors
    from elman.inspection.errors_page import failures_page

    found = inspect_errors(run, text or None, split=split, order=order or 6, max_tokens=max_tokens, cell=cell)
    if _handed_out(found, lambda: failures_page(found), json, html):
        return
    share = found.errors / found.tokens
    print_table(
        clean(f"{_where(found.split, found.corpus)}: {found.errors:,} errors in {found.tokens:,} tokens ({share:.1%})"),
        ["", "an error goes if", "errors", "share", "alone"],
        [
            (cause.name, cause.words, f"{cause.errors:,}", f"{cause.share:.1%}", f"{cause.alone:,}")
            for cause in found.causes
        ],
        text_columns=2,
    )


def _compare(
    run: str, against: str, text: tuple[str, ...], split: Part | None, max_tokens: int, json: bool, html: str | None
) -> None:
    from elman.cli.output import clean, figure, print_table
    from elman.inspection.errors import compare_models
    from elman.inspection.errors_page import compared_page

    found = compare_models(run, against, text or None, split=split, max_tokens=max_tokens)
    if _handed_out(found, lambda: compared_page(found), json, html):
        return
    low, high = found.difference_interval
    rows = [(one.name, f"{one.tokens:,}", figure(one.first_nats), figure(one.second_nats)) for one in found.kinds]
    rows.append(("all", f"{found.tokens:,}", figure(found.first_nats), figure(found.second_nats)))
    title = f"{_where(found.split, found.corpus)}, nats per token; the first less the second: {low:.4f} to {high:.4f}"
    print_table(clean(title), ["tokens", "number", found.first, found.second], rows, footer=True)
    for name, places in ((found.first, found.first_ahead), (found.second, found.second_ahead)):
        print_table(
            clean(f"where {name} is most ahead"),
            ["place", found.first, found.second],
            [
                (
                    _one_line(f"{p.before[-30:]}[{p.at}]{p.after[:20]}"),
                    figure(p.first_nats, 2),
                    figure(p.second_nats, 2),
                )
                for p in places
            ],
        )


class _Found(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


def _handed_out(found: _Found, page: Callable[[], Page], json: bool, html: str | None) -> bool:
    """Print JSON and write a page where they are asked for; whether one was, so that no table is."""
    from elman.cli.output import print_json

    if html is not None:
        page().write(Path(html))
        if not json:
            print(f"written: {html}")
    if json:
        print_json(found.to_dict())
    return json or html is not None


def _where(split: str, corpus: str) -> str:
    return corpus if split == "text" else f"the {split} part of {corpus}"


def _one_line(text: str) -> str:
    from elman.cli.output import clean

    return clean(text).replace("\n", "↵").replace("\t", " ")
