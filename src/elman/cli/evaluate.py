"""``elman eval``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from elman.cli.files import Html, TokensFile
from elman.cli.flags import Json, OwnCell, Switch

if TYPE_CHECKING:
    from elman.evaluation import Evaluation
    from elman.judge import Judgement
    from elman.translation import PairReport

_UNITS = {"char": "character", "byte": "byte", "word": "word", "bpe": "bpe token"}


def evaluate(
    run: str,
    /,
    *text: str,
    split: Literal["test", "valid", "train"] | None = None,
    state: Literal["carried", "reset"] | None = None,
    window: int | None = None,
    stride: int | None = None,
    accuracy: Switch = False,
    baselines: Switch = False,
    dynamic: Switch = False,
    cache: Switch = False,
    tokens: TokensFile = None,
    html: Html = None,
    num_beams: int | None = None,
    json: Json = False,
    cell: OwnCell = None,
) -> None:
    """Judge a model; with torchrun, documents, windows or examples are shared by its processes.

    Args:
        run: A run folder, a model.safetensors, or a folder of a causal language model of Hugging Face's transformers.
        text: Files, folders, globs, '-' for standard input, or the name of a corpus; none: the run's own corpus.
        split: The part of the corpus; none: the test part, else the validation part.
        state: Carried from the start of the text to its end, or reset at every document; none: as in training.
        window: Read so many tokens at once, each time from the initial state, as a model of limited context must.
        stride: Tokens by which a window moves on, the only ones that it scores; none: half of the window.
        accuracy: Also how often the first guess is right, the first five, and whether its probability can be trusted.
        baselines: Also uniform, letter frequencies, n-grams, gzip, bzip2, xz and zstd on the same text.
        dynamic: Also the model that goes on learning while it is judged, settings chosen on the validation part.
        cache: Also the model with a cache of what it has just read, settings chosen on the validation part.
        num_beams: How a model of pairs writes targets; none or 1: greedily, more: by beam search.
    """
    from elman import judge
    from elman.cli.output import print_json
    from elman.surprisal import surprisal_page
    from elman.training.distributed import join

    with join() as ranks:
        judgement = judge.evaluate(
            run,
            text or None,
            split=split,
            state_policy=state,
            window=window,
            stride=stride,
            with_accuracy=accuracy,
            with_baselines=baselines,
            with_surprisal=tokens is not None or html is not None,
            dynamic=dynamic,
            cache=cache,
            num_beams=num_beams,
            cell=cell,
            team=ranks,
        )
    if ranks.rank > 0:  # the first speaks for all
        return
    if judgement.surprisal is not None:
        if tokens is not None:
            judgement.surprisal.write_jsonl(tokens)
        if html is not None:
            surprisal_page(_subject(judgement), judgement.evaluation, judgement.surprisal).write(html)
    if json:
        print_json(judgement.to_dict())
    else:
        _print(judgement)


def _subject(judgement: Judgement) -> str:
    return judgement.corpus if judgement.split == "text" else f"the {judgement.split} part of {judgement.corpus}"


def _print(judgement: Judgement) -> None:
    from elman.cli.output import figure, print_table
    from elman.visible import clean

    evaluation = judgement.evaluation
    adapted = {"dynamic": judgement.dynamic, "with a cache": judgement.cache}
    scores = {"this model": evaluation.score, **judgement.baselines}
    scores |= {name: found.score for name, found in adapted.items() if found is not None}
    ranked = sorted(scores.items(), key=lambda item: item[1].nats_total)
    title = f"{_subject(judgement)}: {evaluation.score.tokens:,} tokens, state {evaluation.state_policy}"
    if evaluation.window is not None:
        title += f", windows of {evaluation.window.size:,} moving on by {evaluation.window.stride:,}"
    title += f", perplexity per {_UNITS[judgement.level]}"
    if judgement.updates is not None:
        title += f"; model of update {judgement.updates:,}, seed {judgement.seed}"
    print_table(
        clean(title),
        ["", "nats/token", "perplexity", "per word", "bits/char", "bits/byte"],
        [
            (
                name,
                figure(s.nats_per_token),
                figure(s.perplexity, 3),
                _per_word(s.perplexity_per_word),
                figure(s.bits_per_char),
                figure(s.bits_per_byte),
            )
            for name, s in ranked
        ],
        bold=[name for name, _ in ranked].index("this model") if len(ranked) > 1 else None,
    )
    for line in _remarks(evaluation):
        print(line)
    for name, found in adapted.items():
        if found is not None:
            chosen = ", ".join(f"{key.replace('_', ' ')} {value:.4g}" for key, value in found.settings.items())
            print(f"{name}: {chosen}; the best of {found.num_tried} on {found.tuned_tokens:,} tokens, {found.tuned_on}")
    if judgement.pairs is not None:
        _print_pairs(judgement.pairs)
    notices = list(judgement.notices)
    if evaluation.num_unknown:
        notices.append(
            f"{evaluation.num_unknown:,} tokens are <unk>, so bits per character and byte are not defined and "
            "compressors are left out; --tokenizer.level byte knows every text"
        )
    for notice in notices:
        print(f"note: {clean(notice)}", file=sys.stderr)


def _per_word(perplexity: float | None) -> str:
    """A word of many characters may have a perplexity of many digits."""
    return "-" if perplexity is None else f"{perplexity:,.1f}" if perplexity < 1e6 else f"{perplexity:.2e}"


def _remarks(evaluation: Evaluation) -> Iterator[str]:
    """What stands below the table."""
    from elman.cli.output import figure

    if interval := evaluation.interval:
        yield (
            f"{interval.level:.0%} interval of nats/token: {interval.low:.4f} to {interval.high:.4f} "
            f"({interval.num_resamples:,} draws of {interval.num_blocks} contiguous blocks)"
        )
    if accuracy := evaluation.accuracy:
        yield (
            f"right at the first guess {accuracy.at_1:.1%}, among the first five {accuracy.at_5:.1%}; "
            f"expected calibration error {accuracy.expected_calibration_error:.4f}"
        )
    if evaluation.num_unknown:
        share = evaluation.num_unknown / evaluation.score.tokens
        adjusted = figure(evaluation.adjusted_perplexity, 3)
        yield f"{share:.2%} of the tokens are <unk>; perplexity that has to say which one each is: {adjusted}"


def _print_pairs(report: PairReport) -> None:
    from elman.cli.output import figure, print_table

    groups = [(str(a) if a == b else f"{a} to {b}", accuracy) for a, b, accuracy in report.by_target_length]
    how = "greedily" if report.num_beams == 1 else f"with {report.num_beams} beams"
    print_table(
        f"targets written {how}, by their length in tokens",
        ["length", "examples", "exact", "tokens right", "written tokens right", "nats/token"],
        [
            (
                name,
                f"{accuracy.examples:,}",
                f"{accuracy.exact_match:.1%}",
                f"{accuracy.token_accuracy:.1%}",
                f"{accuracy.written_token_accuracy:.1%}",
                figure(accuracy.nats_per_token),
            )
            for name, accuracy in [*groups, ("all", report.overall)]
        ],
        footer=True,
    )
