"""Judge a trained model: on the part of its corpus that was held out, or on another text."""

from __future__ import annotations

import hashlib
import math
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from elman.adaptation import Adapted, TuningText, evaluate_dynamically, evaluate_with_cache
from elman.baselines import baselines
from elman.config import DataConfig, TextConfig
from elman.data.pairs import Pairs
from elman.data.prepare import Dataset, Split, prepare, prepared_folder, tokenize_text
from elman.data.texts import count_words, texts_of
from elman.errors import TextError, UserError
from elman.evaluation import ALONE, Evaluation, Readable, StatePolicy, Team, Window, evaluate_pairs, evaluate_split
from elman.metrics import Interval, Score, perplexity
from elman.models.contract import CountedModel
from elman.models.file import Bundle, load_model
from elman.models.huggingface import is_huggingface, load_huggingface
from elman.settings import Config, resolve_run
from elman.surprisal import Surprisal
from elman.text.corpora import is_named, open_corpus
from elman.text.sources import Piece, Source, utf8
from elman.text.tokenizers import UNKNOWN, Tokenizer
from elman.translation import PairReport, is_of_pairs, judge_pairs, reverses_source

SplitName = Literal["train", "valid", "test"]

_BY_PREFERENCE: tuple[SplitName, ...] = ("test", "valid", "train")
_ROWS_AT_ONCE = 16  # of a batch of documents or windows
_EXAMPLES_AT_ONCE = 64
_MAX_TUNED = 10_000
_GIVE_TEXT = "give a TEXT"


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
    dynamic: Adapted | None = None
    """What the model reaches that goes on learning; none unless asked for."""
    cache: Adapted | None = None
    """What the model reaches with a neural cache; none unless asked for."""
    surprisal: Surprisal | None = None
    """What each token cost; none unless asked for."""

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON; what each token cost is left out."""
        return self.evaluation.to_dict() | {
            "interval": _interval_of_figures(self.evaluation.interval, self.evaluation.score),
            "split": self.split,
            "corpus": self.corpus,
            "corpus_sha256": self.corpus_sha256,
            "level": self.level,
            "seed": self.seed,
            "updates": self.updates,
            "baselines": {name: score.to_dict() for name, score in self.baselines.items()},
            "dynamic": None if self.dynamic is None else self.dynamic.to_dict(),
            "cache": None if self.cache is None else self.cache.to_dict(),
            "notices": list(self.notices),
            "pairs": None if self.pairs is None else self.pairs.to_dict(),
        }


def _interval_of_figures(interval: Interval | None, score: Score) -> dict[str, Any] | None:
    """The interval of each figure: all are functions of the nats per token and of counts that stay as they are."""
    if interval is None:
        return None
    ends = (interval.low, interval.high)

    def bits_per(count: int | None) -> list[float] | None:
        return [nats * score.tokens / math.log(2) / count for nats in ends] if count else None

    return {
        "level": interval.level,
        "blocks": interval.num_blocks,
        "resamples": interval.num_resamples,
        "seed": interval.seed,
        "nats_per_token": list(ends),
        "perplexity": [value if math.isfinite(value) else None for value in map(perplexity, ends)],
        "bits_per_char": bits_per(score.chars),
        "bits_per_byte": bits_per(score.bytes),
    }


def evaluate(
    where: str | Path,
    text: str | Path | Sequence[str | Path] | None = None,
    *,
    split: SplitName | None = None,
    state_policy: StatePolicy | None = None,
    window: int | None = None,
    stride: int | None = None,
    with_accuracy: bool = False,
    with_baselines: bool = False,
    with_surprisal: bool = False,
    dynamic: bool = False,
    cache: bool = False,
    num_beams: int | None = None,
    cell: str | None = None,
    device: str = "cpu",
    team: Team = ALONE,
) -> Judgement:
    """Evaluate a model: every token once; one of pairs on its targets alone, and on those that it writes itself.

    Args:
        where: a run folder, a model file, or a folder of a causal language model of Hugging Face's ``transformers``,
            which is read in windows.
        text: files, a folder, a glob, ``-``, or the name of a corpus; none: the corpus of the run.
        split: which part; none: the test part, else the validation part.
        state_policy: ``carried`` reads one stream from start to end; ``reset`` starts every document anew; none: as
            the training had it (``data.reset_at_documents``), else carried.
        window: tokens read at once from the initial state (:class:`elman.evaluation.Window`); none: no windows.
        stride: tokens by which a window moves on; none: half of it.
        with_accuracy: also measure how often the most probable tokens are right, and calibration.
        with_baselines: also judge simple means, whose counts come from the training part of the run.
        with_surprisal: also keep what each token cost, on disk.
        dynamic: also judge the model that goes on learning (:func:`elman.adaptation.dynamic_nats`).
        cache: also judge the model with a neural cache (:func:`elman.adaptation.cache_nats`).
        num_beams: how a model of pairs writes; none or 1: greedily, more: by beam search.
        cell: a person's own cell, where the model was trained with one.
        device: where to compute.
        team: processes that share the documents, windows or examples, each calling this with the same arguments. All
            get the same figures; the baselines are those of the first alone.

    Raises:
        UserError: there is no such text or part, the corpus has changed since the training, or something that was
            asked for has no meaning for this model or for several processes.
    """
    if stride is not None and window is None and not is_huggingface(where):
        raise UserError("--stride says how far a window moves on: give --window as well")
    if team.size > 1 and text is not None and "-" in _names(text):
        raise UserError(f"standard input goes to one of the {team.size} processes: give a file, or start one process")
    if is_huggingface(where):
        if with_baselines or dynamic or cache or num_beams is not None or cell is not None or text is None:
            raise UserError(
                f"{str(where)!r} is a model of Hugging Face's, without a corpus of its own: give a TEXT, and leave "
                "--baselines, --dynamic, --cache, --num-beams and --cell out"
            )
        return _evaluate_huggingface(
            where, text, split, state_policy or "carried", window, stride, with_accuracy, with_surprisal, device, team
        )
    bundle = load_model(where, device=device, cell=cell)
    config = _config_of_run(Path(where), cell)
    if is_of_pairs(bundle):
        if state_policy or with_baselines or window or with_accuracy or with_surprisal or dynamic or cache:
            raise UserError(
                "a model of pairs is judged on targets given their sources: leave --state, --baselines, --window, "
                "--accuracy, --dynamic, --cache, --tokens and --html out"
            )
        return _evaluate_pairs(where, text, split, bundle, config, num_beams, team)
    if num_beams is not None:
        raise UserError("--num-beams has no meaning here: this model was not trained on pairs of source and target")
    if state_policy is None:
        state_policy = "reset" if config is not None and config.data.reset_at_documents else "carried"
    if dynamic or cache:
        _refuse_what_cannot_adapt(bundle, state_policy, window)
    if team.size > 1 and state_policy == "carried" and window is None:
        raise UserError(
            f"a carried state reads one stream, which {team.size} processes cannot share: give --state reset or "
            "--window, or start one process"
        )
    dataset: Dataset | None = None
    if text is None:
        dataset = _dataset_of_run(where, config, bundle, _GIVE_TEXT)
        subject = _part_of(dataset, split)
    else:
        subject = _read(text, split, bundle.tokenizer, config)
        if with_baselines or dynamic or cache:
            dataset = _dataset_of_run(where, config, bundle, "leave --baselines, --dynamic and --cache out")
    measured, surprisal = _measure(
        bundle.network,
        subject,
        bundle.tokenizer,
        state_policy=state_policy,
        window=_window(window, stride),
        num_rows=_ROWS_AT_ONCE,
        with_accuracy=with_accuracy,
        with_surprisal=with_surprisal,
        team=team,
    )
    notices = list(subject.notices)
    if math.isnan(measured.score.nats_per_token):
        notices.append(
            "the model gives no number (nan) for some tokens: its weights have gone wrong; train it anew at a lower "
            "training.learning_rate"
        )
    beside: Mapping[str, Score] = {}
    learning: Adapted | None = None
    caching: Adapted | None = None
    if dataset is not None:
        if with_baselines and team.rank == 0:
            found = baselines(dataset, subject.tokens, state_policy=state_policy)
            beside = {name: replace(score, words=measured.score.words) for name, score in found.scores.items()}
            notices += found.notices
        tokens, plain, tuning = subject.tokens.tokens, measured.score, _tuning_text(dataset, subject)
        if dynamic:
            learning = evaluate_dynamically(
                bundle.network, tokens, plain, train=dataset.train.tokens, tuning=tuning, level=bundle.tokenizer.level
            )
        if cache:
            caching = evaluate_with_cache(bundle.network, tokens, plain, tuning=tuning)
    return Judgement(
        evaluation=measured,
        split=subject.split,
        corpus=subject.corpus,
        corpus_sha256=subject.sha256,
        level=bundle.tokenizer.level,
        seed=_number(bundle.provenance.get("seed")),
        updates=_number(bundle.provenance.get("updates")),
        baselines=beside,
        notices=tuple(notices),
        dynamic=learning,
        cache=caching,
        surprisal=surprisal,
    )


def _refuse_what_cannot_adapt(bundle: Bundle, state_policy: StatePolicy, window: int | None) -> None:
    if isinstance(bundle.network, CountedModel):
        raise UserError("a model that is counted has neither gradients nor features: leave --dynamic and --cache out")
    if state_policy == "reset" or window is not None:
        raise UserError("--dynamic and --cache learn from one stream: give --state carried, and no --window")


def _window(size: int | None, stride: int | None) -> Window | None:
    if size is None:
        return None
    return Window(size, max(1, size // 2) if stride is None else stride)


def _measure(
    network: Readable,
    subject: Subject,
    tokenizer: Tokenizer,
    *,
    state_policy: StatePolicy,
    window: Window | None,
    num_rows: int,
    with_accuracy: bool,
    with_surprisal: bool,
    team: Team,
) -> tuple[Evaluation, Surprisal | None]:
    """All figures of a text, its words counted, and what each token cost; each process reads so many rows at once."""
    surprisal = _kept_on_disk(subject.tokens, tokenizer) if with_surprisal else None
    measured = evaluate_split(
        network,
        subject.tokens,
        tokenizer,
        state_policy=state_policy,
        num_streams=1 if state_policy == "carried" and window is None else num_rows * team.size,
        window=window,
        with_accuracy=with_accuracy,
        surprisal=None if surprisal is None else surprisal.nats,
        team=team,
    )
    words = count_words(texts_of(subject.tokens.tokens, tokenizer))
    return replace(measured, score=replace(measured.score, words=words)), surprisal


def _kept_on_disk(split: Split, tokenizer: Tokenizer) -> Surprisal:
    """Room for the nats of each target in a temporary file, which goes when the result goes."""
    num_targets = len(split.tokens) - 1
    if num_targets < 1:
        raise TextError("the text is empty: there is not one token to predict")
    folder = Path(tempfile.mkdtemp(prefix="elman-"))
    nats = np.memmap(folder / "nats.bin", np.float64, mode="w+", shape=(num_targets,))
    surprisal = Surprisal(split, tokenizer, nats)
    weakref.finalize(surprisal, shutil.rmtree, folder, ignore_errors=True)
    return surprisal


def _tuning_text(dataset: Dataset, subject: Subject) -> TuningText:
    """Where settings are chosen: never on what is judged."""
    if dataset.valid is not None and subject.split != "valid":
        return TuningText("the beginning of the valid part", dataset.valid.tokens[: _MAX_TUNED + 1])
    return TuningText("the end of the train part, which the model has seen", dataset.train.tokens[-_MAX_TUNED - 1 :])


def _evaluate_pairs(
    where: str | Path,
    text: str | Path | Sequence[str | Path] | None,
    split: SplitName | None,
    bundle: Bundle,
    config: Config | None,
    num_beams: int | None,
    team: Team,
) -> Judgement:
    tokenizer, reverse_source = bundle.tokenizer, reverses_source(bundle)
    if text is None:
        subject = _part_of(_dataset_of_run(where, config, bundle, _GIVE_TEXT), split)
    else:
        subject = _read(text, split, tokenizer, config, of_pairs=True)
    pairs = Pairs(subject.tokens.tokens, _EXAMPLES_AT_ONCE * team.size, tokenizer.boundary_id, reverse_source)
    return Judgement(
        evaluation=evaluate_pairs(
            bundle.network,
            subject.tokens,
            tokenizer,
            reverse_source=reverse_source,
            num_rows=_ROWS_AT_ONCE * team.size,
            team=team,
        ),
        split=subject.split,
        corpus=subject.corpus,
        corpus_sha256=subject.sha256,
        level=tokenizer.level,
        seed=_number(bundle.provenance.get("seed")),
        updates=_number(bundle.provenance.get("updates")),
        baselines={},
        notices=subject.notices,
        pairs=judge_pairs(bundle.network, tokenizer, pairs, num_beams=1 if num_beams is None else num_beams, team=team),
    )


def _evaluate_huggingface(
    where: str | Path,
    text: str | Path | Sequence[str | Path],
    split: SplitName | None,
    state_policy: StatePolicy,
    window: int | None,
    stride: int | None,
    with_accuracy: bool,
    with_surprisal: bool,
    device: str,
    team: Team,
) -> Judgement:
    network, tokenizer = load_huggingface(where, device=device)
    subject = _read(text, split, tokenizer, None)
    largest = max(int(piece.max()) for piece in _in_pieces(subject.tokens.tokens))
    if largest >= network.vocab_size:
        raise UserError(
            f"the tokenizer in {str(where)!r} gives the id {largest}, and the model has {network.vocab_size} tokens: "
            "they do not belong together, or the text holds what it has no token for"
        )
    reading = _window(network.default_window if window is None else window, stride)
    measured, surprisal = _measure(
        network,
        subject,
        tokenizer,
        state_policy=state_policy,
        window=reading,
        num_rows=1,
        with_accuracy=with_accuracy,
        with_surprisal=with_surprisal,
        team=team,
    )
    return Judgement(
        evaluation=measured,
        split=subject.split,
        corpus=subject.corpus,
        corpus_sha256=subject.sha256,
        level=tokenizer.level,
        seed=None,
        updates=None,
        baselines={},
        notices=subject.notices,
        surprisal=surprisal,
    )


def _in_pieces(tokens: np.ndarray[Any, Any], size: int = 2**20) -> Iterator[np.ndarray[Any, Any]]:
    return (tokens[start : start + size] for start in range(0, len(tokens), size))


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
        subject = _part_of(_dataset_of_run(where, config, bundle, _GIVE_TEXT), split)
    else:
        subject = _read(text, split, bundle.tokenizer, config, of_pairs=is_of_pairs(bundle))
    tokens = subject.tokens
    if not tokens.num_unknown:
        return subject
    share = f"{tokens.num_unknown:,} of {len(tokens.tokens) - 1:,} tokens"
    notice = f"{share} of {subject.corpus} are {UNKNOWN}: the model never saw what stands there"
    return replace(subject, notices=(*subject.notices, notice))


def _config_of_run(where: Path, cell: str | None) -> Config | None:
    path = where / "run.toml"
    return resolve_run(path, cell=cell) if path.is_file() else None


def dataset_of_run(where: str | Path, *, cell: str | None = None) -> Dataset:
    """The corpus of a run, prepared as it was for the training. Raises UserError where it is gone or has changed."""
    return _dataset_of_run(where, _config_of_run(Path(where), cell), load_model(where, cell=cell))


def _dataset_of_run(where: str | Path, config: Config | None, bundle: Bundle, instead: str = "") -> Dataset:
    """The corpus of a run, prepared as it was for the training; what to do instead is said where it is not there."""
    if config is None:
        raise UserError(f"{str(where)!r} is a model without its corpus: give the run folder{_or(instead)}")
    if "-" in config.data.corpus:
        raise UserError(f"{str(where)!r} was trained on standard input, which is gone: train on a file{_or(instead)}")
    # The model's own tokenizer counts. One that was trained on the corpus is most likely in the cache already; a file
    # that training was given may have changed since.
    has_own = config.tokenizer.path is not None or config.from_model is not None
    dataset = prepare(config.data, config.text, bundle.tokenizer if has_own else config.tokenizer)
    if dataset.tokenizer.to_dict() != bundle.tokenizer.to_dict():
        dataset = prepare(config.data, config.text, bundle.tokenizer)
    if dataset.sha256 != bundle.provenance.get("corpus_sha256"):
        raise TextError(f"the corpus {dataset.corpus_name!r} has changed since the training: restore it{_or(instead)}")
    return dataset


def _or(instead: str) -> str:
    return f", or {instead}" if instead else ""


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


def _names(text: str | Path | Sequence[str | Path]) -> tuple[str, ...]:
    return (str(text),) if isinstance(text, str | Path) else tuple(map(str, text))


def _read(
    text: str | Path | Sequence[str | Path],
    split: SplitName | None,
    tokenizer: Tokenizer,
    config: Config | None,
    *,
    of_pairs: bool = False,
) -> Subject:
    """Read a text with the decoding of the run."""
    data = DataConfig(corpus=_names(text))
    if prepared_folder(data.corpus) is not None:
        return _part_of(prepare(data, TextConfig(), tokenizer), split)
    if of_pairs:
        data = data.model_copy(update={"pairs": True})
        if config is not None and not is_named(data.corpus[0]):
            fields = {name: getattr(config.data, name) for name in ("source_field", "target_field")}
            data = data.model_copy(update=fields)
    corpus = open_corpus(
        data,
        config.text if config else TextConfig(),
        raw=tokenizer.level == "byte",
    )
    there = [name for name in _BY_PREFERENCE if name in corpus.parts]
    if split is not None and not there:
        raise UserError(f"{corpus.name!r} is one text without parts: leave --split out")
    chosen: SplitName | Literal["text"] = split or (there[0] if there else "text")
    source = corpus.parts.get("all" if chosen == "text" else chosen)
    if source is None:
        raise UserError(f"{corpus.name!r} has no {chosen} part; accepted: {', '.join(there)}")
    hashed = _Hashed(source)
    tokens = tokenize_text(hashed, tokenizer, unknown="token", name=repr(corpus.name))
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
