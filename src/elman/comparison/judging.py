"""What a finished run is worth: its one look at the held-out part, and what it writes at several temperatures.

The result stays in the run folder as ``judged.json`` and is taken from there as long as the model is the same, so that
the held-out part is looked at once, however often a report or a comparison is made.
"""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from elman.files import write_atomically
from elman.inspection.repetition import corpus_words, distinct_ngrams, draw_texts, entropy_along, share_of_corpus_words
from elman.judge import dataset_of_run, evaluate
from elman.models.file import Bundle, load_model
from elman.text.tokenizers import Tokenizer
from elman.training.folder import JUDGED_FILE, Run
from elman.training.report import judged_in, model_sha256, write_report
from elman.translation import is_of_pairs

Ids: TypeAlias = npt.NDArray[np.integer[Any]]

TEMPERATURES = (0.3, 0.8, 1.5)

_NUM_TEXTS = 4
_NUM_TOKENS = 400


@dataclass(frozen=True)
class Drawn:
    """Texts at one temperature, or pieces of the training text."""

    name: str
    entropy: float | None
    """Of the model's prediction at temperature 1 where it writes, in nats, a mean over the texts."""
    distinct: tuple[float, ...]
    """Distinct n-grams of tokens over all n-grams, for n = 1, 2, 3, 4; a mean over the texts."""
    known_words: float | None
    """Share of the words that stand in the training text, too; none where there is no whole word."""
    text: str
    """The first of the texts."""


def judge_run(
    run: Run,
    *,
    cell: str | None = None,
    with_baselines: bool = True,
    with_temperatures: bool = True,
    afresh: bool = False,
) -> dict[str, Any]:
    """Judge the model of a run on its held-out part, and write that into its folder and report.

    Args:
        run: a run with a model.
        cell: a person's own cell, where it was trained with one.
        with_baselines: also judge simple means on the same text, which takes longer than many a model.
        with_temperatures: also draw from it at several temperatures.
        afresh: do it again even if it was done for this model.

    Raises:
        UserError: there is no model yet, nothing was held out, or the corpus is gone or has changed.
        ElmanError: another process writes the run.
    """
    if not afresh and (found := judged_in(run)):
        return found
    with run.held():
        text = json.dumps(_judge(run, cell, with_baselines, with_temperatures), indent=1)
        judged: dict[str, Any] = json.loads(text)  # now as later, when it comes from the file
        try:
            write_atomically(run.path / JUDGED_FILE, text.encode())
        except OSError:  # a folder that cannot be written is judged all the same
            return judged
        write_report(run)
    return judged


def _judge(run: Run, cell: str | None, with_baselines: bool, with_temperatures: bool) -> dict[str, Any]:
    bundle = load_model(run.path, cell=cell)
    of_pairs = is_of_pairs(bundle)  # these are judged on targets given their sources, and by nothing else
    judgement = evaluate(
        run.path, with_baselines=with_baselines and not of_pairs, with_accuracy=not of_pairs, cell=cell
    )
    drawn: Sequence[Drawn] = ()
    if with_temperatures and not of_pairs:
        train = dataset_of_run(run.path, cell=cell).train.tokens
        drawn = draw_at_temperatures(bundle, train, num_tokens=_NUM_TOKENS)
    return {
        "model_sha256": model_sha256(run),
        "judgement": judgement.to_dict(),
        "temperatures": [asdict(one) for one in drawn],
    }


def draw_at_temperatures(
    bundle: Bundle,
    train: Ids,
    temperatures: Sequence[float] = TEMPERATURES,
    *,
    num_texts: int = _NUM_TEXTS,
    num_tokens: int = _NUM_TOKENS,
    seed: int = 0,
) -> list[Drawn]:
    """Texts of one model at several temperatures, measured, and pieces of the training text measured the same way.

    Args:
        bundle: the model.
        train: the tokens it was trained on.
        temperatures: from cold to hot.
        num_texts: at each temperature.
        num_tokens: of each text.
        seed: of the texts.
    """
    words, found = corpus_words(train, bundle.tokenizer), []
    for temperature in temperatures:
        texts = [np.array(text.tokens) for text in draw_texts(bundle, temperature, num_texts, num_tokens, seed=seed)]
        found.append(_measured(f"temperature {temperature:g}", bundle, texts, words))
    if len(train) > num_tokens:
        starts = np.linspace(1, len(train) - num_tokens, num_texts).astype(int)
        pieces = [train[start : start + num_tokens].astype(np.int64) for start in starts]
        found.append(_measured("training text", bundle, pieces, words))
    return found


def _measured(name: str, bundle: Bundle, texts: Sequence[Ids], words: Set[str]) -> Drawn:
    decoded = [_text(bundle.tokenizer, text) for text in texts]
    return Drawn(
        name=name,
        entropy=float(np.mean(entropy_along(bundle, texts))),
        distinct=tuple(float(np.mean([distinct_ngrams(text, n) for text in texts])) for n in (1, 2, 3, 4)),
        known_words=share_of_corpus_words(decoded, words),
        text=decoded[0],
    )


def _text(tokenizer: Tokenizer, tokens: Ids) -> str:
    return tokenizer.decode(tokens[tokens != tokenizer.boundary_id])
