"""What can a family of models remember? Tasks of known answer, learned at short lengths and asked at longer ones.

Every family gets the same text, the same number of updates and about the same number of parameters. A trial is one
family on one task; its run and its result lie in a folder, so that what was done is not done again. Answers count when
every character of them is the most probable one, given those before.

Shape letters: T time, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elman.config import CountedConfig, UniformStackConfig, WindowConfig
from elman.errors import ModelFileError, UserError, nearest
from elman.files import write_atomically
from elman.inspection.predictions import predictions
from elman.models.file import Bundle, load_model
from elman.models.kinds import kind_names, model_class, model_config, model_config_class
from elman.text import synthetic
from elman.training.run import train

KINDS = ("elman", "lstm", "gru", "mingru", "mamba", "transformer", "ngram")
"""The families that are compared where none are named."""

_TRAIN_CHARS = 400_000
_TEST_SEED = 1_000_003
_SIZES = range(8, 1025, 8)
_RESULT = "probe.json"
_BATCH, _BPTT = 16, 64
_MASTERED = 0.9
"""Share of the answers that are to be right."""


@dataclass(frozen=True)
class Task:
    """A task, the lengths that are learned, and those that are asked."""

    name: str
    generator: str
    length: str
    """The parameter of the generator that is the length."""
    learned: tuple[int, ...]
    asked: tuple[int, ...]
    fixed: Mapping[str, int]
    choices: str = ""
    """Where it is chance whether an answer comes, but not which: the answers, of which the most probable counts."""
    exact: Callable[[str, int], bool] | None = None
    """Whether a line is of just that length, where the generator gives shorter ones as well."""


def _depth(line: str) -> int:
    return max(np.cumsum([1 if character in "([{<" else -1 for character in line.strip()]), default=0)


TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        Task("copying", "copying", "length", tuple(range(1, 9)), (4, 8, 12, 16, 24), {"symbols": 8}),
        Task("selective-copying", "selective-copying", "blanks", tuple(range(9)), (4, 8, 16, 32), {"length": 4}),
        Task("associative-recall", "associative-recall", "pairs", tuple(range(1, 7)), (3, 6, 9, 12, 18), {}),
        Task("anbn", "anbn", "longest", (12,), (6, 12, 16, 24, 48), {}, "", lambda line, n: line.count("a") == n),
        Task("dyck-2", "dyck", "depth", (4,), (2, 4, 6, 8), {"kinds": 2}, ")]", lambda line, n: _depth(line) == n),
        Task("parity", "parity", "length", tuple(range(1, 13)), (6, 12, 16, 24, 48), {}),
        Task("modular-arithmetic", "modular-arithmetic", "terms", tuple(range(1, 6)), (3, 5, 8, 12, 20), {}),
        Task("adding", "adding", "length", tuple(range(2, 11)), (5, 10, 15, 20, 40), {}),
        Task("agreement", "agreement", "most", (4,), (1, 4, 8, 16), {}, "ia", lambda line, n: line.count(" the ") == n),
    )
}
"""By name. The n of the n-th line of ``agreement`` counts the nouns between subject and verb."""


@dataclass(frozen=True)
class AtLength:
    """The answers at one length."""

    length: int
    cases: int
    accuracy: float


@dataclass(frozen=True)
class Trial:
    """One family on one task."""

    task: str
    kind: str
    parameters: int
    updates: int
    by_length: tuple[AtLength, ...]


@dataclass(frozen=True)
class Probed:
    """All trials."""

    updates: int
    parameters: int
    """That every family was to have; those that have whole numbers of units come near."""
    learned: Mapping[str, int]
    """The greatest length learned of each task."""
    trials: tuple[Trial, ...]

    def of(self, task: str) -> tuple[Trial, ...]:
        """Those on one task."""
        return tuple(trial for trial in self.trials if trial.task == task)

    def reach(self) -> dict[str, dict[str, int | None]]:
        """By family and task: the greatest length up to which nine of ten answers are right, none where not one is."""
        found: dict[str, dict[str, int | None]] = {trial.kind: {} for trial in self.trials}
        for trial in self.trials:
            mastered = takewhile(lambda one: one.accuracy >= _MASTERED, trial.by_length)
            found[trial.kind][trial.task] = max((one.length for one in mastered), default=None)
        return found

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return asdict(self) | {"reach": self.reach()}


def probe(
    out: str | Path,
    *,
    tasks: Sequence[str] = (),
    kinds: Sequence[str] = (),
    updates: int = 1000,
    parameters: int = 30_000,
    seed: int = 0,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> Probed:
    """Train each family on each task, and ask it at all lengths.

    Args:
        out: the folder of the trials; one that was finished there with the same settings is not done again, one that
            was interrupted goes on.
        tasks: names of :data:`TASKS`; none: all.
        kinds: families; none: :data:`KINDS`.
        updates: of each training, 1,024 characters each.
        parameters: of each model; its width is chosen to come near.
        seed: of texts and models.
        on_trial: called after each.

    Raises:
        UserError: there is no such task or family, or the folder holds trials of other settings.
    """
    chosen = [_known(name, TASKS, "task") for name in tasks] or list(TASKS)
    families = [_known(kind, _askable(), "family") for kind in kinds] or list(KINDS)
    if updates < 1 or parameters < 1000:
        raise UserError(f"{updates} updates and {parameters} parameters; accepted: from 1, and from 1,000")
    trials = []
    for name in chosen:
        for kind in families:
            trials.append(_trial(Path(out), TASKS[name], kind, updates, parameters, seed))
            on_trial(trials[-1])
    learned = {name: max(TASKS[name].learned) for name in chosen}
    return Probed(updates, parameters, learned, tuple(trials))


def _known(name: str, accepted: Mapping[str, Task] | tuple[str, ...], what: str) -> str:
    if name not in accepted:
        raise UserError(f"no {what} {name!r}{nearest(name, accepted)}")
    return name


def _askable() -> tuple[str, ...]:
    return tuple(kind for kind in kind_names() if kind not in ("stack", "seq2seq"))


def _trial(out: Path, task: Task, kind: str, updates: int, parameters: int, seed: int) -> Trial:
    folder = out / f"{task.name}-{kind}"
    corpus = _write_corpus(out / f"{task.name}-{seed}.txt", task, seed)
    vocab_size = len(set(corpus.read_text("utf-8"))) + 2
    settings: dict[str, Any] = {
        "model": settings_of(kind, vocab_size, parameters),
        "data": {"corpus": [str(corpus)], "valid_fraction": 0.0, "test_fraction": 0.0},
        "sampling": {"max_new_tokens": 1},
        "seed": seed,
    }
    if kind != "ngram":
        settings["training"] = {
            "max_updates": updates,
            "batch_size": _BATCH,
            "bptt": _BPTT,
            "learning_rate": 0.005,
            "spike_deviations": None,  # where a task is all but solved, a batch of longer lines looks like a fault
            "num_threads": 1,
        }
    result = folder / _RESULT
    if (done := _finished(result, settings)) is not None:
        return done
    train(out=folder, resume="auto", **settings)
    bundle = load_model(folder)
    by_length = tuple(accuracy_at(bundle, task, length) for length in task.asked)
    trial = Trial(task.name, kind, bundle.network.num_parameters, updates, by_length)
    write_atomically(result, json.dumps({"settings": settings, "trial": asdict(trial)}, indent=1).encode())
    return trial


def _finished(path: Path, settings: Mapping[str, Any]) -> Trial | None:
    """What an earlier call has written, if it was for the same settings."""
    try:
        found = json.loads(path.read_text("utf-8"))
        if found["settings"] != settings:
            raise UserError(f"{path} is of other settings: give another --out, or the same settings")
        by_length = tuple(AtLength(**one) for one in found["trial"].pop("by_length"))
        return Trial(**found["trial"], by_length=by_length)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise ModelFileError(f"{path} is damaged: remove it to do this trial again") from None


def _write_corpus(path: Path, task: Task, seed: int) -> Path:
    """The lines of all lengths that are learned, mixed; written once."""
    if not path.exists():
        lines: list[str] = []
        for length in task.learned:
            lines += _lines(task, length, seed, _TRAIN_CHARS // len(task.learned))
        order = np.random.default_rng(seed).permutation(len(lines))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "".join(lines[index] for index in order.tolist()).encode())
    return path


def _lines(task: Task, length: int, seed: int, num_chars: int) -> list[str]:
    """Whole lines of one length, about so many characters of them."""
    lines: list[str] = []
    for chunk in _generator(task, length, seed).chunks():
        lines += chunk.splitlines(keepends=True)
        if sum(map(len, lines)) >= num_chars:
            break
    total = np.cumsum([len(line) for line in lines])
    return [line for line in lines[: int(np.searchsorted(total, num_chars))] if line.endswith("\n")]


def _generator(task: Task, length: int, seed: int) -> synthetic.Generator:
    parameters = {**task.fixed, task.length: length, "seed": seed}
    return synthetic.parse(",".join([task.generator, *(f"{name}={value}" for name, value in parameters.items())]))


def settings_of(kind: str, vocab_size: int, parameters: int) -> dict[str, Any]:
    """The settings of a model of a kind, two layers where it has layers, as near to a number of parameters as it can.

    Args:
        kind: of the model.
        vocab_size: V.
        parameters: the number wished for.
    """
    section = model_config_class(kind)
    if issubclass(section, CountedConfig):
        return {"kind": kind}
    best: tuple[int, dict[str, Any]] | None = None
    for size in _SIZES:
        settings: dict[str, Any] = {"kind": kind, "hidden_size": size}
        if issubclass(section, UniformStackConfig):
            settings["num_layers"] = 2
            is_residual = section.model_fields["residual"].default
            settings["embedding_size"] = size if is_residual else 16
            if section.model_fields["feedforward_size"].default:
                settings["feedforward_size"] = 2 * size
        elif issubclass(section, WindowConfig):
            settings["embedding_size"] = 16
        try:
            config = model_config(settings)
        except ValueError:
            continue  # a width that the heads do not divide
        away = abs(model_class(config).predicted_num_parameters(config, vocab_size) - parameters)
        if best is None or away < best[0]:
            best = away, settings
    if best is None:
        raise UserError(f"model.kind {kind!r} has no width up to {_SIZES[-1]} that can be taken here")
    return best[1]


def accuracy_at(bundle: Bundle, task: Task, length: int, num_chars: int = 20_000) -> AtLength:
    """How many of the answers of one length a model gives rightly.

    Args:
        bundle: the model, whose tokens are characters.
        task: of which kind.
        length: of the questions, whatever lengths were learned.
        num_chars: of the text with the questions.
    """
    # A generator that gives all lengths up to one has few lines of just that one.
    wanted = num_chars if task.exact is None else _TRAIN_CHARS
    lines = [
        line for line in _lines(task, length, _TEST_SEED, wanted) if task.exact is None or task.exact(line, length)
    ]
    total = np.cumsum([len(line) for line in lines])
    lines = lines[: max(20, int(np.searchsorted(total, num_chars)))]
    text = "".join(lines)
    right = np.zeros(len(text), bool)
    tokens = np.concatenate([[bundle.tokenizer.boundary_id], bundle.tokenizer.encode(text)])
    rivals = bundle.tokenizer.encode(task.choices) if task.choices else np.arange(bundle.tokenizer.size)
    for piece in predictions(bundle.network, tokens):
        best_T = torch.from_numpy(rivals)[piece.log_probs_TV.cpu()[:, rivals].argmax(-1)]
        right[piece.start - 1 : piece.start - 1 + len(best_T)] = (best_T == piece.targets_T.cpu()).numpy()
    # The first line comes after the boundary, which the model may never have seen but once.
    answered = list(_answers(task, length, text, [len(line) for line in lines]))[1:]
    return AtLength(
        length, len(answered), float(np.mean([right[places].all() for places in answered])) if answered else 0.0
    )


def _answers(task: Task, length: int, text: str, sizes: Sequence[int]) -> Iterator[list[int]]:
    """The places of the characters of each line that are answers."""
    spans = _generator(task, length, 0).answers(text)
    ends = np.cumsum(sizes)
    by_line: list[list[int]] = [[] for _ in sizes]
    for span in spans:
        # Of an answer that may come or not, only its first character is the question which one it is.
        places = range(span.start, span.start + 1 if task.choices else span.end)
        by_line[int(np.searchsorted(ends, span.start, side="right"))] += places
    return (places for places in by_line if places)
