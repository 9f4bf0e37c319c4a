"""``elman inspect units|state|embeddings|probe|closing|errors``."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from elman.cli.files import Html
from elman.cli.flags import Json, OwnCell, Seed
from elman.cli.inspect import MaxTokens, Names, Part, Run, Text, hand_out, names_model, where
from elman.errors import UserError

if TYPE_CHECKING:
    from elman.inspection.closing import Closings
    from elman.inspection.embeddings import Embeddings
    from elman.inspection.errors import Compared, Difference, Failures
    from elman.inspection.probing import Probed, Trial
    from elman.inspection.states import Alike, States
    from elman.inspection.units import Claim, Passage, Units


def units(
    run: Run,
    /,
    *text: Text,
    split: Part = None,
    label: Annotated[Names, Parameter(allow_leading_hyphen=True)] = (),
    label_file: str | None = None,
    unit: Names = (),
    max_tokens: MaxTokens = 20_000,
    seed: Seed = 0,
    json: Json = False,
    html: Html = None,
    cell: OwnCell = None,
) -> None:
    """Which units follow quotes, brackets, lines, words ... and does the model use them?

    Args:
        label: What to look for: quotes, line-position, ..., or NAME=REGEX. Repeat it; none: all that have a name.
        label_file: A file with a number for each token: one more label.
        unit: A unit to show in any case, PART:NUMBER such as 0.c:37. Repeat it for several.
        seed: Of the random units and the resamples.
    """
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
    hand_out(found, _print_units, units_page, json=json, html=html, notices=found.notices)


def _print_units(found: Units) -> None:
    from elman.cli.output import figure, print_table
    from elman.inspection.recording import read_in_words
    from elman.visible import clean

    holding = sum(claim.holds for claim in found.claims)
    verdicts = [_verdict(claim) for claim in found.claims]
    print_table(
        clean(f"{where(found)}: {read_in_words(found.given, found.tokens)}; {holding} of {len(found.claims)} hold"),
        ["follows", "unit", "holds", "score", "untrained", "effect", "random up to"],
        [
            (
                claim.label,
                f"{claim.part}:{claim.unit}",
                verdict,
                figure(claim.score, 3),
                figure(claim.untrained_score, 3),
                figure(claim.effect, 3),
                "-" if claim.random_interval is None else figure(claim.random_interval[1], 3),
            )
            for claim, verdict in zip(found.claims, verdicts, strict=True)
        ],
        text_columns=3,
    )
    for verdict, why in _REASONS.items():
        if verdict in verdicts:
            print(f"{verdict}: {why}")
    if found.absent:
        print(f"too little of it in the text to be judged: {', '.join(found.absent)}")
    for one in found.shown:
        if one.is_asked:
            print_table(
                f"where unit {one.unit} of {one.part} is highest",
                ["place", "value"],
                [[_place(place), f"{one.rounded(place.value):.4g}"] for place in one.passages],
            )


_REASONS = {
    "no, score": "not above the score of an untrained model beyond chance",
    "no, effect": "not above what random units do beyond chance",
}


def _verdict(claim: Claim) -> str:
    if not claim.beats_untrained:
        return "no, score"
    return "yes" if claim.passes_intervention else "no, effect"


def state(
    run: Run,
    /,
    *text: Text,
    split: Part = None,
    part: str | None = None,
    span: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    method: Literal["pca", "tsne", "umap"] = "pca",
    max_tokens: MaxTokens = 10_000,
    seed: Seed = 0,
    json: Json = False,
    html: Html = None,
    cell: OwnCell = None,
) -> None:
    """The states along a text: their map, their dimension, and which moments and spans are alike.

    Args:
        part: Of the state, such as 0.c; none: all of them together.
        span: Some words of the text; others with the same units on are looked for.
        method: Of the map.
        seed: Of t-SNE and UMAP.
    """
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
    hand_out(found, _print_states, states_page, json=json, html=html, notices=found.notices)


def _print_states(found: States) -> None:
    from elman.cli.output import figure, print_table
    from elman.inspection.recording import read_in_words
    from elman.visible import clean

    print_table(
        clean(f"{where(found)}: {read_in_words(found.given, found.tokens)}"),
        ["part", "units", "effective dimension", "variance along the first axis"],
        [(one.part, f"{one.units:,}", figure(one.effective, 1), f"{one.explained[0]:.1%}") for one in found.dimensions],
    )
    for title, places in (("similar moments", found.alike_moments), ("similar spans", found.alike_spans)):
        rows = [[_place(place), figure(place.similarity, 3)] for place in (found.span, *places)]
        print_table(title, ["place", "alike"], rows)


def embeddings(run: Run, /, *word: str, json: Json = False, html: Html = None, cell: OwnCell = None) -> None:
    """Neighbours of tokens in the embedding, and a map.

    Args:
        word: Tokens whose neighbours to show; none: the first of the vocabulary.
    """
    from elman.inspection.embeddings import inspect_embeddings
    from elman.inspection.embeddings_page import embeddings_page

    found = inspect_embeddings(run, word, cell=cell)
    hand_out(found, _print_embeddings, embeddings_page, json=json, html=html)


def _print_embeddings(found: Embeddings) -> None:
    from elman.cli.output import print_table
    from elman.inspection.embeddings_page import shown_token

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
    task: Names = (),
    kind: Names = (),
    updates: int = 1000,
    parameters: int = 30_000,
    rate: Annotated[tuple[float, ...], Parameter(negative=())] = (),
    seed: Seed = 0,
    json: Json = False,
    html: Html = None,
) -> int:
    """What families of models can remember: tasks of known answer, learned short and asked long.

    Args:
        out: A folder for the trials; what was finished there is not done again.
        task: copying, parity, dyck-2 ... Repeat it for several; none: all nine.
        kind: lstm, mamba ... Repeat it for several; none: ten families.
        updates: Of each training. All tasks and families take about 25 minutes of one core at the default.
        parameters: Of each model, about.
        rate: Learning rate. Of several, each family takes the one it learns parity best with; none: 0.01 and 0.003.
        seed: Of questions and models.
    """
    import signal
    import sys

    from elman.inspection.probing import RATES
    from elman.inspection.probing import probe as probe_families
    from elman.inspection.probing_page import probed_page

    def tell(trial: Trial) -> None:
        figures = ", ".join(f"{one.length}: {one.accuracy:.0%}" for one in trial.by_length)
        chosen = "" if trial.learning_rate is None else f" at {trial.learning_rate:g}"
        print(f"{trial.task} {trial.kind}{chosen}: {figures}", file=sys.stderr, flush=True)

    try:
        found = probe_families(
            out,
            tasks=task,
            kinds=kind,
            updates=updates,
            parameters=parameters,
            rates=rate or RATES,
            seed=seed,
            on_trial=tell,
        )
    except KeyboardInterrupt:
        print(f"interrupted: what was finished is kept in {out}; the same command goes on from there", file=sys.stderr)
        return 128 + signal.SIGINT
    hand_out(found, _print_probed, probed_page, json=json, html=html)
    return 0


def _print_probed(found: Probed) -> None:
    from elman.cli.output import print_table
    from elman.inspection.probing import TASKS

    for name, longest in found.learned.items():
        task = TASKS[name]
        guess = f"; guess: {task.guessed}" if task.guessed else ""
        print_table(
            f"{name}: answers right by length ({task.unit}; learned up to {longest}){guess}",
            ["family", "state", "rate", *map(str, found.lengths(name))],
            [
                *(
                    (
                        trial.kind,
                        "grows" if trial.state_size is None else f"{trial.state_size:,}",
                        "-" if trial.learning_rate is None else f"{trial.learning_rate:g}",
                        *(f"{one.accuracy:.1%}" for one in trial.by_length),
                    )
                    for trial in found.of(name)
                ),
                *([("guess", "", "", *(f"{share:.1%}" for share in found.guess(name)))] if task.guessed else []),
            ],
            footer=bool(task.guessed),
        )
    if len(found.learned) > 1:
        print_table(
            "the greatest length up to which nine of ten answers are right",
            ["family", *found.learned],
            [
                *(
                    (kind, *("-" if length is None else f"{length}" for length in lengths.values()))
                    for kind, lengths in found.reach().items()
                ),
                ("learned up to", *map(str, found.learned.values())),
            ],
            footer=True,
        )


def closing(
    run: Annotated[Run, Parameter(help="A run folder or a model.safetensors, of any kind; more may follow.")],
    /,
    *text: Text,
    samples: int = 0,
    seed: Seed = 0,
    split: Part = None,
    max_tokens: MaxTokens = 200_000,
    json: Json = False,
    html: Html = None,
    cell: OwnCell = None,
) -> None:
    """Do models close the quotes and brackets of a real text, and from how far? Several stand side by side.

    Args:
        samples: Also let each model write on from so many places at each distance, and count what it closes.
        seed: Of what they write.
    """
    from elman.inspection.closing import inspect_closings
    from elman.inspection.closing_page import closings_page

    others = tuple(takewhile(names_model, text))
    found = inspect_closings(
        (run, *others),
        text[len(others) :] or None,
        split=split,
        max_tokens=max_tokens,
        num_samples=samples,
        seed=seed,
        cell=cell,
    )
    hand_out(found, _print_closings, closings_page, json=json, html=html, notices=found.notices)


def _print_closings(found: Closings) -> None:
    from elman.cli.output import figure, print_table
    from elman.inspection.closing import FEW_CASES
    from elman.visible import clean

    for group in found.groups:
        print_table(
            clean(
                f"{group.name} of {where(found)} by tokens since the opening; the most common closing sign "
                f"{group.majority:.1%}; right one"
            ),
            ["opened before", "cases", "model", "of closing signs", "of all tokens", "its probability"],
            [
                (
                    one.words,
                    f"{one.cases:,}",
                    clean(name),
                    _of_cases(judged.which, one.cases),
                    _of_cases(judged.top, one.cases),
                    figure(judged.probability, 3),
                )
                for one in group.by_distance
                for name, judged in one.models.items()
            ],
        )
        if group.written_on and not group.is_open_long:
            print(f"no {group.name} are open for {group.written_on[0].distance} tokens here, to write on from")
        elif group.written_on:
            print_table(
                f"{group.name} that had been open for so many tokens, closed within {found.within} more",
                ["open for", "cases", "the text itself", *map(clean, found.models)],
                [
                    (
                        f"{one.distance}",
                        f"{one.cases:,}",
                        *(_of_cases(share, one.cases) for share in (one.text, *one.models.values())),
                    )
                    for one in group.written_on
                    if one.cases
                ],
            )
    numbers = [one.cases for group in found.groups for one in group.by_distance]
    numbers += [one.cases for group in found.groups for one in group.written_on]
    if any(0 < number < FEW_CASES for number in numbers):
        print(f"*: of fewer than {FEW_CASES} cases, by which little can be judged")


def _of_cases(share: float | None, cases: int) -> str:
    from elman.inspection.closing import FEW_CASES

    return "-" if share is None else f"{'*' * (cases < FEW_CASES)}{share:.1%}"


def errors(
    run: Annotated[Run, Parameter(help="A run folder, of any kind of model.")],
    /,
    *text: Text,
    split: Part = None,
    order: int | None = None,
    against: str | None = None,
    max_tokens: MaxTokens = 100_000,
    json: Json = False,
    html: Html = None,
    cell: OwnCell = None,
) -> None:
    """Which errors an n-gram, a longer memory ... would remove; or where another model differs, token by token.

    Args:
        order: Of the longest oracle n-gram; none: 6.
        against: Another run folder or model with the same tokens: compare the two instead.
    """
    from elman.inspection.errors import compare_models, inspect_errors
    from elman.inspection.errors_page import compared_page, failures_page

    if against is None:
        order = 6 if order is None else order
        found = inspect_errors(run, text or None, split=split, order=order, max_tokens=max_tokens, cell=cell)
        hand_out(found, _print_failures, failures_page, json=json, html=html, notices=found.notices)
        return
    if order is not None or cell is not None:
        raise UserError("--order and --cell have no meaning with --against, which compares two models")
    compared = compare_models(run, against, text or None, split=split, max_tokens=max_tokens)
    hand_out(compared, _print_compared, compared_page, json=json, html=html, notices=compared.notices)


def _print_failures(found: Failures) -> None:
    from elman.cli.output import print_table
    from elman.visible import clean

    share = found.errors / found.tokens
    print_table(
        clean(f"{where(found)}: {found.errors:,} errors in {found.tokens:,} tokens ({share:.1%})"),
        ["", "an error goes if", "errors", "share", "alone"],
        [
            (cause.name, cause.words, f"{cause.errors:,}", f"{cause.share:.1%}", f"{cause.alone:,}")
            for cause in found.causes
        ],
        text_columns=2,
    )


def _print_compared(found: Compared) -> None:
    from elman.cli.output import figure, print_table
    from elman.visible import clean

    low, high = found.difference_interval
    print_table(
        clean(f"{where(found)}, nats per token"),
        ["tokens", "number", found.first, found.second, "difference"],
        [
            (one.name, f"{one.tokens:,}", *map(figure, (one.first_nats, one.second_nats, one.difference)))
            for one in (*found.kinds, found.whole)
        ],
        footer=True,
    )
    print(clean(f"difference of all, 95 % interval: {low:.4f} to {high:.4f}: {found.verdict}"))
    print(clean(f"{found.first_better:.1%} of the tokens are cheaper for {found.first}"))
    for name, places in ((found.first, found.first_ahead), (found.second, found.second_ahead)):
        print_table(
            clean(f"where {name} is most ahead"),
            ["place", found.first, found.second],
            [(_place(place), figure(place.first_nats, 2), figure(place.second_nats, 2)) for place in places],
        )


def _place(place: Alike | Difference | Passage) -> str:
    """A place of a text on one line, with some of what stands before and after it."""
    from elman.visible import clean

    text = clean(f"{place.before[-30:]}[{place.at}]{place.after[:20]}")
    return text.replace("\n", "↵").replace("\t", " ")
