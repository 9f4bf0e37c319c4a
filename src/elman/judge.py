"""Judge a trained model: on the part of its corpus that was held out, or on another text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from elman.config import DataConfig, TextConfig
from elman.data.pairs import Pairs
from elman.data.prepare import Dataset, Split, prepare, tokenize_text
from elman.errors import TextError, UserError
from elman.evaluation import Evaluation, StatePolicy, baselines, evaluate_pairs, evaluate_split
from elman.metrics import Score
from elman.models.file import Bundle, load_model
from elman.settings import Config, resolve_run
from elman.text.corpora import is_named, open_corpus
from elman.text.sources import Piece, Source, utf8
from elman.translation import PairReport, is_of_pairs, judge_pairs, reverses_source

SplitName = Literal["train", "valid", "test"]

_BY_PREFERENCE: tuple[SplitName, ...] = ("test", "valid", "train")
_DOCUMENTS_AT_ONCE = 16  # rows of a batch under the reset policy
_EXAMPLES_AT_ONCE = 64


@dataclass(frozen=True)
class Judgement:
    """What a model is worth on a text, and which model and text that are."""

    evaluation: Evaluation
    split: SplitName | Literal["text"]
    """The part of the corpus, or ``text`` for one that is not divided."""
    corpus: str
    corpus_sha256: str
    """Of the corpus, or of the text alone."""
    level: str
    """The token that perplexity is about: char, byte, word or bpe."""
    seed: int | None
    """Of the training."""
    updates: int | None
    """How far the training was when the model was saved."""
    baselines: Mapping[str, Score]
    """What simple means reach on the same text; empty unless asked for."""
    notices: tuple[str, ...]
    """What a reader of the figures should know about the text."""
    pairs: PairReport | None = None
    """How often the targets are right, for a model of pairs."""

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return self.evaluation.to_dict() | {
            "split": self.split,
            "corpus": self.corpus,
            "corpus_sha256": self.corpus_sha256,
            "level": self.level,
            "seed": self.seed,
            "updates": self.updates,
            "baselines": {name: score.to_dict() for name, score in self.baselines.items()},
            "notices": list(self.notices),
            "pairs": None if self.pairs is None else self.pairs.to_dict(),
        }


def evaluate(
    where: str | Path,
    text: str | Path | Sequence[str | Path] | None = None,
    *,
    split: SplitName | None = None,
    state_policy: StatePolicy | None = None,
    with_baselines: bool = False,
    num_beams: int | None = None,
    cell: str | None = None,
    device: str = "cpu",
) -> Judgement:
    """Evaluate a model: every token once; one of pairs on its targets alone, and on those that it writes itself.

    Args:
        where: a run folder or a model file.
        text: files, a folder, a glob, ``-``, or the name of a corpus; none: the corpus of the run.
        split: which part; none: the test part, else the validation part.
        state_policy: ``carried`` reads one stream from start to end; ``reset`` starts every document anew; none: as
            the training had it (``data.reset_at_documents``), else carried.
        with_baselines: also judge simple means, whose letter counts come from the training part of the run.
        num_beams: how a model of pairs writes; none or 1: greedily, more: by beam search.
        cell: a person's own cell, where the model was trained with one.
        device: where to compute.

    Raises:
        UserError: there is no such text or part, or the corpus has changed since the training.
    """
    bundle = load_model(where, device=device, cell=cell)
    config = _config_of_run(Path(where), cell)
    of_pairs = is_of_pairs(bundle)
    if of_pairs and (state_policy is not None or with_baselines):
        raise UserError("a model of pairs is judged on targets given their sources: leave --state and --baselines out")
    if num_beams is not None and not of_pairs:
        raise UserError("--num-beams has no meaning here: this model was not trained on pairs of source and target")
    if state_policy is None:
        state_policy = "reset" if config is not None and config.data.reset_at_documents else "carried"
    if text is None:
        dataset = _dataset_of_run(where, config, bundle)
        subject = _part_of(dataset, split)
    else:
        subject = _read(text, split, bundle, config)
    report: PairReport | None = None
    if of_pairs:
        tokenizer, reverse_source = bundle.tokenizer, reverses_source(bundle)
        measured = evaluate_pairs(bundle.network, subject.tokens, tokenizer, reverse_source=reverse_source)
        pairs = Pairs(subject.tokens.tokens, _EXAMPLES_AT_ONCE, tokenizer.boundary_id, reverse_source)
        report = judge_pairs(bundle.network, tokenizer, pairs, num_beams=1 if num_beams is None else num_beams)
    else:
        measured = evaluate_split(
            bundle.network,
            subject.tokens,
            bundle.tokenizer,
            state_policy=state_policy,
            num_streams=1 if state_policy == "carried" else _DOCUMENTS_AT_ONCE,
        )
    beside: Mapping[str, Score] = {}
    if with_baselines:
        beside = baselines(dataset if text is None else _dataset_of_run(where, config, bundle), subject.tokens)
    return Judgement(
        evaluation=measured,
        split=subject.split,
        corpus=subject.corpus,
        corpus_sha256=subject.sha256,
        level=bundle.tokenizer.level,
        seed=_number(bundle.provenance.get("seed")),
        updates=_number(bundle.provenance.get("updates")),
        baselines=beside,
        notices=subject.notices,
        pairs=report,
    )


def _number(value: Any) -> int | None:
    """What a file from anywhere claims to be a number, if it is one."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


@dataclass(frozen=True)
class Subject:
    """What a model is judged on."""

    split: SplitName | Literal["text"]
    corpus: str
    sha256: str
    tokens: Split
    notices: tuple[str, ...] = ()


def find_subject(
    where: str | Path,
    bundle: Bundle,
    text: str | Path | Sequence[str | Path] | None = None,
    *,
    split: SplitName | None = None,
    cell: str | None = None,
) -> Subject:
    """What :func:`evaluate` would judge the model on, for whoever looks at it in another way.

    Args:
        where: a run folder or a model file.
        bundle: the model in it.
        text: as there.
        split: as there.
        cell: as there.
    """
    config = _config_of_run(Path(where), cell)
    if text is None:
        return _part_of(_dataset_of_run(where, config, bundle), split)
    return _read(text, split, bundle, config)


def _config_of_run(where: Path, cell: str | None) -> Config | None:
    path = where / "run.toml"
    return resolve_run(path, cell=cell) if path.is_file() else None


def dataset_of_run(where: str | Path, *, cell: str | None = None) -> Dataset:
    """The corpus of a run, prepared as it was for the training. Raises UserError where it is gone or has changed."""
    return _dataset_of_run(where, _config_of_run(Path(where), cell), load_model(where, cell=cell))


def _dataset_of_run(where: str | Path, config: Config | None, bundle: Bundle) -> Dataset:
    """The corpus of a run, prepared as it was for the training."""
    if config is None:
        raise UserError(
            f"{str(where)!r} is a model without its corpus: give the run folder, or a TEXT (and no --baselines)"
        )
    if "-" in config.data.corpus:
        raise UserError(f"{str(where)!r} was trained on standard input, which is gone: give a TEXT to evaluate on")
    # The model's own tokenizer counts. One that was trained on the corpus is most likely in the cache already; a file
    # that training was given may have changed since.
    dataset = prepare(config.data, config.text, bundle.tokenizer if config.tokenizer.path else config.tokenizer)
    if dataset.tokenizer.to_dict() != bundle.tokenizer.to_dict():
        dataset = prepare(config.data, config.text, bundle.tokenizer)
    if dataset.sha256 != bundle.provenance.get("corpus_sha256"):
        raise TextError(f"the corpus {dataset.corpus_name!r} has changed since the training: restore it or give a TEXT")
    return dataset


def _part_of(dataset: Dataset, split: SplitName | None) -> Subject:
    parts: dict[SplitName, Split | None] = {"test": dataset.test, "valid": dataset.valid, "train": dataset.train}
    there = [name for name in _BY_PREFERENCE if parts[name] is not None]
    if split is None and there == ["train"]:
        raise UserError("nothing of this corpus was held out: give a TEXT, or --split train for the training text")
    chosen = split or there[0]
    tokens = parts[chosen]
    if tokens is None:
        raise UserError(f"this corpus has no {chosen} part; accepted: {', '.join(there)}")
    return Subject(chosen, dataset.corpus_name, dataset.sha256, tokens)


def _read(
    text: str | Path | Sequence[str | Path], split: SplitName | None, bundle: Bundle, config: Config | None
) -> Subject:
    """Read a text with the decoding of the run."""
    names = [text] if isinstance(text, str | Path) else text
    data = DataConfig(corpus=tuple(map(str, names)))
    if is_of_pairs(bundle):
        data = data.model_copy(update={"pairs": True})
        if config is not None and not is_named(data.corpus[0]):
            fields = {name: getattr(config.data, name) for name in ("source_field", "target_field")}
            data = data.model_copy(update=fields)
    corpus = open_corpus(
        data,
        config.text if config else TextConfig(),
        raw=bundle.tokenizer.level == "byte",
    )
    there = [name for name in _BY_PREFERENCE if name in corpus.parts]
    if split is not None and not there:
        raise UserError(f"{corpus.name!r} is one text without parts: leave --split out")
    chosen: SplitName | Literal["text"] = split or (there[0] if there else "text")
    source = corpus.parts.get("all" if chosen == "text" else chosen)
    if source is None:
        raise UserError(f"{corpus.name!r} has no {chosen} part; accepted: {', '.join(there)}")
    hashed = _Hashed(source)
    tokens = tokenize_text(hashed, bundle.tokenizer, unknown="token")
    return Subject(chosen, corpus.name, hashed.sha256, tokens, tuple(source.report()))


class _Hashed(Source):
    """A source that says after a pass what the SHA-256 of its text is."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.sha256 = ""

    def pieces(self) -> Iterator[Piece]:
        digest = hashlib.sha256()
        for piece in self._source.pieces():
            digest.update(utf8(piece.text))
            yield piece
        self.sha256 = digest.hexdigest()
