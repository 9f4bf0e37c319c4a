"""What acts against gradients that vanish or explode: small trainings with one thing switched at a time.

Each *arm* is a way to train: clipping, the length of back-propagation, the first recurrent matrix, the forget gate's
bias and gating itself are switched off and on. Each is trained with several seeds on the same text, and compared by how
often it diverges, by its gradients before clipping, by how far back they reach, and by what it is worth held out, with
the state carried and with the state cut. A copying task shows what no gradient reaches: a letter that stands further
back than back-propagation goes is never learned from.

Every trial is a file in a folder. A study that was interrupted, or is made larger, takes up what is there from the same
version of Elman.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeAlias

import torch
from numpy import integer
from numpy.typing import NDArray

import elman
from elman.data.prepare import Dataset, Split, prepare
from elman.errors import ModelFileError, TextError, TrainingError, UserError
from elman.files import clear_writing, is_being_written, write_atomically
from elman.inspection.gradients import finite, study
from elman.models.contract import LanguageModel
from elman.settings import Config, resolve
from elman.text.synthetic import Generator, parse
from elman.text.tokenizers import Tokenizer
from elman.training.loop import Trainer

Ids: TypeAlias = NDArray[integer[Any]]

NUM_SEEDS, NUM_UPDATES, LAG = 3, 400, 10
OUT = Path("runs") / "mitigations"

_MAX_LAG, _NUM_PLACES = 100, 8
_CUT = 64
"""Tokens between two cuts of the state, where it is cut."""
_JUDGED_TOKENS = 20_000
_NUM_SYMBOLS = 8
_LEARNED = 2.0
"""Answers right, of what guessing gives, from which on the copying task counts as learned."""

_MODEL: Mapping[str, Any] = {"kind": "elman", "hidden_size": 64, "embedding_size": 32}
_TRAINING: Mapping[str, Any] = {
    "batch_size": 16,
    "bptt": 64,
    "optimizer": "sgd",
    "learning_rate": 2.0,
    "schedule": "constant",
    "warmup_updates": 1,
    "spike_deviations": None,
    "max_grad_norm": 1.0,
}


@dataclass(frozen=True)
class Arm:
    """A way to train: what is switched, beside the settings that all share."""

    name: str
    what: str
    model: Mapping[str, Any]
    training: Mapping[str, Any]


ARMS = (
    Arm("vanilla", "a vanilla network, orthogonal at first, clipped at 1, bptt 64", {}, {}),
    Arm("no clipping", "the same without clipping", {}, {"max_grad_norm": None}),
    Arm("uniform start", "the same with a uniform recurrent matrix at first", {"recurrent_init": "uniform"}, {}),
    Arm("bptt 4", "the same, back-propagated over 4 tokens", {}, {"bptt": 4}),
    Arm("lstm", "an LSTM with a forget bias of 1, clipped at 1, bptt 64", {"kind": "lstm"}, {}),
    Arm("lstm, forget bias 0", "the same with a forget bias of 0", {"kind": "lstm", "forget_bias": 0.0}, {}),
    Arm("lstm, no clipping", "the LSTM without clipping", {"kind": "lstm"}, {"max_grad_norm": None}),
)
"""What the text is trained with."""
_COMPARED = (
    ("clipping", "vanilla", "no clipping"),
    ("clipping an LSTM", "lstm", "lstm, no clipping"),
    ("an orthogonal start", "vanilla", "uniform start"),
    ("back-propagation over 64 tokens, not 4", "vanilla", "bptt 4"),
    ("a forget bias of 1, not 0", "lstm", "lstm, forget bias 0"),
    ("gating", "lstm", "vanilla"),
)
"""A mitigation, an arm with it, and one without."""
_WORDS_LAG = 10


@dataclass(frozen=True)
class Trial:
    """One training."""

    arm: str
    seed: int
    diverged: bool
    """It stopped on numbers that were not finite, or ended worse than a uniform guess."""
    updates: int
    median_norm: float
    """Of the gradients before clipping."""
    largest_norm: float
    clipped: float
    """Share of the updates."""
    bits: float | None
    """Per token of the validation part, the state carried; none where it diverged."""
    bits_cut: float | None
    """The same with the state put back to initial every 64 tokens."""
    by_lag: tuple[float, ...]
    """Gradient of the loss by the state, from lag 0, over that one step back; empty where it diverged."""
    accuracy: float | None
    """Share of the answers that are right, of the copying task."""


@dataclass(frozen=True)
class ArmResult:
    """All trials of one arm."""

    name: str
    what: str
    bptt: int
    trials: tuple[Trial, ...]

    @property
    def num_diverged(self) -> int:
        """How many trials did."""
        return sum(trial.diverged for trial in self.trials)

    def mean(self, field: str) -> float | None:
        """Of a figure, over the trials that have it, which those that diverged may not; none where none has."""
        values = [value for trial in self.trials if (value := getattr(trial, field)) is not None]
        return fmean(known) if (known := [value for value in values if math.isfinite(value)]) else None

    @property
    def state_is_worth(self) -> float | None:
        """What carrying the state saves, in bits per token."""
        cut, carried = self.mean("bits_cut"), self.mean("bits")
        return None if cut is None or carried is None else cut - carried

    @property
    def by_lag(self) -> tuple[float, ...]:
        """Median over the trials that did not diverge."""
        rows = [trial.by_lag for trial in self.trials if trial.by_lag]
        return tuple(map(median, zip(*rows, strict=True)))

    def to_dict(self) -> dict[str, Any]:
        """All of it by name."""
        means = {name: self.mean(name) for name in ("median_norm", "largest_norm", "clipped", "bits", "accuracy")}
        return asdict(self) | {"diverged": self.num_diverged, "state_is_worth": self.state_is_worth, "mean": means}


@dataclass(frozen=True)
class Mitigations:
    """What each mitigation does."""

    corpus: str
    updates: int
    arms: tuple[ArmResult, ...]
    lag: int
    """Steps between reading a letter and predicting it again."""
    copying: tuple[ArmResult, ...]
    """The copying task, with back-propagation shorter and longer than the lag."""

    @property
    def of_copying(self) -> str:
        """Whether the copying task shows anything, in a sentence."""
        short, long = (arm.mean("accuracy") for arm in self.copying)
        if long is None or long < _LEARNED / _NUM_SYMBOLS:
            return "Here no network has learned the task in so few updates: the figures say nothing of that."
        if short is None or short < _LEARNED / _NUM_SYMBOLS:
            return "Here the longer one alone has taught it."
        return "Here the shorter one has taught it too."

    @property
    def words(self) -> tuple[str, ...]:
        """What the figures say, a sentence each."""
        return tuple(_words(self))

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        arms, copying = ([arm.to_dict() for arm in group] for group in (self.arms, self.copying))
        return finite(asdict(self) | {"arms": arms, "copying": copying, "words": self.words})


def inspect_mitigations(
    text: str | Path | Sequence[str | Path] | None = None,
    *,
    num_seeds: int = NUM_SEEDS,
    updates: int = NUM_UPDATES,
    seconds: float | None = None,
    lag: int = LAG,
    out: str | Path = OUT,
    told: Callable[[str], None] = lambda line: None,
) -> Mitigations:
    """Train small networks with one mitigation switched at a time.

    Args:
        text: files, a folder, a glob, or the name of a corpus; none: ``stdlib-prose``.
        num_seeds: trials of each arm.
        updates: of each trial on the text; the copying task takes three times as many.
        seconds: of each trial at most; none: no limit.
        lag: of the copying task, from 4 on.
        out: the folder of the trials; what is there of the same settings and the same version is not trained again.
        told: hears a line for each trial.

    Raises:
        UserError: a number is out of range, or the folder holds something else.
        TextError: the text is too short.
    """
    if num_seeds < 1 or updates < 1 or lag < 4 or (seconds is not None and seconds <= 0):
        raise UserError("--seeds and --updates are 1 and more, --lag is 4 and more, --seconds is more than 0")
    names = ("stdlib-prose",) if text is None else (text,) if isinstance(text, str | Path) else tuple(text)
    corpus = tuple(map(str, names))
    if "-" in corpus:
        raise UserError("standard input can be read once, and every training reads the text: give a file")
    folder = _folder(Path(out))

    def results(arms: Sequence[Arm], corpus: Sequence[str], updates: int, task: Generator | None) -> list[ArmResult]:
        found = []
        for arm in arms:
            trials = []
            for seed in range(num_seeds):
                config = _config(arm, corpus, updates, seconds, seed)
                trials.append(_trial(arm, config, folder, task))
                told(_line(trials[-1]))
            found.append(ArmResult(arm.name, arm.what, config.training.bptt, tuple(trials)))
        return found

    examples = max(1000, 40_000 // lag)
    task = parse(f"copying,length=1,symbols={_NUM_SYMBOLS},delay={lag - 1},examples={examples}")
    arms = results(ARMS, corpus, updates, None)
    copying = results(_copying_arms(lag), [f"synthetic:{task.specification}"], 3 * updates, task)
    return Mitigations(", ".join(corpus), updates, tuple(arms), lag, tuple(copying))


def _copying_arms(lag: int) -> list[Arm]:
    training = {"optimizer": "adamw", "learning_rate": 0.01}
    return [
        Arm(f"copying, bptt {bptt}", f"an LSTM, back-propagated over {bptt} tokens", {"kind": "lstm"},
            training | {"bptt": bptt})
        for bptt in (lag // 2, 4 * lag)
    ]  # fmt: skip


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the folder {str(path)!r} cannot be made ({error.strerror}): give another --out") from None
    clear_writing(path)
    entries = (entry for entry in path.iterdir() if not is_being_written(entry))
    if others := [entry.name for entry in entries if not entry.name.startswith("trial-")]:
        raise UserError(f"{str(path)!r} holds {others[0]!r}, which is no trial: give another --out")
    return path


def _config(arm: Arm, corpus: Sequence[str], updates: int, seconds: float | None, seed: int) -> Config:
    training = {**_TRAINING, **arm.training, "max_updates": updates, "max_seconds": seconds}
    return resolve(
        {
            "seed": seed,
            "device": "cpu",
            "data": {"corpus": tuple(corpus)},
            "model": {**_MODEL, **arm.model},
            "training": training,
            "evaluation": {"max_tokens": _JUDGED_TOKENS},
            "sampling": {"temperatures": ()},
        }
    )


def _trial(arm: Arm, config: Config, folder: Path, task: Generator | None) -> Trial:
    """The trial of these settings by this version: the one that is there, or a new one."""
    settings = config.to_dict()
    dataset = prepare(config.data, config.text, config.tokenizer)
    if dataset.valid is None:
        raise TextError(f"{dataset.corpus_name!r} is too short for a validation part: give a longer text")
    key = json.dumps([arm.name, settings, dataset.sha256, elman.__version__], sort_keys=True)
    path = folder / f"trial-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    if path.is_file():
        return _read(path)
    trial = _train(arm, config, dataset, dataset.valid, task)
    write_atomically(path, json.dumps({"trial": asdict(trial), "settings": settings}).encode())
    return trial


def _read(path: Path) -> Trial:
    try:
        values = json.loads(path.read_bytes())["trial"]
        return Trial(**{**values, "by_lag": tuple(values["by_lag"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelFileError(f"{str(path)!r} is no trial ({type(error).__name__}): take it away") from None


def _train(arm: Arm, config: Config, dataset: Dataset, valid: Split, task: Generator | None) -> Trial:
    trainer = Trainer(config, dataset)
    norms, has_stopped = [], False
    try:
        for record in trainer.records():
            if record.kind in ("update", "skipped"):
                norms.append(record.values["grad_norm"])
    except TrainingError:
        has_stopped = True
    network, tokens = trainer.network, valid.tokens[: _JUDGED_TOKENS + 1]
    bits = math.nan if has_stopped else bits_per_token(network, tokens)
    diverged = not bits <= math.log2(network.vocab_size)
    threshold = config.training.max_grad_norm
    known = [norm for norm in norms if math.isfinite(norm)]
    by_lag: tuple[float, ...] = ()
    if not diverged and task is None:
        by_lag = study(arm.name, network, tokens, _MAX_LAG, _NUM_PLACES, whole=False).by_lag
    return Trial(
        arm=arm.name,
        seed=config.seed,
        diverged=diverged,
        updates=trainer.update,
        median_norm=median(known) if known else math.nan,
        largest_norm=max(known, default=math.nan),
        clipped=0.0 if threshold is None else fmean(norm > threshold for norm in norms),
        bits=None if diverged else bits,
        bits_cut=None if diverged else bits_per_token(network, tokens, cut_every=_CUT),
        by_lag=by_lag,
        accuracy=None if diverged or task is None else _accuracy(network, task, dataset.tokenizer, tokens),
    )


def bits_per_token(network: LanguageModel, tokens: Ids, *, cut_every: int | None = None) -> float:
    """What each token costs, read as one stream, or with the state put back to initial every so many tokens.

    Both judge the same tokens as far as they fill whole pieces.
    """
    size = cut_every or _CUT
    count = (len(tokens) - 1) // size
    if not count:
        raise TextError(f"the text has {len(tokens)} tokens: to judge a model takes {size + 1} and more")
    both = torch.from_numpy(tokens[: count * size + 1].astype("int64"))
    read_BT, targets_BT = both[:-1].view(count, size), both[1:].view(count, size)
    nats = 0.0
    with torch.no_grad():
        if cut_every is None:
            state = network.initial_state(1)
            for piece_T, targets_T in zip(read_BT, targets_BT, strict=True):
                features_BTF, state = network.features(piece_T[None], state)
                nats += network.head.nll(features_BTF, targets_T[None], dtype=torch.float64).sum().item()
        else:
            features_BTF, _ = network.features(read_BT, network.initial_state(count))
            nats = network.head.nll(features_BTF, targets_BT, dtype=torch.float64).sum().item()
    return nats / (count * size) / math.log(2)


def _accuracy(network: LanguageModel, task: Generator, tokenizer: Tokenizer, tokens: Ids) -> float:
    """Share of the answers that are the most probable token when they are due; the line's end is no answer."""
    text = tokenizer.decode(tokens[1:])
    # The text begins after the boundary, so that the character at i is read as token i + 1, from a prediction at i.
    due = torch.tensor([answer.start for answer in task.answers(text)], dtype=torch.int64)
    both = torch.from_numpy(tokens.astype("int64"))
    with torch.no_grad():
        features_BTF, _ = network.features(both[None, :-1], network.initial_state(1))
        guesses = network.head.logits(features_BTF[:, due]).argmax(-1)[0]
    return (guesses == both[due + 1]).double().mean().item()


def _line(trial: Trial) -> str:
    """What came of a trial."""
    if trial.diverged:
        return f"{trial.arm}, seed {trial.seed}: diverged after {trial.updates:,} updates"
    right = "" if trial.accuracy is None else f", {trial.accuracy:.1%} of the answers right"
    return f"{trial.arm}, seed {trial.seed}: {trial.bits:.3f} bits per token{right}"


def _words(found: Mitigations) -> Iterator[str]:
    arms = {arm.name: arm for arm in found.arms}
    for what, with_it, without in _COMPARED:
        yield f"{what}: {_outcome(arms[with_it])}; without: {_outcome(arms[without])}"
    short, long = found.copying
    yield (
        f"copying over {found.lag} steps: {_share(short.mean('accuracy'))} of the answers are right after "
        f"back-propagation over {short.bptt} tokens, {_share(long.mean('accuracy'))} after {long.bptt}; guessing gives "
        f"{1 / _NUM_SYMBOLS:.1%}"
    )
    for name in ("vanilla", "lstm"):
        yield (
            f"carrying the state ({name}) is worth {_figure(arms[name].state_is_worth)} bits per token, against "
            f"putting it back to initial every {_CUT} tokens"
        )


def _outcome(arm: ArmResult) -> str:
    """What came of all trials of an arm."""
    said = [f"{arm.num_diverged} of {len(arm.trials)} diverged"] if arm.num_diverged else []
    said.append(f"largest gradient {_figure(arm.mean('largest_norm'))}")
    if arm.by_lag:
        said.append(f"{_figure(arm.mean('bits'))} bits per token")
        said.append(f"{arm.by_lag[_WORDS_LAG]:.2g} of the gradient left {_WORDS_LAG} steps back")
    return ", ".join(said)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value >= 10 else f"{value:.3f}"


def _share(value: float | None) -> str:
    return "none" if value is None else f"{value:.1%}"
