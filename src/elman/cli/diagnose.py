"""``elman diagnose``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from elman.cli.flags import Json, OwnCell, Seed
from elman.errors import TextError, UserError

if TYPE_CHECKING:
    from elman.inspection.repetition import Diagnosis, Repetition


def diagnose(
    what: str,
    /,
    *,
    num_tokens: int = 600,
    num_samples: int = 8,
    seed: Seed = 0,
    json: Json = False,
    cell: OwnCell = None,
) -> None:
    """Why does it loop? Measure how much a text, or what a model writes, repeats itself.

    Args:
        what: A run folder, whose model is drawn from and held against its training text; or a text file, '-' for
            standard input, which is measured alone.
        num_tokens: Length of the texts drawn.
        num_samples: Texts drawn at each temperature.
        seed: Of the texts.
    """
    from elman.inspection import repetition

    if Path(what).suffix in (".safetensors", ".arpa"):
        raise UserError(f"{what!r} is a model without the text it was trained on: give the run folder")
    if Path(what).is_dir():
        found = repetition.diagnose(what, num_tokens=num_tokens, num_samples=num_samples, seed=seed, cell=cell)
        _print_diagnosis(found, json=json)
    else:
        _print_text(_read(what), json=json)


def _read(name: str) -> str:
    from elman.config import DataConfig, TextConfig
    from elman.text.corpora import open_corpus

    corpus = open_corpus(DataConfig(corpus=(name,)), TextConfig())
    return "".join(piece.text for source in corpus.parts.values() for piece in source.pieces())


def _print_text(text: str, *, json: bool) -> None:
    import numpy as np

    from elman.cli.output import print_json, print_table
    from elman.inspection.repetition import n_for, repetition

    if not text:
        raise TextError("the text is empty: there is nothing to repeat")
    n = n_for("char")
    found = repetition(np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32), n)
    if json:
        print_json({"n": n, **vars(found)})
        return
    print_table("", _COLUMNS, [_row("the text", found)])
    print(_loop_in_words(found, "character"))


_COLUMNS = ("", "repeated", *(f"dist-{n}" for n in (1, 2, 3, 4)))


def _row(name: str, found: Repetition) -> list[str]:
    return [name, f"{found.repeated:.1%}", *(f"{share:.3f}" for share in found.distinct)]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _loop_in_words(found: Repetition, unit: str) -> str:
    if found.begins is None:
        return "no loop at its end"
    return f"it loops from {unit} {found.begins:,} of {found.tokens:,} on, every {found.period:,} {unit}s"


def _print_diagnosis(found: Diagnosis, *, json: bool) -> None:
    from elman.cli.output import print_json, print_table
    from elman.visible import clean

    if json:
        print_json(found.to_dict())
        return
    rows = []
    for drawn in found.drawn:
        name = f"temperature {drawn.temperature:g}" if drawn.temperature else "greedy"
        entropy = f"{drawn.entropy[0]:.2f} to {drawn.entropy[-1]:.2f}"
        rows.append([*_row(name, drawn.repetition), entropy, _percent(drawn.corpus_words), f"{drawn.copied.longest:,}"])
    print_table(
        f"texts of {found.corpus.tokens:,} tokens. repeated: in an n-gram of {found.n} that came before in the text; "
        "dist-n: distinct n-grams of all; entropy: of the prediction in nats, first quarter to last; corpus words: "
        "words that stand in the training text; copied: characters of the longest piece that stands there",
        [*_COLUMNS, "entropy", "corpus words", "copied"],
        [*rows, [*_row("training text", found.corpus), "-", _percent(1.0), "-"]],
    )
    print(f"{found.duplicates:.1%} of the training text stands in it more than once")
    worst = max(found.drawn, key=lambda drawn: drawn.repetition.repeated)
    if worst.repetition.begins is not None:
        how = "greedily" if not worst.temperature else f"at temperature {worst.temperature:g}"
        print(f"drawn {how}, {_loop_in_words(worst.repetition, 'token')}: {clean(repr(worst.example[-100:]))}")
    copied = found.copied
    verdict = "COPIED" if copied.is_copied else "no copy"
    print(
        f"{verdict}: the longest piece of them that stands in the training text has {copied.longest:,} characters: "
        f"{clean(repr(copied.text))}"
    )
    print(found.words)
