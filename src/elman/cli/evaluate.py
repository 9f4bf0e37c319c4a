"""``elman eval``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Literal

from elman.cli.flags import OwnCell, Switch

if TYPE_CHECKING:
    from elman.judge import Judgement
    from elman.translation import PairReport

_UNITS = {"char": "character", "byte": "byte", "word": "word", "bpe": "bpe token"}


def evaluate(
    run: str,
    /,
    *text: str,
    split: Literal["test", "valid", "train"] | None = None,
    state: Literal["carried", "reset"] | None = None,
    baselines: Switch = False,
    num_beams: int | None = None,
    json: Switch = False,
    cell: OwnCell = None,
) -> None:
    """Judge a model.

    Args:
        run: A run folder or a model.safetensors.
        text: Files, folders, globs, '-' for standard input, or the name of a corpus; none: the run's own corpus.
        split: The part of the corpus; none: the test part, else the validation part.
        state: Carried from the start of the text to its end, or reset at every document; none: as in training.
        num_beams: How a model of pairs writes targets; none or 1: greedily, more: by beam search.
        baselines: Also uniform, letter frequencies, gzip, bzip2 and xz on the same text.
        json: Print one JSON object on standard output.
    """
    from elman import judge
    from elman.cli.output import print_json

    judgement = judge.evaluate(
        run, text or None, split=split, state_policy=state, with_baselines=baselines, num_beams=num_beams, cell=cell
    )
    if json:
        print_json(judgement.to_dict())
    else:
        _print(judgement)


def _print(judgement: Judgement) -> None:
    from elman.cli.output import clean, figure, print_table

    evaluation = judgement.evaluation
    scores = {"this model": evaluation.score, **judgement.baselines}
    ranked = sorted(scores.items(), key=lambda item: item[1].nats_total)
    part = judgement.corpus if judgement.split == "text" else f"the {judgement.split} part of {judgement.corpus}"
    title = f"{part}: {evaluation.score.tokens:,} tokens, state {evaluation.state_policy}"
    if judgement.updates is not None:
        title += f"; model of update {judgement.updates:,}, seed {judgement.seed}"
    print_table(
        clean(title),
        ["", "nats/token", f"perplexity per {_UNITS[judgement.level]}", "bits/char", "bits/byte"],
        [
            (name, figure(s.nats_per_token), figure(s.perplexity, 3), figure(s.bits_per_char), figure(s.bits_per_byte))
            for name, s in ranked
        ],
        bold=[name for name, _ in ranked].index("this model") if judgement.baselines else None,
    )
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
